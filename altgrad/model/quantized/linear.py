"""``QuantizedLinear``: a drop-in ``nn.Linear`` whose three matrix products run in 8-bit formats."""

from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from altgrad.config.recipe import ROLES, LayerRecipe
from altgrad.formats import Format
from altgrad.model.hardware import multiplies_bf16
from altgrad.model.quantized.data_parallel import GatheredCodes, gathered_operands, is_sharded
from altgrad.model.quantized.matmul import Edge, MatmulSettings, QuantizedMatmul
from altgrad.model.quantized.operand import Operand, Operands
from altgrad.model.quantized.quantizer import (
    CheckpointedPasses,
    OperandState,
    OperandStates,
    Quantizer,
    is_traced_in_checkpoint,
)
from altgrad.model.quantized.torch_func import is_transformed, require_transformable, transformed_product
from altgrad.numerics.operand import owned

NO_SCRIPT = (
    "TorchScript (torch.jit.trace, torch.jit.script) cannot hold the products of a quantized layer: take "
    "torch.export.export of model.eval(), or torch.compile"
)
# Significant bits, exponents of the smallest subnormal number and of the largest binade.
BFLOAT16 = (8, -126 - 7, 127)


def exact_in_bfloat16(format: Format, scales: Format | None = None) -> bool:
    """Return whether bfloat16 holds each finite value of ``format``, also times each value of the format ``scales``."""
    return format.fits(*BFLOAT16, scales=scales)


class QuantizedModule(nn.Module):
    """A module that computes ``x @ matrix.T`` from quantized operands: of a layer, an expert or attention.

    Attributes:
        recipe: how each role is quantized: ``input`` is x, ``weight`` the matrix, ``grad`` the product's gradient.
        quantizers: role -> state, for each quantized role.
        shared_roles: the roles whose tensors have other rows in each process that shares a batch.
    """

    shared_roles: tuple[str, ...]

    def __init__(self, recipe: LayerRecipe) -> None:
        super().__init__()
        self.recipe = recipe
        specs = {role: spec for role, spec in recipe.tensors().items() if spec is not None}
        native = recipe.backend == "native"
        self.quantizers = nn.ModuleDict({role: Quantizer(spec, native) for role, spec in specs.items()})
        self.passes = CheckpointedPasses()
        self.exact = all(
            exact_in_bfloat16(spec.format, spec.block_scale) and not (spec.keeps_scales and spec.scale == "float32")
            for spec in specs.values()
        )

    def extra_repr(self) -> str:
        """Formats, for ``print(model)``."""
        return ", ".join(f"{role}={name}" for role, name in self.recipe.format_names().items())

    def settings(self, compute_dtype: torch.dtype, device: str = "cpu") -> MatmulSettings:
        """Return the settings of a forward pass on a device of type ``device``, such as ``"cuda"``.

        compute_dtype: dtype of the products that are not quantized.
        """
        accumulate_fp32 = self.recipe.accumulate == "float32"
        fast_bf16 = device != "cpu" or multiplies_bf16()
        # A tensor that is not quantized keeps the precision of the compute dtype.
        low = self.exact and fast_bf16 and (compute_dtype == torch.bfloat16 or len(self.quantizers) == len(ROLES))
        input, weight, grad = (
            None if q is None else q.scaling for q in map(self.quantizer, ("input", "weight", "grad"))
        )
        return MatmulSettings(
            operand_dtype=torch.bfloat16 if low else torch.float32,
            output_dtype=torch.float32 if accumulate_fp32 else compute_dtype,
            accumulate_fp32=accumulate_fp32,
            gradient=self.recipe.gradient,
            save=self.recipe.save,
            hadamard=self.recipe.hadamard,
            ms_eden=self.training and grad is not None and grad.ms_eden,
            input=input,
            weight=weight,
            grad=grad,
            grad_learns=self._learns("grad"),
        )

    def quantizer(self, role: str) -> Quantizer | None:
        """Return the quantizer of ``role``, ``None`` if ``role`` is not quantized."""
        return cast("Quantizer | None", self.quantizers._modules.get(role))

    @property
    def changes(self) -> bool:
        """Whether a training step changes the state of a quantizer of this layer."""
        return any(quantizer.changes for quantizer in self.quantizers.values())

    def _learns(self, role: str) -> str:
        """Return which amax this step writes into the history of ``role``: ``nothing``, ``first`` or ``each``."""
        quantizer = self.quantizer(role)
        return quantizer.learns if quantizer is not None and self.training else "nothing"

    def operand_state(self, role: str) -> OperandState:
        """Return the format, amax history and, while training, random stream that quantize ``role`` in this step."""
        quantizer = self.quantizer(role)
        if quantizer is None:
            return OperandState()
        # Ranks that share a tensor's rows draw parts of one stream (`Operand.of`).
        ranks = quantizer.scaling.ranks
        apart = quantizer.scaling.stochastic and role in self.shared_roles and ranks == 1
        several = apart and dist.is_available() and dist.is_initialized()
        return quantizer.state(self.training, dist.get_rank() if several else 0)

    def _operand_states(self) -> OperandStates:
        return OperandStates(*map(self.operand_state, OperandStates._fields))

    def __prepare_scriptable__(self) -> Any:  # torch.jit.script asks for it
        raise RuntimeError(NO_SCRIPT)

    def _product(self, x: Tensor, matrix: Tensor, settings: MatmulSettings) -> Tensor:
        """Return ``x @ matrix.T`` for ``x`` (..., n, k) and ``matrix`` (..., m, k) of the same batch."""
        if torch.jit.is_tracing():
            raise RuntimeError(NO_SCRIPT)
        if is_sharded(matrix) or is_sharded(x):
            raise RuntimeError(
                "a quantized layer runs on a weight or an input that is split over processes, whose scale no process "
                "knows: shard the model by torch.distributed.fsdp.fully_shard, not by tensor parallelism"
            )
        if is_transformed():
            quantizers = {role: q for role in ROLES if (q := self.quantizer(role)) is not None}
            require_transformable(quantizers, self.training)
            return transformed_product(x, matrix, settings, self._operand_states())
        may_repeat = self.training and self.changes
        if may_repeat and torch.compiler.is_compiling():
            if is_traced_in_checkpoint():
                torch._dynamo.graph_break(
                    msg="a checkpoint inside a compiled graph cannot repeat stochastic rounding or delayed scaling: "
                    "compile without fullgraph, or take a recipe that rounds to nearest and scales dynamically"
                )
            may_repeat = False
        repeated = self.passes.again() if may_repeat else None
        states = repeated or self._operand_states()
        if may_repeat and repeated is None:
            self.passes.note(states._replace(input=states.input.snapshot(), weight=states.weight.snapshot()))
        of_weight, of_input = ("nothing" if repeated else self._learns(role) for role in ("weight", "input"))
        weight = self.weight_operands(matrix, settings, states.weight, learns=of_weight)
        trains = torch.is_grad_enabled() and matrix.requires_grad
        input = self._input_operands(x, settings, states.input, learns=of_input, for_weight=trains)
        # A compiled graph has no second derivative.
        has_edge = x.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        edge = Edge.apply(x) if has_edge else None
        return QuantizedMatmul.apply(x, matrix, edge, settings, input, weight, states.grad)

    def weight_operands(
        self, matrix: Tensor, settings: MatmulSettings, state: OperandState, *, learns: str = "nothing"
    ) -> Operands:
        """Return the weight ``matrix`` (out_features, in_features), quantized by ``state``, for both its products."""
        if isinstance(matrix, GatheredCodes):
            quantizer = self.quantizer("weight")
            assert quantizer is not None
            return gathered_operands(matrix, quantizer, settings.operand_dtype)
        scaling, dtype, in_memory = settings.weight, settings.operand_dtype, "weight" not in self.shared_roles
        forward = backward = Operand.of(matrix, scaling, state, 1, dtype, learns=learns, in_memory=in_memory)
        if scaling is not None and not scaling.once and torch.is_grad_enabled() and not settings.ms_eden:
            backward = Operand.of(matrix, scaling, state, 0, dtype, in_memory=in_memory)
        return Operands(forward, backward)

    def _input_operands(
        self, x: Tensor, settings: MatmulSettings, state: OperandState, *, learns: str, for_weight: bool
    ) -> Operands:
        scaling, dtype, rotates = settings.input, settings.operand_dtype, settings.hadamard > 0
        differs = rotates or (scaling is not None and not scaling.once and not settings.ms_eden)
        # A gated gradient and the operands of the backward products read the input again.
        once = scaling is not None and not differs and settings.gradient == "straight-through"
        t, free = owned(x) if once else (x, False)
        forward = Operand.of(t, scaling, state, 1, dtype, learns=learns, overwrite=free)
        if not (differs and for_weight):
            return Operands(forward, forward)
        t, free = (x, False) if rotates else owned(x)
        return Operands(forward, Operand.of(t, scaling, state, 0, dtype, overwrite=free, rotate=rotates))


class WeightProduct(QuantizedModule):
    """A product of inputs with a weight that the caller passes; the weight is quantized anew in every forward pass."""

    shared_roles = ("input", "grad")  # a weight is the same in every process

    def __init__(self, recipe: LayerRecipe, device: torch.device) -> None:
        super().__init__(recipe)
        if any(spec is not None and spec.granularity == "head" for spec in recipe.tensors().values()):
            raise ValueError("granularity head is for attention's products: a linear layer has no heads; take row")
        self.quantizers.to(device)

    def multiplied(self, x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x @ matrix.T + bias`` for ``x`` (..., in_features) and ``matrix`` (out_features, in_features).

        The result has autocast's dtype, or that of ``x`` without autocast; with ``accumulate: float32`` it is float32.
        """
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        compute_dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
        is_matrix = x.ndim == 2  # a view of it would be two more nodes of the graph
        rows = x if is_matrix else x.reshape(-1, x.shape[-1])
        y = self._product(rows, matrix, self.settings(compute_dtype, device))
        if bias is not None:
            y = y + bias.to(y.dtype)
        return y if is_matrix else y.reshape(*x.shape[:-1], y.shape[-1])

    def load_constants(self, weight: Tensor) -> None:
        """Make constants on the device of ``weight`` if a checkpoint brought it to a model on the meta device."""
        if any(buffer.is_meta for buffer in self.quantizers.buffers()) and not weight.is_meta:
            self.quantizers.to_empty(device=weight.device)


class QuantizedLinear(WeightProduct):
    """A linear layer that quantizes its weight, its input and the gradient of its output.

    It shares the parameters that it is given: ``weight`` (out_features, in_features), or (in, out) if ``transposed``,
    and ``bias``. The weight is the float32 master weight.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, recipe: LayerRecipe, *, transposed: bool = False
    ) -> None:
        super().__init__(recipe, weight.device)
        self.weight = weight
        self.bias = bias
        self.transposed = transposed
        self._managed_by_fsdp = False
        self.replaced: tuple[nn.Module, ...] = ()  # the plain layer, in a tuple so that it is no submodule

    @classmethod
    def from_linear(cls, linear: nn.Module, recipe: LayerRecipe, *, transposed: bool = False) -> Self:
        """Return a quantized layer that shares the parameters of ``linear``; its ``replaced`` is ``(linear,)``.

        ``transposed``: ``linear`` stores its weight as (in, out).
        """
        layer = cls(*weight_and_bias(linear), recipe, transposed=transposed)
        layer.replaced = (linear,)
        return layer

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        weight = self.quantizer("weight")
        if weight is not None and weight.holds and prefix + "weight" in state_dict:
            amax = state_dict.get(prefix + "quantizers.weight.history", self.weight.detach().abs().amax())
            weight.follow(amax)
        self.load_constants(self.weight)

    @property
    def in_features(self) -> int:
        """Size of each input vector."""
        return self._matrix(self.weight).shape[1]

    @property
    def out_features(self) -> int:
        """Size of each output vector."""
        return self._matrix(self.weight).shape[0]

    def _matrix(self, weight: Tensor) -> Tensor:
        """Return the stored ``weight`` as (out_features, in_features)."""
        return weight.t() if self.transposed else weight

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias`` for ``x`` of shape (..., in_features)."""
        if x.is_nested:
            raise RuntimeError(
                "a quantized layer takes no nested tensors: pad them; quantize an nn.TransformerEncoder as a whole, or "
                "make it with enable_nested_tensor=False"
            )
        # Read once: a parametrization, such as spectral_norm, computes another weight at each reading.
        return self.multiplied(x, self._matrix(self.weight), self.bias)

    @property
    def _is_fsdp_managed_module(self) -> bool:
        """The mark that FSDP1 and FSDP2 set on the modules that they manage."""
        return self._managed_by_fsdp

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, managed: bool) -> None:
        if managed and not is_sharded(self.weight):
            raise RuntimeError(
                "FullyShardedDataParallel flattens weights, whose rows a quantized layer and its optimizer need: shard "
                "the model by torch.distributed.fsdp.fully_shard (FSDP2; in Accelerate fsdp_version=2)"
            )
        self._managed_by_fsdp = managed

    def extra_repr(self) -> str:
        """Sizes and formats, for ``print(model)``."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {super().extra_repr()}"


def weight_and_bias(layer: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Return the weight and the bias of a linear layer, ``None`` for a missing bias."""
    return layer.get_parameter("weight"), None if layer.bias is None else layer.get_parameter("bias")
