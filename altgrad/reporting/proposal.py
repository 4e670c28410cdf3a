"""What a run proposes in its last line: a command that asks what its grid has not."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from altgrad.reporting import optimizer_roles as roles
from altgrad.reporting.decision_rule import SEEDS
from altgrad.reporting.load import Study, every_rule


def proposal(study: Study, experiments: Sequence[str] = ()) -> str:
    """Return a command and what it is for: the baseline, the seeds of a test, a missing control, four times the steps.

    It is the first of these that the grid has not.

    ``experiments`` are the names of those at hand, the newest first; of two, their plots are proposed too.
    """
    new = (seed for seed in itertools.count() if seed not in study.seeds)
    missing = next((f"virtual.{entry}" for entry in study.formats if _lacks_control(study, entry)), None)
    baseline = study.params["grid"]["baseline"]
    if baseline not in study.formats:
        setting, purpose = _list("formats", [baseline, *study.formats]), "compares with the baseline"
    elif len(study.seeds) < SEEDS:
        setting = _list("seeds", [*study.seeds, *itertools.islice(new, SEEDS - len(study.seeds))])
        purpose = "has the seeds that a test takes"
    elif missing:
        setting, purpose = _list("formats", [*study.formats, missing]), "tells what is format-specific"
    else:
        setting, purpose = f"train.steps={4 * study.params['train']['steps']}", "is the longer run"
    plots = f"; dvc plots diff {experiments[1]} {experiments[0]} compares the two" if len(experiments) > 1 else ""
    return f"dvc exp run -S '{setting}' {purpose}{plots}"


def _list(name: str, values: Iterable[object]) -> str:
    return f"grid.{name}=[{','.join(map(str, values))}]"


def _lacks_control(study: Study, entry: str) -> bool:
    """Whether ``entry`` is a format by its name, with a scale per tensor as ``virtual.`` has, and has no control."""
    weights = [rule["weight"] for rule in every_rule(study.entry(entry)) if rule["weight"]]
    arms = [study.arm(name) for name in roles.references(study)]
    return (
        any(roles.follows_spacing(arm) and not roles.is_control(arm) for arm in arms)
        and roles.is_quantized(study, entry) and not roles.has_even_grid(study, entry)
        and {(weight["format"], weight["granularity"]) for weight in weights} == {(entry, "tensor")}
        and entry not in roles.unquantized_controls(study) and f"virtual.{entry}" not in study.formats
    )  # fmt: skip
