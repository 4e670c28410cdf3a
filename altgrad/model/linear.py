"""``QuantizedLinear``: a drop-in ``nn.Linear`` whose three matrix products run in 8-bit formats."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from altgrad.model.hardware import multiplies_bf16
from altgrad.model.matmul import MatmulSettings, Operand, QuantizedMatmul
from altgrad.model.quantizer import Quantizer
from altgrad.model.recipe import ROLES, LayerRecipe, TensorRecipe
from altgrad.numerics import Format
from altgrad.numerics.operand import owned

BF16_SIGNIFICAND_BITS = 8
BF16_EMIN = -126 - 7  # exponent of the smallest bfloat16 subnormal


def exact_in_bfloat16(format: Format) -> bool:
    """Return whether every finite value of ``format`` is a bfloat16 value."""
    smallest = format.emin - format.mantissa_bits
    return format.mantissa_bits + 1 <= BF16_SIGNIFICAND_BITS and smallest >= BF16_EMIN and format.max < 2.0**128


class QuantizedLinear(nn.Module):
    """A linear layer with quantized weights, inputs and incoming gradients.

    It shares the ``weight`` (out_features, in_features) and ``bias`` parameters that it is given:
    these are the float32 master weights, quantized afresh in every forward pass. Under autocast the
    output has the autocast dtype, otherwise the input's; with ``accumulate: fp32`` it is float32.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, recipe: LayerRecipe) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.recipe = recipe
        specs: dict[str, TensorRecipe] = {r: getattr(recipe, r) for r in ROLES if getattr(recipe, r) is not None}
        native = recipe.backend == "native"
        self.quantizers = nn.ModuleDict({role: Quantizer(spec, native) for role, spec in specs.items()})
        self.quantizers.to(weight.device)
        delayed_grad = recipe.grad is not None and recipe.grad.scaling != "dynamic"
        # Written by the backward pass, moved into the history by the next forward pass.
        self.register_buffer("grad_amax", torch.zeros((), device=weight.device) if delayed_grad else None)
        self.exact = all(exact_in_bfloat16(spec.format) for spec in specs.values())

    @classmethod
    def from_linear(cls, linear: nn.Linear, recipe: LayerRecipe) -> QuantizedLinear:
        """Return a quantized layer on the same parameters as ``linear``."""
        return cls(linear.weight, linear.bias, recipe)

    @property
    def in_features(self) -> int:
        """Size of each input vector."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """Size of each output vector."""
        return self.weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias`` for ``x`` of shape (..., in_features)."""
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        compute_dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
        settings = self._settings(compute_dtype, multiplies_bf16(device))
        # Autocast would send float32 products through bfloat16, and so the native product on CPU, which torch
        # makes of one.
        native_on_cpu = self.recipe.backend == "native" and device == "cpu"
        has_fp32_product = settings.accumulate_fp32 or settings.operand_dtype == torch.float32 or native_on_cpu
        context = torch.autocast(device, enabled=False) if autocast and has_fp32_product else nullcontext()
        with context:
            y = self._product(x.reshape(-1, x.shape[-1]), settings)
            if self.bias is not None:
                y = y + self.bias.to(y.dtype)
        return y.reshape(*x.shape[:-1], self.out_features)

    def _settings(self, compute_dtype: torch.dtype, fast_bf16: bool) -> MatmulSettings:
        accumulate_fp32 = self.recipe.accumulate == "fp32"
        # A tensor that is not quantized keeps the precision of the compute dtype.
        low = self.exact and fast_bf16 and (compute_dtype == torch.bfloat16 or len(self.quantizers) == len(ROLES))
        return MatmulSettings(
            operand_dtype=torch.bfloat16 if low else torch.float32,
            output_dtype=torch.float32 if accumulate_fp32 else compute_dtype,
            accumulate_fp32=accumulate_fp32,
            clipped=self.recipe.gradient == "clipped",
            save=self.recipe.save,
            **{role: self.quantizers[role].scaling if role in self.quantizers else None for role in ROLES},
        )

    def _product(self, x: Tensor, settings: MatmulSettings) -> Tensor:
        grad = self._quantizer("grad")
        if self.training:
            self.advance_grad_history()
        x_q = self._operand("input", x, settings)
        weight_q = self._operand("weight", self.weight, settings)
        return QuantizedMatmul.apply(
            x, self.weight, x_q.values, weight_q.values, x_q.scale, weight_q.scale,
            self._constants("input"), self._constants("weight"), self._constants("grad"),
            None if grad is None else grad.remembered_amax(), self.grad_amax, settings,
        )  # fmt: skip

    def advance_grad_history(self) -> None:
        """Move the amax of the last backward pass into the gradient's scaling history."""
        if self.grad_amax is not None:
            self.quantizers["grad"].remember(self.grad_amax)

    def _quantizer(self, role: str) -> Quantizer | None:
        return self.quantizers[role] if role in self.quantizers else None

    def _constants(self, role: str) -> Tensor | None:
        quantizer = self._quantizer(role)
        return None if quantizer is None else quantizer.constants

    def _operand(self, role: str, t: Tensor, settings: MatmulSettings) -> Operand:
        """Return the operand of the forward product, and in training remember its amax."""
        quantizer = self._quantizer(role)
        remembered = None if quantizer is None else quantizer.remembered_amax()
        scaling = getattr(settings, role)
        # A clipped gradient and the operands of the backward products read the tensor again.
        once = scaling is not None and scaling.per_tensor and not settings.clipped
        t, free = owned(t) if once else (t, False)
        constants = self._constants(role)
        operand = Operand.of(t, scaling, constants, remembered, 1, settings.operand_dtype, overwrite=free)
        if self.training and operand.amax is not None:
            quantizer.remember(operand.amax)
        return operand

    def extra_repr(self) -> str:
        """Sizes and formats, for ``print(model)``."""
        formats = ", ".join(f"{role}={name}" for role, name in self.recipe.format_names().items())
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {formats}"
