"""`quantize`: ``round(x * s) / s`` in any format, mode and overflow policy, for any float tensor, with a gradient.

The default mode rounds as `rounding.round_to_grid` does, in eager mode in cache-sized chunks; both give the same bits.
Everything else goes through `round_float64`.

Rounding has derivative zero almost everywhere, so training uses a straight-through estimator (Bengio et al. 2013,
arXiv:1308.3432). The gradient of the result passes to ``x`` unchanged; or it is zeroed where ``x * s`` is outside the
format's range, or where ``x`` is not positive (Yin et al. 2019, arXiv:1903.05662, compare the three). Each estimator is
linear in the incoming gradient, so second derivatives are those of the surrounding function, as Hessians need.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from altgrad.formats import Format, get_format
from altgrad.formats.tables import TableFormat
from altgrad.numerics import loops
from altgrad.numerics.compile_utils import constant_in_graphs, converted
from altgrad.numerics.constants import MAX, format_constants, loops_take, table_of
from altgrad.numerics.eager import PIECE, map_chunks
from altgrad.numerics.rounding import OVERFLOW_POLICIES, ROUNDING_MODES, round_float64, round_to_grid

GRADIENTS = ("straight-through", "clipped", "relu")

# Significant bits, exponent of the smallest positive number, exponent of the largest binade.
_DTYPE_LIMITS = {
    torch.float16: (11, -24, 15),
    torch.bfloat16: (8, -133, 127),
    torch.float32: (24, -149, 127),
    torch.float64: (53, -1074, 1023),
}


def quantize(
    x: Tensor,
    fmt: str | Format | Tensor,
    *,
    scale: float | Tensor | None = None,
    rounding: str = "nearest-even",
    overflow: str = "saturate",
    gradient: str = "straight-through",
    generator: torch.Generator | None = None,
    random_bits: int = 24,
) -> Tensor:
    """Return ``round(x * scale) / scale`` with ``round`` to the format.

    Product and quotient are float32, or float64 for a float64 ``x``. The result is cast to the dtype of ``x``. That is
    exact, unless a scale that is no power of two adds digits that a 16-bit dtype cannot hold.

    Args:
        x: float16, bfloat16, float32 or float64, any shape. NaN stays NaN.
        fmt: a format or its name. `torch.compile` makes a graph for each; to share one among formats, pass what
            `format_constants` returns, with a float32 ``x``, ``nearest-even`` and ``saturate``.
        scale: positive and finite, a number or a tensor that broadcasts to the shape of ``x`` (see
            `scaling.broadcast_scale` for blocks). No gradient flows to it. None is 1.
        rounding: ``nearest-even`` (ties to the even code), ``nearest-away``, ``toward-zero``, ``up``, ``down`` or
            ``stochastic``.
        overflow: ``saturate`` gives the largest value of the sign, also for infinities; ``overflow`` gives Inf if the
            format has it, else NaN. Rounding comes first: what rounds to the largest value is in range.
        gradient: ``straight-through`` (identity), ``clipped`` (zero where ``|x * scale|`` exceeds the largest value) or
            ``relu`` (zero where ``x <= 0``).
        generator: required by stochastic rounding, and read by it alone. A CPU generator gives the same bits whatever
            the device of ``x``.
        random_bits: stochastic only: bits drawn per element, 1 to 31. The probability of rounding away from zero is
            exact to 2^-(random_bits + 1).

    Returns:
        The shape, dtype and device of ``x``.

    Raises:
        TypeError: ``x`` is no float tensor, or with packed constants not float32.
        ValueError: naming the argument: a dtype that cannot hold the format, a scale that is not positive and finite,
            an unknown choice, a missing generator, packed constants in another mode. Values of a tensor ``scale`` are
            checked in eager mode only, since a compiled graph cannot raise on data; on a GPU this waits for them.
    """
    require_choice("rounding", rounding, ROUNDING_MODES)
    require_choice("overflow", overflow, OVERFLOW_POLICIES)
    require_choice("gradient", gradient, GRADIENTS)
    if rounding == "stochastic":
        if generator is None:
            raise ValueError("generator: stochastic rounding needs an explicit torch.Generator")
        if not 1 <= random_bits <= 31:
            raise ValueError(f"random_bits: expected 1 to 31, got {random_bits}")
    known = constants = None
    if isinstance(fmt, Tensor):
        if x.dtype != torch.float32:
            raise TypeError(f"x: with packed constants expected torch.float32, got {x.dtype}")
        if (rounding, overflow) != ("nearest-even", "saturate"):
            only = "packed constants are for nearest-even and saturate"
            raise ValueError(f"rounding: {only}, not {rounding} and {overflow}")
        constants = fmt
    else:
        known = get_format(fmt)
        require_holds("x", x.dtype, known)
        if rounding != "nearest-even" and isinstance(known, TableFormat) and not _holds_all(x.dtype, known):
            raise ValueError(f"x: {x.dtype} cannot hold all values of {known.name}, which rounding {rounding} may give")
    plan = _Plan(known, rounding, overflow, gradient, generator, random_bits)
    scale = _as_scale(scale, x)
    if torch.compiler.is_compiling():
        return _Quantize.apply(x, scale, constants, plan)
    if not _is_differentiated(x):
        return plan.run(x, scale, constants)
    return _QuantizeForwardMode.apply(x, scale, constants, plan)


class _Plan(NamedTuple):
    """The arguments of `quantize` that are no tensors; ``fmt`` is None if packed constants take its place."""

    fmt: Format | None
    rounding: str
    overflow: str
    gradient: str
    generator: torch.Generator | None
    random_bits: int

    def run(self, x: Tensor, scale: Tensor | None, constants: Tensor | None) -> Tensor:
        has_kernel = constants is not None or self._has_kernel(x)
        if not torch.compiler.is_compiling():
            if scale is not None:
                # Here rather than in quantize, because under vmap only here there are values to look at.
                _require_positive(scale)
            if not has_kernel:
                return map_chunks(x, scale, self._round_in_place, piece=PIECE // 2)  # allocates as it goes
            constants = format_constants(_known(self.fmt), x.device) if constants is None else constants
            return map_chunks(x, scale, partial(_round_in_place, constants))
        wide = x if x.dtype == torch.float64 else x.float()
        scaled = wide if scale is None else wide * scale
        if has_kernel:
            constants = format_constants(_known(self.fmt), x.device) if constants is None else constants
            rounded = round_to_grid(scaled, constants)
        else:
            rounded = self._round(scaled)
        return converted(rounded if scale is None else rounded / scale, x.dtype)

    def range_of(self, constants: Tensor | None) -> tuple[Any, Any]:
        """Return the lowest and the largest value."""
        if constants is None:
            fmt = _known(self.fmt)
            return float(fmt.values[0]), fmt.max
        table = table_of(constants)
        return (-constants[MAX], constants[MAX]) if table is None else (table.values[0], table.values[-1])

    def _has_kernel(self, x: Tensor) -> bool:
        default = self.rounding == "nearest-even" and self.overflow == "saturate"
        return default and x.dtype != torch.float64 and _known(self.fmt).rounds_in_float32

    def _round(self, x: Tensor) -> Tensor:
        """Round float32 or float64 by the general path."""
        random = None
        if self.rounding == "stochastic":
            assert self.generator is not None
            where = self.generator.device
            random = torch.randint(1 << self.random_bits, x.shape, generator=self.generator, device=where).to(x.device)
        rounded = round_float64(x.double(), _known(self.fmt), self.rounding, self.overflow, random, self.random_bits)
        return converted(rounded, x.dtype)

    def _round_in_place(self, work: Tensor) -> None:
        work.copy_(self._round(work))


def _round_in_place(constants: Tensor, work: Tensor) -> None:
    by_loops = work.device.type == "cpu" and loops_take(constants) and loops.available()
    work.copy_((torch.ops.altgrad.round_values if by_loops else round_to_grid)(work, constants))


def _known(fmt: Format | None) -> Format:
    """Return ``fmt``, which is not None in a plan without packed constants."""
    assert fmt is not None
    return fmt


class _Quantize(torch.autograd.Function):
    """Reverse-mode and vmap rules of `quantize`. It is element-wise, so vmap quantizes a batch as one tensor."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor | None, constants: Tensor | None, plan: _Plan) -> Tensor:
        return plan.run(x, scale, constants)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, plan = inputs
        ctx.plan = plan
        if plan.gradient != "straight-through":
            ctx.save_for_backward(*tensors)
            ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _through(ctx, grad), None, None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        x: Tensor,
        scale: Tensor | None,
        constants: Tensor | None,
        plan: _Plan,
    ) -> tuple[Tensor, int]:
        x_dim, scale_dim, *_ = in_dims
        if x_dim is None:
            x, x_dim = x.expand(info.batch_size, *x.shape), 0
        x = x.movedim(x_dim, 0)
        if scale is not None and scale_dim is not None:
            scale = scale.movedim(scale_dim, 0)
            missing = x.dim() - scale.dim()
            scale = scale.reshape(scale.shape[0], *[1] * missing, *scale.shape[1:])
        return _QuantizeForwardMode.apply(x, scale, constants, plan), 0


class _QuantizeForwardMode(_Quantize):
    """`_Quantize` with a forward-mode rule, which `torch.compile` refuses to trace."""

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor, *_: None) -> Tensor:
        return _through(ctx, x_tangent)


def _through(ctx: Any, derivative: Tensor) -> Tensor:
    if ctx.plan.gradient == "straight-through":
        return derivative.view_as(derivative)
    x, scale, constants = ctx.saved_tensors
    if ctx.plan.gradient == "relu":
        return derivative * (x > 0)
    lowest, largest = ctx.plan.range_of(constants)
    scaled = x if scale is None else x.to(scale.dtype) * scale
    return derivative * ((scaled >= lowest) & (scaled <= largest))


def _is_differentiated(x: Tensor) -> bool:
    """Whether a derivative or vmap needs `_Quantize`, which costs more than quantizing a small tensor."""
    if torch.is_grad_enabled() and x.requires_grad:
        return True
    return torch._C._are_functorch_transforms_active() or unpack_dual(x).tangent is not None


def _as_scale(scale: float | Tensor | None, x: Tensor) -> Tensor | None:
    if scale is None:
        return None
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    if not isinstance(scale, Tensor):
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"scale: expected a positive finite number, got {scale}")
        return torch.tensor(scale, dtype=compute, device=x.device)
    scale = scale.detach().to(device=x.device, dtype=compute)
    trailing = x.shape[x.dim() - scale.dim() :]
    if scale.dim() > x.dim() or any(n not in (1, m) for n, m in zip(scale.shape, trailing, strict=True)):
        raise ValueError(f"scale: shape {tuple(scale.shape)} does not broadcast to the shape {tuple(x.shape)} of x")
    return scale


def _require_positive(scale: Tensor) -> None:
    usable = 0 < scale.item() < math.inf if scale.numel() == 1 else bool(((scale > 0) & scale.isfinite()).all())
    if not usable:
        raise ValueError("scale: every entry must be positive and finite")


def require_holds(argument: str, dtype: torch.dtype, fmt: Format) -> None:
    """Raise unless every value of the format is one of ``dtype``; messages begin with ``argument``.

    Raises:
        TypeError: ``dtype`` is not float16, bfloat16, float32 or float64.
        ValueError: ``dtype`` cannot hold the format.
    """
    limits = _DTYPE_LIMITS.get(dtype)
    if limits is None:
        known = ", ".join(str(known).removeprefix("torch.") for known in _DTYPE_LIMITS)
        raise TypeError(f"{argument}: expected {known}, got {dtype}")
    if not fmt.fits(*limits):
        raise ValueError(f"{argument}: {dtype} cannot hold the values of {fmt}")


@constant_in_graphs
def _holds_all(dtype: torch.dtype, fmt: TableFormat) -> bool:
    values = torch.tensor(fmt.values)
    return torch.equal(values.to(dtype).double(), values)


def require_choice(argument: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ``ValueError`` unless ``value`` of ``argument`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{argument}: expected one of {', '.join(choices)}, got {value!r}")
