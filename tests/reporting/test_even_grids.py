"""Where values are a uniform grid there is no geometry, and no control is needed. Oracle: made losses."""

from __future__ import annotations

from dataclasses import asdict

from altgrad.formats import get_format
from altgrad.reporting.compare import compare
from altgrad.reporting.fairness import conditions
from altgrad.reporting.roles import has_even_grid
from tests.reporting.made_losses import ADAMW, STIFF, study_of

CONDITION = "Unquantized control (`virtual.`), the same spacing without the format"
PLAIN = [3.50, 3.51, 3.49, 3.52, 3.48]
GAIN = [loss - gain for loss, gain in zip(PLAIN, (0.100, 0.101, 0.099, 0.102, 0.098), strict=True)]


def study_with(entries: list[str], rates: tuple[float, ...] = (1,), **stiff: float):
    """Losses at each rate: the arm gains, and is best at the largest, AdamW at the smallest."""
    arms = {"adamw": ADAMW | {"lr": 0.003}, "stiff": STIFF | {"lr": 0.003} | stiff}
    losses = {
        (entry, arm, rate): [loss + 0.5 * (rate != (rates[-1] if arm == "stiff" else rates[0])) for loss in of_arm]
        for entry in entries
        for arm, of_arm in (("adamw", PLAIN), ("stiff", GAIN))
        for rate in rates
    }
    study = study_of(losses, arms, entries[0])
    for key, cell in study.resolved.items():
        name = key.split("-")[0].removeprefix("virtual.")
        cell["formats"] = {name: asdict(get_format(name))} if name != "bf16" else {}
    return study


def condition(study) -> tuple[str, str]:
    return conditions(study, compare(study))[CONDITION]


def test_formats_without_exponents_that_tell_are_even():
    study = study_with(["bf16", "E0M7", "E1M6", "E2M5", "virtual.E1M6"])
    even = {entry for entry in study.formats if has_even_grid(study, entry)}
    assert even == {"E0M7", "E1M6", "virtual.E1M6"}


def test_it_needs_no_twin():
    assert condition(study_with(["E3M4", "virtual.E3M4", "E1M6"])) == (
        "yes", "one for E3M4; the values of E1M6 are a uniform grid, which needs none",
    )  # fmt: skip
    assert condition(study_with(["E3M4", "E1M6"])) == ("no", "none for E3M4")
    assert condition(study_with(["E1M6"]))[0] == "does not apply"
