"""A row of the table of metrics, and the limit beyond which its values are flagged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

Summarize = Callable[[Sequence[float], Sequence[int]], float]
STRICT_LAYERS = {"*attn.out": "attention outputs", "*head": "the head"}  # held to the tighter limit
BARE = ("1", "ratio", "cosine", "directions", "rank correlation")  # units that a title says already
ROLES = {"input": "inputs", "weight": "weights", "grad": "incoming gradients"}


def mean(values: Sequence[float], _: Sequence[int]) -> float:
    """Return the mean of the layers' ``values``: every layer counts the same."""
    return sum(values) / len(values)


def per_weight(values: Sequence[float], weights: Sequence[int]) -> float:
    """Return the mean of the layers' ``values`` weighted by ``weights``, their numbers of weights."""
    return sum(v * n for v, n in zip(values, weights, strict=True)) / sum(weights)


@dataclass(frozen=True)
class Limit:
    """A layer is flagged if its value is above ``value``, or below it if not ``above``.

    ``strict`` takes the place of ``value`` for `STRICT_LAYERS`: attention outputs and the head.
    """

    above: bool
    value: float
    strict: float | None = None

    def of(self, layer: str) -> float:
        strict = any(fnmatchcase(layer, pattern) for pattern in STRICT_LAYERS)
        return self.strict if self.strict is not None and strict else self.value

    def crossed(self, layer: str, value: float) -> bool:
        return value > self.of(layer) if self.above else value < self.of(layer)


@dataclass(frozen=True)
class Metric:
    """The definition of one metric and where it is measured.

    Training measures the metric on tensors of the ``live`` roles. The ``watched`` roles are flagged if any instrumented
    pass is beyond ``limit``. The diagnosis measures it on the role ``offline``. It flags values of the last step and
    joins the layers' values there by ``summary``. A metric with neither role is measured once for a run. ``title`` is
    its name in a table of summaries, by default ``name`` with spaces.
    """

    name: str
    unit: str
    definition: str
    live: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()
    offline: str | None = None
    summary: Summarize | None = None
    limit: Limit | None = None
    title: str = ""

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)  # the limit as a mapping
        return {name: fields[name] for name in ("unit", "definition", "offline", "limit", "title")}

    @classmethod
    def from_json(cls, name: str, content: dict[str, Any]) -> Metric:
        """Return the metric ``name`` from the ``content`` that `to_json` returned, without summary and live roles."""
        limit = content["limit"] and Limit(**content["limit"])
        return cls(name, **content | {"limit": limit})

    @property
    def head(self) -> str:
        """The head of the metric's column in a table of summaries: the title, and the unit if the title lacks it."""
        title = self.title or self.name.replace("_", " ")
        if self.is_share:
            return f"{title}, %"
        return title if self.unit in BARE else f"{title}, {self.unit}"

    @property
    def is_share(self) -> bool:
        return self.unit.startswith("share")

    @property
    def text(self) -> str:
        """The definition and, if the metric has a limit, a sentence such as ``Flagged above 1 %.``"""
        return self.definition if self.limit is None else f"{self.definition} Flagged {self._flagged(self.limit)}."

    @property
    def level(self) -> str:
        """The limit in words: ``1 %``, ``10 dB``, ``0.4``."""
        return self._level(self.bound.value)

    @property
    def bound(self) -> Limit:
        assert self.limit is not None
        return self.limit

    def _flagged(self, limit: Limit) -> str:
        flagged = f"{'above' if limit.above else 'below'} {self._level(limit.value)}"
        roles = [*self.watched, *([self.offline] if self.offline else [])]
        if not set(self.live) <= set(roles):
            flagged += f" in {' and '.join(ROLES[role] for role in roles)}"
        if limit.strict is not None:
            flagged += f" ({self._level(limit.strict)} in {' and '.join(STRICT_LAYERS.values())})"
        return flagged

    def _level(self, value: float) -> str:
        if self.is_share:
            return f"{100 * value:g} %"
        return f"{value:g} {self.unit}" if self.unit in ("%", "dB") else f"{value:g}"
