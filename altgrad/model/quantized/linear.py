"""``QuantizedLinear``: a drop-in ``nn.Linear`` whose three matrix products run in 8-bit formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from altgrad.config.recipe import ROLES, LayerRecipe, TensorRecipe
from altgrad.formats import Format
from altgrad.model.hardware import multiplies_bf16
from altgrad.model.quantized.data_parallel import is_sharded
from altgrad.model.quantized.gathered import LargestOfParts, gathered_operands, is_gathered
from altgrad.model.quantized.matmul import MatmulSettings, QuantizedMatmul
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


class Ready(NamedTuple):
    """Operands of a weight that were made beforehand, for the forward pass under way, and what they were made with."""

    operands: Operands
    source: Source


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
        self.ready: Ready | None = None
        self.passes: Passes[Sources] = Passes()
        self.largest_of_parts: LargestOfParts | None = None  # of a weight that is gathered as codes
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
    def matrix(self) -> Tensor:
        """The weight as its products take it, (out_features, in_features)."""
        return self.weight.t() if self.transposed else self.weight

    @property
    def in_features(self) -> int:
        """Size of each input vector."""
        return self.matrix.shape[1]

    @property
    def out_features(self) -> int:
        """Size of each output vector."""
        return self.matrix.shape[0]

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
        settings = self.settings(compute_dtype)
        y = self._product(x.reshape(-1, x.shape[-1]), settings)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y.reshape(*x.shape[:-1], self.out_features)

    def settings(self, compute_dtype: torch.dtype) -> MatmulSettings:
        """Return those of a forward pass at hand, whose products otherwise have ``compute_dtype``."""
        accumulate_fp32 = self.recipe.accumulate == "float32"
        fast_bf16 = multiplies_bf16(self.weight.device.type)
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
        return Source() if quantizer is None else quantizer.source(self.training)

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

    def _product(self, x: Tensor, settings: MatmulSettings) -> Tensor:
        if torch.jit.is_tracing():
            raise RuntimeError(NO_SCRIPT)
        if is_sharded(self.weight) or is_sharded(x):
            raise RuntimeError(
                "a quantized layer runs on a weight or an input that is split over processes, whose scale no process "
                "knows: shard the model by torch.distributed.fsdp.fully_shard, not by tensor parallelism"
            )
        if transformed():
            return transformed_product(self, x, settings)
        may_repeat = self.training and self.changes
        if may_repeat and torch.compiler.is_compiling():
            if traced_in_checkpoint():
                torch._dynamo.graph_break(
                    msg="a checkpoint inside a compiled graph cannot repeat stochastic rounding or delayed scaling: "
                    "compile without fullgraph, or take a recipe that rounds to nearest and scales dynamically"
                )
            may_repeat = False
        again = self.passes.again() if may_repeat else None
        if again is not None:
            weight = weight_operands([self], settings, [again.weight], learns="nothing")[0]
            input = self._input_operands(x, settings, again.input, learns="nothing")
            return QuantizedMatmul.apply(x, self.matrix, settings, input, weight, again.grad)
        ready = self.ready or ready_weights([self], settings)[0]
        source, grad = self.source("input"), self.source("grad")
        if may_repeat:
            self.passes.note(Sources(source.kept(), ready.source, grad))
        input = self._input_operands(x, settings, source, learns=self.learns("input"))
        return QuantizedMatmul.apply(x, self.matrix, settings, input, ready.operands, grad)

    def _input_operands(self, x: Tensor, settings: MatmulSettings, source: Source, *, learns: str) -> Operands:
        scaling, dtype = settings.input, settings.operand_dtype
        differs = settings.hadamard > 0 or (scaling is not None and not scaling.once and not settings.ms_eden)
        used_again = differs and torch.is_grad_enabled() and self.weight.requires_grad
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


def weight_operands(
    layers: Sequence[QuantizedLinear], settings: MatmulSettings, sources: Sequence[Source], *, learns: str
) -> list[Operands]:
    """Return the operands of the layers' weights, for layers that ``settings`` fits alike."""
    if is_gathered(layers[0].weight):
        return [gathered_operands(layer, settings) for layer in layers]
    weights, scaling, dtype = [layer.matrix for layer in layers], settings.weight, settings.operand_dtype
    if scaling is None:
        cast = [Operand.of(w, None, Source(), 1, dtype) for w in weights]
        return list(map(Operands, cast, cast))
    forward = backward = Operand.of_each(weights, scaling, sources, 1, dtype, learns=learns, in_memory=True)
    if not scaling.once and torch.is_grad_enabled() and not all(layer.rounds_anew for layer in layers):
        backward = Operand.of_each(weights, scaling, sources, 0, dtype, in_memory=True)
    return list(map(Operands, forward, backward))


def ready_weights(layers: Sequence[QuantizedLinear], settings: MatmulSettings) -> list[Ready]:
    """Return `weight_operands` of a forward pass that begins, and what they were made with."""
    sources, learns = [layer.source("weight") for layer in layers], layers[0].learns("weight")
    keep = learns != "nothing" and not torch.compiler.is_compiling()
    kept = [source.kept() for source in sources] if keep else sources
    return list(map(Ready, weight_operands(layers, settings, sources, learns=learns), kept))
