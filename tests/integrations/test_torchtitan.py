"""A model built from a converted configuration is the quantized model. Oracle: `quantize_model` on the built model.

torchtitan's own models, meta-device initialization, sharding and activation checkpoints run on a CPU. Only two of its
checks are put aside: torch refuses a backward pass of flex attention on a CPU, which its uncompiled definition has, and
torchtitan takes a machine without an accelerator for one with CUDA.
"""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import flex_attention
from torch.nn.functional import cross_entropy

from altgrad.model import LayerRecipe, Recipe, account, linear_layers, quantize_model, virtual_weight
from altgrad.model.quantized.quantizer import Quantizer

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("needs torchtitan: altgrad/integrations/TORCHTITAN.md has the command", allow_module_level=True)

from torchtitan.components.lora import LoRAConverter
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models import deepseek_v3, llama3, qwen3
from torchtitan.models.common.attention import FlexAttention

from altgrad.integrations.torchtitan import QuantizeConverter

SEED = 3
PLAIN = Recipe.uniform("E4M3")
CHANGING = Recipe.uniform("E3M4", scaling="delayed", rounding="stochastic")
RECIPES = {"tensor": PLAIN, "blocks": Recipe.uniform("E2M1", granularity="block"), "changing": CHANGING}
PARTS = Recipe(rules=(LayerRecipe(weight="E4M3").on("*.w*"),))
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(FlexAttention, "_compiled_flex_attn", staticmethod(flex_attention.flex_attention))
    monkeypatch.setattr(parallel_dims, "device_type", "cpu")


def configuration(models=llama3, flavor="debugmodel", recipe=None, **values):
    """Return a model's configuration, converted to ``recipe`` as torchtitan's registry converts it."""
    converters = [] if recipe is None else [QuantizeConverter.Config(recipe=recipe, seed=SEED)]
    config = models.model_registry(flavor).model
    for name, value in values.items():
        setattr(config, name, value)
    for converter in converters:
        config = converter.build().convert(config)
    return config


def built(config, after=lambda model: model):
    """Return the model as torchtitan's trainer makes it: without memory, checked, sharded, initialized."""
    with torch.device("meta"):
        model = config.build()
    model.verify_module_protocol()
    model = after(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights()
    return model.train()


def train(model, steps=10):
    """Return the losses of ``steps`` batches of packed documents."""
    numbers = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for step in range(steps):
        tokens = torch.randint(2048, (2, 33), generator=numbers)
        positions = (torch.arange(32) % (11 + step)).expand(2, -1).contiguous()
        mask = model.get_attention_masks(positions)
        assert isinstance(mask, flex_attention.BlockMask)
        loss = cross_entropy(model(tokens[:, :-1], positions, mask).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def streams(model):
    return {name: module.first for name, module in model.named_modules() if isinstance(module, Quantizer)}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_ten_steps_have_the_losses_and_the_state_of_the_quantized_model(recipe):
    model, oracle = built(configuration(recipe=recipe)), built(configuration())
    oracle = quantize_model(oracle, recipe, seed=SEED)
    assert len(account(model).quantized) == 31
    assert account(model) == account(oracle)
    assert train(model) == train(oracle)
    state, expected = model.state_dict(), oracle.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize("given", [
    (llama3, "debugmodel", CHANGING, {"enable_weight_tying": True}), (llama3, "debugmodel", PARTS, {}),
    (qwen3, "debugmodel_non_fused_qkv", CHANGING, {}), (deepseek_v3, "debugmodel", CHANGING, {}),
], ids=["tied head", "some layers", "two layers of one configuration", "experts left"])  # fmt: skip
def test_the_layers_and_random_streams_are_those_of_the_quantized_model(given):
    models, flavor, recipe, values = given
    with torch.device("meta"):
        converted = configuration(models, flavor, recipe, **values)
        model, oracle = converted.build(), configuration(models, flavor, **values).build()
    quantize_model(oracle, recipe, seed=SEED)
    assert account(model) == account(oracle)
    assert streams(model) == streams(oracle)
    assert len(set(streams(model).values())) == len(streams(model)) > 0
    assert json.dumps(converted.to_dict())


@pytest.mark.parametrize("recipe", [PLAIN, CHANGING], ids=["same", "changing"])
@pytest.mark.parametrize("backend", ["partial_dtensor", "spmd_types"])
def test_sharded_and_checkpointed_by_torchtitan_it_trains_as_before(recipe, backend, tmp_path):
    dims = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1}
    parallelism = ParallelismConfig(spmd_backend=backend)
    training = TrainingConfig(seq_len=32, mixed_precision_param="float32")
    config = configuration(recipe=recipe)
    config.update_from_config(config=type("Given", (), {"parallelism": parallelism, "training": training}))
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    set_spmd_backend(backend)
    try:
        together = ParallelDims(**dims, world_size=1, spmd_backend=backend)
        together.build_mesh()
        settings = {
            "training": training, "parallelism": parallelism, "compile_config": CompileConfig(enable=False),
            "ac_config": SelectiveAC.Config(), "dump_folder": str(tmp_path),
        }  # fmt: skip
        parallelize = llama3.parallelize_llama
        model = built(config, lambda model: parallelize(model, parallel_dims=together, **settings))
        assert train(model, 2) == train(built(configuration(recipe=recipe)), 2)
    finally:
        set_spmd_backend("partial_dtensor")
        dist.destroy_process_group()


def test_torchtitans_adapters_stand_beside_the_quantized_layers():
    model = built(LoRAConverter.Config(rank=2).build().convert(configuration(recipe=PLAIN)))
    assert len(account(model).quantized) == 31
    before = {name: p.clone() for name, p in model.named_parameters()}
    train(model, 2)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if "lora_" in name} != set()


def layer_without_a_configuration(config):
    kind = type(config.layers[0].feed_forward)

    class Config(kind):
        def build(self):
            module = kind.build(self)
            module.w1 = nn.Linear(256, 768, bias=False)
            return module

    config.layers[0].feed_forward = Config(**{name: getattr(config.layers[0].feed_forward, name) for name in FIELDS})


FIELDS = ("w1", "w2", "w3", "param_init", "sharding_config")
TORCHAO = Recipe(rules=(LayerRecipe(torchao="rowwise").on("*.w1"),))
VIRTUAL = Recipe(rules=(LayerRecipe(weight={"format": "E4M3", "virtual": True}).on("*.w1"),))
ONE_OF_TWO = Recipe(rules=(LayerRecipe(weight="E4M3").on("*.wk"),))
UNSAID = "torchtitan has no configuration that quantizes layer layers.0.feed_forward.w1 so: "


@pytest.mark.parametrize(("recipe", "flavor", "change", "words"), [
    (PLAIN, "debugmodel", layer_without_a_configuration, UNSAID),
    (TORCHAO, "debugmodel", None, UNSAID),
    (VIRTUAL, "debugmodel", None, UNSAID),
    (ONE_OF_TWO, "debugmodel_non_fused_qkv", None, "torchtitan builds layers .*wk, .*wv alike: give them one recipe"),
    (PLAIN, "debugmodel_moe", None, "of the weights in products are in modules that no recipe reaches"),
    (Recipe(rules=(LayerRecipe(weight="E4M3").on("*.w9"),)), "debugmodel", None, "matches no layer"),
])  # fmt: skip
def test_what_no_configuration_says_is_refused_in_a_sentence(recipe, flavor, change, words):
    config = configuration(qwen3 if flavor != "debugmodel" else llama3, flavor)
    if change:
        change(config)
    with pytest.raises(ValueError, match=words):
        QuantizeConverter(QuantizeConverter.Config(recipe=recipe)).convert(config)
    with torch.device("meta"):
        layers = linear_layers(config.build())
    assert not any(hasattr(layer, "recipe") or virtual_weight(layer) for layer in layers.values())


@pytest.mark.parametrize(("tp", "backend"), [(2, "spmd_types"), (2, "partial_dtensor"), (1, "full_dtensor")])
def test_a_weight_that_would_be_split_is_refused_in_a_sentence(tp, backend):
    sizes = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "pp": 1, "ep": 1}
    with torch.device("meta"):
        model = configuration(recipe=PLAIN).build()
    with pytest.raises(ValueError, match="a quantized layer takes its scales from a whole weight: set parallelism"):
        model.parallelize(ParallelDims(**sizes, tp=tp, world_size=tp, spmd_backend=backend))
