"""What an earlier run, kept beside the report, says about the learning rates of this one: `make tuning`.

It counts for an arm only if it trained the same model on the same text for as long, with the arm as it is here but for
the learning rate, on seeds that this grid does not have. Its best rate is the one of the lowest mean loss over all
formats and seeds that it tried; a rate at which a run diverged is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from altgrad.config import Params, UserError, load_params
from altgrad.reporting.load import Study


@dataclass(frozen=True)
class Tuned:
    """The learning rates tried for an arm, in order, and the best; why the trial does not count here, if so."""

    rates: tuple[float, ...]
    best: float
    against: str | None

    @property
    def bracketed(self) -> bool:
        """Whether a smaller and a larger rate were tried."""
        return self.rates[0] < self.best < self.rates[-1]


@dataclass(frozen=True)
class Tuning:
    """A tuning run: its seeds and entries, and of each arm what it found."""

    seeds: tuple[int, ...]
    entries: tuple[str, ...]
    arms: dict[str, Tuned]


def load_tuning(folder: Path, study: Study) -> Tuning | None:
    """Return what ``folder`` (``params.yaml`` and ``results.csv``) says for ``study``; ``None`` without such a run.

    One that today's settings cannot be read from says nothing.
    """
    if not (folder / "results.csv").is_file():
        return None
    try:
        params = load_params(folder / "params.yaml")
    except UserError:
        return None
    results = pd.read_csv(folder / "results.csv")
    elsewhere = _elsewhere(params, study)
    arms = {
        arm: _tuned(arm, params, found, elsewhere or _changed(arm, params, study))
        for arm, found in results.groupby("optimizer")
        if arm in study.optimizers
    }
    return Tuning(tuple(params.grid.seeds), tuple(params.grid.formats), arms)


def _tuned(arm: str, params: Params, found: pd.DataFrame, against: str | None) -> Tuned:
    # Kept results have no row of a run that diverged.
    cells = pd.MultiIndex.from_product([params.grid.formats, params.grid.seeds, params.grid.lr_scales])
    of_cell = found.set_index(["format", "seed", "lr_scale"])["val_loss"].reindex(cells)
    losses = of_cell.groupby(level=2).agg(lambda values: values.mean(skipna=False)).sort_index()
    rates = [params.optimizers[arm].lr * float(scale) for scale in losses.index]
    best = rates[int(losses.reset_index(drop=True).idxmin())] if losses.notna().any() else float("nan")
    return Tuned(tuple(rates), best, against)


def _elsewhere(params: Params, study: Study) -> str | None:
    """Return what of the run was not as it is in this grid, if anything."""
    tried: dict[str, Any] = {
        "model": {params.model: params.models[params.model].model_dump(mode="json")},
        "train": params.train.model_dump(mode="json"),
        "text": (params.corpus, params.tokenizer.vocab_size),
    }
    here = {name: study.params.get(name) for name in ("model", "train")}
    here["text"] = study.corpus.get("corpus"), study.corpus.get("vocab_size")
    changed = [name for name in tried if tried[name] != here[name]]
    if changed:
        return f"with another {changed[0]}"
    return "on seeds of this grid" if set(params.grid.seeds) & set(study.seeds) else None


def _changed(arm: str, params: Params, study: Study) -> str | None:
    tried, here = params.optimizers[arm].model_dump(mode="json"), study.params["optimizers"][arm]
    changed = [name for name in tried if name != "lr" and tried[name] != here.get(name)]
    return f"with another {changed[0]}" if changed else None
