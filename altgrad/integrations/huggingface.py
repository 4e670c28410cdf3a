"""Hugging Face's `Trainer`: a callback that records its run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback

from altgrad.integrations.recorder import Recorder


class RecorderCallback(TrainerCallback):
    """Records the run of a `Trainer` in ``folder``; ``settings`` are those of a `Recorder`, without ``steps``.

    It writes the rows that the Trainer logs, whose losses are means since the row before. The monitors look at the
    first batch of a step, of a model that returns its loss. A resumed run goes on in the same files. It has the rows of
    an uninterrupted one if ``logging_steps`` divides ``save_steps``.
    """

    def __init__(self, folder: str | Path, **settings: Any) -> None:
        self._folder, self._settings = folder, settings
        self._recorder: Recorder | None = None
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin, or go on from the checkpoint that was loaded."""
        self._close()
        recorder = self._recorder = Recorder(
            self._folder, given["model"], given["optimizer"], steps=state.max_steps,
            resume_step=state.global_step or None, **self._settings,
        )  # fmt: skip

        def observe(model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            if "labels" in named:  # the call inside of it finds the step observed already
                recorder.observe(lambda: model(*inputs, **named).loss)

        self._hook = given["model"].register_forward_pre_hook(observe, prepend=True, with_kwargs=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        if self._recorder and {"loss", "eval_loss"} & logs.keys():
            self._recorder.log(logs.get("loss"), val_loss=logs.get("eval_loss"), norm=logs.get("grad_norm"))

    def on_save(self, *arguments: Any, **given: Any) -> None:
        """Write all rows to disk with the checkpoint."""
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
