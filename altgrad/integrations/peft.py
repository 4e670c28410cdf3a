"""PEFT: LoRA adapters beside quantized layers, added before or after the model is quantized."""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from peft import LoraConfig
from peft.tuners.lora import Linear, LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn

from altgrad.model import QuantizedLinear, Recipe, quantizable_layers
from altgrad.model import quantize_model as quantize_plain_model
from altgrad.model.experts import router_weights
from altgrad.model.surgery import set_streams

Model = TypeVar("Model", bound=nn.Module)
BASE = ".base_layer"


class LoraQuantizedLinear(Linear):
    """A quantized layer with a frozen weight and a LoRA adapter; the adapter's two products stay unquantized.

    After merging, the layer quantizes the sum of weight and adapter, so outputs change by a rounding.
    """

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, **options: Any) -> None:
        quantized: Any = base_layer.get_base_layer() if isinstance(base_layer, LoraLayer) else base_layer
        config = copy.copy(config)
        config.fan_in_fan_out = quantized.transposed  # PEFT's name for a weight stored as (in, out)
        super().__init__(base_layer, adapter_name, config=config, **options)

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.in_features, module.out_features

    @property
    def lora_variants(self) -> dict[tuple[str, ...], None]:
        """Plain LoRA only: PEFT then refuses its variants, which would compute with the unquantized weight."""
        return {(): None}


def lora_config(config: LoraConfig) -> LoraConfig:
    """Change ``config`` so that `get_peft_model` and `PeftModel.from_pretrained` accept quantized layers; return it.

    Raises ``ValueError`` for ``target_modules="all-linear"``, which finds no quantized layer, and for
    ``modules_to_save`` with ``ensure_weight_tying``, which would replace a quantized head by a plain layer.
    """
    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        raise ValueError('target_modules="all-linear" finds no quantized layer; name the modules, or add LoRA first')
    if config.modules_to_save and config.ensure_weight_tying:
        raise ValueError("ensure_weight_tying puts a plain layer in a quantized head's place; add LoRA first")
    config._register_custom_module({QuantizedLinear: LoraQuantizedLinear})
    return config


def quantize_model(model: Model, recipe: Recipe, *, seed: int = 0) -> Model:
    """Quantize ``model``, which has LoRA adapters, in place, as `altgrad.model.quantize_model` does; return it.

    The patterns of ``recipe`` match the names that layers have without PEFT, such as ``lm_head``. A copy in
    ``modules_to_save`` is quantized like the layer it copies. Adapters stay unquantized. Raises ``ValueError`` as
    `altgrad.model.quantize_model` does.
    """
    name_before = _names_before_peft(model)
    adapters = tuple(f"{name}.lora_" for name, module in model.named_modules() if isinstance(module, LoraLayer))
    layers = {name: layer for name, layer in quantizable_layers(model).items() if not name.startswith(adapters)}
    names = {name: name_before(name).removesuffix(BASE) for name in layers}
    of_routers = router_weights(model)
    routers = {names[name] for name, layer in layers.items() if layer.weight in of_routers}
    matched = recipe.match(dict.fromkeys(names.values()), products=(), routers=routers)
    rules = [matched[before].on(name) for name, before in names.items() if before in matched]
    quantize_plain_model(model, Recipe(rules=tuple(rules)), seed=seed)
    set_streams(model, seed, name_of=name_before)
    return model


def _names_before_peft(model: nn.Module) -> Callable[[str], str]:
    """Return a function from a module's name in ``model`` to its name before PEFT; a saved copy has its original's."""
    places = {
        f"{name}.{place}.": f"{name}."
        for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)
        for place in ("original_module", *(f"modules_to_save.{adapter}" for adapter in module.modules_to_save))
    }  # fmt: skip

    def name_before(name: str) -> str:
        place = next(filter(f"{name}.".startswith, places), "")
        return (places.get(place, "") + f"{name}."[len(place) :])[:-1].removeprefix("base_model.model.")

    return name_before
