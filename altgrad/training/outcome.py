"""Whether a run completed or diverged: at which step, by which signature, and in which rows of a layer it began.

A divergence is a result of the experiment, not a failure of the program: the run stops, records its
signature, and the pipeline goes on.

Rows are features of a layer. A row of a weight (out, in) makes one output feature. An incoming gradient (tokens, out)
has a column for each output feature, and an input (tokens, in) a column for each input feature.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

SMOOTHING = 0.9  # share of the old value in the running mean of the loss
DRIFT_RATIO = 1.2  # a smoothed loss this far above its minimum ...
DRIFT_WINDOWS = 4  # ... for this many windows is a drift
SATURATION = 0.01  # overflow share that explains a divergence: the limit above which overflow is flagged
OUTSTANDING = 8.0  # a row is outstanding if it moved this many times as far as the median row of its layer
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
    minimum: float = math.inf
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
        self.minimum = min(self.minimum, self.smoothed)
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

    def state(self) -> dict[str, Any]:
        """Return every field as a plain value; `restore` makes a tracker of them."""
        state = asdict(self)
        state["minimum"] = None if math.isinf(self.minimum) else self.minimum
        return state

    @classmethod
    def restore(cls, state: dict[str, Any]) -> OutcomeTracker:
        return cls(**{**state, "minimum": math.inf if state["minimum"] is None else state["minimum"]})

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
