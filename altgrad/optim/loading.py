"""Makes, saves and loads an optimizer's state by parameter names, and follows parameters that are replaced."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from altgrad.config.arms import Arm
from altgrad.config.state import State
from altgrad.model.quantized.data_parallel import is_sharded
from altgrad.optim.sharded import from_part, gather_full, local, split_as
from altgrad.optim.state_codec import POWER, SCALE, Coding, Codings, codings_of, decoded
from altgrad.optim.weight_grid import HELD, WeightGrid, plain

#: Name parts that torch.compile, FSDP1 and checkpoint_wrapper insert into parameter names.
WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
STORED = "stored"  # key in a saved group: the arm's ``state`` section, which says how its codes are decoded


class Resumable(torch.optim.Optimizer):
    """An optimizer whose state is saved and loaded by parameter names.

    Attributes:
        arm: the optimizer settings.
        grids: the quantization grid of each weight with a format.
        names: the known names of parameters.
        known: the parameters of each group at the last step.
        sharded: whether any parameter is sharded.
        codings: how moments are stored.
    """

    arm: Arm
    grids: dict[nn.Parameter, WeightGrid]
    names: dict[nn.Parameter, str]
    known: list[list[nn.Parameter]]
    sharded: bool
    codings: Codings

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`; a group has ``param_names`` if all its names are known.

        The state of a weight stored on its quantization grid has ``held_amax``, the amax of its scale. A moment stored
        as codes has ``<name>_scale`` and, with range expansion, ``<name>_power`` beside it.
        """
        state_dict = super().state_dict()
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            if all(p in self.names for p in group["params"]):
                saved["param_names"] = [self.names[p] for p in group["params"]]
            if self.arm.state is not None:
                saved[STORED] = self.arm.state.model_dump()
            for i, p in zip(saved["params"], group["params"], strict=True):
                if self.holds(p):
                    state_dict["state"][i] = {**state_dict["state"].get(i, {}), HELD: self.grids[p].held}
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state, so that this optimizer continues as the saved one would.

        Parameters are matched by name, or by position if either optimizer lacks names. Moments get this optimizer's
        moment dtype; torch would cast moments of bfloat16 weights to bfloat16. Unsharded tensors are sharded as their
        parameters are.

        Raises:
            ValueError: the state belongs to other parameters, or a weight is off the quantization grid in its state.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        state_dict = in_order(state_dict, self.state_dict())
        for i, p in enumerate(parameters):
            for name, t in state_dict["state"].get(i, {}).items():
                if isinstance(t, Tensor) and t.ndim > 1 and t.shape != p.shape:
                    raise ValueError(
                        f"the saved {name} of parameter {i} is {tuple(t.shape)}, and the parameter {tuple(p.shape)}: "
                        "it is of parameters in another order"
                    )
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
            # Sorted, as every process gathers parts in this order, whatever order files were read in.
            saved = dict(sorted(state_dict["state"].get(i, {}).items()))
            held = saved.pop(HELD, None)
            if held is not None and self.holds(p):
                self.grids[p].held.copy_(held)  # type: ignore[union-attr] # as `holds` says
                require_on_grid(p, self.grids[p])
            if saved:
                self.state[p] = self._converted(p, saved, stored[i])

    def _converted(self, p: nn.Parameter, saved: dict[str, Tensor], stored: dict[str, Any] | None) -> dict[str, Tensor]:
        """Return the ``saved`` state of ``p`` as this optimizer stores state. New codes are rounded to nearest.

        ``stored`` is the ``state`` section of the arm that saved ``saved``; None if the saved moments are float32.
        """
        codings, in_parts = self.codings.of(p), self.codings.in_parts(p)
        theirs = None if stored is None else State(**stored)
        if theirs != self.arm.state:
            saved = in_float32({name: t.to(p.device) for name, t in saved.items()}, codings_of(theirs, p.device), p)
            for name in sorted(codings.keys() & saved.keys()):
                values = saved.pop(name)
                values = local(split_as(p, values)) if in_parts else gather_full(values)
                codes = codings[name].encode(values.float(), nearest=True)
                saved.update((name + part, from_part(p, t) if in_parts else t) for part, t in codes.items())
        coded = {name + part for name in codings for part in ("", SCALE, POWER)}
        for name, t in saved.items():
            if name == "step":
                saved[name] = t.float().to("cpu" if p in self.grids or codings else p.device, copy=True)
            elif name in coded:
                saved[name] = (split_as(p, t) if in_parts else gather_full(t)).to(p.device, copy=True)
            else:
                saved[name] = split_as(p, t).to(p.device, self.moment_dtype(p), copy=True)
        return saved

    def know(self, group: Sequence[nn.Parameter]) -> None:
        """Append the parameters of a new group to ``known``, and update ``sharded``."""
        self.known.append(list(group))
        self.sharded = self.sharded or any(map(is_sharded, group))

    def follow_replaced(self, *of_each: dict[nn.Parameter, Any]) -> None:
        """Rekey the dicts ``of_each`` after others, such as Accelerate, replaced parameters in their groups."""
        for i, group in enumerate(self.param_groups):
            before, now = self.known[i], group["params"]
            if not now or now[0] is before[0]:
                continue
            new = dict(zip(before, now, strict=True))
            for values in of_each:
                moved = {new.get(p, p): value for p, value in values.items()}
                values.clear()
                values.update(moved)
            self.known[i] = list(now)
            self.sharded = self.sharded or any(map(is_sharded, now))

    def holds(self, p: nn.Parameter) -> bool:
        """Return whether this optimizer stores ``p`` on its quantization grid and sets the amax of its scale."""
        return self.arm.weights == "quantized" and p in self.grids

    def moment_dtype(self, p: nn.Parameter) -> torch.dtype:
        """Return the dtype of uncoded moments of ``p``: ``p.dtype``, at least float32 if ``p`` is quantized."""
        return torch.promote_types(p.dtype, torch.float32) if p in self.grids or self.codings.of(p) else p.dtype

    def _state(self, p: nn.Parameter, names: Iterable[str], counter: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Return the state of ``p``; the first call makes zeros, with the step count on the device ``counter``."""
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=counter)
            codings = self.codings.of(p)
            for name in names:
                if name in codings:
                    in_parts = self.codings.in_parts(p)
                    codes = codings[name].zeros(local(p).shape if in_parts else p.shape)
                    state.update((name + part, from_part(p, t) if in_parts else t) for part, t in codes.items())
                else:
                    state[name] = torch.zeros_like(p, dtype=self.moment_dtype(p), memory_format=torch.preserve_format)
        return state

    def _decoded(self, p: nn.Parameter) -> dict[str, Tensor]:
        """Return the state of ``p`` gathered from all processes, with coded moments decoded to float32."""
        state = {name: gather_full(t) for name, t in self.state.get(p, {}).items()}
        return in_float32(state, self.codings.of(p), p)


def in_order(saved: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict ``saved``, regrouped and renumbered as the state dict ``own`` is.

    A group takes the settings of the saved group that has its first parameter. Raises ``ValueError`` if the parameters
    of ``saved`` and ``own`` differ.
    """
    places, own_places = _places(saved), _places(own)
    groups, own_groups = saved["param_groups"], own["param_groups"]
    if places is None or own_places is None:
        counts, expected = ([len(group["params"]) for group in each] for each in (groups, own_groups))
        if counts != expected:
            raise ValueError(
                f"the saved state is of groups of {counts} parameters, and here are {expected}: load it into an "
                "optimizer that was built alike, or build both by build_optimizer, which knows parameters by name"
            )
        numbers = [i for group in groups for i in group["params"]]
    else:
        if places.keys() != own_places.keys():
            other = min(places.keys() ^ own_places.keys())
            where = "is not in the saved state" if other in own_places else "is in the saved state alone"
            raise ValueError(f"parameter {other} {where}: load it into an optimizer of the same model")
        numbers = [places[name][1] for name in own_places]
        first = {group: name for name, (group, _) in reversed(own_places.items())}
        groups = [groups[places[first[i]][0]] for i in range(len(own_groups))]
    state = {i: saved["state"][number] for i, number in enumerate(numbers) if number in saved["state"]}
    own_keys = ("params", "param_names")
    groups = [
        group | {key: mine[key] for key in own_keys if key in mine}
        for group, mine in zip(groups, own_groups, strict=True)
    ]
    return {**saved, "state": state, "param_groups": groups}


def require_on_grid(p: nn.Parameter, grid: WeightGrid) -> None:
    """Raise ``ValueError`` unless all values of ``p`` lie on ``grid``."""
    part = plain(local(p).detach())
    if not torch.equal(grid.on_grid(part.float()).to(part.dtype), part):
        raise ValueError(
            f"weights of shape {tuple(p.shape)} do not lie on the quantization grid that their saved state is of: "
            "build the optimizer first, which puts weights on a quantization grid of their own, then load the model's "
            "state_dict without assign, and then the optimizer's"
        )


def in_float32(state: dict[str, Tensor], codings: Mapping[str, Coding], p: Tensor) -> dict[str, Tensor]:
    """Return ``state`` of ``p`` with its coded moments decoded to float32, without their scales and powers."""
    coded = {name: decoded(codings[name], state, name, p) for name in codings if name + SCALE in state}
    return {name: t for name, t in state.items() if not name.endswith((SCALE, POWER))} | coded


def _places(state: dict[str, Any]) -> dict[str, tuple[int, int]] | None:
    """Return ``{name: (group, number)}`` of all parameters; None if a name is missing or occurs twice.

    `WRAPPERS` are removed from the names, so a wrapped model's state loads into the unwrapped model, and back.
    """
    groups = state["param_groups"]
    if not all("param_names" in group for group in groups):
        return None
    names = [".".join(part for part in name.split(".") if part not in WRAPPERS)
             for group in groups for name in group["param_names"]]  # fmt: skip
    while names and all(name.startswith("module.") for name in names):  # of DDP
        names = [name.removeprefix("module.") for name in names]
    numbers = [(place, i) for place, group in enumerate(groups) for i in group["params"]]
    places = dict(zip(names, numbers, strict=True))
    return places if len(places) == len(numbers) else None
