"""Folders of weights to start from, published ones or a run's: what they say of a model, without reading a weight.

``config.json`` is Hugging Face's (``n_positions``, ``activation_function``) or nanoGPT's ``model_args``
(``block_size``, ``bias``), and ``model.safetensors`` lies beside it. What Hugging Face's leaves out has the default of
transformers' ``GPT2Config``. It says ``bias: false`` too where this bench has written it: that layout always has
biases, which are zero then. A run's folder has ``model.safetensors`` by this bench's names and no ``config.json``,
unless it is a copy that `make repro` made.

Every size is checked against the weights but ``n_head``: no tensor's shape depends on it, so a wrong ``n_head`` that
divides ``n_embd`` is read as it stands, by transformers too, and gives other logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from altgrad.common.errors import UserError
from altgrad.common.files import sha256_of
from altgrad.config.models import Model, ModelFrom

WEIGHTS, CONFIG = "model.safetensors", "config.json"
RUNS, KEPT = Path("data/runs"), Path("data/weights")
#: What transformers' ``GPT2Config`` takes for a setting that config.json leaves out, and its other names for settings.
DEFAULTS = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
    "activation_function": "gelu_new",
}  # fmt: skip
ALIASES = {
    "max_position_embeddings": "n_positions", "hidden_size": "n_embd", "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
}  # fmt: skip
#: activation_function -> gelu of a model; nanoGPT's ``nn.GELU()`` is exact
ACTIVATIONS = {"gelu": "exact", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
#: What GPT-2 can be configured to that ours has no counterpart for, and the value that both mean. gpt_bigcode has
#: GPT-2's names and sizes, and other attention.
FIXED = {
    "model_type": "gpt2", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False, "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5,
}  # fmt: skip


def published_sizes(folder: Path) -> dict[str, Any]:
    """Return the fields of ``altgrad.model.GPTConfig`` that the weights in ``folder`` need; dropout is not theirs.

    Raises :class:`UserError` for a missing file, a size that is none, or a setting that our GPT cannot have.
    """
    path = folder / CONFIG
    if not path.is_file() or not (folder / WEIGHTS).is_file():
        missing = WEIGHTS if path.is_file() else CONFIG
        raise UserError(f"{folder} has no {missing}; a folder of weights has {CONFIG} and {WEIGHTS} (no pickle)")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} must hold a mapping of settings, not {type(config).__name__}")

    for alias, name in ALIASES.items():
        if alias in config and config.setdefault(name, config[alias]) != config[alias]:
            raise UserError(f"{path}: {alias} {config[alias]!r} contradicts {name} {config[name]!r}; remove one")
    of_nanogpt = "block_size" in config and "n_positions" not in config
    context = "block_size" if of_nanogpt else "n_positions"
    if not of_nanogpt:
        config = DEFAULTS | config

    def size(name: str) -> int:
        found = config.get(name)
        if type(found) is not int or found < 1:
            raise UserError(f"{path}: {name} must be a whole number of at least 1, not {found!r}")
        return found

    for name, value in FIXED.items():
        if config.get(name, value) != value:
            raise UserError(f"{path}: {name} is {config[name]!r}, and this GPT has {value!r} alone")
    activation = config.get("activation_function", "gelu")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise UserError(f"{path}: activation_function {activation!r} is none of {', '.join(ACTIVATIONS)}")
    width, heads = size("n_embd"), size("n_head")
    if width % heads:
        raise UserError(f"{path}: n_embd {width} is not divisible by n_head {heads}")
    hidden = 4 * width if config.get("n_inner") is None else size("n_inner")
    return {
        "vocab_size": size("vocab_size"), "layers": size("n_layer"), "width": width, "heads": heads,
        "context": size(context), "mlp_ratio": hidden / width,
        "bias": bool(config.get("bias", True)), "gelu": ACTIVATIONS[activation],
    }  # fmt: skip


def cell_model(preset: Model | ModelFrom, start: str | None = None) -> dict[str, Any]:
    """Return a preset as the fields of a cell's model, with the folder that it starts from, if any.

    That is the preset's own, which decides the sizes, or ``start``, which must have the preset's. Raises
    :class:`UserError` as `published_sizes`, for sizes that differ, and for a context that there are no positions for.
    """
    settings = preset.model_dump()
    own = settings.get("from")
    if own is None and start is None:
        return settings
    if own is not None and start is not None:
        raise UserError(f"params.yaml: start: the model has weights to start from too, those in {own}; remove one")
    folder, place = Path(str(own or start)), f"params.yaml: {'start' if own is None else 'model: from'}"
    try:
        if start is not None:
            _require_startable(folder)
        sizes = published_sizes(folder) if own or (folder / CONFIG).is_file() else settings | run_sizes(folder)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    except OSError as error:  # a name too long
        raise UserError(f"{place}: {folder}: {error.strerror}") from None
    context = settings["context"] or sizes["context"]
    if context > sizes["context"]:
        raise UserError(
            f"params.yaml: model: context {context} is more than the {sizes['context']} positions of {folder}"
        )
    for name, size in () if own else sizes.items():
        if name in settings and name != "context" and settings[name] != size:
            raise UserError(
                f"params.yaml: start: {folder} has {name} {size}, and the model {settings[name]}; change the model's, "
                f"or write `model: {{from: {folder}}}` to have all sizes from there"
            )
    taken = {"folder": str(folder), "sha256": weights_sha256(folder), "vocab_size": sizes.pop("vocab_size")}
    return sizes | {"context": context, "start": taken} | {name: settings[name] for name in ("dropout", "threads")}


def _require_startable(folder: Path) -> None:
    if folder.parent == RUNS:
        raise UserError(
            f"{folder} is where a run of this grid goes, so training would write over what it "
            f"starts from; `make repro SET='start={folder}'` keeps a copy in {KEPT} and starts from that"
        )
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder} has no {WEIGHTS}; name a run's folder or one of weights")


def run_sizes(folder: Path) -> dict[str, Any]:
    """Return ``vocab_size`` and ``context`` of the weights of a run; :class:`UserError` where they are none."""
    try:
        with open(folder / WEIGHTS, "rb") as file:  # a safetensors file begins with its table, and that with its length
            table = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return {"vocab_size": table["tokens.weight"]["shape"][0], "context": table["positions.weight"]["shape"][0]}
    except (OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError):
        raise UserError(
            f"{folder / WEIGHTS} has no weights of a run of this bench, and there is no {CONFIG} beside it"
        ) from None


def weights_sha256(folder: Path) -> str:
    """Return the SHA-256 of the weights in ``folder``, of which `published_sizes` must have been read."""
    return sha256_of(folder / WEIGHTS)
