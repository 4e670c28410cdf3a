"""``ArmOptimizer``: an arm on a model's weights, as a ``torch.optim.Optimizer``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast, overload

import torch
from torch import Tensor, nn

from altgrad.config.arms import ADAM, BASES, MOMENTUM, Arm
from altgrad.formats import get_format
from altgrad.model.quantized.data_parallel import is_sharded
from altgrad.numerics import permutation
from altgrad.numerics.compile_utils import compile_apart, sent
from altgrad.optim import update, update_cpu, update_gpu
from altgrad.optim.coded import Coding, Codings, opened
from altgrad.optim.groups import completed, initial_groups, share_kept, step_numbers
from altgrad.optim.loading import Resumable, in_float32
from altgrad.optim.plain import step_adamw, step_sgd
from altgrad.optim.sharded import all_finite, is_elementwise, joined, keep_part, largest, local, whole, whole_together
from altgrad.optim.stiffness import Stiffness
from altgrad.optim.stored import StoredWeight, plain, store
from altgrad.optim.weight_grid import WeightGrid

Loss = TypeVar("Loss", bound=Tensor | float)
#: What a copy has besides what torch's optimizers have.
KEPT = ("arm", "steps", "seed", "skipped", "reference", "compiled", "grids", "known", "sharded")
LAYOUT_OF = Tensor.layout.__get__  # type: ignore[attr-defined] # a property's, which is called for every gradient


class ArmOptimizer(Resumable):
    """Steps the weights that it is given as their arm says and everything else as the arm's plain form does.

    A step in which some gradient is not finite changes nothing and is counted in ``skipped``.
    Random numbers are a function of seed, weight, step and place, so a run that is resumed from ``state_dict`` repeats
    them. Gradients are dense, in any strides. Parameters may be DTensors, as FSDP2 shards them: the steps of all
    processes together are those of one on the whole tensors, to the bit.

    A schedule sets each group's ``lr``, as torch's do, and a step takes the group's ``lr * weight_decay`` of a matrix
    away. An arm that says ``decay`` has the ``weight_decay`` with which that is the share at the first ``lr``.

    Args:
        weights: weights that the arm acts on, (out, in), with their quantization grids, where ``weights: quantized``
            puts them.
        plain: all other parameters; vectors do not decay.
        arm: the settings. An arm without a step of its own steps ``weights`` in its plain form.
        linear: those of ``plain`` that a recipe could have quantized. They take the arm's learning rate, like
            ``weights`` in their plain form, if it means the same there, and decay as those do; ``plain_lr`` is for
            the rest.
        steps: of the run, for ``schedule``.
        seed: of the shuffle of ``permuted`` and of stochastic rounding.
        compiled: compile the rule, once, for what the CPU's own loops do not take.
        names: of parameters, for a state dict that is loaded in any order of groups.
        reference: keep AdamW's moments beside an arm that has others, for `adamw_direction`.
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
        # What OneCycleLR cycles it looks for here, the betas before the momentum, and sets in the groups.
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
        """Make what follows from the settings and the quantization grids, which copies make anew."""
        arm = self.arm
        self.base, self.codings = BASES[arm.base], Codings(arm)
        self._waiting: list[update_gpu.Waiting] = []
        self._names = update.state_names(arm, self.reference)
        self._plain = arm.plain_form
        self._coded_loops: update_cpu.Loops | None = None
        self._plain_names, self._plain_rule = update.state_names(self._plain, False), update.rule_of(self._plain, False)
        self._orders = {
            p: permutation(p.numel(), self.seed, i).to(p.device) if arm.stiffness == "permuted" else None
            for i, p in enumerate(self.grids)
        }
        self._rule: update.Rule = update.rule_of(arm, self.reference)
        if self.compiled:
            self._rule = compile_apart(self._rule, dynamic=True, fullgraph=True)
            if arm.state is not None:
                self._plain_rule = compile_apart(self._plain_rule, dynamic=True, fullgraph=True)
        self.look_at(self.grids)

    def __getstate__(self) -> dict[str, Any]:
        """Return what `copy.deepcopy` and pickle keep: the settings, and the parameters of the groups alone."""
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
        """See these quantization grids from now on, of the same weights as before; what is known of steps is kept.

        An arm that needs no format sees none, and acts on its weights as before.
        """
        if self.arm.needs_format:
            self.grids = {p: weights[p] for p in self.grids}
        self._stiffness = {p: self._stiffness_of(grid, p.device) for p, grid in self.grids.items()}
        self._loops: dict[nn.Parameter, update_cpu.Loops | update_gpu.Kernels] = {}
        for p, grid in self.grids.items():
            stiff = self._stiffness[p]
            if stiff is not None and update_gpu.available(self.arm, p, grid, self._names):
                self._loops[p] = update_gpu.Kernels(self.arm, grid, stiff, self._waiting)
            elif update_cpu.available(self.arm, local(p), grid):
                self._loops[p] = update_cpu.Loops(self.arm, grid, stiff, self._orders[p], self.codings.of(p))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters that are stepped in the plain form; settings that the group lacks are the arm's.

        They may be pairs of a name and a parameter, as `Module.named_parameters` has them. A group of matrices decays
        as the arm's embeddings do, one with a vector in it not at all, unless it says ``weight_decay``. Raises
        ``ValueError`` for a setting that no step looks at, and for weights of a format in float16, whose updates are
        below its smallest number.
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
        """Take a step; ``closure`` computes the loss anew, as torch's optimizers allow.

        ``norm`` is the norm of all gradients, for a caller who knows it from clipping them. A finite norm means finite
        gradients, so that they need not be read to find out; reading them takes a fifth of the time of an AdamW step.
        Who does not give it is warned of the first step that is skipped. Raises ``RuntimeError`` for a sparse gradient.
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
        for i, group in enumerate(self.param_groups):
            if group["quantized"]:
                self._step_quantized(group)
                continue
            present = [p for p in group["params"] if p.grad is not None]
            if self.arm.state is not None:
                present = self._step_coded(i, present)
            if self.base.plain == "adamw":
                # torch's fused step counts on the device, which load_state_dict knows by the group's name for it.
                step_adamw(group, present, [self._state(p, ADAM, p.device) for p in present], self.sharded)
            else:
                states = [self._state(p, MOMENTUM) for p in present] if group["momentum"] else []
                step_sgd(group, present, states, self.sharded)
        # Neither torch's fused step nor the loops tell autograd, whose backward pass would read the new weights.
        torch.autograd.graph.increment_version(stepped)
        return loss

    def _step_quantized(self, group: dict[str, Any]) -> None:
        # By step, which is the same for weights that always had a gradient, and by how fine their quantization grid is.
        numbers: dict[tuple[int, int], Tensor] = {}
        present = [(i, p, self._state(p, self._names)) for i, p in enumerate(group["params"]) if p.grad is not None]
        if present:
            torch._foreach_add_([state["step"] for *_, state in present], 1)
        for index, p, state in present:
            step = int(state["step"].item())
            which = step, self.grids[p].refinement
            if which not in numbers:
                numbers[which] = self._numbers(group, *which, p.device)
            stream = self.seed, index, step
            if p in self._loops and self._loops[p].reads_codes:
                self._step_weight(p, p.grad, state, numbers[which], stream)
                continue
            with opened(self.codings.of(p), state, self._names, p, stream) as moments:
                self._step_weight(p, p.grad, moments, numbers[which], stream)
        update_gpu.run(self._waiting)

    def _step_weight(
        self, p: nn.Parameter, g: Tensor, state: update.State, numbers: Tensor, stream: tuple[int, int, int]
    ) -> None:
        """Step a weight, or what this process has of it."""
        if isinstance(p, StoredWeight) and p in self._loops and p.memory.steps_in_codes:
            self._loops[p].step(p.memory.codes, g, state, numbers, stream, None)
            return
        remembered, w = self.grids[p].remembered(), cast("Tensor", p)
        kept: dict[str, Any] | None = None  # the parts of state that is gathered
        in_parts = not self.codings.of(p) or self.codings.in_parts(p)
        if is_sharded(p) and in_parts and is_elementwise(self.arm, self.grids[p]):
            remembered = largest(p) if remembered is None else torch.where(remembered > 0, remembered, largest(p))
            w, g, state = local(p), local(g), {name: local(t) for name, t in state.items()}
        elif is_sharded(p):
            kept, dtype = {name: t for name, t in state.items() if is_sharded(t)}, self.moment_dtype(p)
            alike = [name for name, t in kept.items() if (t.shape, t.dtype) == (p.shape, dtype)]
            w, g, *moments = whole_together([p, g, *(kept[name] for name in alike)], dtype)
            gathered = dict(zip(alike, moments, strict=True))
            state = {name: gathered[name] if name in gathered else whole(t) for name, t in state.items()}
        w = plain(w)
        target = w if w.dtype == self.moment_dtype(p) else w.to(self.moment_dtype(p))
        if p in self._loops:
            self._loops[p].step(target, g, state, numbers, stream, remembered)
        else:
            grid = self._grid_tensors(p, stream)._replace(remembered=remembered)
            self._rule(target, g.to(target.dtype), state, numbers, grid)
        if target is not w:
            w.copy_(target)
        if isinstance(p, StoredWeight):
            p.memory.keep(w)
        if kept is not None:
            for part, t in ((p, w), *((kept[name], state[name]) for name in kept)):
                keep_part(part, t)

    def _step_coded(self, index: int, present: list[nn.Parameter]) -> list[nn.Parameter]:
        """Step, in the plain form, what has moments in codes of ``present``, of a group; return the others."""
        group = self.param_groups[index]
        start = sum(len(other["params"]) for other in self.param_groups[:index])
        coded = [
            (place, p, codings, self._state(p, self._plain_names))
            for place, p in enumerate(group["params"], start)
            if p.grad is not None and (codings := self.codings.of(p))
        ]
        if not coded:
            return present
        counters = [state["step"] for *_, state in coded]
        torch._foreach_add_(counters, 1)
        numbers: dict[float, Tensor] = {}
        waiting: dict[tuple[update_cpu.Loops, float], list[tuple[Tensor, Tensor, update.State, int]]] = {}
        for (place, p, codings, state), step in zip(coded, torch.stack(counters).tolist(), strict=True):
            if step not in numbers:
                numbers[step] = self._numbers(group, step, 1, p.device)
            stream, g = (self.seed, place, int(step)), cast("Tensor", p.grad)
            take = local if not is_sharded(p) or self.codings.in_parts(p) else whole
            w, g = take(p), take(g)
            loops = self._plain_loops(w, codings)
            own = {name: local(t) for name, t in state.items()} if self.sharded else state
            if loops is not None and take is local:
                waiting.setdefault((loops, step), []).append((w, g, own, place))
                continue
            if loops is not None:
                loops.step(w, g, own, numbers[step], stream, None)
            else:
                w = w if w.dtype == torch.float32 else w.float()
                with opened(codings, state, self._plain_names, p, stream) as moments:
                    own = {name: local(t) for name, t in moments.items()}
                    self._plain_rule(w, g.to(w.dtype), own, numbers[step], update.NO_GRID)
            if take is whole:
                keep_part(p, w)
            elif w.dtype != p.dtype:
                local(p).copy_(w)
        for (loops, step), each in waiting.items():
            weights, gradients, states, places = zip(*each, strict=True)
            loops.step_each(weights, gradients, states, places, numbers[step], self.seed, int(step))
        return [p for p in present if not self.codings.of(p)]

    def _plain_loops(self, p: Tensor, codings: dict[str, Coding]) -> update_cpu.Loops | None:
        """Return the loops for the plain form of ``p``, whose moments are codes, if they take it."""
        if not update_cpu.takes(p):
            return None
        if self._coded_loops is None and update_cpu.available(self._plain, p, None):
            grid = WeightGrid(get_format("E4M3"))  # one that nobody looks at
            self._coded_loops = update_cpu.Loops(self._plain, grid, None, None, codings)
        return self._coded_loops if self._coded_loops is not None and self._coded_loops.reads_codes else None

    # --- what it is made of --------------------------------------------------------------------------

    def adamw_direction(self, p: nn.Parameter) -> Tensor | None:
        """Return the direction, before the learning rate, that AdamW takes on the gradients so far, if it is known.

        For a weight that has been stepped: (out, in) float32, whole.
        """
        state = self.state.get(p, {})
        if "reference_avg" not in state and not ("exp_avg" in state and self.arm.has_adam_moments):
            return None
        group = self._group_of(p)
        numbers = self._numbers(group, self.state[p]["step"].item(), 1, p.device)
        return update.adamw_direction(self._decoded(p), numbers)

    @torch.no_grad()
    def wanted(self, p: nn.Parameter) -> Tensor | None:
        """Return where the next step would put ``p`` (out, in) if nothing were rounded to its quantization grid.

        Of weights that live on theirs, with their gradient at hand; None for any other. Nothing changes. It is whole.
        """
        if self.arm.weights != "quantized" or p not in self.grids or p.grad is None:
            return None
        kept, dtype = self.state.get(p, {}), self.moment_dtype(p)
        w, g = (whole(t).to(dtype) for t in (p, p.grad))
        zeros = torch.zeros_like(w)
        state = {name: whole(kept[name]).clone() if name in kept else zeros.clone() for name in self._names}
        step = 1 + (kept["step"].item() if "step" in kept else 0)
        numbers = self._numbers(self._group_of(p), step, self.grids[p].refinement, p.device)
        return update.wanted(self.arm, w, g, state, numbers, self._grid_tensors(p, (0, 0, 0)))

    def decay(self, p: nn.Parameter) -> float:
        """Return what the last step multiplied ``p`` with before the update."""
        return share_kept(self._group_of(p))

    def _decoded(self, p: nn.Parameter) -> dict[str, Tensor]:
        """Return the state of ``p``, whole, with its moments in float32."""
        return in_float32({name: whole(t) for name, t in self.state.get(p, {}).items()}, self.codings.of(p), p)

    def _group_of(self, p: nn.Parameter) -> dict[str, Any]:
        return next(group for group in self.param_groups if any(p is q for q in group["params"]))

    def _state(self, p: nn.Parameter, names: Iterable[str], counter: torch.device | str = "cpu") -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=counter)
            codings = self.codings.of(p)
            for name in names:
                if name in codings:
                    in_parts = self.codings.in_parts(p)
                    parts = codings[name].zeros(local(p).shape if in_parts else p.shape)
                    state.update((name + part, joined(p, t) if in_parts else t) for part, t in parts.items())
                else:
                    state[name] = torch.zeros_like(p, dtype=self.moment_dtype(p), memory_format=torch.preserve_format)
        return state

    def _numbers(self, group: dict[str, Any], step: float, refinement: int, device: torch.device) -> Tensor:
        return sent(step_numbers(group, self.arm, step, self.steps, refinement), device)

    def _grid_tensors(self, p: nn.Parameter, stream: tuple[int, int, int]) -> update.GridTensors:
        grid, stiff = self.grids[p], self._stiffness[p]
        return update.GridTensors(
            constants=grid.constants,
            stiff_constants=None if stiff is None else stiff.constants,
            numbers=None if stiff is None else stiff.numbers,
            order=self._orders[p],
            remembered=grid.remembered(),
            options=grid.options,
            stream=sent(torch.tensor(stream), p.device) if self.arm.rounding != "nearest" else None,
            held=grid.held if self.arm.weights == "quantized" else None,
        )

    def _stiffness_of(self, grid: WeightGrid, device: torch.device) -> Stiffness | None:
        arm = self.arm
        if arm.stiffness is None:
            return None
        return Stiffness(grid.format, arm.stiffness, arm.foreign, knee=arm.knee, slope=arm.slope).to(device)

    @torch.no_grad()
    def _put_on_grid(self) -> None:
        """Round the initial weights to the quantization grid that their amax makes."""
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
