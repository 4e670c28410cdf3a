"""The role of each optimizer and of each grid entry in a comparison: baseline optimizer, method or control.

A grid's settings determine the role. Runs of other programs have no such settings: their cells declare the role under
`ROLE`, as an `OptimizerRole` or an `EntryRole`.
"""

import itertools
from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np

from altgrad.config.arms import BASES, FORMAT_FREE, PLAIN
from altgrad.formats import from_definition
from altgrad.reporting.load import Study, every_rule

NULL_STIFFNESS = ("mean", "permuted")  # they carry no information about the weight
FOREIGN_STIFFNESS = ("foreign",)
# Settings by which an optimizer is tuned: an optimizer and its control may differ in them.
TUNED = ("lr", "plain_lr")
# Settings apart from the spacing, in which an optimizer and its reference should not differ.
SHARED = ("betas", "eps", "momentum", "weight_decay", "decay", "plain_decay", "plain_lr")
ROLE = "role"  # the key under which a resolved cell and its arm may declare their roles

Arm = dict[str, Any]


class OptimizerRole(NamedTuple):
    """What an optimizer is in a comparison."""

    plain: bool  # a baseline optimizer: AdamW or SGD, with updates that ignore the spacing of a format
    control: bool  # it shows where the gain of another comes from, and a gain of its own is no result
    follows_spacing: bool  # its steps follow the spacing of a format: by a stiffness, or in code steps
    needs_format: bool  # it trains as its baseline optimizer where no weight has a format
    group: Hashable = None  # equal for an optimizer and the baseline optimizers that it may be compared with
    control_of: str | None = None  # the optimizer whose control it is declared to be


class EntryRole(NamedTuple):
    """What a grid entry (a format or recipe) is in a comparison."""

    has_format: bool  # any weight, input or gradient has a format
    virtual: bool  # the format only determines the steps of optimizers, and nothing is quantized
    spacing: Hashable  # equal for an entry and its unquantized control


def regime(arm: Arm) -> str:
    """Return the weight storage: "master" (float32 master weights) or "quantized" (always values of a format)."""
    return arm.get("weights", "master")


def role_of(arm: Arm) -> OptimizerRole:
    """Return an optimizer's role: the declared one, or else the one that its resolved settings determine."""
    if ROLE in arm:
        return arm[ROLE]
    stiffness, base = arm.get("stiffness"), BASES[arm["base"]]
    follows = stiffness not in (None, *FORMAT_FREE) or base.unit == "rungs"
    return OptimizerRole(
        plain=arm["base"] in PLAIN and stiffness is None and not arm.get("feedback"),
        control=stiffness in (*NULL_STIFFNESS, *FORMAT_FREE), follows_spacing=follows,
        needs_format=follows or regime(arm) == "quantized",  # as `altgrad.config.arms.Arm.needs_format`
        group=(base.plain, regime(arm)),
    )  # fmt: skip


def plain(study: Study) -> list[str]:
    """Return the baseline optimizers."""
    return [name for name in study.optimizers if role_of(study.arm(name)).plain]


def aware(study: Study) -> list[str]:
    """Return the optimizers that are not baseline optimizers."""
    return [name for name in study.optimizers if not role_of(study.arm(name)).plain]


def is_plain_in(study: Study, entry: str, arm: str) -> bool:
    """Whether ``arm`` trains as its baseline optimizer in ``entry``: it needs a format, and no weight has one."""
    return not entry_role(study, entry).has_format and role_of(study.arm(arm)).needs_format


def references(study: Study) -> dict[str, str]:
    """Return the baseline optimizer of each other optimizer, by its name; optimizers without one are left out.

    Both have the same base optimizer and the same weight storage. One with the same rounding is preferred.
    """
    candidates, chosen = plain(study), {}
    for name in aware(study):
        arm = study.arm(name)
        group = [other for other in candidates if role_of(study.arm(other)).group == role_of(arm).group]
        if group:
            chosen[name] = min(group, key=lambda other: study.arm(other).get("rounding") != arm.get("rounding"))
    return chosen


def spacing_methods(study: Study) -> list[str]:
    """Return the optimizers that follow a format's spacing and have a reference, without controls."""
    roles = {name: role_of(study.arm(name)) for name in references(study)}
    return [name for name, role in roles.items() if role.follows_spacing and not role.control]


def main_plain(study: Study) -> str | None:
    """Return the baseline optimizer under which formats are compared, if possible with master weights."""
    return min(plain(study), key=lambda name: regime(study.arm(name)) != "master", default=None)


def controls(study: Study, optimizer: str) -> list[str]:
    """Return the controls of an optimizer: declared, then shuffled and mean ones, then those with foreign spacing.

    A shuffled or mean control has neither of the latter; a control with foreign spacing has shuffled and mean ones.
    """
    declared = [name for name in study.optimizers if role_of(study.arm(name)).control_of == optimizer]
    kinds = [NULL_STIFFNESS, FOREIGN_STIFFNESS]
    others = itertools.takewhile(lambda kind: study.arm(optimizer).get("stiffness") not in kind, kinds)
    return declared + [other for kind in others for other in _relatives(study, optimizer, "stiffness", kind)]


def rms_forms(study: Study, optimizer: str) -> tuple[list[str], list[str]]:
    """Return two lists: an optimizer's RMS-matched form, if any, and the optimizers whose RMS-matched form it is."""
    if study.arm(optimizer).get("match_rms"):
        return [], _relatives(study, optimizer, "match_rms", (False, None))
    return _relatives(study, optimizer, "match_rms", (True,))[:1], []


def _relatives(study: Study, optimizer: str, changed: str, values: tuple[Any, ...]) -> list[str]:
    """Return the optimizers whose setting ``changed`` is one of ``values`` and whose other settings are the same.

    The setting ``foreign``, which belongs to the stiffness, and the `TUNED` ones may differ.
    """

    def rest(arm: Arm) -> Arm:
        return {key: value for key, value in arm.items() if key not in (changed, "foreign", *TUNED)}

    same = rest(study.arm(optimizer))
    others = {name: study.arm(name) for name in study.optimizers if name != optimizer}
    return [name for name, arm in others.items() if arm.get(changed) in values and rest(arm) == same]


def entry_role(study: Study, entry: str) -> EntryRole:
    """Return a grid entry's role: the declared one, or else the one that its resolved settings determine."""
    cell = study.entry(entry)
    if ROLE in cell:
        return cell[ROLE]
    rules = every_rule(cell)
    specs = [rule[name] for rule in rules for name in ("weight", "input", "grad") if rule[name]]
    settings = ("format", "granularity", "block", "scale", "scale_rounding")  # which determine the spacing
    spacing = frozenset(tuple(rule["weight"].get(name) for name in settings) for rule in rules if rule["weight"])
    return EntryRole(bool(rules), bool(specs) and all(spec.get("virtual") for spec in specs), spacing)


def is_quantized(study: Study, entry: str) -> bool:
    """Whether anything is quantized in ``entry``."""
    role = entry_role(study, entry)
    return role.has_format and not role.virtual


def has_even_grid(study: Study, entry: str) -> bool:
    """Whether every weight format of ``entry`` is a uniform grid, as those of at most one exponent bit are.

    There stiffness is one number, and every optimizer takes the steps of its baseline optimizer.
    """
    names = {rule["weight"]["format"] for rule in every_rule(study.entry(entry)) if rule["weight"]}
    formats = study.entry(entry).get("formats", {})
    uniform = (name in formats and np.ptp(np.diff(from_definition(formats[name]).values)) == 0 for name in names)
    return bool(names) and all(uniform)


def unquantized_controls(study: Study) -> dict[str, str]:
    """Return the unquantized control of each entry that has one: it has the same spacing and quantizes nothing."""
    entries = {entry: entry_role(study, entry) for entry in study.formats}
    virtual = {role.spacing: entry for entry, role in entries.items() if role.virtual}
    return {
        entry: virtual[role.spacing] for entry, role in entries.items() if not role.virtual and role.spacing in virtual
    }


def unquantized_control(study: Study, entry: str, arm: str) -> str | None:
    """Return the entry in which ``arm`` takes the same steps as in ``entry`` and nothing is quantized, if any.

    It is the unquantized control with the same spacing. If there is none and ``arm`` needs no format, it is the
    baseline, provided that no tensor there has a format.
    """
    control, baseline = unquantized_controls(study).get(entry), study.baseline
    if control is not None or baseline is None or not is_quantized(study, entry):
        return control
    return None if role_of(study.arm(arm)).needs_format or entry_role(study, baseline).has_format else baseline
