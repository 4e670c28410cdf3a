"""Code around quantized layers gets what the layers compute, or one sentence: fast paths, resizing, FSDP1, TorchScript.

Oracles: a model's own training mode without dropout, which calls each layer; the plain model, resized before it is
quantized.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from altgrad.model import QuantizedLinear, Recipe, account, quantize_model, requantize_model, unquantize_model

E4M3 = Recipe.uniform("E4M3")


def encoder_layer(**settings) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(32, 2, 128, dropout=0.0, batch_first=True, **settings)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


ENCODERS = {
    "layer": lambda: nn.Sequential(encoder_layer()),
    "root": lambda: encoder_layer(activation="gelu"),
    "encoder": lambda: nn.TransformerEncoder(encoder_layer(), 2),
    "of a quantized layer": lambda: nn.TransformerEncoder(quantize_model(encoder_layer(), E4M3), 2),
}
WAYS = {
    "itself": lambda m: m, "deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "requantized": lambda m: requantize_model(m, Recipe.uniform("E2M1")),
}  # fmt: skip


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*(no recipe reaches|nested)")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_evaluates_as_quantized_as_it_trains(kind, way):
    torch.manual_seed(0)
    model, x = ENCODERS[kind](), torch.randn(4, 8, 32)
    quantized = model if kind == "of a quantized layer" else quantize_model(model, E4M3)
    model = WAYS[way](quantized)
    padding = torch.arange(8) >= torch.tensor([8, 5, 8, 2])[:, None]
    with torch.no_grad():
        for options in ({}, {"src_key_padding_mask": padding}) if kind == "encoder" else ({},):
            trained, evaluated = model.train()(x, **options), model.eval()(x, **options)
            kept = ~padding if options else torch.ones(4, 8, dtype=torch.bool)
            assert distance(evaluated[kept], trained[kept]) < 1e-3  # attention's own fast path sums otherwise
        assert distance(unquantize_model(model)(x, **options)[kept], evaluated[kept]) > 1e-2


@pytest.mark.filterwarnings("ignore:.*no recipe reaches", "ignore:.*nested tensors")
@pytest.mark.parametrize("kind", list(ENCODERS)[:3])
def test_unquantized_again_it_has_its_fast_path(kind):
    model = ENCODERS[kind]()
    before = [dict(vars(module)) for module in model.modules()]
    unquantize_model(quantize_model(model, E4M3))
    for module, attributes in zip(model.modules(), before, strict=True):
        for name in ("activation_relu_or_gelu", "use_nested_tensor"):
            assert vars(module).get(name) == attributes.get(name)


@pytest.mark.filterwarnings("ignore:.*no recipe reaches", "ignore:.*nested tensors")
def test_nested_tensors_are_refused_in_one_sentence():
    encoder = nn.TransformerEncoder(encoder_layer(), 1).eval()
    quantize_model(encoder.layers[0], E4M3)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"^a quantized layer takes no nested tensors: pad them; "):
        encoder(torch.randn(2, 4, 32), src_key_padding_mask=torch.tensor([[False] * 4, [False, False, True, True]]))


def language_model(kind: str):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    if kind == "bert":
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=64, **sizes)).eval()
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, **ids, tie_word_embeddings=kind == "tied")
    ).eval()


def resized(model, size, **options):
    torch.manual_seed(1)
    model.resize_token_embeddings(size, **options)
    return model


RECIPES = {"tensor": E4M3, "row": Recipe.uniform("E4M3", granularity="row"), "MXFP8": Recipe.named("MXFP8"),
           "stochastic": Recipe.uniform("E3M4", rounding="stochastic"),
           "torchao": Recipe(rules=[{"layers": "lm_head", "torchao": "tensorwise"}])}  # fmt: skip


@pytest.mark.parametrize("size", [80, 48, 64])
@pytest.mark.parametrize(
    ("kind", "recipe"),
    [*((kind, "tensor") for kind in ("tied", "untied", "bert")),
     *(("untied", name) for name in ("row", "MXFP8", "stochastic", "torchao"))],
)  # fmt: skip
def test_a_quantized_model_is_resized_as_the_plain_one_is(kind, recipe, size):
    x = torch.randint(48, (2, 8))
    expected = quantize_model(resized(language_model(kind), size), RECIPES[recipe]).eval()
    model = quantize_model(language_model(kind), RECIPES[recipe])
    original = pickle.loads(pickle.dumps(model))
    other = resized(copy.deepcopy(model), size)
    head = model.get_output_embeddings()
    for found in (resized(model, size), other, copy.deepcopy(other), resized(original, size, mean_resizing=True)):
        assert torch.equal(found(input_ids=x).logits, expected(input_ids=x).logits)
        assert account(found).quantized == account(expected).quantized
        weights = [found.get_output_embeddings().weight, found.get_input_embeddings().weight]
        assert (weights[0] is weights[1]) == (kind != "untied") and weights[0].shape == (size, 32)
        found.train()(input_ids=x).logits.sum().backward()
        assert weights[0].grad.shape == (size, 32)
        found.eval()
    assert recipe == "torchao" or model.get_output_embeddings() is head
    plain = resized(unquantize_model(model), size + 1)
    assert type(plain.get_output_embeddings()) is nn.Linear and "resize_token_embeddings" not in vars(plain)
    assert plain.get_output_embeddings().out_features == size + 1 == plain(input_ids=x).logits.shape[-1]


def test_a_virtual_head_stays_one():
    model = quantize_model(language_model("untied"), Recipe(rules=[
        {"layers": "lm_head", "weight": {"format": "E4M3", "virtual": True}}]))  # fmt: skip
    before = account(model).left["lm_head"]
    assert before.startswith("virtual") and account(resized(model, 80)).left["lm_head"] == before


def test_fsdp1_is_refused_before_it_changes_the_model(one_process):
    model = quantize_model(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8)), E4M3)
    x = torch.randn(4, 16)
    before = model(x)
    with pytest.raises(RuntimeError, match=r"shard the model by torch\.distributed\.fsdp\.fully_shard"):
        FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    assert all(isinstance(layer, QuantizedLinear) for layer in model) and torch.equal(model(x), before)


@pytest.mark.parametrize(
    "make", [torch.jit.script, lambda m: torch.onnx.export(m, (torch.randn(4, 16),), dynamo=False)], ids=["", "onnx"]
)  # STACKS.md has torch.jit.trace
@pytest.mark.filterwarnings("ignore")
def test_torchscript_is_refused_in_one_sentence(make):
    model = quantize_model(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), E4M3).eval()
    with pytest.raises(RuntimeError, match=r"^TorchScript .* take torch\.export\.export of model\.eval\(\), or torch"):
        make(model)
