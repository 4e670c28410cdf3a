"""``ArmOptimizer``: applies an arm to a model's weights, as a ``torch.optim.Optimizer``."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar, cast, overload

import torch
from torch import Tensor, nn

from altgrad.config.arms import ADAM, BASES, MOMENTUM, Arm
from altgrad.formats import get_format
from altgrad.model.quantized.data_parallel import is_sharded
from altgrad.numerics import permutation
from altgrad.numerics.compile_utils import compile_apart
from altgrad.numerics.constants import table_of
from altgrad.optim import update, update_cpu, update_gpu
from altgrad.optim.groups import completed, initial_groups, share_kept, step_adamw, step_numbers, step_sgd
from altgrad.optim.loading import Resumable
from altgrad.optim.sharded import all_finite, gather_full, gathered, is_elementwise, largest, local
from altgrad.optim.state_codec import Codings, opened
from altgrad.optim.stiffness import Stiffness
from altgrad.optim.weight_grid import CodeWeight, WeightGrid, plain, store

Loss = TypeVar("Loss", bound=Tensor | float)
Stream = tuple[int, int, int]  # seed, parameter and step of random numbers
AnyLoops = update_cpu.Loops | update_gpu.Kernels
Opened = AbstractContextManager[tuple[Tensor, Tensor, update.State, Tensor | None]]
#: The attributes that a copy or pickle keeps besides those of torch's optimizers.
KEPT = ("arm", "steps", "seed", "skipped", "reference", "compiled", "grids", "known", "sharded")
LAYOUT_OF = Tensor.layout.__get__  # type: ignore[attr-defined] # getter of a property, called per gradient


class Form(NamedTuple):
    """A way to step weights one by one: an arm, the ``names`` of its state tensors, and its update rule."""

    arm: Arm
    names: tuple[str, ...]
    rule: update.Rule


class ArmOptimizer(Resumable):
    """Steps ``weights`` as the arm says, and all other parameters in the arm's plain form (AdamW or SGD).

    If a gradient is not finite, the step changes nothing and ``skipped`` grows by one. Random numbers depend on seed,
    parameter, step and element, so a resumed run repeats them. Gradients are dense, with any strides. Parameters may be
    FSDP2's DTensors; the results are bitwise those of one process.

    Learning-rate schedulers set each group's ``lr``, as in torch. A step multiplies a matrix by
    ``1 - lr * weight_decay`` of its group. For an arm with ``decay``, ``weight_decay`` is ``decay / lr`` at the start.

    Args:
        weights: the weights that the arm acts on, (out, in), and their quantization grids. With ``weights: quantized``
            the optimizer rounds the weights to their grids.
        plain: all other parameters; vectors do not decay.
        arm: the optimizer settings. If the arm has no step of its own, ``weights`` are stepped in its plain form.
        linear: the parameters in ``plain`` that are weights of linear layers. They use ``arm.decay``, and ``arm.lr``
            unless the arm's rate has another unit. The other parameters in ``plain`` use ``plain_lr``.
        steps: number of steps in the run, for the stiffness ``schedule``.
        seed: seed of the shuffle of ``permuted`` and of stochastic rounding.
        compiled: compile the update rule, for weights that the C++ loops do not take.
        names: names of parameters, so that `load_state_dict` takes groups in any order.
        reference: keep AdamW's moments for `adamw_direction` even if the arm has other moments.
    """

    def __init__(
        self, weights: Mapping[nn.Parameter, WeightGrid], plain: Iterable[nn.Parameter], arm: Arm, *,
        linear: Iterable[nn.Parameter] = (), steps: int = 1, seed: int = 0, compiled: bool = False,
        reference: bool = False, names: Mapping[nn.Parameter, str] | None = None,
    ) -> None:  # fmt: skip
        self.arm, self.steps, self.seed, self.skipped = arm, steps, seed, 0
        self.reference, self.compiled = reference, compiled
        self.grids = dict(weights) if arm.has_own_step else {}
        self.names, self.known, self.sharded = dict(names or {}), [], False
        linear = [*(p for p in weights if p not in self.grids), *linear]
        groups, plain_lr = initial_groups(arm, list(self.grids), linear, plain)
        # OneCycleLR looks here for betas, then for momentum, and cycles the setting that it finds in the groups.
        cycled = {"betas": arm.betas} if BASES[arm.base].plain == "adamw" else {"momentum": arm.momentum}
        super().__init__(groups, {"lr": plain_lr, "quantized": False, **cycled})
        self._prepare()
        if arm.weights == "quantized":
            self._put_on_grid()
        elif any(grid.held is not None for grid in weights.values()):
            raise ValueError(
                "these grids wait for an arm that keeps weights on them, and this one keeps master weights: quantize "
                "the model anew and leave out grids"
            )

    def _prepare(self) -> None:
        """Build the rules, codings, shuffles and loops from the settings and grids; copies call this again."""
        arm = self.arm
        self.codings = Codings(arm)
        self._waiting: list[update_gpu.Waiting] = []
        self._plain_loops: update_cpu.Loops | None = None
        self._acting, self._plain = (
            Form(form, update.state_names(form, reference), update.rule_of(form, reference))
            for form, reference in ((arm, self.reference), (arm.plain_form, False))
        )
        if self.compiled:
            self._acting = self._acting._replace(rule=compile_apart(self._acting.rule, dynamic=True, fullgraph=True))
            if arm.state is not None:
                self._plain = self._plain._replace(rule=compile_apart(self._plain.rule, dynamic=True, fullgraph=True))
        self._orders = {
            p: permutation(p.numel(), self.seed, i).to(p.device) if arm.stiffness == "permuted" else None
            for i, p in enumerate(self.grids)
        }
        self.look_at(self.grids)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copy and pickle: the attributes `KEPT`, and the names of the groups' parameters."""
        known = {p for group in self.param_groups for p in group["params"]}
        names = {p: name for p, name in self.names.items() if p in known}
        return super().__getstate__() | {name: vars(self)[name] for name in KEPT} | {"names": names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "arm" not in state:  # of a state dict that torch loads
            return
        self._prepare()
        if self.arm.store == "codes":  # copies of these weights are float32
            for p, grid in self.grids.items():
                store(p, grid)

    def look_at(self, weights: Mapping[nn.Parameter, WeightGrid]) -> None:
        """Replace the quantization grids by those in ``weights``, for the same weights; keep moments and step counts.

        If the arm needs no format, ``weights`` is ignored.
        """
        if self.arm.needs_format:
            self.grids = {p: weights[p] for p in self.grids}
        arm, names = self.arm, self._acting.names
        self._stiffness: dict[nn.Parameter, Stiffness | None] = {}
        self._loops: dict[nn.Parameter, AnyLoops] = {}
        for p, grid in self.grids.items():
            stiff = self._stiffness[p] = None if arm.stiffness is None else Stiffness(
                grid.format, arm.stiffness, arm.foreign, knee=arm.knee, slope=arm.slope
            ).to(p.device)  # fmt: skip
            spaced_by = [grid.constants] if stiff is None else [grid.constants, stiff.constants]
            if any(table_of(constants) is not None for constants in spaced_by):
                continue  # neither loops nor kernels read the spacing of a table
            if stiff is not None and update_gpu.available(arm, p, grid, names):
                self._loops[p] = update_gpu.Kernels(arm, grid, stiff, self._waiting)
            elif update_cpu.available(arm, local(p), grid):
                self._loops[p] = update_cpu.Loops(arm, names, grid, stiff, self._orders[p], self.codings.of(p))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters that are stepped in the plain form.

        ``params`` may hold (name, parameter) pairs, as from `Module.named_parameters`. Missing settings are the arm's.
        Without ``weight_decay``, a group of matrices decays as embeddings do, and a group with any vector not at all.
        Raises ``ValueError`` for an unknown setting, and for quantized float16 weights, which would lose their updates.
        """
        group = completed(param_group, self.arm, self.defaults["lr"], self.names)
        self.know(group["params"])
        super().add_param_group(group)

    # --- a step --------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None, *, norm: float | None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Loss], *, norm: float | None = None) -> Loss: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], Loss] | None = None, *, norm: float | None = None) -> Loss | None:
        """Take a step.

        Args:
            closure: recomputes and returns the loss, as in torch's optimizers.
            norm: total norm of all gradients, from clipping. A finite norm shows that the gradients are finite.
                If None, the step checks all gradients, which takes a fifth of an AdamW step, and the first skip warns.

        Returns:
            The loss that ``closure`` returned; None without a closure.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.follow_replaced(self.grids, self._stiffness, self._orders, self._loops, self.names)
        stepped = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in stepped]
        if not gradients:
            return loss
        if any(layout != torch.strided for layout in set(map(LAYOUT_OF, gradients))):
            g = next(g for g in gradients if g.layout != torch.strided)
            raise RuntimeError(
                f"a gradient of shape {tuple(g.shape)} is sparse, and gradients must be dense here: make its "
                "embedding with sparse=False, or step that parameter with torch.optim.SparseAdam"
            )
        known = norm is not None and math.isfinite(norm)
        if not (known or all_finite(gradients, self.sharded)):
            self.skipped += 1
            if self.skipped == 1 and norm is None:
                warnings.warn(
                    "a gradient is not finite, so this step changes nothing; the optimizer's `skipped` counts such "
                    "steps, and no more is said of them", stacklevel=4,
                )  # fmt: skip
            return loss
        place = 0  # number of the parameter, which selects its stream of random numbers
        for group in self.param_groups:
            first = 0 if group["quantized"] else place
            present = [(i, p) for i, p in enumerate(group["params"], first) if p.grad is not None]
            place += len(group["params"])
            if group["quantized"]:
                self._step_by_rule(self._acting, group, present)
            else:
                self._step_plain(group, present)
        # The fused step and the loops bypass autograd: the new version makes a backward pass on old weights fail.
        torch.autograd.graph.increment_version(stepped)
        return loss

    def _step_plain(self, group: dict[str, Any], present: list[tuple[int, nn.Parameter]]) -> None:
        """Step parameters by torch's AdamW or SGD; parameters with coded moments by the plain form's rule."""
        if self.arm.state is not None:
            self._step_by_rule(self._plain, group, [(i, p) for i, p in present if self.codings.of(p)])
        params = [p for _, p in present if not self.codings.of(p)]
        if BASES[self.arm.base].plain == "adamw":
            # torch's fused step counts on the device, which load_state_dict knows by the group's name for it.
            step_adamw(group, params, [self._state(p, ADAM, p.device) for p in params], self.sharded)
        else:
            states = [self._state(p, MOMENTUM) for p in params] if group["momentum"] else []
            step_sgd(group, params, states, self.sharded)

    def _step_by_rule(self, form: Form, group: dict[str, Any], present: list[tuple[int, nn.Parameter]]) -> None:
        """Step the parameters ``present`` of a group, (number, parameter) pairs, one by one by the rule of ``form``."""
        # The hyperparameters by (step, grid refinement); weights that always had a gradient share their step.
        numbers: dict[tuple[int, int], Tensor] = {}
        states = [self._state(p, form.names) for _, p in present]
        if states:
            torch._foreach_add_([state["step"] for state in states], 1)
        for (place, p), state in zip(present, states, strict=True):
            step, grid, loops = int(state["step"].item()), self.grids.get(p), self._loops_of(form, p)
            which = step, 1 if grid is None else grid.refinement
            if which not in numbers:
                numbers[which] = self._numbers(group, *which, p.device)
            stream = self.seed, place, step
            if p.dtype != torch.float32 or self.sharded or self.arm.state is not None or self.arm.store == "codes":
                opened_weight: Opened = self._opened(form, loops, p, state, stream)
            else:
                moments = {name: state[name] for name in form.names}
                amax = None if grid is None else grid.remembered()
                opened_weight = nullcontext((cast("Tensor", p), cast("Tensor", p.grad), moments, amax))
            with opened_weight as (w, g, moments, amax):
                if loops is not None:
                    loops.step(w, g, moments, numbers[which], stream, amax)
                else:
                    form.rule(w, g, moments, numbers[which], self._grid_tensors(p, stream, amax))
        update_gpu.run(self._waiting)

    @contextmanager
    def _opened(
        self, form: Form, loops: AnyLoops | None, p: nn.Parameter, state: update.State, stream: Stream
    ) -> Iterator[tuple[Tensor, Tensor, update.State, Tensor | None]]:
        """Yield weight, gradient, state and the scale's amax (or None) of ``p`` for a step; then store the results.

        Codes are decoded unless ``loops`` reads codes. bfloat16 becomes float32. A sharded weight is the local part if
        the step is elementwise, else the gathered whole.
        """
        w, g, grid, codings = cast("Tensor", p), cast("Tensor", p.grad), self.grids.get(p), self.codings.of(p)
        amax, dtype = None if grid is None else grid.remembered(), self.moment_dtype(p)
        with ExitStack() as stack:
            if loops is None or not loops.reads_codes:
                state = stack.enter_context(opened(codings, state, form.names, p, stream))
            if is_sharded(p):
                elementwise = grid is None or is_elementwise(self.arm, grid)
                if elementwise and (not codings or self.codings.in_parts(p)):
                    if grid is not None:
                        amax = largest(p) if amax is None else torch.where(amax > 0, amax, largest(p))
                    w, g, state = local(p), local(g), {name: local(t) for name, t in state.items()}
                else:
                    w, g, state = stack.enter_context(gathered(p, g, state, dtype))
            if isinstance(p, CodeWeight) and loops is not None and p.memory.steps_in_codes:
                yield p.memory.codes, g, state, amax
                return
            values = plain(w).to(dtype)
            yield values, g.to(dtype), state, amax
            if isinstance(p, CodeWeight):
                p.memory.keep(values)
            elif values is not w:
                w.copy_(values)

    def _loops_of(self, form: Form, p: nn.Parameter) -> AnyLoops | None:
        """Return the C++ loops or GPU kernels that step ``p`` in ``form``; None if the tensor rule does."""
        if form is self._acting:
            return self._loops.get(p)
        if not update_cpu.takes(local(p)):
            return None
        if self._plain_loops is None and update_cpu.available(form.arm, local(p), None):
            grid = WeightGrid(get_format("E4M3"))  # a placeholder: the plain form reads no grid
            self._plain_loops = update_cpu.Loops(form.arm, form.names, grid, codings=self.codings.of(p))
        return self._plain_loops if self._plain_loops is not None and self._plain_loops.reads_codes else None

    # --- what it is made of --------------------------------------------------------------------------

    def adamw_direction(self, p: nn.Parameter) -> Tensor | None:
        """Return AdamW's update direction for ``p`` without the learning rate: (out, in) float32, gathered.

        None if ``p`` was never stepped, or AdamW's moments are not kept (see ``reference``).
        """
        state = self.state.get(p, {})
        if "reference_avg" not in state and not ("exp_avg" in state and self.arm.has_adam_moments):
            return None
        numbers = self._numbers(self._group_of(p), state["step"].item(), 1, p.device)
        return update.adamw_direction(self._decoded(p), numbers)

    @torch.no_grad()
    def wanted(self, p: nn.Parameter) -> Tensor | None:
        """Return the unrounded value of ``p`` after the next step, (out, in), gathered; change nothing.

        None unless ``p`` is stored on its quantization grid and has a gradient.
        """
        if self.arm.weights != "quantized" or p not in self.grids or p.grad is None:
            return None
        kept, dtype = self.state.get(p, {}), self.moment_dtype(p)
        w, g = (gather_full(t).to(dtype) for t in (p, p.grad))
        names = self._acting.names
        state = {name: gather_full(kept[name]).clone() if name in kept else torch.zeros_like(w) for name in names}
        step = 1 + (kept["step"].item() if "step" in kept else 0)
        numbers = self._numbers(self._group_of(p), step, self.grids[p].refinement, p.device)
        grid = self._grid_tensors(p, (0, 0, 0), self.grids[p].remembered())
        return update.wanted(self.arm, w, g, state, numbers, grid)

    def decay(self, p: nn.Parameter) -> float:
        """Return the factor by which the group's current weight decay multiplies ``p`` in a step, such as 0.9999."""
        return share_kept(self._group_of(p))

    def _group_of(self, p: nn.Parameter) -> dict[str, Any]:
        return next(group for group in self.param_groups if any(p is q for q in group["params"]))

    def _numbers(self, group: dict[str, Any], step: float, refinement: int, device: torch.device) -> Tensor:
        return step_numbers(group, self.arm, step, self.steps, refinement).to(device, non_blocking=True)

    def _grid_tensors(self, p: nn.Parameter, stream: Stream, amax: Tensor | None) -> update.GridTensors:
        if p not in self.grids:
            return update.NO_GRID
        grid, stiff = self.grids[p], self._stiffness[p]
        return update.GridTensors(
            constants=grid.constants,
            stiff_constants=None if stiff is None else stiff.constants,
            numbers=None if stiff is None else stiff.numbers,
            order=self._orders[p],
            remembered=amax,
            options=grid.options,
            stream=torch.tensor(stream).to(p.device, non_blocking=True) if self.arm.rounding != "nearest" else None,
            held=grid.held if self.arm.weights == "quantized" else None,
        )

    @torch.no_grad()
    def _put_on_grid(self) -> None:
        """Set each held amax to its weight's amax, and round the initial weights to that quantization grid."""
        for p, grid in self.grids.items():
            if grid.held is None:
                raise ValueError(
                    "weights on the quantization grid need a buffer that holds the amax of their scale; take "
                    "weight_grids(model, on_grid=True)"
                )
            grid.held.fill_(largest(p))
            local(p).copy_(grid.on_grid(local(p).to(self.moment_dtype(p))))
            if self.arm.store == "codes":
                if is_sharded(p):
                    raise ValueError("store: codes is of weights that one process has; set store: float32")
                store(p, grid)
