"""Compiled graphs. A process keeps one graph for all models of the same structure.

Loading a graph from the cache on disk takes seconds, and a small model's whole run little longer. Formats and weights
enter a graph as tensors, so the next cell of a process can call the previous cell's graph.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from altgrad.model.gpt import GPT, MLP, Attention, Block, Rotary
from altgrad.model.quantized.attention import Product, QuantizedProduct
from altgrad.model.quantized.linear import QuantizedLinear, QuantizedModule
from altgrad.model.quantized.quantizer import Quantizer
from altgrad.numerics.compile_utils import ISOLATES, compile_apart

if TYPE_CHECKING:
    from torch._dynamo.types import GuardFilterEntry

# `structure` reads everything that these modules depend on. A model with any other module has its own graph.
KNOWN = {
    GPT, Block, Attention, Rotary, MLP, Product, QuantizedLinear, QuantizedProduct, Quantizer,
    nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.ModuleList, nn.ModuleDict,
}  # fmt: skip
COMPUTE_DTYPES = torch.bfloat16, torch.float32
NO_SLP = "-fno-tree-slp-vectorize"

_graphs: dict[Hashable, Graph] = {}


def compile_model(model: nn.Module, mode: str = "default") -> Callable[..., Tensor]:
    """Return a function of the inputs that calls ``model`` compiled, for training and evaluation.

    The graph is compiled at the first call with each shape. A graph of this process for a model of the same `structure`
    is used again. ``mode`` is the ``mode`` of `torch.compile`.
    """
    key = structure(model)
    key = key if key is None else (mode, key)
    graph = _graphs.get(key) or Graph(next(model.parameters()).device.type, key, mode)
    if key is not None:
        _graphs[key] = graph
    return partial(graph, model)


class Graph:
    """The graph of all models of one structure. Call it with a model and its inputs; the first call compiles it."""

    def __init__(self, device: str, key: Hashable, mode: str) -> None:
        self._call = _compiled(device, mode, of_one_structure=key is not None)
        self._key = key
        self._shapes: set[tuple[torch.Size, ...]] = set()

    def __call__(self, model: nn.Module, *inputs: Tensor) -> Tensor:
        shapes = tuple(t.shape for t in inputs)
        if shapes in self._shapes:
            return self._call(model, *inputs)
        self._shapes.add(shapes)
        with _compiled_by_one_process(f"{torch.__version__} {torch.get_num_threads()} {self._key} {shapes}"):
            return self._call(model, *inputs)


@contextmanager
def _compiled_by_one_process(what: str) -> Iterator[None]:
    """Wait while another process compiles the graph named ``what``, and then find the graph in the cache on disk.

    Two processes that compile it at once would each take twice as long. A graph in the cache is loaded without waiting.
    The processes of one cell do not wait for each other: their first calls communicate and end together.
    """
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder is None or dist.is_initialized():
        yield
        return
    made = Path(folder, "made", hashlib.sha256(what.encode()).hexdigest()[:16])
    made.parent.mkdir(parents=True, exist_ok=True)
    with open(made.with_suffix(".lock"), "w") as lock:
        if not made.exists():
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        made.touch()


def structure(model: nn.Module) -> Hashable | None:
    """Return a key that is equal for models that can share a graph, ``None`` if a module is not in `KNOWN`.

    The key holds the shapes and dtypes of the model's tensors, which of them are shared, and the settings of quantized
    layers' products without the formats' constants. It leaves out the mode (training or evaluation) and the inputs.
    """
    places: dict[int, int] = {}
    parts: list[Hashable] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module) not in KNOWN:
            return None
        parts.append((name, type(module), *_settings(module)))
        for kind, t in chain(module._parameters.items(), module._buffers.items()):
            tensor = None if t is None else (places.setdefault(id(t), len(places)), t.shape, t.dtype, t.device)
            parts.append((kind, tensor, t is not None and t.requires_grad))
    return tuple(parts)


def _settings(module: nn.Module) -> Iterator[Hashable]:
    """Yield the settings that a module's computation depends on, besides its mode, tensors and children."""
    yield from (len(module._forward_pre_hooks), len(module._forward_hooks))
    if isinstance(module, GPT):
        yield module.config
    elif isinstance(module, QuantizedModule):
        yield getattr(module, "transposed", False)
        yield from map(module.settings, COMPUTE_DTYPES)
    elif isinstance(module, Quantizer):
        yield from (module.scaling, module.learns)
    elif type(module).__module__.startswith("torch."):
        yield module.extra_repr()


def _compiled(device: str, mode: str, of_one_structure: bool) -> Callable[..., Tensor]:
    """Return a function of a model and its inputs that is compiled when it is first called.

    Before each call torch checks every attribute of the model that the graph depends on: 0.5 ms in a step of `nano` in
    an 8-bit format. Models that share a graph have one structure, which never changes, so only their training mode is
    checked. A model with unknown modules may be traced in pieces, whose code other models share. If torch cannot keep
    these pieces apart (`ISOLATES` is false), everything is checked.

    On a CPU the whole graph is C++. After a matrix product an operator called from Python takes 26 us instead of 3,
    since its code has left the caches, and a step has a hundred. `nano` gains 1 % in bf16 and 2 % in an 8-bit format,
    for a sixth more time in the compiler.
    """

    def depends_on(guards: Sequence[GuardFilterEntry]) -> list[bool]:
        fixed = ("model", "G[")  # the model, and the Python modules of its code
        return [guard.name.endswith(".training") or not guard.name.startswith(fixed) for guard in guards]

    def call(model: nn.Module, *inputs: Tensor) -> Tensor:
        return model(*inputs)  # the hooks of a model that is compiled itself would be graphs of their own

    calls = {"cpp_wrapper": device == "cpu", "cpp_wrapper_build_separate": device == "cpu"}
    _prepare_compiler(device)
    options: dict[str, Any] = {"size_asserts": False, **calls}
    if mode != "default":
        from torch._inductor import list_mode_options  # torch.compile takes a mode or options, not both

        options |= list_mode_options(mode)
    if of_one_structure or ISOLATES:
        options["guard_filter_fn"] = depends_on
    return compile_apart(call, dynamic=False, options=options)


def _prepare_compiler(device: str) -> None:
    """Let torch cache the quantized product on disk, and keep GCC from compiling a transposition wrongly.

    torch caches only functions declared pure. The quantized product is pure, and so are entering and leaving autocast,
    whose arguments are in the graph.

    GCC 12.2 compiles torch's transposition of 32 by 32 bfloat16 numbers wrongly when it joins scalar operations into
    vectors of 512 bits (``-ftree-slp-vectorize``, part of ``-O3``). It does so where it does not know the processor
    well enough to prefer 256 bits, as in virtual machines that hide AMX. torch has no setting for further flags, but
    passes on the text of its flag for contraction.
    """
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor  # which loads the compiler, and most processes compile nothing

    if device == "cpu" and platform.system() == "Linux" and platform.machine() == "x86_64":
        contract = inductor.cpp.enable_floating_point_contract_flag
        if NO_SLP not in contract:
            inductor.cpp.enable_floating_point_contract_flag = f"{contract} {NO_SLP}"
    functorch.autograd_cache_allow_custom_autograd_functions = True
    switches = ("torch.amp.autocast_mode._enter_autocast", "torch.amp.autocast_mode._exit_autocast")
    inductor.unsafe_marked_cacheable_functions = dict.fromkeys(switches, torch.__version__)
