"""Sections of params.yaml: texts and their tokens, formats of one's own, training, monitoring, diagnosis and budget.

Each setting has its unit, its range and its default here. Ranges are wide enough for any serious experiment, and narrow
enough to catch a slip of the keyboard before hours of training. `altgrad.config.params` has the file as a whole.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from altgrad.config.base import Fraction, Settings

Tracker = Literal["tensorboard", "mlflow", "wandb"]
COMPILE_PAYS_AFTER = 100  # steps; below, compiling takes longer than it saves


class LicencesCorpus(Settings):
    """Licence texts that the ``licensedcode-data`` package installs; this works offline, in seconds."""

    source: Literal["licences"] = Field(description="which kind of corpus this is")
    min_characters: int = Field(200, ge=1, description="shorter documents are dropped")
    max_repeated: Fraction = Field(0.8, description="drop a document with more than this share of seen word 8-grams")
    labels: Literal["categories", "flags"] = Field(
        "flags", description="the categories of the licences; flags: also what kind of text it is, and what it names"
    )


class HubCorpus(Settings):
    """A data set of the Hugging Face hub, or a local folder in the hub's layout."""

    source: Literal["hub"] = Field(description="which kind of corpus this is")
    path: str = Field(min_length=1, description="repository on the hub, or a folder in its layout")
    name: str | None = Field(None, description="configuration of the data set")
    revision: str | None = Field(None, description="commit or tag of the repository; default: its newest")
    text: str = Field("text", description="column that holds the text; a dot leads into a column of records")
    labels: str = Field("labels", description="column that holds a document's labels, for `task: classify`")
    splits: dict[Literal["train", "val", "test"], str] = Field(
        default={"train": "train", "val": "validation", "test": "test"},
        description="the data set's names for our splits; train and val are needed",
    )
    fallback: str | None = Field(None, description="corpus to name when this one cannot be reached")

    def mistakes(self) -> Iterator[str]:
        if not {"train", "val"} <= set(self.splits):
            yield "splits needs train and val"


class LocalCorpus(Settings):
    """The user's own text: a folder of .txt and .md files, one such file, or a table; compressed or not."""

    source: Literal["local"] = Field(description="which kind of corpus this is")
    path: str = Field(min_length=1, description="a folder of .txt and .md files, a text file, or a table")
    text: str = Field("text", description="column of a table (.parquet, .csv, .json, .jsonl) that holds the text")
    labels: str = Field(
        "labels", description="column of a table with the labels of documents: lists, or texts with ; between labels"
    )
    min_characters: int = Field(1, ge=1, description="shorter documents are dropped")
    max_repeated: Fraction = Field(
        0.8, description="drop a document with more than this share of seen word 8-grams; 1: none"
    )


def _with_source(value: Any) -> Any:
    if isinstance(value, dict) and "source" not in value:
        raise ValueError(f"source is missing; add source: {', '.join(SOURCES)}")
    return value


Corpus = LicencesCorpus | HubCorpus | LocalCorpus
CORPORA: tuple[type[Settings], ...] = get_args(Corpus)
SOURCES = [get_args(kind.model_fields["source"].annotation)[0] for kind in CORPORA]
OneCorpus = Annotated[Annotated[Corpus, Field(discriminator="source")], BeforeValidator(_with_source)]


class Tokenizer(Settings):
    """GPT-2 byte-pair encoding, cut to its first ``vocab_size - 1`` ranks plus ``<|endoftext|>``."""

    name: Literal["gpt2"] = Field("gpt2", description="byte-pair encoding of GPT-2")
    vocab_size: int = Field(4096, ge=257, le=50_257, description="256 bytes + 1 to the full GPT-2 vocabulary")


class Divergence(Settings):
    """When a run counts as diverged (see `altgrad.training.outcome`)."""

    spike: float = Field(2.0, gt=1, le=1e9, description="loss above this multiple of its running minimum")
    window: int = Field(50, ge=2, description="steps that the loss must stay above it, or rise, to count")


class Train(Settings):
    """The training schedule, the same for every cell unless overridden."""

    steps: int = Field(300, ge=1, le=10_000_000, description="optimizer steps")
    batch: int = Field(16, ge=1, le=65_536, description="sequences per micro-batch")
    grad_accumulation: int = Field(1, ge=1, le=65_536, description="micro-batches per optimizer step")
    warmup: Fraction = Field(0.1, description="share of the steps that the linear warm-up takes")
    final_lr: Fraction = Field(0.1, description="learning rate at the last step, as a share of its peak")
    cooldown: Fraction | None = Field(
        None, description="share of the steps, the last, in which a constant rate falls linearly; default: half a "
        "cosine from the warm-up to the last step"
    )  # fmt: skip
    clip: float = Field(1.0, gt=0, le=1e9, description="largest global gradient norm")
    loss_scale: float = Field(
        1.0, gt=0, le=2.0**60, description="factor of the loss in the backward pass; gradients are divided by it "
        "before they are clipped; a power of two changes nothing, unless something overflows"
    )  # fmt: skip
    log_every: int = Field(10, ge=1, description="steps between rows of history.csv")
    eval_every: int = Field(50, ge=1, description="steps between evaluations")
    eval_sequences: int = Field(256, ge=1, description="size of the fixed validation sample")
    checkpoint_every: int = Field(100, ge=1, description="steps between checkpoints")
    compute: Literal["bf16", "float32"] = Field("bf16", description="dtype of matrix products outside the formats")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU if there is one")
    devices: int = Field(
        1, ge=1, le=1024, description="processes that train a cell together, each with a GPU of its own or a CPU's "
        "threads, and a share of every micro-batch"
    )  # fmt: skip
    compile: Literal["auto", "on", "off"] = Field(
        "auto", description="torch.compile, but not with lora; auto: from 100 steps on, where there is a C++ compiler"
    )
    divergence: Divergence = Field(Divergence(), description="when a run counts as diverged")

    def mistakes(self) -> Iterator[str]:
        if self.cooldown is not None and self.warmup + self.cooldown > 1:
            yield f"warmup {self.warmup} and cooldown {self.cooldown} are more than all steps together; lower one"

    @property
    def compiles(self) -> bool:
        """Whether to compile the model, if this machine can: ``compile`` is on, or auto and the run is long enough."""
        return self.compile == "on" or (self.compile == "auto" and self.steps >= COMPILE_PAYS_AFTER)


def learning_rate(
    step: int, *, peak: float, steps: int, warmup: float, final: float, cooldown: float | None = None
) -> float:
    """Return the learning rate of update ``step`` (from 1 to ``steps``).

    It rises linearly to ``peak`` over the first ``warmup`` share of the steps. Then it falls along half a cosine to
    ``final * peak`` at the last step (Loshchilov & Hutter, SGDR, ICLR 2017). With ``cooldown`` it stays at ``peak`` and
    falls linearly over the last ``cooldown`` share (Hägele et al. 2024, arXiv:2405.18392).
    """
    rising = round(warmup * steps)
    if step <= rising:
        return peak * step / rising
    falling = steps - rising if cooldown is None else round(cooldown * steps)
    progress = max(0, step - (steps - falling)) / max(1, falling)
    left = 0.5 * (1 + math.cos(math.pi * progress)) if cooldown is None else 1 - progress
    return peak * (final + (1 - final) * left)


def schedule_of(train: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `learning_rate` besides ``step`` and ``peak``, from the settings ``train`` of a cell."""
    cooldown = train.get("cooldown")  # a cell that was resolved before there was one has none
    return {"steps": train["steps"], "warmup": train["warmup"], "final": train["final_lr"], "cooldown": cooldown}


def kept_by_decay(decay: float, **schedule: Any) -> float:
    """Return the share of a weight that is left after a run in which only decay acts on it.

    ``decay`` is the share that a step at the peak learning rate takes away, an arm's ``decay`` or ``plain_decay``.
    ``schedule``: as of `schedule_of`.
    """
    shape = (learning_rate(step, peak=1.0, **schedule) for step in range(1, schedule["steps"] + 1))
    return math.prod(1 - decay * share for share in shape)


Group = Literal["tensors", "outputs", "gradients", "updates"]
GROUPS: list[Group] = list(get_args(Group))


class MonitorSettings(Settings):
    """What is recorded inside a run, and how often.

    Groups: ``tensors``, the layers' inputs, weights and incoming gradients, and what their formats do to them;
    ``outputs`` of the blocks and attention; ``gradients`` of the weights; the optimizer's ``updates``, in rungs, in
    codes and beside AdamW's. ``tensors`` takes an extra pass as long as a step or two; only it can tell that a run
    diverged by saturation.
    """

    every: int = Field(50, ge=1, description="steps between records of a group; the first step is recorded too")
    groups: list[Group] = Field(GROUPS, description="what is recorded; `[]`: nothing")
    intervals: dict[Group, Annotated[int, Field(ge=1)]] = Field(
        {}, description="steps between records of single groups instead of every, such as `{updates: 10}`"
    )
    probes: int = Field(3, ge=1, le=100, description="snapshots of weights and gradients, evenly spaced")

    def mistakes(self) -> Iterator[str]:
        for name in self.intervals:
            if name not in self.groups:
                yield f"intervals names {name}, which groups leaves out; name it in both or in neither"

    def due(self, step: int) -> set[str]:
        """Return the names of the groups that are recorded at ``step``, counted from 1."""
        return {name for name in self.groups if step == 1 or step % self.intervals.get(name, self.every) == 0}


class Diagnose(Settings):
    """How much the diagnosis of a finished run computes; a change trains no cell again."""

    fisher_tokens: int = Field(
        1024, ge=0, le=2**24, description="validation tokens for the Fisher information; 0: without it"
    )
    noise_tokens: int = Field(
        1024, ge=0, le=2**24, description="validation tokens for the gradient's noise, cause by cause; 0: without it"
    )
    hessian_tokens: int = Field(256, ge=0, le=2**24, description="validation tokens for the Hessian; 0: without it")
    lanczos: int = Field(8, ge=2, le=1000, description="most steps to the eigenvalues of a layer, and of the model")
    hutchinson: int = Field(8, ge=2, le=10_000, description="random vectors for the traces")


class Budget(Settings):
    """What a study may cost. It decides which cells are trained, and no bit of their results; `make repro` obeys it."""

    price: float = Field(0.0, ge=0, le=1e6, description="price of an hour of this machine, in any currency")
    cap: float | None = Field(None, gt=0, le=1e9, description="the most that training may cost; needs a price")
    seconds: float | None = Field(None, gt=0, le=1e9, description="the longest time that training may take")
    early_stop: bool = Field(
        False, description="stop a cell if another learning rate is clearly better after a fifth of the steps"
    )

    def mistakes(self) -> Iterator[str]:
        if self.cap is not None and not self.price:
            yield "cap needs a price; set budget.price to what an hour of this machine costs"

    @property
    def limit(self) -> float:
        """The most seconds that training may take, by ``cap`` and ``seconds``; infinity if neither is set."""
        by_cost = math.inf if self.cap is None else 3600 * self.cap / self.price
        return min(by_cost, math.inf if self.seconds is None else self.seconds)
