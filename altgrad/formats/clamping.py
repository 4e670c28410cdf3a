"""Say how much of the right token's gradient a power-of-two scale clamps, for a given number of tokens per batch.

The loss is the mean cross-entropy over T tokens, and p is the model's probability of the right token. The gradient at
the right token's logit is ``(p - 1) / T``, the largest element of its block. Rule ``floor`` of OCP MX v1.0 scales this
element to ``m 2^emax``, with m its significand in [1, 2). The format ends at ``t 2^emax``: t is 1.75 in E4M3, E5M2 and
E3M2, 1.875 in E2M3, 1.5 in E2M1. So the share ``1 - t / m`` is clamped. Write T as ``r 2^n`` with r in [1, 2). While p
is small, m is ``2 (1 - p) / r``. Batches with r below ``2 / t`` are clamped, by up to ``1 - r t / 2``. E4M3 loses an
eighth at r = 1 and nothing from r = 1.143 on. T counts all tokens that a backward pass divides by: the tokens of all
micro-batches if each loss is divided by their number, but of one process if gradients are averaged afterwards.

bfloat16 has 8 significant bits, so 1 - p is 1 for p below 2^-9. Then the gradient of a batch of 2^n tokens is a power
of two, which no rule clamps.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from fractions import Fraction

from altgrad.common.console import called, while_read
from altgrad.formats.format import Format
from altgrad.formats.registry import UnknownFormatError, get_format

RULES = ("floor", "even", "ceil", "rceil")
BF16_BITS = 8  # significant ones
SHOWN = (0.001, 0.01, 0.03, 0.1, 0.3, 0.52)  # probabilities of the right token


def right_token(tokens: int, p: float, *, label: float = 1.0, bf16: bool = False) -> Fraction:
    """Return the magnitude of the gradient at the right token's logit, exactly.

    Args:
        tokens: number of tokens that the loss averages over.
        p: the model's probability of the right token.
        label: the target for p: 1, or ``1 - e + e / V`` with labels smoothed by e over V tokens. If the loss has a
            factor, multiply both p and label by this factor.
        bf16: round the result to bfloat16, the dtype of the gradient of bfloat16 logits.
    """
    size = abs(Fraction(label) - Fraction(p)) / tokens
    if not bf16 or not size:
        return size
    spacing = size / significand(size) * Fraction(1, 2 ** (BF16_BITS - 1))
    return round(size / spacing) * spacing  # ties to even, as Fraction's round has them


def significand(x: Fraction) -> Fraction:
    """Return the significand of a positive ``x``: ``x / 2^floor(log2(x))``, in [1, 2)."""
    rough = x * Fraction(2) ** (x.denominator.bit_length() - x.numerator.bit_length())  # in (1/2, 2)
    return rough if rough >= 1 else 2 * rough


def cut_off(amax: Fraction, fmt: str | Format, rule: str) -> Fraction:
    """Return the share, 0 to 1, of a block's largest magnitude that is clamped under the block's power-of-two scale.

    Args:
        amax: the block's largest magnitude, 0 or more.
        fmt: format of the elements.
        rule: rule of the scale, one of `RULES`: see :func:`altgrad.numerics.compute_scale`.

    Raises:
        ValueError: an unknown rule or format.
    """
    if rule not in RULES:
        raise ValueError(f"rule: expected one of {', '.join(RULES)}, got {rule!r}")
    fmt = get_format(fmt)
    if not amax or rule in ("ceil", "rceil"):
        return Fraction(0)
    found, binade = significand(amax), _top_binade(fmt)
    spacing = Fraction(float(fmt.spacing(fmt.scale_target))) / binade
    if rule == "even" and found + spacing / 2 >= 2:  # rounds up to the next power of two, which has a larger scale
        return Fraction(0)
    return max(Fraction(0), 1 - Fraction(fmt.max) / binade / found)


def _top_binade(fmt: Format) -> Fraction:
    """Return the power of two that begins the scaling target's binade; rules scale the largest element into it."""
    target = Fraction(fmt.scale_target)
    return target / significand(target)


def unclamped(tokens: int, fmt: str | Format, label: float = 1.0) -> tuple[int, int]:
    """Return (fewest, most): the batch sizes near ``tokens`` for which rule ``floor`` clamps nothing at small p."""
    fmt = get_format(fmt)
    power = tokens / significand(tokens / Fraction(label))  # label times a power of two, at most tokens
    return math.ceil(2 * power * _top_binade(fmt) / Fraction(fmt.max)), math.ceil(2 * power) - 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Print `table` and return 0; arguments that are refused exit with status 2."""
    parser = argparse.ArgumentParser(prog=called("formats.clamping"), description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tokens", type=int, help="tokens that the mean loss of a step is over, such as 1024")
    parser.add_argument("--format", default="E4M3", help="of the gradient (default %(default)s, as in MXFP8)")
    parser.add_argument("--smoothing", type=float, default=0.0, help="of the labels, 0 to 1 (default %(default)s)")
    options = parser.parse_args(arguments)
    if options.tokens < 1:
        parser.error(f"tokens: expected 1 or more, not {options.tokens}")
    if not 0 <= options.smoothing < 1:
        parser.error(f"--smoothing: expected 0 or more and less than 1, not {options.smoothing}")
    try:
        fmt = get_format(options.format)
    except UnknownFormatError as error:
        parser.error(str(error))
    print(table(options.tokens, fmt, 1 - options.smoothing))
    return 0


def table(tokens: int, fmt: Format, label: float = 1.0) -> str:
    """Return a text table of the clamped per cent by rule, dtype and p; ``label`` as in `right_token`."""
    rows = [("rule", "gradients", *(f"p={p:g}" for p in SHOWN))]
    for rule in RULES[:2]:
        for dtype in ("float32", "bf16"):
            sizes = [right_token(tokens, p, label=label, bf16=dtype == "bf16") for p in SHOWN]
            rows.append((rule, dtype, *(f"{float(100 * cut_off(size, fmt, rule)):.1f}" for size in sizes)))
    first, last = unclamped(tokens, fmt, label)
    what = f"the gradient at the right token's logit, (p - {label:g}) / {tokens:,}"
    return "\n".join([
        f"{fmt.name} with a power of two for each block, in batches of {tokens:,} tokens. Per cent that is clamped of",
        f"{what}, by the probability p that the model gives to it:",
        "", *(f"{rule:<6}  {dtype:<9}" + "".join(f"{cell:>9}" for cell in cells) for rule, dtype, *cells in rows),
        "", f"While p is small, floor clamps nothing in batches of {first:,} to {last:,} tokens.",
        "Ceil and rceil clamp nothing in any batch.",
    ])  # fmt: skip


if __name__ == "__main__":
    with while_read():
        sys.exit(main())
