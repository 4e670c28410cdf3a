"""Models in the shape of Llama and Qwen 3, and mixtures of experts, compute what their definitions say.

Oracles: transformers' ``LlamaForCausalLM`` and ``Qwen3ForCausalLM`` with the same weights, both ways through a folder;
for mixtures a loop over tokens; torch's count of operations; a sum over tensors.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from altgrad.config import UserError, load_params
from altgrad.config.models import Model, published_sizes
from altgrad.model import GPT, GPTConfig, Recipe, account, load_published, quantize_model, save_published
from altgrad.model.mixture import load_balance
from altgrad.training import graphs
from altgrad.training.graphs import compile_model
from altgrad.training.monitor import TensorMonitor

TOKENS = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(2))
SIZES = {"vocab_size": 61, "layers": 2, "width": 32, "heads": 4, "context": 24}
LLAMA = {"norm": "rms", "positions": "rope", "mlp": "swiglu", "mlp_ratio": 2.5}
SHAPES = {
    "llama": LLAMA, "grouped": LLAMA | {"kv_heads": 2}, "untied": LLAMA | {"tied": False, "rope_theta": 500.0},
    "qwen3": LLAMA | {"kv_heads": 1, "qk_norm": True, "head_dim": 16, "norm_eps": 1e-6},
}  # fmt: skip
MIXTURE = LLAMA | {"experts": 4, "active": 2, "mlp_ratio": 1.0}


def scattered(**settings: object) -> GPT:
    """Return a model whose weights, those of the norms too, are large enough for every part to matter."""
    torch.manual_seed(1)
    gpt = GPT(GPTConfig(**SIZES | settings))
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + (parameter.ndim == 1))
    return gpt.eval()


def agree(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_reads_what_is_written_and_computes_the_same(tmp_path: Path, shape: str) -> None:
    gpt = scattered(**SHAPES[shape])
    save_published(gpt, tmp_path)
    theirs = (Qwen3ForCausalLM if shape == "qwen3" else LlamaForCausalLM).from_pretrained(tmp_path).eval()
    agree(gpt(TOKENS), theirs(TOKENS).logits)
    assert load_published(tmp_path).config == gpt.config


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_what_transformers_writes_is_read_and_computes_the_same(tmp_path: Path, kind: str, tied: bool) -> None:
    config, model = (Qwen3Config, Qwen3ForCausalLM) if kind == "qwen3" else (LlamaConfig, LlamaForCausalLM)
    torch.manual_seed(0)
    theirs = model(config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, max_position_embeddings=24, tie_word_embeddings=tied,
    )).eval()  # fmt: skip
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    theirs.save_pretrained(tmp_path)
    agree(load_published(tmp_path).eval()(TOKENS), theirs(TOKENS).logits)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"), ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "rotary positions are scaled"),
        ({"num_key_value_heads": 3}, "not divisible by num_key_value_heads 3"),
        ({"num_key_value_heads": 1}, "q_proj.weight and the other two is"),
        ({"num_hidden_layers": 3}, "has no layers.2"),
        ({"num_hidden_layers": 1}, "which Llama's published layout has not"),
    ],
)  # fmt: skip
def test_a_folder_of_another_shape_is_refused_in_a_sentence(tmp_path: Path, change: dict, says: str) -> None:
    save_published(scattered(**SHAPES["grouped"]), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=says):
        load_published(tmp_path)


def test_heads_of_other_sizes_with_the_same_sum_are_refused(tmp_path: Path) -> None:
    save_published(scattered(**SHAPES["grouped"]), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    q, k, v = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")
    whole = torch.cat([tensors[q], tensors[k], tensors[v]])
    tensors[q], tensors[k], tensors[v] = (part.clone() for part in whole.split([24, 24, 16]))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="and the other two is"):
        load_published(tmp_path)


@pytest.mark.parametrize("settings", [LLAMA | {"softcap": 15.0}, {"mlp": "relu2"}, {"norm": "rms"}, MIXTURE])
def test_a_shape_that_transformers_lacks_is_not_written(tmp_path: Path, settings: dict) -> None:
    with pytest.raises(ValueError, match="transformers has no model of this shape"):
        save_published(scattered(**settings), tmp_path)
    assert not list(tmp_path.iterdir())


def test_sizes_of_a_published_folder_are_all_of_a_models_settings(tmp_path: Path) -> None:
    """A setting that a folder leaves open could contradict the model that starts from it unseen."""
    for settings in ({}, LLAMA):
        save_published(scattered(**settings), tmp_path)
        found = set(published_sizes(tmp_path)) | {"dropout", "threads", "active", "balance"}
        assert found >= set(Model.model_fields) - ({"gelu"} if settings else set())


def test_the_squared_relu_and_the_cap_are_those_of_their_formulas() -> None:
    gpt = scattered(mlp="relu2", softcap=3.0, tied=False)
    plain = scattered(mlp="relu2", tied=False)
    agree(gpt(TOKENS), 3 * torch.tanh(plain(TOKENS) / 3))
    mlp, x = gpt.blocks[0].mlp, torch.randn(5, 32)
    agree(mlp(x), torch.relu(x @ mlp.up.weight.T) ** 2 @ mlp.down.weight.T)


# --- mixtures of experts ----------------------------------------------------------------------------------------------


def test_a_mixture_is_the_weighted_sum_of_each_tokens_experts() -> None:
    mixture, x = scattered(**MIXTURE).blocks[0].mlp, torch.randn(3, 7, 32)
    expected = torch.zeros_like(x)
    for place in ((i, j) for i in range(3) for j in range(7)):
        p = torch.softmax(mixture.router.weight.double() @ x[place].double(), 0)
        best = p.argsort(descending=True)[:2]
        for e in best:
            expected[place] += (p[e] / p[best].sum()) * mixture.experts[e](x[place])
    agree(mixture(x), expected)


def test_an_expert_without_tokens_has_no_part_and_no_gradient() -> None:
    gpt = quantize_model(scattered(**MIXTURE | {"balance": 0.0}).train(), Recipe.uniform("E4M3"))
    block = gpt.blocks[0].mlp
    with torch.no_grad():
        block.router.weight[:] = torch.tensor([3.0, 2.0, -50.0, -60.0]).unsqueeze(1)
        gpt.blocks[0].norm2.register_forward_hook(lambda m, i, o: o.abs() + 1)  # so that all choose 0 and 1
    loss = gpt(TOKENS, TOKENS)
    loss.backward()
    grads = {e: [p.grad for p in block.experts[e].parameters()] for e in range(4)}
    assert all(g.any() for e in (0, 1) for g in grads[e]) and not any(g.any() for e in (2, 3) for g in grads[e])
    with torch.no_grad():
        block.experts[2].down.weight.fill_(torch.nan)
    assert torch.equal(gpt(TOKENS, TOKENS), loss)


def test_the_balance_loss_is_one_where_all_experts_are_chosen_alike() -> None:
    even = torch.full((8, 4), 0.25), torch.arange(16).reshape(8, 2) % 4
    assert load_balance(*even).item() == pytest.approx(1)
    p = torch.tensor([[0.7, 0.1, 0.1, 0.1]]).expand(8, 4)
    assert load_balance(p, torch.zeros(8, 1, dtype=torch.int64)).item() == pytest.approx(4 * 0.7)


def test_the_balance_loss_trains_the_router_and_is_no_part_of_the_loss() -> None:
    losses, grads = [], []
    for balance in (0.0, 0.5):
        gpt = scattered(**MIXTURE | {"balance": balance}).train()
        loss = gpt(TOKENS, TOKENS)
        (loss / 4).backward()  # as micro-batches do: the added gradient shrinks with the loss's
        losses.append(loss.item())
        grads.append(gpt.blocks[1].mlp.router.weight.grad)
    assert losses[0] == losses[1] == scattered(**MIXTURE)(TOKENS, TOKENS).item()
    gpt = scattered(**MIXTURE).train()
    seen = {}
    gpt.blocks[1].mlp.router.register_forward_hook(lambda m, i, o: seen.update(p=o[0], chosen=o[1]))
    gpt(TOKENS, TOKENS)
    added = 0.5 * load_balance(seen["p"], seen["chosen"]) / 4
    (extra,) = torch.autograd.grad(added, gpt.blocks[1].mlp.router.weight)
    agree(grads[1] - grads[0], extra)


def test_another_routing_compiles_no_other_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's tracer alone makes graphs, so that they need not be compiled to C++, which takes a minute or two."""
    compiles = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, options, **kept: compiles(call, backend="aot_eager", **kept))
    monkeypatch.setattr(graphs, "_graphs", {})
    torch.compiler.reset()
    gpt = quantize_model(scattered(**MIXTURE).train(), Recipe.uniform("E4M3"))
    compiled = compile_model(gpt)
    made = []
    for seed in range(4):
        tokens = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            for block in gpt.blocks:
                block.mlp.router.weight.normal_()
        compiled(tokens, tokens).backward()
        made.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert made[1] == made[3]


# --- counts -----------------------------------------------------------------------------------------------------------


def test_the_monitor_logs_the_balance_of_each_block() -> None:
    gpt = scattered(**MIXTURE).train()
    blocks = {f"blocks.{i}": block for i, block in enumerate(gpt.blocks)}
    seen = []
    gpt.blocks[1].mlp.router.register_forward_hook(lambda m, i, o: seen.append(load_balance(o[0], o[1]).item()))
    rows = TensorMonitor(gpt, blocks).observe(1, lambda: gpt(TOKENS, TOKENS), {"outputs"})
    found = {row.layer: row.value for row in rows if row.metric == "expert_balance"}
    assert set(found) == set(blocks) and found["blocks.1"] == seen[0]


@pytest.mark.parametrize("name", ["pico", "llama-pico", "llama-nano", "llama-micro", "moe-pico", "moe-nano"])
def test_parameters_are_those_of_the_settings_and_of_the_model_of_the_same_name(name: str) -> None:
    models, vocabulary = load_params().models, 1024 if "pico" in name else 4096
    with torch.device("meta"):
        gpt, plain = (GPT(GPTConfig(vocab_size=vocabulary, **models[n].sizes)) for n in (name, name.split("-")[-1]))
    assert sum(p.numel() for p in gpt.parameters() if p.ndim > 1) == models[name].matrix_elements(vocabulary)
    if name.startswith("llama"):
        count, other = (sum(p.numel() for p in m.parameters()) for m in (gpt, plain))
        assert abs(count / other - 1) < 0.02


@pytest.mark.parametrize("settings", [*SHAPES.values(), MIXTURE, {"mlp": "relu2", "tied": False}])
def test_operations_are_those_that_torch_counts(settings: dict) -> None:
    model = quantize_model(GPT(GPTConfig(**SIZES | settings | {"context": 20})), Recipe.uniform("E4M3"))
    with FlopCounterMode(display=False) as counter:
        model(TOKENS, TOKENS).backward()
    assert counter.get_total_flops() == TOKENS.numel() * model.flops_per_token()


def test_every_layer_can_be_addressed_and_the_router_stays() -> None:
    found = account(quantize_model(GPT(GPTConfig(**SIZES | MIXTURE)), Recipe.uniform("E4M3")))
    names = {"blocks.0.attn.qkv", "blocks.1.mlp.experts.3.gate", "blocks.0.mlp.experts.0.up", "head"}
    assert names <= set(found.quantized) and found.unknown == {}
    assert "router" in found.left["blocks.0.mlp.router.weight"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kv_heads": 3}, "not divisible by kv_heads 3"), ({"positions": "rope", "head_dim": 7}, "pairs of features"),
        ({"experts": 2, "active": 3}, "active"), ({"gelu": "tanh", "mlp": "swiglu"}, "gelu has no effect"),
        ({"rope_theta": 500.0}, "rope_theta has no effect"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together_are_mistakes(settings: dict, says: str) -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "vocab_size"}
    with pytest.raises(ValueError, match=says):
        Model(**sizes | settings)


def test_the_first_loss_is_that_of_a_uniform_guess() -> None:
    for settings in (*SHAPES.values(), MIXTURE):
        torch.manual_seed(0)
        assert abs(GPT(GPTConfig(**SIZES | settings))(TOKENS, TOKENS.roll(1)).item() - math.log(61)) < 0.05
