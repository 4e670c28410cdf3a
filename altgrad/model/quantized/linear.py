"""``QuantizedLinear``: a drop-in ``nn.Linear`` whose three matrix products run in 8-bit formats."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from altgrad.config.recipe import ROLES, LayerRecipe, TensorRecipe
from altgrad.formats import Format
from altgrad.model.hardware import multiplies_bf16
from altgrad.model.quantized.data_parallel import SHARED_ROLES, is_sharded
from altgrad.model.quantized.gathered import gathered_operands, is_gathered
from altgrad.model.quantized.matmul import Edge, MatmulSettings, QuantizedMatmul
from altgrad.model.quantized.operand import Operand, Operands
from altgrad.model.quantized.quantizer import Quantizer, Source
from altgrad.model.quantized.recompute import Passes, traced_in_checkpoint
from altgrad.model.quantized.transforms import transformed, transformed_product
from altgrad.numerics.operand import owned

NO_SCRIPT = (
    "TorchScript (torch.jit.trace, torch.jit.script) cannot hold the products of a quantized layer: take "
    "torch.export.export of model.eval(), or torch.compile"
)
# Significant bits, exponents of the smallest subnormal number and of the largest binade.
BFLOAT16 = (8, -126 - 7, 127)


def exact_in_bfloat16(format: Format, scales: Format | None = None) -> bool:
    """Return whether every finite value of ``format``, times any scale in ``scales``, is a bfloat16 value."""
    return format.fits(*BFLOAT16, scales=scales)


class Sources(NamedTuple):
    """What the operands of one pass of a layer are made with: those of its forward pass as they were before it."""

    input: Source
    weight: Source
    grad: Source


class QuantizedLinear(nn.Module):
    """A linear layer with quantized weights, inputs and incoming gradients.

    It shares the ``weight`` (out_features, in_features), stored the other way round if ``transposed``, and the
    ``bias`` parameter that it is given: these are the float32 master weights, quantized afresh in every forward
    pass. Under autocast the output has the autocast dtype, otherwise the input's; with ``accumulate: float32`` it
    is float32.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, recipe: LayerRecipe, *, transposed: bool = False
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.recipe = recipe
        self.transposed = transposed
        specs: dict[str, TensorRecipe] = {r: getattr(recipe, r) for r in ROLES if getattr(recipe, r) is not None}
        native = recipe.backend == "native"
        self.quantizers = nn.ModuleDict({role: Quantizer(spec, native) for role, spec in specs.items()})
        self.quantizers.to(weight.device)
        self.passes: Passes[Sources] = Passes()
        self.exact = all(
            exact_in_bfloat16(spec.format, spec.block_scale) and not (spec.keeps_scales and spec.scale == "float32")
            for spec in specs.values()
        )
        self._managed_by_fsdp = False
        self.replaced: tuple[nn.Module, ...] = ()  # in a tuple, so that it is no part of this module

    @classmethod
    def from_linear(cls, linear: nn.Module, recipe: LayerRecipe, *, transposed: bool = False) -> QuantizedLinear:
        """Return a quantized layer on the same parameters as ``linear``, which it keeps as ``replaced``."""
        layer = cls(*weight_and_bias(linear), recipe, transposed=transposed)
        layer.replaced = (linear,)
        return layer

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        weight, state = self.quantizer("weight"), arguments[0]
        if weight is not None and weight.holds and arguments[1] + "weight" in state:
            weight.follow(state.get(arguments[1] + "quantizers.weight.history", self.weight.detach().abs().amax()))
        # A checkpoint that was assigned to a model without memory has brought parameters, and no constants.
        if any(buffer.is_meta for buffer in self.quantizers.buffers()) and not self.weight.is_meta:
            self.quantizers.to_empty(device=self.weight.device)

    @property
    def in_features(self) -> int:
        """Size of each input vector."""
        return self._matrix(self.weight).shape[1]

    @property
    def out_features(self) -> int:
        """Size of each output vector."""
        return self._matrix(self.weight).shape[0]

    def _matrix(self, weight: Tensor) -> Tensor:
        """Return the weight as its products take it, (out_features, in_features)."""
        return weight.t() if self.transposed else weight

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias`` for ``x`` of shape (..., in_features)."""
        if x.is_nested:
            raise RuntimeError(
                "a quantized layer takes no nested tensors: pad them; quantize an nn.TransformerEncoder as a whole, or "
                "make it with enable_nested_tensor=False"
            )
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        compute_dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
        # Read once: a parametrization, such as spectral_norm, computes another weight at each reading.
        weight = self._matrix(self.weight)
        y = self._product(x.reshape(-1, x.shape[-1]), weight, self.settings(compute_dtype, device))
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def settings(self, compute_dtype: torch.dtype, device: str = "cpu") -> MatmulSettings:
        """Return the settings of a forward pass on a ``device``, by its type.

        compute_dtype: dtype of the products that are not quantized.
        """
        accumulate_fp32 = self.recipe.accumulate == "float32"
        fast_bf16 = device != "cpu" or multiplies_bf16()
        # A tensor that is not quantized keeps the precision of the compute dtype.
        low = self.exact and fast_bf16 and (compute_dtype == torch.bfloat16 or len(self.quantizers) == len(ROLES))
        input, weight, grad = map(self.quantizer, ("input", "weight", "grad"))
        return MatmulSettings(
            operand_dtype=torch.bfloat16 if low else torch.float32,
            output_dtype=torch.float32 if accumulate_fp32 else compute_dtype,
            accumulate_fp32=accumulate_fp32,
            gradient=self.recipe.gradient,
            save=self.recipe.save,
            hadamard=self.recipe.hadamard,
            ms_eden=self.rounds_anew,
            input=None if input is None else input.scaling,
            weight=None if weight is None else weight.scaling,
            grad=None if grad is None else grad.scaling,
            grad_learns=self.learns("grad"),
        )

    def quantizer(self, role: str) -> Quantizer | None:
        """Return the quantizer of ``role``, ``None`` where nothing is quantized."""
        found = self.quantizers[role] if role in self.quantizers else None
        assert found is None or isinstance(found, Quantizer)
        return found

    @property
    def rounds_anew(self) -> bool:
        """Whether the backward products of a forward pass at hand round the operands of the forward one anew."""
        grad = self.quantizer("grad")
        return self.training and grad is not None and grad.scaling.ms_eden

    @property
    def changes(self) -> bool:
        """Whether a training step leaves its mark in a quantizer of this layer."""
        return any(quantizer.changes for quantizer in self.quantizers.values())

    def learns(self, role: str) -> str:
        """Return what a forward pass at hand, and its backward pass, leave in the history of ``role``."""
        quantizer = self.quantizer(role)
        return quantizer.learns if quantizer is not None and self.training else "nothing"

    def source(self, role: str) -> Source:
        """Return what the operands of ``role`` are made with in the forward pass at hand and its backward pass.

        When the layer does not train, all is rounded to nearest.
        """
        quantizer = self.quantizer(role)
        if quantizer is None:
            return Source()
        # Ranks that share a tensor's rows draw parts of one stream (`Operand.of`).
        apart = role in SHARED_ROLES and quantizer.scaling.ranks == 1 and dist.is_available() and dist.is_initialized()
        return quantizer.source(self.training, dist.get_rank() if apart else 0)

    def __prepare_scriptable__(self) -> Any:  # torch.jit.script asks for it
        raise RuntimeError(NO_SCRIPT)

    @property
    def _is_fsdp_managed_module(self) -> bool:
        """What both generations of FSDP note on the modules that they manage."""
        return self._managed_by_fsdp

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, managed: bool) -> None:
        if managed and not is_sharded(self.weight):
            raise RuntimeError(
                "FullyShardedDataParallel flattens weights, whose rows a quantized layer and its optimizer need: shard "
                "the model by torch.distributed.fsdp.fully_shard (FSDP2; in Accelerate fsdp_version=2)"
            )
        self._managed_by_fsdp = managed

    def _product(self, x: Tensor, matrix: Tensor, settings: MatmulSettings) -> Tensor:
        if torch.jit.is_tracing():
            raise RuntimeError(NO_SCRIPT)
        if is_sharded(matrix) or is_sharded(x):
            raise RuntimeError(
                "a quantized layer runs on a weight or an input that is split over processes, whose scale no process "
                "knows: shard the model by torch.distributed.fsdp.fully_shard, not by tensor parallelism"
            )
        if transformed():
            return transformed_product(self, x, matrix, settings)
        may_repeat = self.training and self.changes
        if may_repeat and torch.compiler.is_compiling():
            if traced_in_checkpoint():
                torch._dynamo.graph_break(
                    msg="a checkpoint inside a compiled graph cannot repeat stochastic rounding or delayed scaling: "
                    "compile without fullgraph, or take a recipe that rounds to nearest and scales dynamically"
                )
            may_repeat = False
        again = self.passes.again() if may_repeat else None
        sources = again or Sources(*map(self.source, ("input", "weight", "grad")))
        if may_repeat and again is None:
            self.passes.note(Sources(sources.input.kept(), sources.weight.kept(), sources.grad))
        learns = dict.fromkeys(ROLES, "nothing") if again else {role: self.learns(role) for role in ROLES}
        weight = self.weight_operands(matrix, settings, sources.weight, learns=learns["weight"])
        trains = torch.is_grad_enabled() and matrix.requires_grad
        input = self._input_operands(x, settings, sources.input, learns=learns["input"], for_weight=trains)
        # A compiled graph has no second derivative.
        has_edge = x.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        edge = Edge.apply(x) if has_edge else None
        return QuantizedMatmul.apply(x, matrix, edge, settings, input, weight, sources.grad)

    def weight_operands(
        self, matrix: Tensor, settings: MatmulSettings, source: Source, *, learns: str = "nothing"
    ) -> Operands:
        """Return the weight, (out_features, in_features), quantized for both products, with the state in ``source``."""
        if is_gathered(matrix):
            return gathered_operands(self, matrix, settings)
        scaling, dtype = settings.weight, settings.operand_dtype
        forward = backward = Operand.of(matrix, scaling, source, 1, dtype, learns=learns, in_memory=True)
        if scaling is not None and not scaling.once and torch.is_grad_enabled() and not settings.ms_eden:
            backward = Operand.of(matrix, scaling, source, 0, dtype, in_memory=True)
        return Operands(forward, backward)

    def _input_operands(
        self, x: Tensor, settings: MatmulSettings, source: Source, *, learns: str, for_weight: bool
    ) -> Operands:
        scaling, dtype = settings.input, settings.operand_dtype
        differs = settings.hadamard > 0 or (scaling is not None and not scaling.once and not settings.ms_eden)
        used_again = differs and for_weight
        # A gated gradient and the operands of the backward products read the input again.
        once = scaling is not None and not differs and settings.gradient == "straight-through"
        own, free = owned(x) if once else (x, False)
        forward = Operand.of(own, scaling, source, 1, dtype, learns=learns, overwrite=free)
        if not used_again:
            return Operands(forward, forward)
        own, free = (x, False) if settings.hadamard else owned(x)
        rotates = settings.hadamard > 0
        return Operands(forward, Operand.of(own, scaling, source, 0, dtype, overwrite=free, rotate=rotates))

    def extra_repr(self) -> str:
        """Sizes and formats, for ``print(model)``."""
        formats = ", ".join(f"{role}={name}" for role, name in self.recipe.format_names().items())
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {formats}"


def weight_and_bias(layer: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Return the parameters of a linear layer."""
    return layer.get_parameter("weight"), None if layer.bias is None else layer.get_parameter("bias")
