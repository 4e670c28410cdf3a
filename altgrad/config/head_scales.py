"""Find recipes whose scales clamp the right token's gradient because of how many tokens a step has.

`altgrad.formats.clamping` derives what is clamped. A recipe is found where the incoming gradient of ``head`` has scales
that are powers of two by the rule ``floor``, and the tokens of a step, divided by the factor of its loss, are 2^n or a
few per cent more. Only language models are looked at: the mean of a classifier's loss is over labels, which its text
decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from altgrad.config.cell import Cell
from altgrad.config.recipe import last_matching
from altgrad.formats import Format
from altgrad.formats.clamping import cut_off, right_token, unclamped

HEAD = "head"  # the layer that makes the logits
SMALL = 1e-6  # a probability of the right token that changes nothing
LEAST = 0.01  # of the gradient, from which on it is said: an 8-bit format rounds by more


class ClampedHead(NamedTuple):
    """The head's gradient under ``rule``, in steps of ``tokens``: up to the share ``cut`` of it is clamped."""

    tokens: int
    rule: str
    cut: float
    unclamped: tuple[int, int]  # tokens

    def __str__(self) -> str:
        first, last = self.unclamped
        return (
            f"scales of the gradient of {HEAD} are rounded down ({self.rule}), and with {self.tokens:,} tokens a step "
            f"they clamp up to {100 * self.cut:.3g} % of the right token's gradient; set scale_rounding: rceil or even "
            f"there, or take {first:,} to {last:,} tokens"
        )


def clamped_head(cell: Cell) -> ClampedHead | None:
    """Return what the scales of the head's gradient clamp while the right token's probability is small, if anything."""
    tokens = cell.train.grad_accumulation * cell.train.batch * cell.model.context
    found = []
    for rules in ([] if cell.task else [cell.rules, *(switch.rules for switch in cell.schedule)]):
        grad = last_matching([HEAD], [(rule.layers, 1.0, rule.grad) for rule in rules]).get(HEAD)
        if grad is not None and grad.scale == "E8M0" and grad.scale_rounding == "floor":
            name = grad.format.name if isinstance(grad.format, Format) else grad.format
            fmt = Format(**cell.formats[name])
            label = cell.train.loss_scale  # times the loss, what it wants the right token's probability to be
            cut = float(cut_off(right_token(tokens, SMALL, label=label), fmt, grad.scale_rounding))
            found.append(ClampedHead(tokens, grad.scale_rounding, cut, unclamped(tokens, fmt, label)))
    return max((one for one in found if one.cut > LEAST), key=lambda one: one.cut, default=None)


def clamped_heads(cells: Iterable[Cell]) -> dict[ClampedHead, list[str]]:
    """Return the entries of the grid by what their scales clamp."""
    entries: dict[ClampedHead, list[str]] = {}
    for cell in cells:
        if (found := clamped_head(cell)) is not None and cell.format not in entries.setdefault(found, []):
            entries[found].append(cell.format)
    return entries
