"""A saved optimizer's state in the order of the one that loads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


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
        groups = [saved["param_groups"][names[group["param_names"][0]][1]] for group in own["param_groups"]]
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


def _names(state: dict[str, Any]) -> dict[str, tuple[int, int]] | None:
    """Return the number of each parameter and of its group by its name, ``None`` if some have none."""
    found = {}
    for number, group in enumerate(state["param_groups"]):
        if "param_names" not in group:
            return None
        for i, name in zip(group["params"], group["param_names"], strict=True):
            found[name] = i, number
    return found
