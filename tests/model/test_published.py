"""Laws of GPT-2's published layout: the same function from the same file, both ways, and one sentence otherwise.

Oracles: the logits of transformers' ``GPT2LMHeadModel`` with random weights; for nanoGPT's names, the file that
transformers wrote, renamed and transposed by hand.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

from altgrad.config import UserError
from altgrad.config.schema import Tokenizer
from altgrad.data.tokens import load_tokenizer
from altgrad.model import GPT, GPTConfig, Recipe, load_published, quantize_model, save_published

TOKENS = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(2))
LAYERS = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def theirs(**settings: object) -> GPT2LMHeadModel:
    """Return a model whose every parameter, biases and norms too, is large enough to matter."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes | {"bos_token_id": 0, "eos_token_id": 0} | settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def rewritten(folder: Path, change) -> None:
    """Change the tensors, by name, of the folder's weights."""
    tensors = load_file(folder / "model.safetensors")
    save_file({k: t.contiguous().clone() for k, t in change(tensors).items()}, folder / "model.safetensors")


def configured(folder: Path, **settings: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def agree(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


def read_alike(folder: Path) -> None:
    """Both read the folder and give the same logits, or both refuse it, ours in one sentence."""
    try:
        logits = GPT2LMHeadModel.from_pretrained(folder).eval()(TOKENS).logits
    except (RuntimeError, StrictDataclassError, ValueError):
        with pytest.raises(UserError) as raised:
            load_published(folder)
        assert "\n" not in str(raised.value)
    else:
        agree(load_published(folder).eval()(TOKENS), logits)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    theirs().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("settings", [{}, {"activation_function": "gelu"}, {"n_inner": 80}], ids=str)
def test_a_model_of_transformers_gives_its_logits_here(tmp_path, settings):
    theirs(**settings).save_pretrained(tmp_path)
    agree(load_published(tmp_path).eval()(TOKENS), theirs(**settings)(TOKENS).logits)


def test_what_config_json_leaves_out_is_what_transformers_takes(tmp_path):
    theirs(n_positions=1024, n_embd=24, n_layer=12, n_head=12).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    kept = [config.keys() - {name} for name in config] + [{"vocab_size", "n_embd"}, {"n_embd"}, {"vocab_size"}, set()]
    for names in kept:
        (tmp_path / "config.json").write_text(json.dumps({name: config[name] for name in names}))
        read_alike(tmp_path)


@pytest.mark.parametrize("given", [
    {"hidden_size": 32, "num_attention_heads": 8, "num_hidden_layers": 2, "max_position_embeddings": 24},
    {"n_head": 2}, {"n_head": 5}, {"n_head": None}, {"n_layer": True}, {"n_embd": "32"}, {"activation_function": None},
    {"reorder_and_upcast_attn": True}, {"activation_function": "gelu_pytorch_tanh"},
], ids=str)  # fmt: skip
def test_a_setting_means_what_it_means_in_transformers(folder, given):
    config = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24}
    sizes = {} if "hidden_size" in given else config
    (folder / "config.json").write_text(json.dumps({"vocab_size": 61} | sizes | given))
    read_alike(folder)


def test_names_without_the_prefix_and_masks_of_older_files_are_read(tmp_path):
    model = theirs()
    GPT2Model.save_pretrained(model.transformer, tmp_path)
    rewritten(
        tmp_path, lambda t: t | {"h.0.attn.bias": torch.ones(1, 1, 24, 24), "h.1.attn.masked_bias": torch.ones(1)}
    )
    assert "wte.weight" in load_file(tmp_path / "model.safetensors")
    agree(load_published(tmp_path).eval()(TOKENS), model(TOKENS).logits)


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_nanogpts_names_and_linear_layers_are_read(folder, prefix):
    def as_nanogpt(tensors):
        found = {prefix + k: t.t() if k.endswith(LAYERS) else t for k, t in tensors.items()}
        return found | {f"{prefix}lm_head.weight": tensors["transformer.wte.weight"]}

    rewritten(folder, as_nanogpt)
    (folder / "config.json").write_text(json.dumps(
        {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 24, "bias": True, "vocab_size": 61, "dropout": 0.0}
    ))  # fmt: skip
    agree(load_published(folder).eval()(TOKENS), theirs(activation_function="gelu")(TOKENS).logits)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gelu", ["exact", "tanh"])
def test_our_file_gives_our_logits_in_transformers_and_our_weights_here(tmp_path, bias, gelu):
    torch.manual_seed(1)
    model = GPT(GPTConfig(61, layers=2, width=32, heads=4, context=24, mlp_ratio=2.5, bias=bias, gelu=gelu)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    save_published(quantize_model(model, Recipe.uniform("E4M3")), tmp_path)
    plain, again = GPT(model.config).eval(), load_published(tmp_path).eval()
    plain.load_state_dict(model.state_dict())
    read, problems = GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(problems.values())
    agree(read.eval()(TOKENS).logits, plain(TOKENS))
    assert again.config == model.config
    assert all(torch.equal(t, plain.state_dict()[name]) for name, t in again.state_dict().items())


@pytest.mark.parametrize("vocab_size", [300, 50257])
def test_texts_end_in_transformers_with_the_id_that_ends_them_here(tmp_path, vocab_size):
    save_published(GPT(GPTConfig(vocab_size, layers=1, width=2, heads=1, context=4)), tmp_path)
    config = GPT2Config.from_pretrained(tmp_path)
    end = load_tokenizer(Tokenizer(vocab_size=vocab_size)).eot_token
    assert config.bos_token_id == config.eos_token_id == end < config.vocab_size


def test_a_default_model_has_no_biases_and_fresh_biases_are_zero():
    sizes = {"vocab_size": 61, "layers": 1, "width": 16, "heads": 2, "context": 8}
    assert not any(name.endswith("bias") for name, _ in GPT(GPTConfig(**sizes)).named_parameters())
    biases = [p for name, p in GPT(GPTConfig(**sizes, bias=True)).named_parameters() if name.endswith("bias")]
    assert len(biases) == 7 and not any(p.any() for p in biases)


def without(name: str):
    return lambda tensors: {k: t for k, t in tensors.items() if k != name}


def at_one(name: str, value: float):
    """Return a change of one tensor's last element; in float64, which holds numbers that are infinite in float32."""

    def change(tensors):
        changed = tensors[name].double()
        changed.view(-1)[-1] = value
        return tensors | {name: changed}

    return change


@pytest.mark.parametrize(
    ("settings", "change", "words"),
    [
        ({"vocab_size": 70}, dict, "wte.weight is 61 x 32, and by .* it should be 70 x 32"),
        ({"n_inner": 64}, dict, r"h\.0\.mlp\.c_fc\.weight is 32 x 128, and by .* it should be 32 x 64"),
        ({"n_positions": 48}, dict, "wpe.weight is 24 x 32, and by .* it should be 48 x 32"),
        ({"n_layer": 3}, dict, "has no h.2.ln_1.weight"),
        ({"n_layer": 1}, dict, r"has h\.1\..*, which GPT-2's published layout has not"),
        ({}, without("transformer.ln_f.bias"), "has no ln_f.bias"),
        ({"bias": False}, dict, "ln_f.bias is not zero, but .* says bias: false"),
        ({}, lambda t: t | {"lm_head.weight": torch.ones(61, 32)}, "the head of this GPT is by"),
        ({"tie_word_embeddings": False}, dict, "tie_word_embeddings is False"),
        ({"scale_attn_by_inverse_layer_idx": True}, dict, "scale_attn_by_inverse_layer_idx is True"),
        ({"activation_function": "relu"}, dict, "activation_function 'relu' is none of gelu"),
        ({"model_type": "gpt_bigcode"}, dict, "model_type is 'gpt_bigcode', and this GPT has 'gpt2' alone"),
        ({"num_attention_heads": 8}, dict, "num_attention_heads 8 contradicts n_head 4"),
        ({}, at_one("transformer.wte.weight", math.nan), "wte.weight has values that are NaN or infinite"),
        ({}, at_one("transformer.h.1.mlp.c_fc.bias", -math.inf), r"h\.1\.mlp\.c_fc\.bias has values that are NaN"),
        ({}, at_one("transformer.ln_f.weight", 1e300), r"ln_f\.weight has values that are NaN or infinite"),
        ({}, lambda t: {k: v.to(torch.int8) for k, v in t.items()}, "wte.weight is torch.int8, and weights are"),
        ({"n_head": 5}, dict, "n_embd 32 is not divisible by n_head 5"),
        ({"n_layer": None}, dict, "n_layer must be a whole number of at least 1, not None"),
    ],
)
def test_what_does_not_fit_is_said_in_one_sentence(folder, settings, change, words):
    rewritten(folder, change)
    configured(folder, **settings)
    with pytest.raises(UserError, match=words) as raised:
        load_published(folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_or_broken_file_is_named(folder, name):
    (folder / name).write_text("{")
    with pytest.raises(UserError, match=name):
        load_published(folder)
    (folder / name).unlink()
    with pytest.raises(UserError, match=f"has no {name}"):
        load_published(folder)
