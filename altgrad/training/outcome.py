"""Whether a run completed or diverged: at which step, by which signature, and in which rows of a layer it began.

A divergence is a result of the experiment, not a failure of the program: the run stops, records its
signature, and the pipeline goes on. If the cell has a schedule, its next recipe may take over before (`Switches`).

A change of recipe depends on earlier steps and the batch of the present step. All data for it is in the checkpoint or
is computed again. So a run that is resumed on either side of a change continues with the same bits. Only instrumented
passes see an overflow, so a change by overflow depends on how often the run is watched. Nothing else does.

Rows are features of a layer. A row of a weight (out, in) makes one output feature. An incoming gradient (tokens, out)
has a column for each output feature, and an input (tokens, in) a column for each input feature.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from altgrad.config import Cell

SMOOTHING = 0.9  # share of the old value in the running mean of the loss
DRIFT_RATIO = 1.2  # a smoothed loss this far above its minimum ...
DRIFT_WINDOWS = 4  # ... for this many windows is a drift
SATURATION = 0.01  # overflow share that explains a divergence: the limit above which overflow is flagged
OUTSTANDING = 8.0  # a row is outstanding if it moved this many times as far as the median row of its layer
TINY = 1e-300  # keeps a loss of 0 from being a divisor
FEATURES = {"input": "input features", "weight": "output rows", "grad": "output rows"}


@dataclass
class OutcomeTracker:
    """Watches the loss of every step; its fields are part of the checkpoint.

    Signatures: ``nonfinite`` (NaN or Inf in the loss or a gradient), ``spike`` (the smoothed loss stays above ``spike``
    times its minimum for ``window`` steps, or is above it when the run ends), ``drift`` (the smoothed loss stays above
    ``DRIFT_RATIO`` times its minimum for ``DRIFT_WINDOWS`` windows), ``saturation`` (any of these, after more than a
    share of ``SATURATION`` of some tensor overflowed its format), ``none``.
    """

    spike: float
    window: int
    smoothed: float | None = None
    minimum: float | None = None
    spike_start: int | None = None
    drift_start: int | None = None
    saturated: bool = False
    outcome: str = "completed"
    signature: str = "none"
    outcome_step: int | None = None
    first_nonfinite: str | None = None  # the first tensor that was not finite, such as "blocks.2.mlp.down grad"
    first_rows: str | None = None  # rows of that tensor, or else the rows whose weights moved farthest

    def update(self, step: int, loss: float, grad_norm: float) -> bool:
        """Record the loss and gradient norm of ``step``; return whether the run has diverged."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return self.diverge("nonfinite", step)
        old = loss if self.smoothed is None else self.smoothed
        self.smoothed = SMOOTHING * old + (1 - SMOOTHING) * loss
        self.minimum = self.smoothed if self.minimum is None else min(self.minimum, self.smoothed)
        self.spike_start = _since(self.spike_start, step, self.smoothed > self.spike * self.minimum)
        self.drift_start = _since(self.drift_start, step, self.smoothed > DRIFT_RATIO * self.minimum)
        if self.spike_start is not None and step - self.spike_start >= self.window:
            return self.diverge("spike", self.spike_start)
        if self.drift_start is not None and step - self.drift_start >= DRIFT_WINDOWS * self.window:
            return self.diverge("drift", self.drift_start)
        return False

    def observe_overflow(self, overflow_frac: float) -> None:
        self.saturated |= overflow_frac > SATURATION

    def finish(self) -> None:
        """Judge a run at its last step: it diverged by a spike if its smoothed loss is still above the spike limit."""
        if self.outcome == "completed" and self.spike_start is not None:
            self.diverge("spike", self.spike_start)

    @property
    def diverged(self) -> bool:
        return self.outcome == "diverged"

    def diverge(self, signature: str, step: int) -> bool:
        """Record that the run diverged at ``step`` with ``signature``, or ``saturation`` if a tensor overflowed."""
        self.outcome = "diverged"
        self.signature = "saturation" if self.saturated else signature
        self.outcome_step = step
        return True


def _since(start: int | None, step: int, above: bool) -> int | None:
    if not above:
        return None
    return step if start is None else start


class Switches:
    """The place of ``cell`` in its schedule: 0 is the first recipe, 1 the next.

    ``made`` has a dict for each change so far: ``step`` (the first in the new recipe), ``recipe`` (its name), ``place``
    and ``why`` (after, overflow, spike or nonfinite). ``least`` is the smallest smoothed loss since the last change.
    """

    def __init__(self, cell: Cell, made: list[dict[str, Any]] | None = None, least: float | None = None) -> None:
        self._cell, self.made = cell, made or []
        self._least = math.inf if least is None else least
        self._smoothed = math.inf

    @property
    def place(self) -> int:
        return self.made[-1]["place"] if self.made else 0

    @property
    def recipe(self) -> str:
        """The name of the present recipe; before any change, the cell's format."""
        return self.made[-1]["recipe"] if self.made else self._cell.format

    def state(self) -> dict[str, Any]:
        """Return plain values; ``Switches(cell, **state)`` restores this object from them."""
        return {"made": self.made, "least": None if math.isinf(self._least) else self._least}

    def before(self, step: int, smoothed: float | None) -> bool:
        """Change the recipe before ``step`` if a scheduled share of the steps is over or the ``smoothed`` loss spikes.

        Returns whether the recipe changes. ``smoothed`` is ``None`` before the first step.
        """
        self._smoothed = math.inf if smoothed is None else smoothed
        self._least = min(self._least, self._smoothed)
        over = [s.is_over(step - 1, self._cell.train.steps) for s in self._cell.schedule]
        last = max((i for i, it_is in enumerate(over, 1) if it_is), default=0)
        if last > self.place:
            return self._change(step, last, "after")
        return not math.isinf(self._smoothed) and self.when(step, spike=self._smoothed / max(self._least, TINY))

    def when(self, step: int, **seen: float) -> bool:
        """Change to the next recipe with a ``when``, if ``seen`` exceeds its limit; return whether the recipe changes.

        ``seen`` is one keyword: ``spike`` (a ratio), ``overflow`` (a share of a tensor) or ``nonfinite=True``.
        """
        waiting = [(i, s.when) for i, s in enumerate(self._cell.schedule, 1) if i > self.place and s.when is not None]
        ((name, value),) = seen.items()
        limit = getattr(waiting[0][1], name) if waiting else None
        if not limit or not (value is True or value > limit):
            return False
        return self._change(step, waiting[0][0], name)

    def _change(self, step: int, place: int, why: str) -> bool:
        recipe = self._cell.schedule[place - 1].recipe
        self.made = [*self.made, {"step": step, "recipe": recipe, "place": place, "why": why}]
        self._least = self._smoothed
        return True


def nonfinite_rows(t: Tensor, role: str) -> str:
    """Return which features of ``t`` hold NaN or infinity, ``"output rows 3 to 17 (5 of 128)"``, or "" if none does.

    The features of a weight (out, in) are its rows. For other roles they are the last dimension of ``t``.
    """
    bad = ~t.detach().reshape(-1, t.shape[-1]).isfinite()
    return _in_words(bad.any(dim=1 if role == "weight" else 0), FEATURES[role])


def outstanding_rows(moved: Mapping[str, Tensor]) -> str | None:
    """Return the layer and its rows that moved more than `OUTSTANDING` times its median row, ``None`` without any.

    An example is ``"blocks.0.mlp.up output rows 3 to 17 (5 of 128)"``, from the layer with the largest ratio. The
    median leaves out rows that did not move.

    Args:
        moved: the change of each layer's weights (out, in), by layer. A layer with NaN is skipped.
    """
    farthest, words = OUTSTANDING, None
    for layer, change in moved.items():
        norms = torch.linalg.vector_norm(change, dim=1, dtype=torch.float64)
        if not (norms > 0).any():
            continue
        ratios = norms / norms[norms > 0].median()
        if ratios.max().item() > farthest:
            farthest = ratios.max().item()
            words = f"{layer} {_in_words(ratios > OUTSTANDING, FEATURES['weight'])}"
    return words


def _in_words(chosen: Tensor, what: str) -> str:
    """Return where ``chosen`` (1-d bool) is true, ``"output rows 3 to 17 (5 of 128)"``, or "" if nowhere."""
    places = chosen.nonzero().flatten().tolist()
    if not places:
        return ""
    if len(places) == 1:
        return f"{what.removesuffix('s')} {places[0]} (of {len(chosen)})"
    return f"{what} {places[0]} to {places[-1]} ({len(places)} of {len(chosen)})"
