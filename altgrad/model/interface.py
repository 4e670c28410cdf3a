"""Attention's products in models of Hugging Face's transformers, through its registry of attention functions.

An attention of transformers looks up its function by ``config._attn_implementation``. `adopt` registers a function
called ``altgrad`` and gives each attention the submodules ``scores`` and ``values``, which rules name and
`quantize_model` replaces. The function computes what the class's own ``eager_attention_forward`` does, in float32.
An attention whose eager function does anything else is refused by its name. transformers is imported only here.
"""

import inspect
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from altgrad.config.recipe import PRODUCTS, Recipe
from altgrad.model.layers import attention_products
from altgrad.model.quantized.attention import LARGEST_PROBABILITY, Product, attend

NAME = "altgrad"  # of the attention function
BEFORE = "attention_before"  # attribute of an adopted model: its configurations and their functions before
REGISTRY, EAGER = "ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"
#: What the eager functions of transformers 5 call and read, all of which `_attention` does too.
KNOWN = {
    "torch", "matmul", "transpose", "nn", "functional", "F", "softmax", "float32", "dtype", "to", "type", "dropout",
    "training", "contiguous", "repeat_kv", "num_key_value_groups", "size", "head_dim", "scaling", "tanh", "cat",
    "shape", "reshape", "expand", "max", "values", "sinks",
}  # fmt: skip
ARGUMENTS = {
    "module", "query", "key", "value", "attention_mask", "scaling", "dropout", "softcap", "position_bias", "kwargs",
}  # fmt: skip


def pretrained_models(model: nn.Module) -> list[Any]:
    """Return ``model`` and its submodules that are transformers models, the outer ones first."""
    bases = ("transformers.modeling_utils", "PreTrainedModel")
    return [m for m in model.modules() if any((c.__module__, c.__name__) == bases for c in type(m).__mro__)]


def interface_products(model: nn.Module) -> dict[str, str | None]:
    """Return name of a product -> why it cannot be quantized, or None, for each attention that `adopt` would change."""
    found: dict[str, str | None] = {}
    for name, module in model.named_modules() if pretrained_models(model) else ():
        if REGISTRY in _names_in(type(module).forward) and not set(PRODUCTS) <= set(module._modules):
            found |= {f"{name}.{product}".removeprefix("."): _refusal(module) for product in PRODUCTS}
    return found


def product_names(model: nn.Module, recipe: Recipe, layers: Iterable[str]) -> list[str]:
    """Return the names of attention's products in ``model``; none if no rule is for them.

    Raises ``ValueError`` if a rule is for a product that the model computes in its own way.
    """
    rules = [rule for rule in recipe.rules if rule.reaches_products]
    if not rules:
        return []
    found = interface_products(model)
    reached = any(fnmatchcase(name, rule.layers) for name in found for rule in rules)
    for name, why in found.items() if reached else ():  # `adopt` changes every attention
        if why is not None:
            kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise ValueError(f"no rule can quantize attention's products in this model: {kind} {why}; remove the rule")
    names = [*attention_products(model), *found]
    if not names and (models := pretrained_models(model)):
        for rule in rules:
            if not any(fnmatchcase(name, rule.layers) for name in layers):
                raise ValueError(
                    f"{type(models[0]).__name__} has no attention that goes through the attention interface of "
                    f"transformers, so pattern {rule.layers!r} matches nothing; remove the rule"
                )
    return names


def _names_in(function: Any) -> set[str]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return set() if code is None else set(code.co_names)


def _refusal(module: nn.Module) -> str | None:
    """Return why the attention ``module`` cannot be computed by `_attention`, ``None`` if it can."""
    for product in PRODUCTS:
        if hasattr(module, product):
            return f"has an attribute {product} of its own"
    forward: Any = inspect.unwrap(type(module).forward)
    for name in _names_in(forward):
        function = forward.__globals__.get(name)
        if EAGER in name and function is not None:
            code = inspect.unwrap(function).__code__
            arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            more = sorted({*code.co_names} - KNOWN | {*arguments} - ARGUMENTS)
            if more:
                return f"has an {name} that uses {', '.join(more)}, which quantized products do not know"
    return None


def adopt(model: nn.Module) -> None:
    """Give each attention of the transformers models in ``model`` plain products, and let them compute attention.

    Raises ``ValueError`` if transformers cannot change a model's attention function.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, eager_mask)
    names = {name.rpartition(".")[0] for name, why in interface_products(model).items() if why is None}
    for name in names:
        attention = model.get_submodule(name)
        attention.add_module("scores", Product())
        attention.add_module("values", Product(left_amax=LARGEST_PROBABILITY))
    inner: set[nn.Module] = set()
    for outer in pretrained_models(model):
        if outer not in inner:
            inner |= set(outer.modules())
            configs = {id(c): c for c in _configurations(outer)}.values()
            vars(outer)[BEFORE] = [(config, config._attn_implementation_internal) for config in configs]
            outer.set_attn_implementation(NAME)


def _configurations(model: nn.Module) -> list[Any]:
    """Return the configurations of ``model``, of its submodules, and those inside of them."""
    configs: list[Any] = [m.config for m in model.modules() if hasattr(getattr(m, "config", None), "sub_configs")]
    for config in configs:  # which grows
        configs += [sub for key in config.sub_configs if (sub := getattr(config, key)) is not None]
    return configs


def give_back(model: nn.Module) -> None:
    """Undo `adopt`: the products, none of which is quantized any more, go, and the attention functions are restored."""
    for outer in model.modules():
        if BEFORE not in vars(outer):
            continue
        for config, before in vars(outer).pop(BEFORE):
            config._attn_implementation_internal = before
        for module in outer.modules():
            if REGISTRY in _names_in(type(module).forward):
                for product in PRODUCTS:
                    module._modules.pop(product, None)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float | None = None, dropout: float = 0.0, softcap: float | None = None,
    position_bias: Tensor | None = None, **unused: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return (output, None), as the attention functions of transformers do: ``output`` is (batch, length, heads, d).

    Arguments are those of transformers; ``unused`` are the ones that its eager functions do not use either.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    if position_bias is not None:
        attention_mask = position_bias if attention_mask is None else position_bias + attention_mask
    modules: Any = module
    y = attend(
        (modules.scores, modules.values), query, key, value, attention_mask,
        query.shape[-1] ** -0.5 if scaling is None else scaling, dropout if module.training else 0.0,
        softcap, getattr(module, "sinks", None),
    )  # fmt: skip
    return y.to(query.dtype).transpose(1, 2).contiguous(), None
