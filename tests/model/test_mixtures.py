"""Laws of models with quantized experts: what a recipe reaches, copies, checkpoints, compiling, sharding, optimizers.

What a module of experts computes is in tests/model/test_experts.py. Oracles: transformers' own model; torch's AdamW.
"""

from __future__ import annotations

import copy
import io
import pickle
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from altgrad.integrations import peft
from altgrad.model import QuantizedLinear, Recipe, account, quantize_model, requantize_model, unquantize_model
from altgrad.model.experts import ExpertProduct, quantizable_layers
from altgrad.model.quantized.quantizer import Quantizer
from altgrad.optim import Arm, build_optimizer
from tests.model.test_experts import HIDDEN, INNER, RECIPES, E, experts, same
from tests.processes import together

COMMON = {
    "vocab_size": 61, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
MODELS = {
    "qwen3_moe": ("Qwen3Moe", {"intermediate_size": 96, "moe_intermediate_size": INNER, "num_experts": E,
                               "head_dim": 16}),
    "mixtral": ("Mixtral", {"intermediate_size": INNER, "num_local_experts": E}),
    "deepseek_v3": ("DeepseekV3", {"intermediate_size": 96, "moe_intermediate_size": INNER, "n_routed_experts": E,
                                   "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **LATENT}),
    "gpt_oss": ("GptOss", {"intermediate_size": INNER, "num_local_experts": E, "head_dim": 16}),
}  # fmt: skip
IDS = torch.randint(3, 61, (2, 24), generator=torch.Generator().manual_seed(2))


def model(family: str) -> Any:
    torch.manual_seed(0)
    name, sizes = MODELS[family]
    return getattr(hf, f"{name}ForCausalLM")(getattr(hf, f"{name}Config")(**COMMON | sizes))

@pytest.mark.parametrize("family", MODELS)
def test_a_recipe_for_all_layers_reaches_every_expert(family: str, recwarn: pytest.WarningsRecorder) -> None:
    net = model(family)
    sizes = {name: p.numel() for name, p in net.named_parameters()}
    plain = net(input_ids=IDS, labels=IDS).loss.item()
    quantize_model(net, Recipe.uniform("E4M3"))
    assert not [w for w in recwarn if "no recipe reaches" in str(w.message)]
    found = account(net)
    weights = {name for name in sizes if name.endswith((".gate_up_proj", ".down_proj"))}
    assert len(weights) == (2 if family == "deepseek_v3" else 4)
    assert weights <= found.quantized.keys()
    assert found.quantized[min(weights)] == {"weight": "E4M3", "input": "E4M3", "grad": "E5M2"}
    routers = {name for name in sizes if name.endswith((".mlp.gate.weight", ".mlp.router.weight"))}
    assert routers and all("router" in found.left[name] for name in routers) and not found.unknown
    rest = sum(sizes[name] for name in routers)
    assert found.shares["quantized"] == pytest.approx(1 - rest / (rest + sum(
        sizes.get(name, sizes.get(f"{name}.weight", 0)) for name in found.quantized)))
    loss = net(input_ids=IDS, labels=IDS).loss
    loss.backward()
    assert 0 < abs(loss.item() - plain) < 0.1
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    quantizers = [m for m in net.modules() if isinstance(m, Quantizer)]
    assert len({q.first for q in quantizers}) == len(quantizers) > 6 * E
    assert len({id(q.constants) for q in quantizers}) == 3  # one for each role, for compiled graphs


def test_unquantizing_gives_the_model_back() -> None:
    net = model("gpt_oss")
    keys, parameters = [*net.state_dict()], dict(net.named_parameters())
    kinds = {name: type(module) for name, module in net.named_modules()}
    expected = net(input_ids=IDS).logits
    quantize_model(net, RECIPES["tensor"])
    assert [*net.state_dict()] == keys
    assert not torch.equal(net(input_ids=IDS).logits, expected)
    assert net.training is all(module.training for module in net.modules())
    unquantize_model(net.eval())
    assert not any(module.training for module in net.modules())
    assert {name: type(module) for name, module in net.named_modules()} == kinds
    assert all(p is parameters[name] for name, p in net.named_parameters())
    assert torch.equal(net(input_ids=IDS).logits, expected)


def test_what_transformers_is_told_about_experts_does_not_unquantize_them() -> None:
    net, other = model("qwen3_moe"), None
    other = type(net)(net.config)  # it shares the configuration
    quantize_model(net, RECIPES["tensor"])
    expected = net(input_ids=IDS).logits
    net.set_experts_implementation("eager")
    assert torch.equal(net(input_ids=IDS).logits, expected)
    unquantize_model(quantize_model(other, RECIPES["tensor"]))
    assert torch.equal(net(input_ids=IDS).logits, expected)


def test_copies_pickles_and_checkpoints_have_the_same_bits(tmp_path: Path) -> None:
    net = quantize_model(model("mixtral"), RECIPES["delayed"])
    net(input_ids=IDS, labels=IDS).loss.backward()
    expected = net.eval()(input_ids=IDS).logits
    stored = io.BytesIO()
    torch.save(net, stored)
    stored.seek(0)
    loaded = quantize_model(model("mixtral"), RECIPES["delayed"]).eval()
    with torch.no_grad():
        [p.zero_() for p in loaded.parameters()]
    loaded.load_state_dict(net.state_dict())
    with torch.device("meta"):
        empty = quantize_model(model("mixtral"), RECIPES["tensor"]).eval()
    empty.load_state_dict(net.state_dict(), assign=True)
    assert not any(b.is_meta for module in empty.modules() if isinstance(module, Quantizer) for b in module.buffers())
    for same_net in (
        copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.load(stored, weights_only=False), loaded
    ):  # fmt: skip
        assert torch.equal(same_net(input_ids=IDS).logits, expected)
    net.save_pretrained(tmp_path)
    again = hf.MixtralForCausalLM.from_pretrained(tmp_path)
    weights = dict(unquantize_model(net).named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in again.named_parameters())


def test_changing_the_recipe_keeps_histories() -> None:
    net = quantize_model(model("qwen3_moe"), RECIPES["delayed"])
    net(input_ids=IDS, labels=IDS).loss.backward()

    def histories() -> dict[str, Tensor]:
        return {name: b.clone() for name, b in net.named_buffers() if "experts" in name and "history" in name}

    before = histories()
    requantize_model(net, RECIPES["delayed"])
    assert len(before) == 2 * 2 * E * 3 and sum(h.count_nonzero() > 0 for h in before.values()) > E
    same(before, histories())
    requantize_model(net, RECIPES["tensor"])
    assert not histories()


def test_compiled_once_whatever_the_routing() -> None:
    net = quantize_model(model("qwen3_moe"), RECIPES["delayed"], seed=3)
    block, alike = net.model.layers[0], copy.deepcopy(net.model.layers[0])
    counter, counts, used = CompileCounterWithBackend("aot_eager"), [], []
    torch._dynamo.reset()
    compiled = torch.compile(alike, backend=counter)
    block.mlp.gate.register_forward_hook(lambda module, inputs, output: used.append(output[2].flatten().bincount()))
    for seed in range(3):
        x = torch.randn(2, 24, HIDDEN, generator=torch.Generator().manual_seed(seed)) + 3 * seed
        positions = torch.ones(1, 24, 16), torch.zeros(1, 24, 16)
        for module in (block, compiled):
            module.zero_grad()
            module(x, position_embeddings=positions).square().sum().backward()
        counts.append(counter.frame_count)
        same({name: p.grad for name, p in block.named_parameters()}, {n: p.grad for n, p in alike.named_parameters()})
    assert counts[0] > 0 and set(counts) == {counts[0]}
    assert not torch.equal(used[0], used[1])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("way", ["stochastic", "delayed"])
def test_checkpoints_repeat_what_experts_did(way: str, reentrant: bool) -> None:
    found = []
    for checkpointed in (False, True):
        net = quantize_model(model("qwen3_moe"), RECIPES[way], seed=3).train()
        if checkpointed:
            net.activation_checkpointing_enable({"use_reentrant": reentrant})
        for _ in range(2):
            net.zero_grad()
            net(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        found.append({name: p.grad for name, p in net.named_parameters()} | dict(net.named_buffers()))
    same(*found)


def test_sharded_by_fsdp2_they_train_as_in_one_process(tmp_path: Path) -> None:
    from tests.model import sharded_experts  # it imports this module

    work, name = sharded_experts.steps_are_those_of_one_process, "tests.model.sharded_experts"
    together(work, 2, tmp_path, tmp_path, "MXFP8", loads=name)


# --- which rules reach what -------------------------------------------------------------------------------------------


class LinearRouter(nn.Module):
    """A block as some families have it: the router is an ``nn.Linear`` inside of ``router``, beside the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.ModuleDict({"proj": nn.Linear(HIDDEN, E)})
        self.shared_expert_gate = nn.Linear(HIDDEN, 1)
        self.experts = experts("qwen3_moe")


@pytest.mark.parametrize(("rules", "reached"), [
    (["*"], False), (["*[0-9].*"], False), (["*.router.*"], True), (["0.router.proj"], True), (["*.proj", "*"], True),
    (["*", "*.r*"], True), (["*.[rs]*"], False),
])  # fmt: skip
def test_a_router_is_quantized_by_rules_for_routers_alone(rules: list[str], reached: bool) -> None:
    net = nn.Sequential(LinearRouter())
    quantize_model(net, Recipe(rules=[{"layers": pattern, "weight": "E4M3"} for pattern in rules]))
    assert isinstance(net[0].router["proj"], QuantizedLinear) == reached
    beside = any(fnmatchcase("0.shared_expert_gate", rule) for rule in rules)
    assert isinstance(net[0].shared_expert_gate, QuantizedLinear) == beside
    assert ("0.router.proj" in account(net).quantized) == reached
    assert reached or "rule for routers alone" in account(net).left["0.router.proj"]


def test_one_product_of_an_expert_alone() -> None:
    net = model("mixtral")
    quantize_model(net, Recipe(rules=[{"layers": "*.1.mlp.experts.down_proj", "weight": "E4M3", "grad": "E5M2"}]))
    assert [*account(net).quantized] == ["model.layers.1.mlp.experts.down_proj"]
    products = {name for name, module in net.named_modules() if isinstance(module, ExpertProduct)}
    assert products == {f"model.layers.1.mlp.experts.products.down_proj.{e}" for e in range(E)}
    net(input_ids=IDS, labels=IDS).loss.backward()


def test_the_last_share_of_the_layers_counts_experts_in_their_place() -> None:
    names = [*quantizable_layers(model("mixtral"))]
    places = [names.index(f"model.layers.{i}.mlp.experts.down_proj") for i in range(2)]
    assert names[places[0] + 1] == "model.layers.1.self_attn.q_proj" and names[places[1] + 1] == "lm_head"


@pytest.mark.parametrize(("recipe", "options", "sentence"), [
    ({"torchao": "tensorwise"}, {}, "cannot have a torchao recipe"),
    ({"weight": "E4M3", "input": "E4M3", "grad": "E5M2", "backend": "native"}, {}, "cannot have backend: native"),
    ({"weight": {"format": "E4M3", "virtual": True}}, {}, "cannot have a virtual weight"),
    ({"weight": "E4M3"}, {"gather_codes": True}, "gather_codes is for linear layers, and model.layers.0.mlp.experts"),
])  # fmt: skip
def test_what_experts_cannot_have_is_refused(recipe: dict[str, Any], options: dict[str, Any], sentence: str) -> None:
    net = model("mixtral")
    with pytest.raises(ValueError, match=sentence):
        quantize_model(net, Recipe(rules=[{"layers": "*.experts.*", **recipe}]), **options)
    assert not account(net).quantized


def test_experts_that_do_something_unknown_are_not_quantized() -> None:
    net = model("mixtral")
    for layer in net.model.layers:
        layer.mlp.experts.has_a_new_flag = True
    with pytest.raises(ValueError, match=r"weights in products are in modules that no recipe reaches: .*experts"):
        quantize_model(net, Recipe.uniform("E4M3"))


def test_a_quantized_model_is_refused_by_its_experts() -> None:
    net = quantize_model(model("mixtral"), Recipe(rules=[{"layers": "*.experts.*", "weight": "E4M3"}]))
    with pytest.raises(ValueError, match="the model is already quantized"):
        quantize_model(net, Recipe.uniform("E4M3"))


def test_adamw_steps_experts_as_torch_does_and_other_arms_are_refused() -> None:
    net, other = (quantize_model(model("mixtral"), RECIPES["tensor"]) for _ in range(2))
    ours = build_optimizer(net, Arm(lr=1e-3, weight_decay=0.0))
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-3, betas=ours.arm.betas, eps=ours.arm.eps, weight_decay=0.0)
    for _ in range(3):
        for each, optimizer in ((net, ours), (other, theirs)):
            optimizer.zero_grad()
            each(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
    for name, p in net.named_parameters():
        torch.testing.assert_close(p, other.get_parameter(name), rtol=1e-5, atol=1e-6)
    groups = [i for i, group in enumerate(ours.param_groups) for p in group["params"] if p.ndim == 3]
    linear = [i for i, group in enumerate(ours.param_groups) if any(p is net.lm_head.weight for p in group["params"])]
    assert set(groups) == set(linear)
    on_grid = Arm(lr=1e-2, weights="quantized", rounding="nearest")
    for arm in (Arm(lr=1e-2, stiffness="ulp"), Arm(base="muon", lr=1e-2), on_grid):
        with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts\.gate_up_proj holds a matrix for each expert"):
            build_optimizer(net, arm)
        [p.requires_grad_(p.ndim < 3) for p in net.parameters()]
        if arm.weights == "master":
            build_optimizer(net, arm)
        [p.requires_grad_() for p in net.parameters()]


def test_experts_beside_adapters_are_quantized() -> None:
    from peft import LoraConfig, get_peft_model

    net = get_peft_model(model("qwen3_moe"), LoraConfig(r=2, target_modules=["q_proj"]))
    found = account(peft.quantize_model(net, RECIPES["tensor"]))
    assert "base_model.model.model.layers.0.mlp.experts.down_proj" in found.quantized and not found.unknown
