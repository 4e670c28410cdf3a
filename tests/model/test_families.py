"""Models of transformers, each of another family: quantized, or refused in a sentence.

Oracles: the plain model's modules, counted here by class and shape, and its loss; each quantized layer multiplies.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from altgrad.model import Recipe, account, quantize_model
from altgrad.model.quantized.linear import WeightProduct

SIZES = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_experts_per_tok": 2,
}  # fmt: skip
HEAD, MOE, FOUR = {"head_dim": 16}, {"moe_intermediate_size": 32}, {"num_experts": 4}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "layer_types": ["mamba", "attention"]}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
HYBRID = {
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "num_hidden_layers": 3,
    "moe_shared_expert_intermediate_size": 32, "layers_block_type": ["mamba", "moe", "attention"],
}  # fmt: skip
#: Family -> settings of its configuration, and the smallest share of the weights in products that is quantized.
QUANTIZED: dict[str, tuple[dict[str, Any], float]] = {
    "Llama": ({}, 1.0), "Qwen3": (HEAD, 1.0), "Phi3": ({}, 1.0),
    "Mamba2": ({"num_heads": 8, "n_groups": 1, **HEAD}, 0.96),
    "Qwen3Moe": (HEAD | MOE | FOUR, 0.99), "Mixtral": ({"num_local_experts": 4}, 0.99),
    "DeepseekV3": (LATENT | GROUPS | MOE | {"first_k_dense_replace": 1}, 0.99),
    "GptOss": (HEAD | {"num_local_experts": 4}, 0.99), "Olmoe": (FOUR, 0.99),
    "Phimoe": ({"num_local_experts": 4}, 0.99),
    "GraniteMoeHybrid": ({"num_local_experts": 4, "shared_intermediate_size": 32, **MAMBA}, 0.99),
    "Lfm2Moe": ({"num_dense_layers": 1, "layer_types": ["conv", "full_attention"], **MOE, **FOUR}, 0.99),
    "Qwen3Next": (HEAD | MOE | FOUR | DELTA, 0.98), "NemotronH": (HEAD | MOE | GROUPS | HYBRID, 0.98),
}  # fmt: skip
REFUSED = {
    "Llama4": HEAD | {"num_local_experts": 4, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 1},
    "JetMoe": {"num_local_experts": 4, "kv_channels": 16},
}  # fmt: skip
IDS = torch.randint(3, 61, (2, 24), generator=torch.Generator().manual_seed(2))


def model(family: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(hf, f"{family}TextConfig", None) or getattr(hf, f"{family}Config")
    return getattr(hf, f"{family}ForCausalLM")(config(**SIZES | settings))


@pytest.mark.filterwarnings("ignore:.* of the weights in products are in modules that no recipe reaches")
@pytest.mark.parametrize("family", QUANTIZED)
def test_quantized(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = model(family, QUANTIZED[family][0])
    linear = {m.weight for m in net.modules() if type(m) is nn.Linear}
    reached = linear | {p for p in net.parameters() if p.ndim == 3 and p.shape[0] == 4}
    embeddings = {m.weight for m in net.modules() if isinstance(m, nn.Embedding)} - linear
    matrices = [p for name, p in net.named_parameters() if p.ndim > 1 and p not in embeddings and "_bias" not in name]
    share = sum(p.numel() for p in reached) / sum(p.numel() for p in matrices)
    plain = net(input_ids=IDS, labels=IDS).loss.item()

    quantize_model(net, Recipe.uniform("E4M3"))
    assert account(net).shares["quantized"] == pytest.approx(share)
    assert share >= QUANTIZED[family][1]
    multiplied, called = WeightProduct.multiplied, set()

    def noted(self: WeightProduct, *arguments: Any) -> Any:
        called.add(self)
        return multiplied(self, *arguments)

    monkeypatch.setattr(WeightProduct, "multiplied", noted)
    loss = net(input_ids=IDS, labels=IDS).loss
    loss.backward()
    assert called == {module for module in net.modules() if isinstance(module, WeightProduct)}
    assert 0 < abs(loss.item() - plain) < 0.1
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("family", REFUSED)
def test_refused(family: str) -> None:
    net = model(family, REFUSED[family])
    with pytest.raises(ValueError, match=rf"of the weights in products are in modules .*\({family}\w*Experts\)"):
        quantize_model(net, Recipe.uniform("E4M3"))
    assert not account(net).quantized
