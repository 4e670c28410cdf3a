"""The whole of params.yaml: its schema, the presets below its entries, and reading it.

Presets are the models, corpora, arms and recipes of ``presets.yaml``, which params.yaml may name without declaring.
"""

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    StrictInt,
    Tag,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from altgrad.common.errors import UserError, did_you_mean, sentences
from altgrad.common.files import read_yaml
from altgrad.config.arms import Arm
from altgrad.config.base import ModelName, Name, Settings
from altgrad.config.models import Lora, Preset
from altgrad.config.own_formats import OwnFormat
from altgrad.config.recipe import Rule, published_recipes
from altgrad.config.schema import (
    Budget,
    Diagnose,
    MonitorSettings,
    OneCorpus,
    Tokenizer,
    Tracker,
    Train,
)
from altgrad.config.tasks import Classify, TaskName, Tasks

Model = TypeVar("Model", bound=BaseModel)
PRESETS = Path(__file__).with_name("presets.yaml")
SECTIONS = ("optimizers", "recipes", "models", "corpora")  # of params.yaml, those that have presets
#: An entry with one of these settings replaces the preset of its name; any other entry changes some of its settings.
WHOLE = {"base", "source", "from"}


def _number(value: Any) -> int | float:
    """Return the number unchanged: DVC builds a cell's key from it, and 1 must not become 1.0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e6:
        raise ValueError(f"must be a number above 0 and up to 1e6, not {value!r}")
    return value


class GridSettings(Settings):
    """The cells: every combination of the four lists, in ``model`` and in each of ``models``."""

    formats: list[Name] = Field(
        min_length=1,
        description="formats, for the recipe of grid.recipe; recipes; or a recipe and its format, such as virtual.E3M4",
    )
    optimizers: list[Name] = Field(min_length=1, description="arms, by name from optimizers")
    seeds: list[Annotated[StrictInt, Field(ge=0, le=2**31 - 1)]] = Field(
        min_length=1, description="a seed fixes initial weights and data order, alike in every format and arm"
    )
    lr_scales: list[Annotated[Any, BeforeValidator(_number), WithJsonSchema({"type": "number"})]] = Field(
        min_length=1, description="multiples of the arm's lr, above 0 and up to 1000000"
    )
    models: list[ModelName] = Field([], description="further models beside model, by name from models")
    recipe: Name = Field("uniform", description="recipe that a plain format name stands for")
    baseline: Name = Field("bf16", description="entry of formats that the others are compared with")

    def mistakes(self) -> Iterator[str]:
        for field in ("formats", "optimizers", "seeds", "lr_scales", "models"):
            values = getattr(self, field)
            repeated = [value for i, value in enumerate(values) if value in values[:i]]
            if repeated:
                yield f"{field} lists {repeated[0]} twice; remove one"


class Trigger(Settings):
    """What makes a run change its recipe; any of them does."""

    overflow: float | None = Field(
        None, gt=0, lt=1, description="an instrumented pass saw more than this share of a tensor beyond its format's "
        "largest value"
    )  # fmt: skip
    spike: float | None = Field(
        None, gt=1, le=1e9, description="the smoothed loss is above this multiple of its minimum under the recipe"
    )
    nonfinite: bool = Field(False, description="a loss or gradient is NaN or infinite; the step is done again")

    def mistakes(self) -> Iterator[str]:
        if not self.changed():
            yield "waits for nothing; write overflow: 0.01, spike: 1.5 or nonfinite: true"


class Switch(Settings):
    """A change of recipe, ``after`` a share of the steps or ``when`` something happens. All weights and the optimizer's
    state are kept. A tensor keeps its amax history if it has one of the same length; other scales begin anew.
    """

    recipe: str = Field(min_length=1, description="entry of a grid, such as bf16, E5M2 or uniform_row.E5M2")
    after: float | None = Field(None, gt=0, lt=1, description="share of the steps before it, rounded to whole steps")
    when: Trigger | None = Field(None, description="what it waits for")

    def mistakes(self) -> Iterator[str]:
        if (self.after is None) == (self.when is None):
            yield "needs either after, a share of the steps, or when"


class ChangingRecipe(Settings):
    """A recipe that changes during a run. ``FORMAT`` in the recipes that it names is the format of the grid's entry.

    A run only moves forward through the schedule. Once the share of a switch has passed (``after``), the run is at this
    switch or a later one. An event moves the run to the next switch with ``when``, if that switch waits for this event.
    """

    recipe: str = Field(min_length=1, description="entry of a grid that a run begins with, such as NVFP4")
    schedule: Annotated[list[Switch], Field(min_length=1)] = Field(description="what takes over, in order")

    def mistakes(self) -> Iterator[str]:
        for earlier, later in pairwise(switch.after for switch in self.schedule if switch.after is not None):
            if later <= earlier:
                yield f"schedule has after {later} behind after {earlier}; list them in their order"

    @property
    def names(self) -> dict[str, str]:
        """Grid entries that this recipe names, by setting: ``{"recipe": "NVFP4", "schedule[0].recipe": "bf16"}``."""
        return {"recipe": self.recipe} | {f"schedule[{i}].recipe": s.recipe for i, s in enumerate(self.schedule)}


class CellSwitch(Switch):
    """A change of recipe in a resolved cell, with the rules of the new recipe."""

    rules: list[Rule]

    def is_over(self, done: int, steps: int) -> bool:
        """Whether the share ``after`` has passed when ``done`` of ``steps`` steps are done; False without ``after``."""
        return self.after is not None and done >= round(self.after * steps)


OneRecipe = Annotated[
    Annotated[list[Rule], Tag("rules")] | Annotated[ChangingRecipe, Tag("changing")],
    Discriminator(lambda value: "changing" if isinstance(value, dict | ChangingRecipe) else "rules"),
]


def _with_published(recipes: Any) -> Any:
    return {**published_recipes(), **recipes} if isinstance(recipes, dict) else recipes


def _as_published(recipes: dict[str, Any]) -> dict[str, Any]:
    for name, rules in published_recipes().items():
        if recipes[name] != [Rule.model_validate(rule) for rule in rules]:
            raise ValueError(f"the published recipe {name} has other rules; give yours a name of its own")
    return recipes


EmptyIfNone = BeforeValidator(lambda value: {} if value is None else value)  # a section whose entries were all deleted


class Params(Settings):
    """params.yaml. ``overrides`` maps a model, a format, an arm or a cell key to settings of that cell."""

    task: TaskName = Field("language", description="what the models learn: text, or the labels of documents")
    tasks: Tasks = Field(Tasks(), description="the settings of each task")
    corpus: str = Field(description="the text to train on, by name from corpora")
    corpora: dict[str, OneCorpus] = Field(description="texts beside the presets, or other settings of a preset")
    tokenizer: Tokenizer = Field(Tokenizer(), description="how text becomes tokens")
    model: str = Field(description="the model to train, by name from models")
    models: dict[str, Preset] = Field(description="models beside the presets, or other settings of a preset")
    start: str | None = Field(
        None, min_length=1, description="folder of weights to begin with, a run's or published ones; a "
        "classifier has a new head"
    )  # fmt: skip
    lora: Lora | None = Field(None, description="train adapters of frozen weights, with start; none: all weights")
    grid: GridSettings = Field(description="the cells")
    formats: Annotated[dict[Name, OwnFormat], EmptyIfNone] = Field({}, description="formats of your own")
    recipes: Annotated[dict[Name, OneRecipe], BeforeValidator(_with_published), AfterValidator(_as_published)] = Field(
        description="which layer is quantized how, beside the presets and the published recipes"
    )
    optimizers: dict[Name, Arm] = Field(description="arms beside the presets, or other settings of a preset")
    train: Train = Field(Train(), description="the training schedule")
    monitor: MonitorSettings = Field(MonitorSettings(), description="what is recorded inside a run")
    diagnose: Diagnose = Field(Diagnose(), description="how much the diagnosis of a finished run computes")
    budget: Budget = Field(Budget(), description="what a study may cost")
    tracking: list[Tracker] = Field([], description="trackers that get results while cells train")
    overrides: Annotated[dict[str, dict[str, Any]], EmptyIfNone] = Field(
        {}, description="other settings for some cells, which a model, a grid entry, an arm or a cell's key selects"
    )

    @property
    def classify(self) -> Classify | None:
        """How documents are classified; ``None`` where the models learn the next token."""
        return self.tasks.classify if self.task == "classify" else None

    @property
    def cell_takes(self) -> tuple[int, int]:
        """(CPU threads, GPUs) that a cell needs; the second number counts only on a machine with GPUs."""
        threads = max(self.models[name].threads for name in self.all_models)
        return threads * self.train.devices, self.train.devices

    @property
    def all_models(self) -> list[str]:
        """The names of the grid's models: ``model``, then ``grid.models``."""
        return [self.model, *self.grid.models]

    @model_validator(mode="before")
    @classmethod
    def _with_presets(cls, values: Any) -> Any:
        """Lay the file's own entries over the presets, and turn ``model: {from: FOLDER}`` into an entry of models."""
        if not isinstance(values, dict):
            return values
        values = with_presets(values)
        model, models = values.get("model"), values["models"]
        if not (isinstance(model, dict) and isinstance(models, dict)):
            return values
        name = str(model.get("from", "model"))
        return values | {"model": name, "models": {**models, name: model}}


@cache
def presets() -> dict[str, Any]:
    """Return the content of ``presets.yaml``: settings by section and name, as in params.yaml."""
    return read_yaml(PRESETS)


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``changes``: mappings are merged, and any other value replaces the old one."""
    both = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(both.get(key), dict)
        both[key] = merged(both[key], value) if nested else value
    return both


def with_presets(params: dict[str, Any]) -> dict[str, Any]:
    """Return params.yaml's content with the presets added to its sections.

    An entry of a preset's name changes the settings that it names; an entry with a setting of `WHOLE` replaces the
    preset. A section that is not a mapping is returned as it is, so that the schema refuses it.
    """
    content = dict(params)
    for section in SECTIONS:
        entries = params.get(section) or {}
        if isinstance(entries, dict):
            whole = {name: its for name, its in entries.items() if isinstance(its, dict) and WHOLE & set(its)}
            content[section] = merged(presets()[section], entries) | whole
    return content


def validated(schema: type[Model], values: Any, source: object) -> Model:
    """Return ``values`` as a ``schema``; raise :class:`UserError` that names ``source`` and each wrong setting."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise UserError("\n       ".join(sentences(error, str(source)))) from None


def require_name(name: str, known: dict[str, Any], source: object, setting: str, section: str) -> None:
    """Raise :class:`UserError` unless ``name``, the value of ``setting``, is a key of ``section``."""
    if name not in known:
        raise UserError(f"{source}: {setting}: {name!r} is not in {section}{did_you_mean(name, known)}")


def load_params(path: Path | str = "params.yaml") -> Params:
    """Return params.yaml, checked. Raises :class:`UserError` also for a name that is not in its section."""
    path = Path(path)
    params = validated(Params, read_yaml(path), path)
    require_name(params.corpus, params.corpora, path, "corpus", "corpora")
    require_name(params.model, params.models, path, "model", "models")
    for i, model in enumerate(params.grid.models):
        require_name(model, params.models, path, f"grid.models[{i}]", "models")
        if model == params.model:
            raise UserError(f"{path}: grid.models[{i}]: the grid has {model} already, by model; remove it here")
    require_name(params.grid.recipe, params.recipes, path, "grid.recipe", "recipes")
    for i, arm in enumerate(params.grid.optimizers):
        require_name(arm, params.optimizers, path, f"grid.optimizers[{i}]", "optimizers")
    for name, corpus in params.corpora.items():
        fallback = getattr(corpus, "fallback", None)
        if fallback is not None:
            require_name(fallback, params.corpora, path, f"corpora.{name}.fallback", "corpora")
    return params
