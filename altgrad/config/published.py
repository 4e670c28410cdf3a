"""Folders of weights in GPT-2's published layout: what their config.json says, without reading a weight.

``config.json`` is Hugging Face's (``n_positions``, ``activation_function``) or nanoGPT's ``model_args``
(``block_size``, ``bias``), and ``model.safetensors`` lies beside it. Hugging Face's says ``bias: false`` too where this
bench has written it: that layout always has biases, which are zero then.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from altgrad.config.errors import UserError
from altgrad.config.models import Model, ModelFrom

WEIGHTS, CONFIG = "model.safetensors", "config.json"
#: activation_function -> gelu of a model; nanoGPT's ``nn.GELU()`` is exact
ACTIVATIONS = {"gelu": "exact", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
#: What GPT-2 can be configured to that ours has no counterpart for, and the value that both mean.
FIXED = {
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
    "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5,
}  # fmt: skip


def published_sizes(folder: Path) -> dict[str, Any]:
    """Return the fields of ``altgrad.model.GPTConfig`` that the weights in ``folder`` need; dropout is not theirs.

    Raises :class:`UserError` for a missing file, a missing size, or a setting that our GPT cannot have.
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

    def size(*names: str) -> int:
        found = next((config[name] for name in names if config.get(name) is not None), None)
        if not isinstance(found, int) or found < 1:
            raise UserError(f"{path}: {names[0]} must be a whole number of at least 1, not {found!r}")
        return found

    for name, value in FIXED.items():
        if config.get(name, value) != value:
            raise UserError(f"{path}: {name} is {config[name]!r}, and this GPT has {value!r} alone")
    activation = config.get("activation_function", "gelu")
    if activation not in ACTIVATIONS:
        raise UserError(f"{path}: activation_function {activation!r} is none of {', '.join(ACTIVATIONS)}")
    width, heads = size("n_embd"), size("n_head")
    if width % heads:
        raise UserError(f"{path}: n_embd {width} is not divisible by n_head {heads}")
    hidden = 4 * width if config.get("n_inner") is None else size("n_inner")
    return {
        "vocab_size": size("vocab_size"), "layers": size("n_layer"), "width": width, "heads": heads,
        "context": size("n_positions", "block_size"), "mlp_ratio": hidden / width,
        "bias": bool(config.get("bias", True)), "gelu": ACTIVATIONS[activation],
    }  # fmt: skip


def cell_model(preset: Model | ModelFrom) -> dict[str, Any]:
    """Return a preset as the fields of a cell's model, read from its folder if it starts from one.

    Raises :class:`UserError` as `published_sizes`, and for a context that the weights have no positions for.
    """
    if isinstance(preset, Model):
        return preset.model_dump()
    settings = preset.model_dump()
    folder = Path(settings["from"])
    sizes = published_sizes(folder)
    context = settings["context"] or sizes["context"]
    if context > sizes["context"]:
        raise UserError(
            f"params.yaml: model: context {context} is more than the {sizes['context']} positions of {folder}"
        )
    start = {"folder": str(folder), "sha256": weights_sha256(folder), "vocab_size": sizes.pop("vocab_size")}
    return sizes | {"context": context, "start": start} | {name: settings[name] for name in ("dropout", "threads")}


def weights_sha256(folder: Path) -> str:
    """Return the SHA-256 of the weights in ``folder``, of which `published_sizes` must have been read."""
    with open(folder / WEIGHTS, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
