"""Mixtures of experts of Hugging Face's transformers: which modules they are, and their quantized form.

A module of experts keeps the weights of all experts in one 3-d parameter per product, (experts, out, in) or
(experts, in, out). transformers' decorator ``use_experts_implementation`` marks such a module with flags that say how
to compute it, and transformers' own implementations compute every marked family by these flags. So does
:class:`QuantizedExperts`. The flags are attributes, so that transformers need not be installed.

A recipe addresses each parameter by its dotted name, such as ``model.layers.0.mlp.experts.down_proj``. Each expert's
product is quantized by itself, as a :class:`QuantizedLinear` on the expert's weight and tokens would be: with scales,
histories and random numbers of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from altgrad.config.recipe import LayerRecipe
from altgrad.model.layers import is_linear, with_hooks_of
from altgrad.model.mixture import by_expert
from altgrad.model.quantized.linear import WeightProduct

#: The flags of ``use_experts_implementation``. A module with another flag does work that is not known here.
FLAGS = {"has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated"}
ROUTERS = ("gate", "router")  # the names that transformers gives to the router beside ``experts``


@dataclass(frozen=True)
class ExpertWeight:
    """A 3-d parameter ``weight`` of a module of experts, as a layer that a recipe can address.

    Attributes:
        experts: the module, quantized or not.
        name: the parameter's name in it.
    """

    experts: nn.Module
    name: str

    @property
    def weight(self) -> nn.Parameter:
        """The weights of all experts."""
        return self.experts.get_parameter(self.name)

    @property
    def recipe(self) -> LayerRecipe | None:
        """How the products are quantized, ``None`` if they are not."""
        return self.experts.recipes.get(self.name) if isinstance(self.experts, QuantizedExperts) else None


class ExpertProduct(WeightProduct):
    """One product of one expert, called with the expert's tokens, its matrix (out, in) and its bias or ``None``."""

    def forward(self, x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x @ matrix.T + bias``."""
        return self.multiplied(x, matrix, bias)


class QuantizedExperts(nn.Module):
    """A module of experts that shares the parameters of ``plain`` and quantizes those that ``recipes`` names.

    An expert sees its tokens in the order of the sequence, so blocks along the tokens have tokens of one expert. An
    expert without tokens is not computed: its gradient is zero, and its histories and streams stay as they are.
    Biases, the activation and the sum over experts are not quantized. The compiler leaves the module to eager mode,
    since its shapes depend on the routing.
    """

    def __init__(self, plain: nn.Module, recipes: dict[str, LayerRecipe]) -> None:
        super().__init__()
        self.replaced = (plain,)  # in a tuple so that it is no submodule
        self.recipes = recipes
        for name, parameter in plain.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, child in plain.named_children():
            self.add_module(name, child)
        self.products = nn.ModuleDict()
        for name, recipe in recipes.items():
            weight = plain.get_parameter(name)
            self.products[name] = nn.ModuleList(ExpertProduct(recipe, weight.device) for _ in range(len(weight)))

    @torch._disable_dynamo  # torch.compiler.disable, which would load the compiler with this module
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return, for each token, the sum of its experts' outputs times their weights.

        Args:
            hidden_states: (tokens, in).
            top_k_index: (tokens, k), the experts of each token. A number that no expert has is skipped.
            top_k_weights: (tokens, k).

        Returns:
            (tokens, out), in the dtype of ``hidden_states``.
        """
        plain: Any = self.replaced[0]
        names = weight_names(plain)
        matrices = [self._each(name, transposed=plain.is_transposed) for name in names]
        biases = [self._each(f"{name}_bias") if plain.has_bias else [None] * len(matrices[0]) for name in names]
        order, counts = by_expert(top_k_index, len(matrices[0]))
        chosen = order.split(counts)
        dtype = torch.promote_types(hidden_states.dtype, top_k_weights.dtype)
        total = torch.zeros_like(hidden_states, dtype=dtype)
        for expert in range(len(matrices[0])):
            if not counts[expert]:
                continue
            tokens, choice = chosen[expert] // top_k_index.shape[1], chosen[expert] % top_k_index.shape[1]
            x = hidden_states[tokens]
            for name, matrix, bias in zip(names, matrices, biases, strict=True):
                x = self._product(name, expert, x, matrix[expert], bias[expert])
                if name != "down_proj":
                    x = plain._apply_gate(x) if plain.has_gate else plain.act_fn(x)
            if plain.has_post_expert_norm:
                x = self.get_submodule("post_expert_norm")(x)
            total.index_add_(0, tokens, (x * top_k_weights[tokens, choice, None]).to(dtype))
        return total.to(hidden_states.dtype)

    def _each(self, name: str, *, transposed: bool = False) -> list[Tensor]:
        """Return each expert's part of a parameter. Their gradients are put together in one tensor, not one each."""
        parts = getattr(self, name).unbind(0)
        return [part.t() for part in parts] if transposed else list(parts)

    def _product(self, name: str, expert: int, x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        if name not in self.products:
            return F.linear(x, matrix, bias)
        return cast("Tensor", self.get_submodule(f"products.{name}.{expert}")(x, matrix, bias))

    def unquantized(self) -> nn.Module:
        """Return the module that this one replaced, with the parameters that this one has now."""
        plain = self.replaced[0].train(self.training)
        for name, parameter in self.named_parameters(recurse=False):
            plain.register_parameter(name, parameter)
        return plain

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        for product in self.products.modules():
            if isinstance(product, ExpertProduct):
                product.load_constants(next(self.parameters(recurse=False)))

    def extra_repr(self) -> str:
        """Shapes and formats, for ``print(model)``."""
        shapes = [f"{name}={tuple(p.shape)}" for name, p in self.named_parameters(recurse=False)]
        return ", ".join(shapes + [f"{name}: {recipe.format_names()}" for name, recipe in self.recipes.items()])


def weight_names(experts: nn.Module) -> tuple[str, str]:
    """Return the names of the 3-d parameters of a module of experts, in the order of their products."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def is_experts(module: nn.Module) -> bool:
    """Return whether ``module`` is a module of experts that a recipe can address, quantized already or not."""
    if isinstance(module, QuantizedExperts):
        return True
    flags = {name for name in vars(module) if name.startswith(("has_", "is_"))}
    if flags != FLAGS or "forward" in vars(module):
        return False
    names = weight_names(module)
    biases = [f"{name}_bias" for name in names] if module.has_bias else []
    return set(module._parameters) == {*names, *biases} and all(module.get_parameter(name).ndim == 3 for name in names)


def quantizable_layers(model: nn.Module) -> dict[str, Any]:
    """Return dotted name -> linear layer or `ExpertWeight`, quantized or not, in the order of the model's modules.

    A layer at several places in the model is listed once, under its first name.
    """
    layers: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        if is_linear(module):
            layers[prefix] = module
        elif is_experts(module):
            plain = module.replaced[0] if isinstance(module, QuantizedExperts) else module
            layers |= {f"{prefix}.{name}".removeprefix("."): ExpertWeight(module, name) for name in weight_names(plain)}
    return layers


def require_of_experts(name: str, spec: LayerRecipe) -> None:
    """Raise ``ValueError`` if ``spec`` has a setting that the weights of experts cannot have."""
    settings = {
        "a torchao recipe": spec.torchao is not None, "backend: native": spec.backend == "native",
        "a virtual weight": spec.virtual_weight is not None,
    }  # fmt: skip
    for setting, has in settings.items():
        if has:
            raise ValueError(f"{name} has the weights of experts, which cannot have {setting}; give it another rule")


def quantized_experts(experts: nn.Module, recipes: dict[str, LayerRecipe]) -> nn.Module:
    """Return ``experts`` with the parameters named in ``recipes`` quantized; it shares parameters and hooks."""
    return with_hooks_of(experts, QuantizedExperts(experts, recipes)).train(experts.training)


def router_weights(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of routers: modules called ``gate`` or ``router`` that stand beside ``experts``."""
    beside = [module for module in model.modules() if "experts" in module._modules]
    routers = [router for module in beside for name in ROUTERS if (router := module._modules.get(name)) is not None]
    return {parameter for router in routers for parameter in router.parameters()}
