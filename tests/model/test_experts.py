"""Laws of quantized experts: transformers' mixtures of experts, each product of each expert quantized by itself.

Oracles: transformers' own eager forward pass; a loop over experts, each a pair of `QuantizedLinear` layers on copies of
its matrices, with the activation of each family written out here.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from altgrad.model import QuantizedLinear, Recipe, quantize_model
from altgrad.model.experts import QuantizedExperts

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
