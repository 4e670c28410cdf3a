"""torchao's float8 training recipes, as baselines beside our own layers.

PyTorch users train FP8 models with torchao (github.com/pytorch/ao, ``torchao.float8``). Its public function
``convert_to_float8_training`` converts the layers here by ``Float8LinearConfig.from_recipe_name``. Converted layers run
torchao's code, with one of three recipes:

- ``tensorwise``: E4M3 weights and inputs, E5M2 gradients, one float32 scale per tensor. The arithmetic is the same as
  of ``Recipe.uniform("E4M3")``.
- ``rowwise``: E4M3 throughout, a power-of-two scale per row of each product's sum.
- ``rowwise_with_gw_hp``: like ``rowwise`` in the forward product. The product of gradient and weight has one scale for
  the weight. The weight's gradient is computed from unquantized inputs and gradients.

torchao has no layer that quantizes only its weight, as our recipes do for the head. The example in torchao's
documentation leaves out the last layer, and so do the recipes of params.yaml.

Native FP8 products run where the GPU has them. Elsewhere torchao's ``emulate`` computes them in float32 from the
dequantized operands. Compiled results then differ from eager ones, because the compiler leaves out roundings to
bfloat16 (unless ``torch._inductor.config.emulate_precision_casts`` is set).

Importing torchao takes seconds, so only the functions import it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from altgrad.config.recipe import LayerRecipe, TensorRecipe
from altgrad.formats import get_format
from altgrad.model.hardware import has_products

if TYPE_CHECKING:
    from torchao.float8 import CastConfig, Float8LinearConfig

FORMATS = {
    torch.float8_e4m3fn: "E4M3", torch.float8_e5m2: "E5M2",
    torch.float8_e4m3fnuz: "E4M3FNUZ", torch.float8_e5m2fnuz: "E5M2FNUZ",
}  # fmt: skip

# Harmless messages of importing torchao 0.18, by logger: libraries for other GPUs and Pythons do not load, and it
# registers an enum in a way that torch 2.13 deprecates.
IMPORT_NOISE = {"torchao": "Failed to load ", "torch.utils._pytree": "register_constant() on Enum"}


def torchao_linear(linear: nn.Linear, recipe: LayerRecipe) -> nn.Module:
    """Return torchao's layer for ``recipe``; it shares the parameters of ``linear``, and its ``.recipe`` is ``recipe``.

    The weight's device decides once between native and emulated products: move a model before you quantize it.
    Under autocast the layer casts inputs and outputs to autocast's dtype.
    """
    assert recipe.torchao is not None
    float8 = _torchao_float8()
    scales = "one scale" if recipe.torchao == "tensorwise" else "rows"
    native = has_products(scales, linear.weight.device)
    config = dataclasses.replace(_config(recipe.torchao), emulate=not native)
    layer = float8.convert_to_float8_training(linear, config=config)
    layer.register_forward_pre_hook(_cast_by_autocast)
    layer.recipe = recipe
    return layer


def tensor_recipes(name: str) -> dict[str, TensorRecipe | None]:
    """Return role -> how torchao's recipe ``name`` quantizes it, ``None`` if it does not.

    The scales are for the forward product, and for ``grad`` for the product with the weight. torchao raises an amax
    below 1e-12 to 1e-12.
    """
    config = _config(name)
    casts = {"weight": config.cast_config_weight, "input": config.cast_config_input}
    casts["grad"] = config.cast_config_grad_output
    return {role: _tensor_recipe(cast, config.round_scales_to_power_of_2) for role, cast in casts.items()}


def require_as_stated(recipe: LayerRecipe) -> None:
    """Raise ``ValueError`` if the installed torchao quantizes a layer differently from what ``recipe`` says."""
    if recipe.torchao is not None and (tensors := tensor_recipes(recipe.torchao)) != recipe.tensors():
        formats = {role: tensor.format.name if tensor else None for role, tensor in tensors.items()}
        raise ValueError(
            f"this torchao's recipe {recipe.torchao} quantizes to {formats} with scales of its own, not as "
            "altgrad.config.recipe says; install torchao 0.18, on a device with OCP formats"
        )


def _tensor_recipe(cast: CastConfig, powers_of_two: bool) -> TensorRecipe | None:
    if cast.scaling_type.value == "disabled":
        return None
    granularity = {"tensorwise": "tensor", "axiswise": "row"}[cast.scaling_granularity.value]
    return TensorRecipe(
        format=get_format(FORMATS[cast.target_dtype]),
        scaling=cast.scaling_type.value, granularity=granularity, scale="E8M0" if powers_of_two else "float32",
    )  # fmt: skip


def _config(name: str) -> Float8LinearConfig:
    return _torchao_float8().Float8LinearConfig.from_recipe_name(name)


def _cast_by_autocast(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the input, cast to autocast's dtype if autocast is on: on a CPU torchao 0.18 leaves it float32.

    ``rowwise_with_gw_hp`` would then fail, as it multiplies this input with a bfloat16 gradient.
    """
    (x,) = inputs
    device = x.device.type
    return (x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x,)


def _torchao_float8() -> Any:
    with _without_import_noise():
        import torchao.float8
    return torchao.float8


@contextmanager
def _without_import_noise() -> Iterator[None]:
    """Within the context, drop the log records in :data:`IMPORT_NOISE` and no others."""
    filters = []
    for name, words in IMPORT_NOISE.items():
        logger = logging.getLogger(name)
        filters.append((logger, lambda record, words=words: words not in record.getMessage()))
        logger.addFilter(filters[-1][1])
    try:
        yield
    finally:
        for logger, drop in filters:
            logger.removeFilter(drop)
