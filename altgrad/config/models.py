"""The model's settings: its sizes, or a folder of weights to start from. No weights are loaded here, only their sizes.

A folder of published weights has ``model.safetensors`` and ``config.json``. The latter is Hugging Face's, of GPT-2
(``n_positions``, ``activation_function``), Llama or Qwen 3, or nanoGPT's ``model_args`` (``block_size``, ``bias``).
Hugging Face's may leave out settings, which then have the default of transformers' own configuration. For a model
without biases this bench writes GPT-2's layout, which always has biases, with zeros and ``bias: false``. The folder of
a run has ``model.safetensors`` with this bench's names, and a ``config.json`` only if `make repro` has copied it; that
one has ``model_type: altgrad`` and the names of `Model`.

Every size is checked against the weights except ``n_head``, which no tensor's shape depends on. A wrong ``n_head`` that
divides ``n_embd`` gives other logits, in transformers too.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from altgrad.common.errors import UserError
from altgrad.common.files import sha256_of
from altgrad.config.base import Settings

LEAST_CONTEXT = 8
# A setting of the model and not of the machine, since a sum over several threads has other bits.
THREADS = Field(1, ge=1, le=4096, description="CPU threads of a cell, which decide its last bits")

WEIGHTS, CONFIG = "model.safetensors", "config.json"
OWN = "altgrad"  # the ``model_type`` of a config.json that has the names of `Model`
RUNS, KEPT = Path("data/runs"), Path("data/weights")
#: Defaults of transformers' ``GPT2Config``, and its other names for settings.
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
#: Settings of GPT-2 that must have this value here. gpt_bigcode has GPT-2's names and sizes, but another attention.
FIXED = {
    "model_type": "gpt2", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False, "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5,
}  # fmt: skip
#: Defaults of transformers' ``LlamaConfig`` and ``Qwen3Config``.
LLAMA = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3 = LLAMA | {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "head_dim": 128,
    "max_position_embeddings": 32768,
}  # fmt: skip
LLAMAS = ("llama", "qwen3")  # model types with that layout
#: The settings of `Model` that a config.json of GPT-2 does not have, since GPT-2 has their defaults.
SHAPE = (
    "norm", "norm_eps", "positions", "rope_theta", "mlp", "kv_heads", "qk_norm", "head_dim", "tied", "softcap",
    "experts", "bias",
)  # fmt: skip
#: Settings of Llama and Qwen 3 that must have this value here.
FIXED_LLAMA = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}


class Model(Settings):
    """A GPT: its size. The vocabulary comes from the tokenizer."""

    layers: int = Field(ge=1, le=200, description="transformer blocks")
    width: int = Field(ge=8, le=32_768, description="features of a token between the blocks")
    heads: int = Field(ge=1, le=256, description="attention heads; they divide the width")
    context: int = Field(ge=LEAST_CONTEXT, le=131_072, description="tokens per sequence")
    mlp_ratio: float = Field(4.0, gt=0, le=16, description="hidden units of a block's MLP, as a multiple of the width")
    dropout: float = Field(0.0, ge=0, lt=1, description="share of the activations that are dropped in training")
    bias: bool = Field(False, description="biases in linear layers and norms; GPT-2 has them")
    gelu: Literal["exact", "tanh"] = Field("exact", description="tanh is the approximation that GPT-2 has")
    norm: Literal["layer", "rms"] = Field("layer", description="LayerNorm as in GPT-2, or RMSNorm as in Llama")
    norm_eps: float = Field(1e-5, gt=0, le=1e-2, description="added to a norm's variance or mean square")
    positions: Literal["learned", "rope"] = Field("learned", description="added embeddings, or rotary positions")
    rope_theta: float = Field(10_000.0, gt=1, le=1e9, description="base of the rotary positions' wavelengths")
    mlp: Literal["gelu", "swiglu", "relu2"] = Field(
        "gelu", description="down(gelu(up(x))), down(silu(gate(x)) * up(x)), or down(relu(up(x))^2)"
    )
    kv_heads: int | None = Field(None, ge=1, le=256, description="heads of keys and values; default: as many as heads")
    qk_norm: bool = Field(False, description="an RMSNorm over each head of queries and keys, as in Qwen 3")
    head_dim: int | None = Field(None, ge=1, le=1024, description="features of a head; default: width / heads")
    tied: bool = Field(True, description="the head has the token embedding's weight; a classifier's never has")
    softcap: float = Field(0.0, ge=0, le=1e4, description="c of logits c tanh(x / c), such as 15; 0 for none")
    experts: int = Field(0, ge=0, le=1024, description="MLPs of a block, of which a token takes some; 0 for one")
    active: int = Field(2, ge=1, le=1024, description="experts that a token passes through")
    balance: float = Field(0.01, ge=0, le=1, description="factor of the experts' load-balancing loss")
    threads: int = THREADS

    @property
    def sizes(self) -> dict[str, Any]:
        """The fields of `altgrad.model.GPTConfig` by name, without ``vocab_size``."""
        return {name: getattr(self, name) for name in Model.model_fields if name != "threads"}

    def matrix_elements(self, vocabulary: int) -> int:
        """Return the number of elements of all matrices: embeddings, linear layers, routers and an untied head."""
        size, groups = self.head_dim or self.width // self.heads, self.kv_heads or self.heads
        hidden = round(self.mlp_ratio * self.width)
        block = 2 * (self.heads + groups) * size + (3 if self.mlp == "swiglu" else 2) * hidden * max(1, self.experts)
        tables = vocabulary * (1 if self.tied else 2) + (self.context if self.positions == "learned" else 0)
        return self.width * (tables + self.layers * (block + self.experts))

    def mistakes(self) -> Iterator[str]:
        if self.heads % (self.kv_heads or 1):
            yield f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}; use a divisor, such as 1"
        if self.positions == "rope" and (self.head_dim or self.width // self.heads) % 2:
            yield "positions: rope turns pairs of features, and a head has an odd number of them; use an even head_dim"
        if self.experts and self.active > self.experts:
            yield f"active {self.active} is more than the {self.experts} experts; use {self.experts} or less"
        for name, of, value in (("gelu", "mlp", "gelu"), ("rope_theta", "positions", "rope")):
            if getattr(self, name) != type(self).model_fields[name].default and getattr(self, of) != value:
                yield f"{name} has no effect with {of}: {getattr(self, of)}; remove it"
        if self.head_dim is None and self.width % self.heads:
            near = [h for h in range(1, self.width + 1) if self.width % h == 0]
            nearest = min(near, key=lambda h: abs(h - self.heads))
            yield (
                f"width {self.width} is not divisible by heads {self.heads}; "
                f"use heads: {nearest} or width: {-(-self.width // self.heads) * self.heads}"
            )
        if round(self.mlp_ratio * self.width) < 1:
            yield f"mlp_ratio {self.mlp_ratio} leaves no hidden unit at width {self.width}; use 4"


class ModelFrom(Settings):
    """A GPT that starts from published weights (GPT-2, nanoGPT, Llama, Qwen 3), whose config.json says its size."""

    model_config = ConfigDict(serialize_by_alias=True)  # `from` is a keyword in Python

    from_: str = Field(alias="from", min_length=1, description="folder with config.json and model.safetensors")
    context: int | None = Field(
        None, ge=LEAST_CONTEXT, description="tokens per sequence; default, and most: the weights' own"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="share of the activations that are dropped in training")
    threads: int = THREADS


def _kind_of_model(preset: Any) -> str:
    """Return ``from`` for a preset that names the folder it starts from, else ``sizes``."""
    return "from" if isinstance(preset, ModelFrom) or (isinstance(preset, dict) and "from" in preset) else "sizes"


Preset = Annotated[
    Annotated[Model, Tag("sizes")] | Annotated[ModelFrom, Tag("from")], Discriminator(_kind_of_model)
]  # fmt: skip


class Lora(Settings):
    """Low-rank adapters of the blocks' linear layers, trained in place of their weights, which are frozen.

    LoRA (arXiv:2106.09685). The frozen weights are quantized as the recipe says (QLoRA, arXiv:2305.14314).
    """

    rank: int = Field(ge=1, le=4096, description="columns of B and rows of A")
    alpha: float = Field(gt=0, le=1e6, description="B A is multiplied by alpha / rank")


class Start(Settings):
    """The weights that a cell starts from, with their hash from the time when the cell was resolved."""

    folder: str
    sha256: str = Field(description="of model.safetensors")
    vocab_size: int


class CellModel(Model):
    """The model of a resolved cell; ``start`` is ``None`` where training begins with random weights."""

    start: Start | None = None


def published_sizes(folder: Path) -> dict[str, Any]:
    """Return the fields of `altgrad.model.GPTConfig` by name, without ``dropout``, for the weights in ``folder``.

    Raises :class:`UserError` for a missing file, an impossible size, and a setting that this GPT cannot have.
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

    kind = config.get("model_type", "gpt2")
    if kind == OWN:
        return {name: value for name, value in config.items() if name != "model_type"}
    sizes = _llama_sizes(config, path) if kind in LLAMAS else _gpt2_sizes(config, path)
    return {name: Model.model_fields[name].default for name in SHAPE} | sizes


def _size(config: dict[str, Any], name: str, path: Path) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise UserError(f"{path}: {name} must be a whole number of at least 1, not {value!r}")
    return value


def _require_fixed(config: dict[str, Any], fixed: dict[str, Any], path: Path) -> None:
    for name, value in fixed.items():
        if config.get(name, value) != value:
            raise UserError(f"{path}: {name} is {config[name]!r}, and this GPT has {value!r} alone")


def _llama_sizes(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the fields of `GPTConfig` for a ``config.json`` of Llama or Qwen 3, as `published_sizes` does."""
    qwen3 = config["model_type"] == "qwen3"
    config = (QWEN3 if qwen3 else LLAMA) | config
    _require_fixed(config, FIXED_LLAMA, path)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UserError(f"{path}: rotary positions are scaled ({rope}), and this GPT has unscaled ones alone")
    width, heads = _size(config, "hidden_size", path), _size(config, "num_attention_heads", path)
    own = config.get("head_dim") is not None and _size(config, "head_dim", path) * heads != width
    if not own and width % heads:
        raise UserError(f"{path}: hidden_size {width} is not divisible by num_attention_heads {heads}")
    groups = heads if config.get("num_key_value_heads") is None else _size(config, "num_key_value_heads", path)
    if heads % groups:
        raise UserError(f"{path}: num_attention_heads {heads} is not divisible by num_key_value_heads {groups}")
    return {
        "vocab_size": _size(config, "vocab_size", path), "layers": _size(config, "num_hidden_layers", path),
        "width": width, "heads": heads, "kv_heads": None if groups == heads else groups,
        "head_dim": config["head_dim"] if own else None, "context": _size(config, "max_position_embeddings", path),
        "mlp_ratio": _size(config, "intermediate_size", path) / width, "mlp": "swiglu",
        "norm": "rms", "norm_eps": config["rms_norm_eps"], "qk_norm": qwen3, "positions": "rope",
        "rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        "tied": bool(config["tie_word_embeddings"]),
    }  # fmt: skip


def _gpt2_sizes(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the fields of `GPTConfig` for a ``config.json`` of GPT-2 or nanoGPT, as `published_sizes` does."""
    for alias, name in ALIASES.items():
        if alias in config and config.setdefault(name, config[alias]) != config[alias]:
            raise UserError(f"{path}: {alias} {config[alias]!r} contradicts {name} {config[name]!r}; remove one")
    of_nanogpt = "block_size" in config and "n_positions" not in config
    context = "block_size" if of_nanogpt else "n_positions"
    if not of_nanogpt:
        config = DEFAULTS | config
    _require_fixed(config, FIXED, path)
    activation = config.get("activation_function", "gelu")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise UserError(f"{path}: activation_function {activation!r} is none of {', '.join(ACTIVATIONS)}")
    width, heads = _size(config, "n_embd", path), _size(config, "n_head", path)
    if width % heads:
        raise UserError(f"{path}: n_embd {width} is not divisible by n_head {heads}")
    hidden = 4 * width if config.get("n_inner") is None else _size(config, "n_inner", path)
    return {
        "vocab_size": _size(config, "vocab_size", path), "layers": _size(config, "n_layer", path), "width": width,
        "heads": heads, "context": _size(config, context, path), "mlp_ratio": hidden / width,
        "bias": bool(config.get("bias", True)), "gelu": ACTIVATIONS[activation],
    }  # fmt: skip


def cell_model(preset: Model | ModelFrom, start: str | None = None) -> dict[str, Any]:
    """Return the fields of `CellModel` by name: the sizes of ``preset``, and ``start`` if there are weights to load.

    The weights are in the preset's folder (``from``), which decides the sizes, or in the folder ``start``, which must
    have the preset's sizes. Raises :class:`UserError` as `published_sizes` does, for weights in both places, for other
    sizes, and for a context longer than that of the weights.
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
    weights = {"folder": str(folder), "sha256": weights_sha256(folder), "vocab_size": sizes.pop("vocab_size")}
    return sizes | {"context": context, "start": weights} | {name: settings[name] for name in ("dropout", "threads")}


def _require_startable(folder: Path) -> None:
    if folder.parent == RUNS:
        raise UserError(
            f"{folder} is where a run of this grid goes, so training would write over what it "
            f"starts from; `make repro SET='start={folder}'` keeps a copy in {KEPT} and starts from that"
        )
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder} has no {WEIGHTS}; name a run's folder or one of weights")


def run_sizes(folder: Path) -> dict[str, Any]:
    """Return ``vocab_size`` and ``context`` of a run's weights in ``folder``; raise :class:`UserError` for others.

    Weights with rotary positions do not tell their context.
    """
    try:
        with open(folder / WEIGHTS, "rb") as file:  # safetensors: the length of a table, then the table
            table = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        named = {"vocab_size": "tokens.weight", "context": "positions.weight"}
        return {size: table[name]["shape"][0] for size, name in named.items() if name in table or size == "vocab_size"}
    except (OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError):
        raise UserError(
            f"{folder / WEIGHTS} has no weights of a run of this bench, and there is no {CONFIG} beside it"
        ) from None


def weights_sha256(folder: Path) -> str:
    """Return the SHA-256 of ``model.safetensors`` in ``folder`` as hex digits."""
    return sha256_of(folder / WEIGHTS)
