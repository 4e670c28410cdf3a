"""Read the weights of a `GPT` from a run's folder or a published layout, GPT-2's or Llama's; write them in that layout.

A folder has ``config.json`` and ``model.safetensors`` (see :mod:`altgrad.config.models`). Nothing is unpickled: first
save a nanoGPT checkpoint as such a folder, its ``model`` as tensors and its ``model_args`` as JSON. Names may begin
with ``transformer.``, as on the Hugging Face hub, and with torch.compile's ``_orig_mod.``. nanoGPT's layers store
weights as (out, in), Hugging Face's ``Conv1D`` as (in, out); the shape of ``c_attn`` tells which. Masks in older files
are skipped. In the layout of Llama and Qwen 3 queries, keys and values are three layers, which here are one.
"""

import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from altgrad.common.errors import UserError
from altgrad.common.files import replacing, write_json
from altgrad.config.models import ACTIVATIONS, CONFIG, SHAPE, WEIGHTS, Model, Start, published_sizes, weights_sha256
from altgrad.model.gpt import GPT, GPTConfig

#: Our modules -> GPT-2's modules; GPT-2's modules in `INSIDE` are in a block ``h.<n>.``.
OUTSIDE = {"tokens": "wte", "positions": "wpe", "norm": "ln_f"}
INSIDE = {
    "norm1": "ln_1", "attn.qkv": "attn.c_attn", "attn.out": "attn.c_proj",
    "norm2": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
}  # fmt: skip
#: The same for Llama and Qwen 3, whose modules in `INSIDE_LLAMA` are in a block ``layers.<n>.``.
OUTSIDE_LLAMA = {"tokens": "embed_tokens", "norm": "norm", "head": "lm_head"}
INSIDE_LLAMA = {
    "norm1": "input_layernorm", "attn.qkv": "self_attn.{q,k,v}_proj", "attn.out": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm", "norm2": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip
HEAD = "lm_head.weight"
PREFIX, LLAMA_PREFIX = "transformer.", "model."
MASKS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
#: Tensors in a run's file that are not parameters of a language model: a classifier's, and the state of quantizers.
BESIDES = re.compile(r"head\.weight|label_weights|.*\.(quantizers\..*|held_amax)")


def load_published(folder: str | Path) -> GPT:
    """Return a :class:`GPT` with the weights in ``folder``, float32 on the CPU and without dropout.

    Raises :class:`altgrad.config.UserError` for a missing or broken file, a shape that contradicts ``config.json``, a
    missing or unknown name, a value that is NaN or infinite, and a setting that our GPT does not have. A wrong
    ``n_head`` that divides ``n_embd`` is not noticed: no shape depends on it.
    """
    folder = Path(folder)
    model = GPT(GPTConfig(**published_sizes(folder)))
    read_published(folder, model)
    return model


def start_from(start: Start, key: str, model: GPT) -> None:
    """Copy the weights that the cell ``key`` starts from into ``model``; on ``meta``, only check that they fit.

    Raises :class:`UserError` if the weights do not fit, or have changed since the cell was resolved.
    """
    folder = Path(start.folder)
    if not model.head.weight.is_meta and weights_sha256(folder) != start.sha256:
        raise UserError(
            f"{folder}: the weights are not those that cell {key} was resolved for; run `dvc repro --force grid`"
        )
    read_published(folder, model)


@torch.no_grad()
def read_published(folder: Path, model: GPT) -> None:
    """Copy the weights in ``folder`` into ``model``, which may have a shorter context; raise as `load_published` does.

    No random numbers are drawn. If ``model`` is on ``meta``, only names and shapes are checked.
    """
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            _copy(file, model, folder)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / WEIGHTS} cannot be read: {error}") from None


def save_published(model: GPT, folder: str | Path) -> None:
    """Write ``model`` into ``folder`` in the layout of transformers, in float32.

    The layout is that of ``GPT2LMHeadModel``, ``LlamaForCausalLM`` or, with ``qk_norm``, ``Qwen3ForCausalLM``. A GPT-2
    without biases is written with zero biases, and ``config.json`` says ``bias: false``. Texts begin and end with the
    last id, ``<|endoftext|>`` in every vocabulary of :mod:`altgrad.data.tokens`. No tokenizer is written: the lower ids
    are GPT-2's own, but GPT-2's tokenizer has merges that a smaller vocabulary lacks.

    Raises ``ValueError`` for a shape that none of the three has.
    """
    config, folder = model.config, Path(folder)
    llama, settings = is_llama(config), _settings(config)
    tensors = {}
    for ours, names, transposed in _llama_names(model) if llama else _gpt2_names(model, conv1d=True):
        t = _parameter(model, ours)
        if t is None:  # the layout has every bias
            t = torch.zeros(model.get_parameter(ours.replace(".bias", ".weight")).shape[0])
        t = t.detach().cpu()
        t = (t.t() if transposed else t).float()
        for name, part in zip(names, t.split(_rows(model)) if len(names) > 1 else [t], strict=True):
            prefix = (LLAMA_PREFIX if name != HEAD else "") if llama else PREFIX
            tensors[prefix + name] = part.contiguous().clone()
    with replacing(folder / WEIGHTS) as temporary:
        temporary.write_bytes(save(tensors, {"format": "pt"}))
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), config.vocab_size - 1)
    write_json(folder / CONFIG, {**settings, "vocab_size": config.vocab_size, **ends})


def is_llama(config: GPTConfig) -> bool:
    """Return whether ``config`` has the shape of Llama or Qwen 3."""
    return (config.norm, config.positions, config.mlp) == ("rms", "rope", "swiglu")


def _settings(config: GPTConfig) -> dict[str, Any]:
    """Return the ``config.json`` of transformers for ``config`` without tokens; raise ``ValueError`` if it has none."""
    usual = {name: Model.model_fields[name].default for name in SHAPE if name != "bias"}
    if is_llama(config):
        usual = {"softcap": 0.0, "experts": 0, "bias": False}
    for name, value in usual.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"transformers has no model of this shape: with norm: {config.norm}, positions: {config.positions} and "
                f"mlp: {config.mlp}, {name} is {value} there, not {getattr(config, name)}"
            )
    hidden = round(config.mlp_ratio * config.width)
    if is_llama(config):
        kind, name = ("qwen3", "Qwen3ForCausalLM") if config.qk_norm else ("llama", "LlamaForCausalLM")
        return {
            "model_type": kind, "architectures": [name], "hidden_size": config.width, "intermediate_size": hidden,
            "num_hidden_layers": config.layers, "num_attention_heads": config.heads, "head_dim": config.head_size,
            "num_key_value_heads": config.groups, "max_position_embeddings": config.context, "hidden_act": "silu",
            "rms_norm_eps": config.norm_eps, "tie_word_embeddings": config.tied, "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        }  # fmt: skip
    activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.gelu)
    return {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"],
        "n_layer": config.layers, "n_head": config.heads, "n_embd": config.width, "n_positions": config.context,
        "n_inner": hidden, "activation_function": activation, "bias": config.bias,
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), config.dropout),
    }  # fmt: skip


Names = Iterator[tuple[str, list[str], bool]]


def _gpt2_names(model: GPT, *, conv1d: bool) -> Names:
    """Yield our name of each parameter, its published names, and whether the published tensor is transposed.

    ``conv1d``: the file's layers are Hugging Face's ``Conv1D``. Biases are included even if ``model`` has none.
    """
    modules = dict(OUTSIDE)
    for i in range(model.config.layers):
        modules |= {f"blocks.{i}.{ours}": f"h.{i}.{theirs}" for ours, theirs in INSIDE.items()}
    for ours, theirs in modules.items():
        yield f"{ours}.weight", [f"{theirs}.weight"], conv1d and ".c_" in theirs  # their layers
        if ours not in ("tokens", "positions"):
            yield f"{ours}.bias", [f"{theirs}.bias"], False


def _llama_names(model: GPT) -> Names:
    """Yield the same for the layout of Llama and Qwen 3; queries, keys and values have three published names."""
    modules = dict(OUTSIDE_LLAMA)
    for i in range(model.config.layers):
        modules |= {f"blocks.{i}.{ours}": f"layers.{i}.{theirs}" for ours, theirs in INSIDE_LLAMA.items()}
    if not model.config.qk_norm:
        modules = {ours: theirs for ours, theirs in modules.items() if not ours.endswith(("q_norm", "k_norm"))}
    if model.config.tied:
        del modules["head"]
    for ours, theirs in modules.items():
        parts = [theirs.replace("{q,k,v}", part) for part in "qkv"] if "{q,k,v}" in theirs else [theirs]
        yield f"{ours}.weight", [f"{part}.weight" for part in parts], False


def _own_names(model: GPT) -> Names:
    """Yield the same for a run's file, which has our names; a classifier's head is not read."""
    for name, _ in model.named_parameters():
        if name != "head.weight" or not model.config.labels:
            yield name, [name], False


def _rows(model: GPT) -> list[int]:
    """Return the number of rows of queries, keys and values in the weight of `attn.qkv`."""
    config = model.config
    return [heads * config.head_size for heads in (config.heads, config.groups, config.groups)]


def _parameter(model: nn.Module, name: str) -> Tensor | None:
    module, _, parameter = name.rpartition(".")
    return getattr(model.get_submodule(module), parameter)


def _copy(file: Any, model: GPT, folder: Path) -> None:
    """Copy an open safetensors file into ``model``; raise :class:`UserError` if it does not fit."""
    path = folder / WEIGHTS
    prefixes = "_orig_mod.", PREFIX, LLAMA_PREFIX
    stored = {reduce(str.removeprefix, prefixes, name): name for name in file.keys()}  # noqa: SIM118
    of_run = "tokens.weight" in stored
    llama = "embed_tokens.weight" in stored
    attention = stored.get("h.0.attn.c_attn.weight")
    width = model.config.width
    conv1d = attention is not None and file.get_slice(attention).get_shape() == [width, 3 * width]
    named = _own_names(model) if of_run else _llama_names(model) if llama else _gpt2_names(model, conv1d=conv1d)
    names = list(named)
    others, says = (BESIDES, "params.yaml") if of_run else (MASKS, str(folder / CONFIG))
    wanted = {name for _, theirs, _ in names for name in theirs}
    stored = {name: full for name, full in stored.items() if name in wanted or not others.fullmatch(name)}
    head = None if HEAD in wanted else stored.pop(HEAD, None)
    for ours, published, transposed in names:
        theirs = published[0] if len(published) == 1 else f"{published[0]} and the other two"
        full, target = [stored.pop(name, None) for name in published], _parameter(model, ours)
        if None in full and target is not None:
            raise UserError(f"{path} has no {published[full.index(None)]}, which {says} asks for")
        parts = [_tensor(file, name, model.head.weight.device) for name in full if name is not None]
        if not parts:
            continue
        tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
        if target is None:
            if not tensor.is_meta and tensor.any():
                raise UserError(f"{path}: {theirs} is not zero, but {says} says bias: false")
            continue
        tensor = tensor.t() if transposed else tensor
        if ours == "positions.weight":
            tensor = tensor[: len(target)]
        if tensor.shape != target.shape or (len(parts) > 1 and list(map(len, parts)) != _rows(model)):
            raise UserError(
                f"{path}: {theirs} is {_shape(tensor, transposed)}, and by {says} it should be "
                f"{_shape(target, transposed)}"
            )
        if not tensor.is_floating_point():
            raise UserError(f"{path}: {theirs} is {tensor.dtype}, and weights are floating-point numbers")
        target.copy_(tensor)
        if not target.is_meta and not target.isfinite().all():
            raise UserError(f"{path}: {theirs} has values that are NaN or infinite, so these weights are of no use")
    if stored:
        layout = "the model of params.yaml" if of_run else f"{'Llama' if llama else 'GPT-2'}'s published layout"
        raise UserError(f"{path} has {next(iter(stored))}, which {layout} has not")
    tokens = model.tokens.weight
    if head is not None and not tokens.is_meta and not torch.equal(file.get_tensor(head).to(tokens), tokens):
        raise UserError(f"{path}: {HEAD} is not the token embedding, which the head of this GPT is by {says}")


def _tensor(file: Any, name: str, device: torch.device) -> Tensor:
    """Return the tensor ``name`` of an open file; for the device ``meta`` an empty tensor of its shape."""
    if device.type == "meta":
        return torch.empty(file.get_slice(name).get_shape(), device=device)
    return file.get_tensor(name)


def _shape(t: Tensor, transposed: bool) -> str:
    return " x ".join(map(str, reversed(t.shape) if transposed else t.shape))
