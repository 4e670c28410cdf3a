"""torchtitan: a converter of model configurations, after which the model is built with quantized layers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module, ModuleDict

from altgrad.config.recipe import LayerRecipe
from altgrad.model import QuantizedLinear, Recipe, layer_recipe, linear_layers, quantize_model, virtual_weight
from altgrad.model.quantized.quantizer import Quantizer


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
        """What `Linear.Config` says, the layer's recipe, and role -> seed and number of its random stream."""

        _recipe: LayerRecipe
        _streams: dict[str, tuple[int, int]]

    def __init__(self, config: Config) -> None:
        plain = nn.Linear(config.in_features, config.out_features, bias=config.bias)
        super().__init__(plain.weight, plain.bias, config._recipe)
        native = config._recipe.backend == "native"
        made = {role: TitanQuantizer(self.quantizers[role].recipe, native) for role in self.quantizers}
        self.quantizers = ModuleDict(made)  # torchtitan takes no submodule that is not a `Module`
        for role, stream in config._streams.items():
            made[role].count_from(*stream)

    reset_parameters = nn.Linear.reset_parameters  # which torchtitan calls where no `param_init` is given

    def parallelize(self, parallel_dims: Any) -> None:
        """Apply the sharding of the configuration. Raises ``ValueError`` where it would split the weight."""
        if parallel_dims.tp_enabled or parallel_dims.spmd_backend == "full_dtensor":
            raise ValueError(
                "a quantized layer takes its scales from a whole weight: set parallelism.tensor_parallel_degree to 1 "
                "and parallelism.spmd_backend to another than full_dtensor, and let FSDP shard the model"
            )
        super().parallelize(parallel_dims)

    def forward(self, input: Tensor) -> Tensor:
        """Return what `QuantizedLinear` does. torchtitan's sharding names the argument ``input``."""
        return super().forward(input)


class QuantizeConverter(QuantizationConverter):
    """Replaces the configurations of the linear layers that a recipe quantizes."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """Attributes: ``recipe`` and ``seed`` as `altgrad.model.quantize_model` takes them."""

        recipe: Recipe
        seed: int = 0

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Module.Config) -> Module.Config:
        """Replace, in place, the configurations of what `quantize_model` would quantize in the model; return the root.

        The model that is built from it has the layers, and the random streams, of the built model quantized by
        `quantize_model`. Raises ``ValueError`` as that does, and for a layer that no configuration of its own makes.
        """
        wanted = quantize_model(_build(model_config), self.config.recipe, seed=self.config.seed)
        quantized = {name: layer for name, layer in linear_layers(wanted).items() if isinstance(layer, QuantizedLinear)}
        for name, config, parent, attribute in list(model_config.traverse(Linear.Config)):
            if name not in quantized:
                continue
            made = TitanQuantizedLinear.Config(
                **{field.name: getattr(config, field.name) for field in fields(Linear.Config)},
                _recipe=quantized[name].recipe, _streams=_streams(quantized[name]),
            )  # fmt: skip
            if isinstance(parent, list):
                parent[attribute] = made
            else:
                setattr(parent, attribute, made)
        built = _described(_build(model_config))
        for name, described in _described(wanted).items():
            if built.get(name) != described:
                raise ValueError(
                    f"torchtitan has no configuration that quantizes layer {name} as the recipe says: the layer needs "
                    "a Linear.Config of its own, and a recipe without torchao or virtual_weight"
                )
        return model_config


def _build(model_config: Module.Config) -> nn.Module:
    with torch.device("meta"):
        return model_config.build()


def _streams(layer: QuantizedLinear) -> dict[str, tuple[int, int]]:
    return {role: quantizer.first for role in layer.quantizers if (quantizer := layer.quantizer(role)) is not None}


def _described(model: nn.Module) -> dict[str, Any]:
    """Return how each layer that a recipe addresses is quantized."""
    return {
        name: (layer_recipe(layer), virtual_weight(layer), isinstance(layer, QuantizedLinear) and _streams(layer))
        for name, layer in linear_layers(model).items()
        if layer_recipe(layer) or virtual_weight(layer)
    }
