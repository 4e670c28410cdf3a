"""Read the weights of a `GPT` from a run's folder or from GPT-2's published layout; write them in that layout.

A folder has ``config.json`` and ``model.safetensors`` (see :mod:`altgrad.config.models`). Nothing is unpickled: first
save a nanoGPT checkpoint as such a folder, its ``model`` as tensors and its ``model_args`` as JSON. Names may begin
with ``transformer.``, as on the Hugging Face hub, and with torch.compile's ``_orig_mod.``. nanoGPT's layers store
weights as (out, in), Hugging Face's ``Conv1D`` as (in, out); the shape of ``c_attn`` tells which. Masks in older files
are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from altgrad.common.errors import UserError
from altgrad.common.files import replacing, write_json
from altgrad.config.models import ACTIVATIONS, CONFIG, WEIGHTS, Start, published_sizes, weights_sha256
from altgrad.model.gpt import GPT, GPTConfig

#: Our modules -> GPT-2's modules; GPT-2's modules in `INSIDE` are in a block ``h.<n>.``.
OUTSIDE = {"tokens": "wte", "positions": "wpe", "norm": "ln_f"}
INSIDE = {
    "norm1": "ln_1", "attn.qkv": "attn.c_attn", "attn.out": "attn.c_proj",
    "norm2": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
}  # fmt: skip
HEAD = "lm_head.weight"
PREFIX = "transformer."
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
    """Write ``model`` into ``folder`` in the layout of Hugging Face's ``GPT2LMHeadModel``, in float32.

    A model without biases is written with zero biases, and ``config.json`` says ``bias: false``. Texts begin and end
    with the last id, ``<|endoftext|>`` in every vocabulary of :mod:`altgrad.data.tokens`. No tokenizer is written: the
    lower ids are GPT-2's own, but GPT-2's tokenizer has merges that a smaller vocabulary lacks.
    """
    config, folder = model.config, Path(folder)
    activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.gelu)
    tensors = {}
    for ours, theirs, transposed in _names(model, conv1d=True):
        t = _parameter(model, ours)
        if t is None:  # the layout has every bias
            t = torch.zeros(model.get_parameter(ours.replace(".bias", ".weight")).shape[0])
        t = t.detach().cpu()
        tensors[PREFIX + theirs] = (t.t() if transposed else t).float().contiguous().clone()
    with replacing(folder / WEIGHTS) as temporary:
        temporary.write_bytes(save(tensors, {"format": "pt"}))
    write_json(folder / CONFIG, {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": config.vocab_size,
        **dict.fromkeys(("bos_token_id", "eos_token_id"), config.vocab_size - 1),
        "n_layer": config.layers, "n_head": config.heads, "n_embd": config.width, "n_positions": config.context,
        "n_inner": round(config.mlp_ratio * config.width), "activation_function": activation, "bias": config.bias,
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), config.dropout),
    })  # fmt: skip


def _names(model: GPT, *, conv1d: bool) -> Iterator[tuple[str, str, bool]]:
    """Yield our name of each parameter, its published name, and whether the published tensor is transposed.

    ``conv1d``: the file's layers are Hugging Face's ``Conv1D``. Biases are included even if ``model`` has none.
    """
    modules = dict(OUTSIDE)
    for i in range(model.config.layers):
        modules |= {f"blocks.{i}.{ours}": f"h.{i}.{theirs}" for ours, theirs in INSIDE.items()}
    for ours, theirs in modules.items():
        yield f"{ours}.weight", f"{theirs}.weight", conv1d and ".c_" in theirs  # their layers
        if ours not in ("tokens", "positions"):
            yield f"{ours}.bias", f"{theirs}.bias", False


def _parameter(model: nn.Module, name: str) -> Tensor | None:
    module, _, parameter = name.rpartition(".")
    return getattr(model.get_submodule(module), parameter)


def _copy(file: Any, model: GPT, folder: Path) -> None:
    """Copy an open safetensors file into ``model``; raise :class:`UserError` if it does not fit."""
    path = folder / WEIGHTS
    stored = {name.removeprefix("_orig_mod.").removeprefix(PREFIX): name for name in file.keys()}  # noqa: SIM118
    of_run = "tokens.weight" in stored
    others, says = (BESIDES, "params.yaml") if of_run else (MASKS, str(folder / CONFIG))
    stored = {name: full for name, full in stored.items() if not others.fullmatch(name)}
    head, width = stored.pop(HEAD, None), model.config.width
    attention = stored.get("h.0.attn.c_attn.weight")
    conv1d = attention is not None and file.get_slice(attention).get_shape() == [width, 3 * width]
    for ours, published, transposed in _names(model, conv1d=conv1d):
        theirs = ours if of_run else published
        full, target = stored.pop(theirs, None), _parameter(model, ours)
        if full is None and target is not None:
            raise UserError(f"{path} has no {theirs}, which {says} asks for")
        if full is None:
            continue
        tensor = _tensor(file, full, model.head.weight.device)
        if target is None:
            if not tensor.is_meta and tensor.any():
                raise UserError(f"{path}: {theirs} is not zero, but {says} says bias: false")
            continue
        tensor = tensor.t() if transposed else tensor
        if ours == "positions.weight":
            tensor = tensor[: len(target)]
        if tensor.shape != target.shape:
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
        layout = "the model of params.yaml" if of_run else "GPT-2's published layout"
        raise UserError(f"{path} has {next(iter(stored))}, which {layout} has not")
    tokens = model.tokens.weight
    if head is not None and not tokens.is_meta and not torch.equal(file.get_tensor(head).to(tokens), tokens):
        raise UserError(f"{path}: {HEAD} is not wte.weight, and in this GPT the head is the token embedding")


def _tensor(file: Any, name: str, device: torch.device) -> Tensor:
    """Return the tensor ``name`` of an open file; for the device ``meta`` an empty tensor of its shape."""
    if device.type == "meta":
        return torch.empty(file.get_slice(name).get_shape(), device=device)
    return file.get_tensor(name)


def _shape(t: Tensor, transposed: bool) -> str:
    return " x ".join(map(str, reversed(t.shape) if transposed else t.shape))
