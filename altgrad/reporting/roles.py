"""What part each arm and each entry of a grid plays in a comparison: plain, spacing-scaled, control, virtual."""

from __future__ import annotations

from typing import Any

from altgrad.config.arms import BASES, FORMAT_FREE, PLAIN
from altgrad.reporting.load import Study, every_rule

NULL_STIFFNESS = ("mean", "permuted")  # they carry no information about the weight
FOREIGN_STIFFNESS = ("foreign",)
# Settings in which arms that are compared may differ without another being the cause: what an arm is tuned by.
TUNED = ("lr", "plain_lr")
# Settings that have nothing to do with the geometry, in which an optimizer and its reference should not differ.
SHARED = ("betas", "eps", "momentum", "weight_decay", "decay", "plain_decay", "plain_lr")

Arm = dict[str, Any]


def regime(arm: Arm) -> str:
    """Return what the arm keeps: float32 ``master`` weights, or ``quantized`` ones, always values of a format."""
    return arm.get("weights", "master")


def plain(study: Study) -> list[str]:
    """Return the arms whose updates ignore the format's quantization grid: AdamW or SGD, no stiffness, no feedback."""
    arms = {name: study.arm(name) for name in study.optimizers}
    return [
        name for name, arm in arms.items()
        if arm["base"] in PLAIN and arm.get("stiffness") is None and not arm.get("feedback")
    ]  # fmt: skip


def aware(study: Study) -> list[str]:
    """Return the arms that are not `plain`."""
    known = plain(study)
    return [name for name in study.optimizers if name not in known]


def is_null(arm: Arm) -> bool:
    """Whether the arm is a control that looks geometry-aware and carries no geometry of the weight."""
    return arm.get("stiffness") in NULL_STIFFNESS


def is_control(arm: Arm) -> bool:
    """Whether the arm is there to tell where another's gain comes from: what it gains itself is no finding."""
    return arm.get("stiffness") in (*NULL_STIFFNESS, *FORMAT_FREE)


def follows_spacing(arm: Arm) -> bool:
    """Whether the arm's steps follow the spacing of a format's values: by a stiffness of it, or in code steps."""
    return arm.get("stiffness") not in (None, *FORMAT_FREE) or BASES[arm["base"]].unit == "rungs"


def needs_format(arm: Arm) -> bool:
    """Whether the arm is its plain form where no weight has a format, as `altgrad.config.arms.Arm.needs_format`."""
    return follows_spacing(arm) or regime(arm) == "quantized"


def is_plain_in(study: Study, entry: str, arm: str) -> bool:
    """Whether ``arm`` trains as its plain form in ``entry``: it needs a format, and no weight has one there."""
    return not every_rule(study.entry(entry)) and needs_format(study.arm(arm))


def references(study: Study) -> dict[str, str]:
    """Return for each arm that is not plain the plain one to hold it against; those without one are left out.

    It has the base that the arm falls back to where it looks at no format, and weights of the same regime, rounded
    alike if it can be had.
    """
    candidates, found = plain(study), {}
    for name in aware(study):
        arm = study.arm(name)
        alike = [
            other for other in candidates
            if study.arm(other)["base"] == BASES[arm["base"]].plain and regime(study.arm(other)) == regime(arm)
        ]  # fmt: skip
        if alike:
            found[name] = min(alike, key=lambda other: study.arm(other).get("rounding") != arm.get("rounding"))
    return found


def main_plain(study: Study) -> str | None:
    """Return the baseline optimizer whose runs stand for a format: with master weights where there is one."""
    return min(plain(study), key=lambda name: regime(study.arm(name)) != "master", default=None)


def relatives(study: Study, optimizer: str, **changed: tuple[Any, ...]) -> list[str]:
    """Return the arms that differ from ``optimizer`` in the settings ``changed`` alone, and have one of the values.

    ``foreign`` goes with the stiffness, and learning rates are tuned arm by arm: they may differ.
    """

    def rest(arm: Arm) -> Arm:
        return {key: value for key, value in arm.items() if key not in (*changed, "foreign", *TUNED)}

    arm = study.arm(optimizer)
    others = {name: study.arm(name) for name in study.optimizers if name != optimizer}
    return [
        name
        for name, other in others.items()
        if rest(other) == rest(arm) and all(other.get(key) in values for key, values in changed.items())
    ]


# --- entries ---------------------------------------------------------------------------------------


def geometry(study: Study, entry: str) -> tuple[frozenset[str], bool]:
    """Return the formats whose geometry the arms see in ``entry``, and whether that is all: nothing is quantized."""
    rules = every_rule(study.entry(entry))
    specs = [rule[role] for rule in rules for role in ("weight", "input", "grad") if rule[role]]
    formats = frozenset(rule["weight"]["format"] for rule in rules if rule["weight"])
    return formats, bool(specs) and all(spec.get("virtual") for spec in specs)


def is_virtual(study: Study, entry: str) -> bool:
    """Whether ``entry`` lends the arms a format's geometry and quantizes nothing."""
    return geometry(study, entry)[1]


def is_quantized(study: Study, entry: str) -> bool:
    """Whether anything is quantized in ``entry``."""
    return bool(every_rule(study.entry(entry))) and not is_virtual(study, entry)


def has_even_grid(study: Study, entry: str) -> bool:
    """Whether representable values lie equally far apart in every weight format of ``entry``: no exponent tells.

    On such a quantization grid stiffness is one number, and every arm takes the steps of its plain form.
    """
    formats, own = geometry(study, entry)[0], study.entry(entry).get("formats", {})
    return bool(formats) and all(name in own and own[name]["exponent_bits"] <= 1 for name in formats)


def unquantized_controls(study: Study) -> dict[str, str]:
    """Return for each entry that quantizes weights the one with the same geometry on weights that are not."""
    seen = {entry: _spacing(study, entry) for entry in study.formats}
    lent = {spacing: entry for entry, spacing in seen.items() if is_virtual(study, entry)}
    return {entry: lent[own] for entry, own in seen.items() if not is_virtual(study, entry) and own in lent}


def unquantized_control(study: Study, entry: str, arm: str) -> str | None:
    """Return the entry in which ``arm`` does what it does in ``entry``, on weights that no product quantizes.

    That is the one with the same spacing; for an arm that needs no format the baseline, if that quantizes nothing.
    """
    found, baseline = unquantized_controls(study).get(entry), study.baseline
    if found is None and baseline is not None and is_quantized(study, entry) and not needs_format(study.arm(arm)):
        return None if every_rule(study.entry(baseline)) else baseline
    return found


def _spacing(study: Study, entry: str) -> frozenset[tuple[Any, ...]]:
    """Return what the spacing at a weight of ``entry`` follows from: formats, and what has a scale of its own."""
    weights = [rule["weight"] for rule in every_rule(study.entry(entry)) if rule["weight"]]
    settings = ("format", "granularity", "block", "scale", "scale_rounding")
    return frozenset(tuple(weight.get(name) for name in settings) for weight in weights)
