"""What an optimizer saves and goes on from, in the order of the one that loads it; parameters that are replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from altgrad.config.arms import Arm
from altgrad.config.state import State
from altgrad.model.quantized.data_parallel import is_sharded
from altgrad.optim.code_weights import plain
from altgrad.optim.sharded import from_part, gather_full, local, split_as
from altgrad.optim.state_codec import MOMENTS, POWER, SCALE, Coding, Codings, decoded
from altgrad.optim.weight_grid import HELD, WeightGrid

#: Parts of the names that torch.compile, FSDP1 and checkpoint_wrapper give the parameters of a module.
WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
STORED = "stored"  # of a saved group: the arm's ``state``, by which its codes are read


class Resumable(torch.optim.Optimizer):
    """An optimizer that is saved and loaded by the names of its parameters.

    Attributes:
        arm: the settings.
        grids: weights with a format, and their quantization grids.
        names: of parameters, as far as they are known.
        known: the parameters of each group, as they were at the last step.
        sharded: whether some of them are.
        codings: how moments are stored.
    """

    arm: Arm
    grids: dict[nn.Parameter, WeightGrid]
    names: dict[nn.Parameter, str]
    known: list[list[nn.Parameter]]
    sharded: bool
    codings: Codings

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes: groups with the names of their parameters, if those are known.

        The state of weights that live on their quantization grid has the amax of their scale, ``held_amax``. Moments
        that are stored as codes have beside them ``<name>_scale`` and, with range expansion, ``<name>_power``.
        """
        found = super().state_dict()
        for kept, group in zip(found["param_groups"], self.param_groups, strict=True):
            if all(p in self.names for p in group["params"]):
                kept["param_names"] = [self.names[p] for p in group["params"]]
            if self.arm.state is not None:
                kept[STORED] = self.arm.state.model_dump()
            for i, p in zip(kept["params"], group["params"], strict=True):
                if self.holds(p):
                    found["state"][i] = {**found["state"].get(i, {}), HELD: self.grids[p].held}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on as the optimizer would have that ``state_dict`` is of.

        By the names of parameters where both know them, else in their order. Moments keep the dtype that they have
        here, where torch casts those of bfloat16 weights to bfloat16; whole ones of sharded parameters are split.
        Raises ``ValueError`` for other parameters, and for weights off the quantization grid that their state is of.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        state_dict = in_order(state_dict, self.state_dict())
        require_shapes(state_dict, parameters)
        stored = [group.get(STORED) for group in state_dict["param_groups"] for _ in group["params"]]
        for group in state_dict["param_groups"]:
            group.pop(STORED, None)
            if "weight_decay" not in group:
                raise ValueError(
                    "the saved groups have no weight_decay: they are of an earlier version; put those of this "
                    "optimizer's own state_dict() in their place"
                )
        super().load_state_dict({**state_dict, "state": {}})
        for i, p in enumerate(parameters):
            # In one order in every process, whatever order files were read in: parts are gathered one after the other.
            saved = dict(sorted(state_dict["state"].get(i, {}).items()))
            kept = as_stored(saved, stored[i], self.codings, p)
            held = kept.pop(HELD, None)
            if held is not None and self.holds(p):
                self.grids[p].held.copy_(held)  # type: ignore[union-attr] # as `holds` says
                require_on_grid(p, self.grids[p])
            for name, t in kept.items():
                if name == "step":
                    on_cpu = p in self.grids or self.codings.of(p)
                    kept[name] = t.float().to("cpu" if on_cpu else p.device, copy=True)
                elif self.codings.of(p).keys() & {name, name.removesuffix(SCALE), name.removesuffix(POWER)}:
                    t = split_as(p, t) if self.codings.in_parts(p) else gather_full(t)
                    kept[name] = t.to(p.device, copy=True)
                else:
                    kept[name] = split_as(p, t).to(p.device, self.moment_dtype(p), copy=True)
            if kept:
                self.state[p] = kept

    def know(self, group: Sequence[nn.Parameter]) -> None:
        """Take note of the parameters of a new group."""
        self.known.append(list(group))
        self.sharded = self.sharded or any(map(is_sharded, group))

    def follow_replaced(self, *kept: dict[nn.Parameter, Any]) -> None:
        """Have ``kept`` know parameters again whose place in their group others took, as Accelerate's shards do."""
        for i, group in enumerate(self.param_groups):
            before, now = self.known[i], group["params"]
            if not now or now[0] is before[0]:
                continue
            new = dict(zip(before, now, strict=True))
            for of_each in kept:
                moved = {new.get(p, p): value for p, value in of_each.items()}
                of_each.clear()
                of_each.update(moved)
            self.known[i] = list(now)
            self.sharded = self.sharded or any(map(is_sharded, now))

    def holds(self, p: nn.Parameter) -> bool:
        """Return whether ``p`` lives on its quantization grid, whose amax this optimizer sets."""
        return self.arm.weights == "quantized" and p in self.grids

    def moment_dtype(self, p: nn.Parameter) -> torch.dtype:
        """Return the dtype of moments of ``p`` that are no codes: float32 at least with a format, else its own."""
        return torch.promote_types(p.dtype, torch.float32) if p in self.grids or self.codings.of(p) else p.dtype


def in_order(saved: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return ``saved`` with the groups and the numbers of ``own``, both as `Optimizer.state_dict` makes them.

    A parameter is told by its name, and its group takes the settings of the saved group that the first of its names is
    in. Where one of them has no names it is told by its place. Raises ``ValueError`` if they have other parameters.
    """
    names, own_names = _names(saved), _names(own)
    counts = [len(group["params"]) for group in saved["param_groups"]]
    if names is None or own_names is None:
        if counts != (expected := [len(group["params"]) for group in own["param_groups"]]):
            raise ValueError(
                f"the saved state is of groups of {counts} parameters, and here are {expected}: load it into an "
                "optimizer that was built alike, or build both by build_optimizer, which knows parameters by name"
            )
        numbers = [i for group in saved["param_groups"] for i in group["params"]]
        groups = saved["param_groups"]
    else:
        if names.keys() != own_names.keys():
            other = min(names.keys() ^ own_names.keys())
            where = "is not in the saved state" if other in own_names else "is in the saved state alone"
            raise ValueError(f"parameter {other} {where}: load it into an optimizer of the same model")
        numbers = [names[name][0] for name in own_names]
        first = {group: name for name, (_, group) in reversed(own_names.items())}  # by the number of the group
        groups = [saved["param_groups"][names[first[i]][1]] for i in range(len(own["param_groups"]))]
    state = {i: saved["state"][number] for i, number in enumerate(numbers) if number in saved["state"]}
    kept = [
        {**group, **{key: mine[key] for key in ("params", "param_names") if key in mine}}
        for group, mine in zip(groups, own["param_groups"], strict=True)
    ]
    return {**saved, "state": state, "param_groups": kept}


def require_shapes(saved: dict[str, Any], parameters: Sequence[nn.Parameter]) -> None:
    """Raise ``ValueError`` where a moment in ``saved`` has not the shape of its parameter."""
    for i, p in enumerate(parameters):
        for name, t in saved["state"].get(i, {}).items():
            if isinstance(t, Tensor) and t.ndim > 1 and t.shape != p.shape:
                raise ValueError(
                    f"the saved {name} of parameter {i} is {tuple(t.shape)}, and the parameter {tuple(p.shape)}: it is "
                    "of parameters in another order"
                )


def require_on_grid(p: nn.Parameter, grid: WeightGrid) -> None:
    """Raise ``ValueError`` where weights, which an optimizer keeps on their quantization grid, are not there."""
    part = plain(local(p).detach())
    if not torch.equal(grid.on_grid(part.float()).to(part.dtype), part):
        raise ValueError(
            f"weights of shape {tuple(p.shape)} do not lie on the quantization grid that their saved state is of: "
            "build the optimizer first, which puts weights on a quantization grid of their own, then load the model's "
            "state_dict without assign, and then the optimizer's"
        )


def in_float32(state: dict[str, Tensor], codings: Mapping[str, Coding], p: Tensor) -> dict[str, Tensor]:
    """Return ``state`` of ``p`` with the moments that are stored as codes in float32."""
    found = {name: t for name, t in state.items() if not name.endswith((SCALE, POWER))}
    coded = [name for name in codings if name + SCALE in state]
    return found | {name: decoded(codings[name], state, name, p) for name in coded}


def as_stored(saved: dict[str, Tensor], stored: dict[str, Any] | None, own: Codings, p: Tensor) -> dict[str, Tensor]:
    """Return the ``saved`` state of ``p`` as ``own`` codings store it; what becomes codes is rounded to nearest.

    ``stored``: the section ``state`` of the arm that saved it, None if its moments are float32.
    """
    theirs = None if stored is None else State(**stored)
    if theirs == own.state:
        return dict(saved)
    codings = {} if theirs is None else {
        name: Coding(moment, p.device) for name in MOMENTS if (moment := theirs.of(name)) is not None
    }  # fmt: skip
    found = in_float32({name: t.to(p.device) for name, t in saved.items()}, codings, p)
    for name in sorted(own.of(p).keys() & found.keys()):
        t = found.pop(name)
        t = local(split_as(p, t)) if own.in_parts(p) else gather_full(t)
        parts = own.of(p)[name].encode(t.float(), nearest=True)
        found.update((name + part, from_part(p, of_it) if own.in_parts(p) else of_it) for part, of_it in parts.items())
    return found


def _names(state: dict[str, Any]) -> dict[str, tuple[int, int]] | None:
    """Return the number of each parameter and of its group by its name, ``None`` if some have none of their own.

    Names are those without wrappers, so that a state moves between a model and the same one wrapped.
    """
    groups = state["param_groups"]
    if not all("param_names" in group for group in groups):
        return None
    names = _unwrapped([name for group in groups for name in group["param_names"]])
    places = [(i, number) for number, group in enumerate(groups) for i in group["params"]]
    found = dict(zip(names, places, strict=True))
    return found if len(found) == len(places) else None


def _unwrapped(names: list[str]) -> list[str]:
    """Return ``names`` without `WRAPPERS`, and without the ``module.`` that all of them begin with in DDP."""
    names = [".".join(part for part in name.split(".") if part not in WRAPPERS) for name in names]
    while names and all(name.startswith("module.") for name in names):
        names = [name.removeprefix("module.") for name in names]
    return names
