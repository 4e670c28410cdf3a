"""torchtitan: a converter that changes a model's configuration so that torchtitan builds quantized layers."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module, ModuleDict

from altgrad.config.recipe import LayerRecipe
from altgrad.model import QuantizedLinear, Recipe, layer_recipe, linear_layers, quantize_model, virtual_weight
from altgrad.model.quantized.linear import weight_and_bias
from altgrad.model.quantized.quantizer import Quantizer
from altgrad.model.surgery import set_streams


class TitanQuantizer(Quantizer, Module):
    """A quantizer whose buffers torchtitan initializes."""

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        device = buffer_device or self.constants.device
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = self._new(name).to(device)


class TitanQuantizedLinear(QuantizedLinear, Module):
    """A quantized layer that torchtitan builds from a configuration."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """``Linear.Config`` with the layer's recipe."""

        _recipe: LayerRecipe

    def __init__(self, config: Config) -> None:
        plain = nn.Linear(config.in_features, config.out_features, bias=config.bias)
        recipe = config._recipe
        super().__init__(*weight_and_bias(plain), recipe)
        native = recipe.backend == "native"
        # torchtitan refuses a submodule that is not a `Module`.
        self.quantizers = ModuleDict({role: TitanQuantizer(getattr(recipe, role), native) for role in self.quantizers})

    reset_parameters = nn.Linear.reset_parameters  # torchtitan calls it without a `param_init`

    def parallelize(self, parallel_dims: Any) -> None:
        """Apply the configuration's sharding. Raises ``ValueError`` for tensor parallelism and ``full_dtensor``."""
        if parallel_dims.tp_enabled or parallel_dims.spmd_backend == "full_dtensor":
            raise ValueError(
                "a quantized layer takes its scales from a whole weight: set parallelism.tensor_parallel_degree to 1 "
                "and parallelism.spmd_backend to another than full_dtensor, and let FSDP shard the model"
            )
        super().parallelize(parallel_dims)

    def forward(self, input: Tensor) -> Tensor:
        """Call `QuantizedLinear.forward`. torchtitan's sharding names the argument ``input``."""
        return super().forward(input)


class _NumberedLinear(Linear):
    """A plain layer that keeps the number of the configuration it was built from."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        _number: int

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.number = config._number


class QuantizeConverter(QuantizationConverter):
    """Replaces the configurations of the linear layers that a recipe quantizes."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """``recipe`` and ``seed`` are the arguments of `altgrad.model.quantize_model`."""

        recipe: Recipe
        seed: int = 0

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Module.Config) -> Module.Config:
        """Replace in place the configuration of each layer that `quantize_model` would quantize; return a new root.

        The recipe's patterns match the names of layers in the built model. Raises ``ValueError`` as `quantize_model`
        does, for a layer that no ``Linear.Config`` builds, and if layers of one configuration have different recipes.
        """
        recipes = self._recipes(model_config)
        for number, (_, config, parent, attribute) in enumerate(list(model_config.traverse(Linear.Config))):
            if number in recipes:
                _put(parent, attribute, TitanQuantizedLinear.Config(**_values(config), _recipe=recipes[number]))
        return _with_streams(model_config, self.config.seed)

    def _recipes(self, model_config: Module.Config) -> dict[int, LayerRecipe]:
        """Return place in ``traverse`` -> recipe, for each ``Linear.Config`` whose layers are quantized."""
        numbered = copy.deepcopy(model_config)
        for number, (_, config, parent, attribute) in enumerate(list(numbered.traverse(Linear.Config))):
            if type(config) is Linear.Config and parent is not None:
                _put(parent, attribute, _NumberedLinear.Config(**_values(config), _number=number))
        with torch.device("meta"):
            model = numbered.build()
        by_number: dict[int, dict[str, LayerRecipe | None]] = {}  # configuration -> its layers -> their recipes
        for name, layer in linear_layers(quantize_model(model, self.config.recipe)).items():
            plain = layer.replaced[0] if isinstance(layer, QuantizedLinear) else layer
            if isinstance(plain, _NumberedLinear) and not virtual_weight(plain):
                by_number.setdefault(plain.number, {})[name] = layer_recipe(layer)
            elif layer_recipe(layer) or virtual_weight(layer):
                raise ValueError(
                    f"torchtitan has no configuration that quantizes layer {name} so: leave out of the recipe what no "
                    "Linear.Config makes, torchao (use torchtitan's own converters) and virtual_weight"
                )
        for layers in by_number.values():
            if any(recipe != next(iter(layers.values())) for recipe in layers.values()):
                raise ValueError(f"torchtitan builds layers {', '.join(layers)} alike: give them one recipe")
        return {number: recipe for number, layers in by_number.items() if (recipe := next(iter(layers.values())))}


def _put(parent: Any, attribute: Any, config: Linear.Config) -> None:
    if isinstance(parent, list):
        parent[attribute] = config
    else:
        setattr(parent, attribute, config)


def _values(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(config) if field.init}


def _with_streams(config: Module.Config, seed: int) -> Module.Config:
    """Return a copy of ``config`` that gives the model it builds the random streams of `quantize_model`."""
    kind: Any = type(config)

    class Config(kind):
        def build(self, **options: Any) -> nn.Module:
            model = kind.build(self, **options)
            set_streams(model, seed)
            return model

    Config.__qualname__ = kind.__qualname__
    return Config(**_values(config))
