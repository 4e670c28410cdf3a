"""Laws of quantized experts: transformers' mixtures of experts, each product of each expert quantized by itself.

Oracles: transformers' own eager forward pass; a loop over experts, each a pair of `QuantizedLinear` layers on copies of
its matrices, with the activation of each family written out here.
"""

from __future__ import annotations

import copy
import io
import pickle
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from altgrad.integrations import peft
from altgrad.model import QuantizedLinear, Recipe, account, quantize_model, requantize_model, unquantize_model
from altgrad.model.experts import ExpertProduct, QuantizedExperts, quantizable_layers
from altgrad.model.quantized.quantizer import Quantizer
from altgrad.optim import Arm, build_optimizer
from tests.processes import together

E, HIDDEN, INNER, TOKENS = 4, 64, 32, 72
CONFIG = {
    "num_experts": E, "num_local_experts": E, "n_routed_experts": E, "moe_num_experts": E,
    "hidden_size": HIDDEN, "moe_hidden_size": HIDDEN, "moe_latent_size": None,
    "intermediate_size": INNER, "moe_intermediate_size": INNER,
    "hidden_act": "silu", "mlp_hidden_act": "relu2", "swiglu_alpha": 1.7, "swiglu_limit": 1.0, "post_norm_eps": 1e-6,
    "_experts_implementation": "eager",
}  # fmt: skip


def clamped(x: Tensor) -> Tensor:
    gate, up = x[:, ::2].clamp(max=1.0), x[:, 1::2].clamp(-1.0, 1.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.7))


def gated(x: Tensor) -> Tensor:
    return F.silu(x[:, : x.shape[1] // 2]) * x[:, x.shape[1] // 2 :]


#: Family -> class, activation between the two products, whether weights are stored as (experts, in, out).
EXPERTS: dict[str, tuple[type[nn.Module], Any, bool]] = {
    "qwen3_moe": (Qwen3MoeExperts, gated, False),
    "gpt_oss": (GptOssExperts, clamped, True),
    "nemotron_h": (NemotronHExperts, lambda x: F.relu(x).square(), False),
    "aria": (AriaExperts, gated, True),
    "muse_spark": (MuseSparkExperts, gated, False),
}
FP4 = {"format": "E2M1", "granularity": "block", "block": 16, "scale": "E4M3"}
QUARTET = {"weight": FP4, "input": FP4, "grad": FP4 | {"rounding": "MS-EDEN"}}
RECIPES = {
    "tensor": Recipe.uniform("E4M3"),
    "row": Recipe.uniform("E4M3", granularity="row"),
    "MXFP8": Recipe.uniform("MXFP8", grad="MXFP8"),
    "NVFP4": Recipe.uniform("NVFP4", grad="NVFP4"),
    "stochastic": Recipe.uniform("E3M4", rounding="stochastic"),
    "delayed": Recipe.uniform("E4M3", scaling="delayed", history=2),
    "codes": Recipe.uniform("E4M3", save="codes", gradient="clipped"),
    "hadamard": Recipe.uniform("E2M1", hadamard=16),
    "MS-EDEN": Recipe(rules=[{"layers": "*", **QUARTET}]),
}
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


def experts(family: str) -> nn.Module:
    torch.manual_seed(0)
    module = EXPERTS[family][0](SimpleNamespace(**CONFIG))
    for name, parameter in module.named_parameters():
        nn.init.ones_(parameter) if "norm" in name else nn.init.normal_(parameter, std=0.2)
    return module


def routing(*, empty: int = 3, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, two experts of each token, never ``empty``, and their weights."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(TOKENS, E, generator=generator).index_fill(1, torch.tensor([empty]), -1.0)
    weights, index = scores.topk(2)
    return torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_(), index, weights.requires_grad_()


def quantized(module: nn.Module, recipe: Recipe) -> Any:
    return quantize_model(nn.ModuleDict({"experts": module}), recipe, seed=7)["experts"]


def model(family: str) -> Any:
    torch.manual_seed(0)
    name, sizes = MODELS[family]
    return getattr(hf, f"{name}ForCausalLM")(getattr(hf, f"{name}Config")(**COMMON | sizes))


class Loop(nn.Module):
    """The oracle: layers of one expert each, with the streams and in the mode of a module of quantized experts."""

    def __init__(self, family: str, module: QuantizedExperts) -> None:
        super().__init__()
        _, self.activation, transposed = EXPERTS[family]
        self.norm = copy.deepcopy(module._modules.get("post_expert_norm"))
        self.up, self.down = nn.ModuleList(), nn.ModuleList()
        for layers, name in ((self.up, next(iter(module.recipes))), (self.down, "down_proj")):
            for e in range(E):
                matrix = getattr(module, name)[e].detach()
                matrix = matrix.t() if transposed else matrix
                bias = getattr(module, f"{name}_bias", None)
                linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=bias is not None)
                linear.weight = nn.Parameter(matrix.clone())
                linear.bias = None if bias is None else nn.Parameter(bias[e].detach().clone())
                layer = QuantizedLinear.from_linear(linear, module.recipes[name])
                for role, quantizer in layer.quantizers.items():
                    quantizer.count_from(*module.products[name][e].quantizers[role].first)
                layers.append(layer)
        self.train(module.training)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for e in range(E):
            pairs = [(t, k) for t in range(TOKENS) for k in range(2) if index[t, k] == e]
            if not pairs:
                continue
            tokens, choice = torch.tensor(pairs).t()
            y = self.down[e](self.activation(self.up[e](x[tokens])))
            y = y if self.norm is None else self.norm(y)
            total = total.index_add(0, tokens, y * weights[tokens, choice, None])
        return total


def gradients(module: nn.Module, *, empty: int = 3, seed: int = 1, second: bool = False) -> dict[str, Tensor]:
    """Return output, and gradients of inputs, weights and biases; ``second``: of a penalty on the input's gradient."""
    x, index, weights = routing(empty=empty, seed=seed)
    y = module(x, index, weights)
    by = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    loss = (y * by).sum()
    if second:
        loss = torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
    module.zero_grad()
    loss.backward()
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "dx": x.grad, "dweights": weights.grad, **found}


def of_loop(family: str, found: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """Return the gradients of a `Loop`, stacked over experts, under the parameter names of a module of experts."""
    result = {name: found[name] for name in ("y", "dx", "dweights") if found[name] is not None}
    for part, name in zip(("up", "down"), names, strict=True):
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            present = {e: found[key] for e in range(E) if (key := f"{part}.{e}.{kind}") in found}
            if present:
                some = next(iter(present.values()))
                each = [present.get(e, torch.zeros_like(some)) for e in range(E)]
                each = [t.t() for t in each] if EXPERTS[family][2] and kind == "weight" else each
                result[name + suffix] = torch.stack(each)
    return result | {"post_expert_norm.weight": found["norm.weight"]} if "norm.weight" in found else result


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert {name for name, t in a.items() if t is not None} == {name for name, t in b.items() if t is not None}
    different = {name for name, t in a.items() if t is not None and not torch.equal(t, b[name])}
    assert different == set()


# --- what an expert computes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", EXPERTS)
def test_unquantized_they_are_transformers_own(family: str) -> None:
    """In float64, where sums in another order differ by nothing that matters."""
    torch.set_default_dtype(torch.float64)
    try:
        plain = experts(family)
        expected = gradients(plain)
        found = gradients(QuantizedExperts(plain, {}))
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.keys() == expected.keys() and len(found) >= 5
    near = 1e-5 if any("norm" in name for name in expected) else 1e-10  # transformers' norms compute in float32
    for name, t in expected.items():
        torch.testing.assert_close(found[name], t, rtol=near, atol=near)


@pytest.mark.parametrize("way", RECIPES)
@pytest.mark.parametrize("family", EXPERTS)
def test_each_expert_is_a_pair_of_quantized_layers_to_the_bit(family: str, way: str) -> None:
    module = quantized(experts(family), RECIPES[way])
    loop, names = Loop(family, module), [*module.recipes]
    for step in range(3):  # another expert is left out each time; histories and streams go on
        found = gradients(module, empty=step, seed=step)
        same(found, of_loop(family, gradients(loop, empty=step, seed=step), names))
    plain = gradients(experts(family), empty=step, seed=step)
    assert not any(torch.equal(found[name], plain[name]) for name in ("y", "dx", *names))
    assert F.cosine_similarity(found["dx"].flatten(), plain["dx"].flatten(), dim=0) > 0.75


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_second_derivatives_are_those_of_the_layers(family: str) -> None:
    module = quantized(experts(family), RECIPES["tensor"])
    loop = Loop(family, module)
    same(gradients(module, second=True), of_loop(family, gradients(loop, second=True), [*module.recipes]))


def test_autocast_gives_the_output_of_the_layers() -> None:
    module = quantized(experts("gpt_oss"), RECIPES["tensor"])
    x, index, weights = routing()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module(x, index, weights), Loop("gpt_oss", module)(x, index, weights))


@pytest.mark.parametrize("way", ["delayed", "stochastic", "NVFP4"])
def test_an_expert_without_tokens_contributes_exactly_nothing(way: str) -> None:
    module = quantized(experts("gpt_oss"), RECIPES[way])
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    found = gradients(module, empty=3)
    assert all(t.isfinite().all() for t in found.values())
    for name in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
        assert found[name][3].count_nonzero() == 0
        assert all(found[name][e].count_nonzero() > 0 for e in range(3))
    changed = {name for name, buffer in module.named_buffers() if not torch.equal(buffer, before[name])}
    assert bool(changed) == (way != "NVFP4")
    assert not any(name.split(".")[2] == "3" for name in changed)


def test_a_number_that_no_expert_has_is_skipped() -> None:
    """Expert parallelism marks the experts of other processes so."""
    module = quantized(experts("qwen3_moe"), RECIPES["tensor"])
    x, index, weights = routing()
    kept = (index[:, 0] != 1).float().unsqueeze(1)
    elsewhere = index.clone()
    elsewhere[index == 1] = E
    assert torch.equal(module(x, elsewhere, weights), module(x, index, weights * (index != 1)))
    assert 0 < kept.sum() < TOKENS
    assert module(x, torch.full_like(index, E), weights).count_nonzero() == 0


# --- a model of experts -----------------------------------------------------------------------------------------------


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


def with_flag(net: Any) -> None:
    net.model.layers[0].mlp.experts.has_a_new_flag = True


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
