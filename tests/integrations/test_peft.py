"""LoRA beside quantized layers is the quantized product plus the adapter's, whichever came first.

Oracle: that sum, by the layer's own two parts.
"""

from __future__ import annotations

import pytest
import torch

from altgrad.model import LayerRecipe, QuantizedLinear, Recipe, account
from altgrad.model import quantize_model as quantize_plain_model
from tests.integrations.conftest import arm_of, gpt2, tokens

peft = pytest.importorskip("peft", reason="needs peft")

from altgrad.integrations.peft import lora_config, quantize_model  # noqa: E402 - skipped above without its framework

# Of PEFT's, on GPT-2's shared embedding and on its two kinds of layers in one configuration.
NOISE = ("tie_word", "ensure_weight_tying", "fan_in", "save_embedding", "is_gradient_checkpointing")
pytestmark = pytest.mark.filterwarnings(*(f"ignore:.*{words}" for words in NOISE))

RECIPE = Recipe.uniform("E3M4", grad="E5M2")
TARGETS = ["c_attn", "c_fc", "lm_head"]


def config(**settings):
    return peft.LoraConfig(r=2, target_modules=TARGETS, ensure_weight_tying=False, **settings)


def quantized_first(**settings):
    return peft.get_peft_model(quantize_plain_model(gpt2(), RECIPE), lora_config(config(**settings)))


def adapters_first(**settings):
    return quantize_model(peft.get_peft_model(gpt2(), config(**settings)), RECIPE)


def filled(model):
    """Give the adapters numbers: LoRA begins with none."""
    generator = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = 0.1 * torch.randn(p.shape, generator=generator)
    return model


def loss_of(model):
    return model(input_ids=tokens(4), labels=tokens(4)).loss


ORDERS = pytest.mark.parametrize("order", [quantized_first, adapters_first])


@ORDERS
def test_an_adapted_layer_is_the_quantized_product_plus_the_adapters(order):
    model = filled(order())
    for name, layer in model.named_modules():
        if name.endswith(tuple(TARGETS)):
            base, a, b = layer.base_layer, layer.lora_A["default"], layer.lora_B["default"]
            assert isinstance(base, QuantizedLinear) and not base.weight.requires_grad
            assert type(a) is type(b) is torch.nn.Linear
            x = torch.randn(3, base.in_features)
            assert torch.equal(layer(x), base(x) + b(a(x)) * layer.scaling["default"])


HEAD_SAVED = {"target_modules": ["c_attn"], "modules_to_save": ["lm_head"], "ensure_weight_tying": False}
RECIPES = {
    "tensor": RECIPE, "named": Recipe.named("NVFP4"), "stochastic": Recipe.uniform("E3M4", rounding="stochastic"),
    "delayed": Recipe.uniform("E4M3", scaling="delayed"),
    "head": Recipe(rules=[{"layers": "lm_head", "weight": "E3M4"}, {"layers": "transformer.h.0.*", "input": "E4M3"}]),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_both_orders_are_one_model_where_the_head_is_saved_too(name):
    """In evaluation, and through training, to the bit; the copy of the head is quantized as the head."""
    one = peft.get_peft_model(
        quantize_plain_model(gpt2(), RECIPES[name], seed=3), lora_config(peft.LoraConfig(r=2, **HEAD_SAVED))
    )
    other = quantize_model(peft.get_peft_model(gpt2(), peft.LoraConfig(r=2, **HEAD_SAVED)), RECIPES[name], seed=3)
    assert account(one).quantized == account(other).quantized
    assert [p.requires_grad for p in one.parameters()] == [p.requires_grad for p in other.parameters()]
    head = "base_model.model.lm_head"
    expected = account(quantize_plain_model(gpt2(), RECIPES[name])).quantized
    for place in ("original_module", "modules_to_save.default"):
        assert account(one).quantized.get(f"{head}.{place}") == expected.get("lm_head")
    losses = []
    for model in (filled(one), filled(other)):
        optimizer = arm_of(model)
        losses.append([loss_of(model.eval())])
        for _ in range(3):
            optimizer.zero_grad()
            losses[-1].append(loss_of(model.train()))
            losses[-1][-1].backward()
            optimizer.step()
    assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))
    assert losses[0][-1] < losses[0][0]
    for (key, t), (key_of_other, u) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        assert key == key_of_other and torch.equal(t, u), key


@ORDERS
def test_a_merged_layer_quantizes_the_sum_and_gives_the_weight_back(order):
    model = filled(order())
    layer = model.base_model.model.transformer.h[0].attn.c_attn
    before = layer.base_layer.weight.detach().clone()
    delta = (layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]).t()
    layer.merge()
    torch.testing.assert_close(layer.base_layer.weight, before + delta)
    x = torch.randn(3, 32)
    assert torch.equal(layer(x), layer.base_layer(x))
    layer.unmerge()
    torch.testing.assert_close(layer.base_layer.weight, before)
    merged = model.merge_and_unload()
    assert isinstance(merged.transformer.h[0].attn.c_attn, QuantizedLinear)


def test_saved_adapters_load_beside_quantized_layers(tmp_path):
    model = filled(quantized_first())
    model.save_pretrained(tmp_path)
    base = quantize_plain_model(gpt2(), RECIPE)
    found = lora_config(peft.LoraConfig.from_pretrained(tmp_path))
    again = peft.PeftModel.from_pretrained(base, tmp_path, config=found)
    assert torch.equal(loss_of(again), loss_of(model.eval()))


def test_what_does_not_fit_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match='"all-linear" finds no quantized layer'):
        lora_config(peft.LoraConfig(target_modules="all-linear"))
    with pytest.raises(ValueError, match="ensure_weight_tying puts a plain layer in a quantized head's place"):
        lora_config(peft.LoraConfig(**HEAD_SAVED | {"ensure_weight_tying": True}))
    with pytest.raises(ValueError, match=r"adapters too; call quantize_model of altgrad\.integrations\.peft, which"):
        quantize_plain_model(peft.get_peft_model(gpt2(), config()), RECIPE)
    with pytest.raises(ValueError, match="unsupported variant"):
        quantized_first(use_dora=True)
    misspelt = Recipe(rules=(LayerRecipe(weight="E3M4").on("*.c_atn"),))
    with pytest.raises(ValueError, match=r"c_atn"):
        quantize_model(peft.get_peft_model(gpt2(), config()), misspelt)
    with pytest.raises(ValueError, match="already quantized"):
        quantize_model(adapters_first(), RECIPE)
