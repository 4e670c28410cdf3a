"""Did the run converge or diverge, when, and how did it look.

A divergence is a result of the experiment, not a failure of the program: the run stops, records its
signature, and the pipeline goes on.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

SMOOTHING = 0.9  # share of the old value in the running mean of the loss
DRIFT_RATIO = 1.2  # a smoothed loss this far above its minimum ...
DRIFT_WINDOWS = 4  # ... for this many windows is a drift
SATURATION = 0.01  # overflow share that explains a divergence: where overflow is flagged


@dataclass
class OutcomeTracker:
    """Watches the loss of every step; its fields are part of the checkpoint.

    Signatures: ``nonfinite`` (NaN or Inf in the loss or a gradient), ``spike`` (the smoothed loss
    stays above ``spike`` times its minimum for ``window`` steps, or is there when the run ends),
    ``drift`` (above ``DRIFT_RATIO`` times its minimum for ``DRIFT_WINDOWS`` windows), ``saturation`` (any
    of these after a share of over ``SATURATION`` of some tensor had overflowed its format), ``none``.
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
    first_rows: str | None = None  # of that tensor, or else those whose weights went farthest

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
        """Judge a run that reached its last step: an excursion that has not come back is a spike."""
        if self.outcome == "completed" and self.spike_start is not None:
            self.diverge("spike", self.spike_start)

    @property
    def diverged(self) -> bool:
        return self.outcome == "diverged"

    def state(self) -> dict[str, Any]:
        """Return every field, as plain values; ``OutcomeTracker(**state)`` restores it."""
        state = asdict(self)
        state["minimum"] = None if math.isinf(self.minimum) else self.minimum
        return state

    @classmethod
    def restore(cls, state: dict[str, Any]) -> OutcomeTracker:
        return cls(**{**state, "minimum": math.inf if state["minimum"] is None else state["minimum"]})

    def diverge(self, signature: str, step: int) -> bool:
        """Record that the run diverged at ``step``, in the way of ``signature``."""
        self.outcome = "diverged"
        self.signature = "saturation" if self.saturated else signature
        self.outcome_step = step
        return True


def _since(start: int | None, step: int, above: bool) -> int | None:
    if not above:
        return None
    return step if start is None else start
