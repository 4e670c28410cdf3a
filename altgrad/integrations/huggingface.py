"""Hugging Face's `Trainer`: a callback that records a training run."""

from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback

from altgrad.integrations.recorder import Recorder


class RecorderCallback(TrainerCallback):
    """Records a run of a `Trainer` in ``folder``; ``settings`` go to `Recorder`, without ``steps`` and ``resume_step``.

    Each record that the Trainer logs becomes a row. Its loss is the mean since the row before. The monitors observe the
    first batch of a step if the batch has ``labels``, so that the model returns its loss. A resumed run continues the
    same files. It has the rows of an uninterrupted run if ``logging_steps`` divides ``save_steps``.
    """

    def __init__(self, folder: str | Path, **settings: Any) -> None:
        self._folder, self._settings = folder, settings
        self._recorder: Recorder | None = None
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin a record, or continue the record of the checkpoint that the Trainer loaded."""
        self._close()
        recorder = self._recorder = Recorder(
            self._folder, given["model"], given["optimizer"], steps=state.max_steps,
            resume_step=state.global_step or None, **self._settings,
        )  # fmt: skip

        def observe(model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            if "labels" in named:  # the lambda's call comes here too, with the step observed already
                recorder.observe(lambda: model(*inputs, **named).loss)

        self._hook = given["model"].register_forward_pre_hook(observe, prepend=True, with_kwargs=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        if self._recorder and {"loss", "eval_loss"} & logs.keys():
            self._recorder.log(logs.get("loss"), val_loss=logs.get("eval_loss"), norm=logs.get("grad_norm"))

    def on_save(self, *arguments: Any, **given: Any) -> None:
        """Write all rows to disk when the Trainer saves a checkpoint."""
        if self._recorder:
            self._recorder.sync()

    def on_train_end(self, *arguments: Any, **given: Any) -> None:
        if self._recorder:
            self._recorder.finish()
        self._close()

    def _close(self) -> None:
        if self._recorder:
            self._hook.remove()
            self._recorder.close()
            self._recorder = None
