"""How often the report's own rules claim what is not there, and how often they find what is: by simulation.

Studies of pure chance, and studies with one known gain, are drawn and read by the code that reads real ones
(:mod:`altgrad.reporting.claims`). A loss is a shift per seed, which pairing takes
away, plus noise of 0.01 nats per run; what differs between the *noises* below is how that noise is spread over runs.

    make simulate

writes a row per design and noise: the share of null studies whose report has at least one significant result, the
share of all in which the 95 % interval of the last optimizer's gain in the last format, the noisiest run, holds zero,
and the share of studies with one effect of four standard deviations of a run's noise in which that is significant.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

from altgrad.common.console import while_read
from altgrad.common.run_table import KEY
from altgrad.reporting import roles
from altgrad.reporting.claims import GAIN, Answers, Questions, answer, ask
from altgrad.reporting.external.family import Family, study_of
from altgrad.reporting.load import Study
from altgrad.reporting.runs import Run, Runs

NOISE, SEED_SHIFT, EFFECT = 0.01, 0.03, 4.0  # nats, nats, standard deviations of a run's noise
TABLE = "reports/simulation.csv"
DESIGNS = [(5, 2, 3), (5, 2, 5), (5, 2, 8), (8, 8, 5), (8, 8, 8)]  # formats, arms, seeds
BAD = 7.5  # nats: how far above the others a run ends that learned nothing
FORMATS = ("E0M7", "E1M6", "E2M5", "E3M4", "E4M3", "E5M2", "E6M1", "E7M0")

Spread = Callable[[np.random.Generator, np.ndarray], np.ndarray]


def _louder(which: tuple[slice | int, slice | int], factor: float) -> Spread:
    def spread(random: np.random.Generator, noise: np.ndarray) -> np.ndarray:
        noise[which] *= factor
        return noise

    return spread


def _bad(random: np.random.Generator, noise: np.ndarray) -> np.ndarray:
    noise[-1, -1, 0] += BAD
    return noise


def _unequal(random: np.random.Generator, noise: np.ndarray, axes: int) -> np.ndarray:
    """Return noise of another size wherever the first ``axes`` indices differ."""
    return noise * np.exp(0.7 * random.standard_normal((*noise.shape[:axes], *[1] * (3 - axes))))


#: By name, how the noise of (formats, arms, seeds) is changed from one that is equal and normal everywhere.
NOISES: dict[str, Spread] = {
    "equal": lambda random, noise: noise,
    "one arm 2 times as noisy": _louder((slice(None), -1), 2),
    "one arm 5 times as noisy": _louder((slice(None), -1), 5),
    "one run 3 times as noisy": _louder((-1, -1), 3),
    "one run 10 times as noisy": _louder((-1, -1), 10),
    "one seed of one run 7.5 nats higher": _bad,
    "baseline 3 times as noisy": _louder((0, slice(None)), 3),
    "baseline optimizer 3 times as noisy": _louder((slice(None), 0), 3),
    "unequal from run to run": partial(_unequal, axes=2),
    "unequal from format to format": partial(_unequal, axes=1),
    "heavy tails (t, 3 degrees)": lambda random, noise: NOISE * random.standard_t(3, noise.shape) / np.sqrt(3),
    "a tenth of the cells lost": lambda random, noise: np.where(random.random(noise.shape) < 0.1, np.nan, noise),
}


@dataclass(frozen=True)
class Design:
    """A grid to draw losses for: its study without losses, the questions that the report asks of it, and its runs.

    All is held against the first format, and against the optimizer ``plain``. Every format is quantized, and no other
    arm is another's control.
    """

    study: Study
    questions: Questions
    place: dict[Run, int]

    @classmethod
    def of(cls, formats: int, arms: int, seeds: int) -> Design:
        """Return the grid of so many formats, optimizers, and seeds."""
        names = ["plain", *(f"arm{i}" for i in range(arms - 1))]
        rows = pd.DataFrame(itertools.product(FORMATS[:formats], names, range(seeds)), columns=KEY).assign(loss=0.0)
        study = study_of(rows, None, Family(reference=FORMATS[0], reference_optimizer="plain"))
        best: dict[tuple[str, str], Run] = {run: (*run, 1) for run in itertools.product(FORMATS[:formats], names)}
        place = {run: i for i, run in enumerate(best.values())}
        return cls(study, ask(study, best, roles.references(study)), place)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Formats, arms, seeds."""
        return len(self.study.formats), len(self.study.optimizers), len(self.study.seeds)

    def drawn(self, random: np.random.Generator, noise: Spread, gains: np.ndarray | float = 0.0) -> Runs:
        """Return losses; ``gains`` (formats, arms, 1) lowers them."""
        chance = noise(random, NOISE * random.standard_normal(self.shape))
        losses = 3.5 + SEED_SHIFT * random.standard_normal(self.shape[2]) + chance - gains
        return Runs(self.place, losses.reshape(-1, self.shape[2]))

    def read(self, runs: Runs) -> Answers:
        """Return what the report reads from ``runs``."""
        return answer(self.questions, runs, {}, tuned_here=False)


def worst_rate(file: Path, study: Study) -> float | None:
    """Return how often chance alone gives a significant result in the design that is most like ``study``.

    Of the table that `make simulate` writes, ``None`` without it. Most like: nearest in seeds, then in the number of
    runs; of all noises the worst.
    """
    if not file.is_file():
        return None
    table = pd.read_csv(file)
    runs = table["formats"] * table["arms"] - len(study.formats) * len(study.optimizers)
    for distance in ((table["seeds"] - len(study.seeds)).abs(), runs.abs()):
        table = table[distance[table.index] == distance[table.index].min()]
    return float(table["false_significant"].max())


def rates(design: Design, noise: Spread, draws: int, seed: int = 0) -> dict[str, float]:
    """Return the rates of error and of discovery of the report's rules; see the module."""
    random = np.random.default_rng(seed)
    formats, arms = design.study.formats, design.study.optimizers
    claims, noisiest = (GAIN, formats[-2], arms[1]), (GAIN, formats[-1], arms[-1])
    single = np.zeros((*design.shape[:2], 1))
    single[-2, 1] = EFFECT * NOISE
    null = [design.read(design.drawn(random, noise)) for _ in range(draws)]
    one = [design.read(design.drawn(random, noise, single)) for _ in range(draws)]
    wrong = [any(found.significant and not found.exploratory for found in study.claims.values()) for study in null]
    known = [result for study in null + one if (result := study.of(*noisiest)) is not None and result.half_width > 0]
    covered = [abs(result.difference.mean) <= result.half_width for result in known]
    seen = [(result := study.of(*claims)) is not None and result.significant for study in one]
    shares = {"false_significant": wrong, "covered": covered, "found": seen}
    return {name: float(np.mean(share)) for name, share in shares.items()}


def simulated(job: tuple[tuple[int, int, int], str, int]) -> dict[str, object]:
    """Return the row of rates of a design and a noise, each from so many studies of every kind."""
    shape, noise, draws = job
    row = dict(zip(("formats", "arms", "seeds"), shape, strict=True)) | {"noise": noise, "draws": draws}
    return row | rates(Design.of(*shape), NOISES[noise], draws)


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m altgrad.reporting.simulate", description="Error rates of the report's rules, by simulation."
    )
    parser.add_argument("--draws", type=int, default=1500, help="studies of every kind in a row (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(TABLE), help="the table (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one per core)")
    settings = parser.parse_args(arguments)
    jobs = [(design, noise, settings.draws) for design in DESIGNS for noise in NOISES]
    with ProcessPoolExecutor(settings.jobs, mp_context=get_context("spawn")) as pool:
        rows = list(tqdm(pool.map(simulated, jobs), total=len(jobs), desc="designs x noises"))
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(settings.out, index=False, lineterminator="\n", float_format="%.4g")
    print(f"wrote {settings.out}")


if __name__ == "__main__":
    with while_read():
        main()
