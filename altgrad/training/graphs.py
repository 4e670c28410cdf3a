"""Compiled graphs, one for all models of the same structure, for as long as the process lives.

Loading a graph from the cache on disk takes seconds, a small model's whole run hardly longer. A format enters a graph
as a tensor, and so do weights, so that the next cell of a process finds the graph of the one before ready to be called.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from altgrad.model.gpt import GPT, MLP, Attention, Block
from altgrad.model.quantized.linear import QuantizedLinear
from altgrad.model.quantized.quantizer import Quantizer
from altgrad.numerics.compile_utils import ISOLATES, compile_apart
from altgrad.training.machine import RECORDS, recorded

if TYPE_CHECKING:
    from torch._dynamo.types import GuardFilterEntry

# What these do follows from what `structure` reads of them. A model with any other module has a graph of its own.
KNOWN = {
    GPT, Block, Attention, MLP, QuantizedLinear, Quantizer,
    nn.Linear, nn.Embedding, nn.LayerNorm, nn.Dropout, nn.ModuleList, nn.ModuleDict,
}  # fmt: skip
COMPUTE_DTYPES = torch.bfloat16, torch.float32
NO_SLP = "-fno-tree-slp-vectorize"

_graphs: dict[Hashable, Graph] = {}


def compile_model(model: nn.Module, mode: str = "default") -> Callable[..., Tensor]:
    """Return ``model`` compiled for the shapes that it is called with, and for training and evaluation.

    A graph that this process has of a model of the same `structure` is used again. ``mode`` is `torch.compile`'s.
    """
    key = structure(model)
    key = key if key is None else (mode, key)
    graph = _graphs.get(key) or Graph(next(model.parameters()).device.type, key, mode)
    if key is not None:
        _graphs[key] = graph
    return partial(graph, model)


class Graph:
    """A graph to come of all models of one structure, called with a model and its inputs."""

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
    """Wait while another process compiles the same, if nobody has: it is then found in the cache on disk.

    Two of them at it at once would each take twice as long. Whoever finds it loads it without waiting for others. Nor
    do the processes of one cell wait, since the first call of each is done only with that of all.
    """
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder is None or dist.is_initialized():
        yield
        return
    made = Path(folder, RECORDS, f"{hashlib.sha256(what.encode()).hexdigest()[:16]}.json")
    made.parent.mkdir(parents=True, exist_ok=True)
    if made.exists():
        yield
        return
    with open(made.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with nullcontext() if made.exists() else recorded(Path(folder), made):
            yield


def structure(model: nn.Module) -> Hashable | None:
    """Return all that a graph of ``model`` is made for, but for its mode and inputs; ``None`` if that is not known.

    Shapes and dtypes of its tensors, and which of them are one and the same; of a quantized layer what its products
    are settled by, which is all but the formats' constants.
    """
    places: dict[int, int] = {}
    found: list[Hashable] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module) not in KNOWN:
            return None
        found.append((name, type(module), *_settled(module)))
        for kind, t in chain(module._parameters.items(), module._buffers.items()):
            one = None if t is None else (places.setdefault(id(t), len(places)), t.shape, t.dtype, t.device)
            found.append((kind, one, t is not None and t.requires_grad))
    return tuple(found)


def _settled(module: nn.Module) -> Iterator[Hashable]:
    """Yield what a module's computation depends on besides its mode, tensors and children."""
    yield from (len(module._forward_pre_hooks), len(module._forward_hooks))
    if isinstance(module, GPT):
        yield module.config
    elif isinstance(module, QuantizedLinear):
        yield module.transposed
        yield from map(module.settings, COMPUTE_DTYPES)
    elif isinstance(module, Quantizer):
        yield from (module.scaling, module.learns)
    elif type(module).__module__.startswith("torch."):
        yield module.extra_repr()


def _compiled(device: str, mode: str, of_one_structure: bool) -> Callable[..., Tensor]:
    """Return what compiles when it is first called, with a model and its inputs.

    Before each call torch checks what the graph was made for, one attribute of the model after the other: 0.5 ms in
    a step of `nano` in an 8-bit format. Models that share it have one structure, which nothing changes; what changes
    is their mode, so that is all of a model that is checked. Nor does the graph check the sizes of what it reads. A
    model of modules that are not known may be traced in pieces, whose code other models have too: where torch cannot
    keep those apart (`ISOLATES`), all is checked.

    On a CPU the graph is C++ throughout. Called from Python, operators find their code gone from the caches after a
    product of matrices, 26 us each instead of 3, and a step has a hundred: `nano` wins 1 % in bf16 and 2 % in an 8-bit
    format, for a sixth more time in the compiler.
    """

    def depends_on(guards: Sequence[GuardFilterEntry]) -> list[bool]:
        settled = ("model", "G[")  # the model, and the modules of Python that its code is in
        return [guard.name.endswith(".training") or not guard.name.startswith(settled) for guard in guards]

    def call(model: nn.Module, *inputs: Tensor) -> Tensor:
        return model(*inputs)  # with its hooks, which would be graphs of their own were it compiled itself

    calls = {"cpp_wrapper": device == "cpu", "cpp_wrapper_build_separate": device == "cpu"}
    _prepare_compiler(device)
    options: dict[str, Any] = {"size_asserts": False, **calls}
    if mode != "default":
        from torch._inductor import list_mode_options  # which torch.compile takes options or a mode of

        options |= list_mode_options(mode)
    if of_one_structure or ISOLATES:
        options["guard_filter_fn"] = depends_on
    return compile_apart(call, dynamic=False, options=options)


def _prepare_compiler(device: str) -> None:
    """Tell torch that what it takes for unsafe to keep on disk is safe, and keep GCC from compiling it wrongly.

    The quantized product is a pure function of its arguments, which is what caching it asks for, and those of leaving
    autocast are in the graph.

    GCC 12.2 compiles the transposition of 32 by 32 bfloat16 numbers, which torch writes in intrinsics, to one of other
    numbers, when it joins scalar operations into vectors of 512 bits (``-ftree-slp-vectorize``, part of ``-O3``). It
    does so where it does not know the processor well enough to prefer 256 bits, as in virtual machines that hide AMX.
    torch has no setting for other flags; it passes on whatever stands for that of contraction.
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
