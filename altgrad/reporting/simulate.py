"""How often the report's rules find an effect that is not there, and one that is: by simulation.

Studies without any effect, and studies with one known gain, are drawn and judged by `altgrad.reporting.compare`, as
real ones are. A loss is a shift per seed, which pairing removes, plus noise of 0.01 nats per run; the *noises* below
differ in how it is spread over runs.

    make simulate

writes a row per design and noise. ``false_significant`` is the share of studies without an effect that have at least
one significant result. ``covered`` is the share of all studies in which the 95 % interval of the last optimizer's gain
in the last format, the noisiest run, holds zero. ``found`` is the share of studies with an effect of four standard
deviations of a run's noise in which it is significant.
"""

import argparse
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Self

import numpy as np
import pandas as pd
from tqdm import tqdm

from altgrad.common.console import while_read
from altgrad.common.run_table import KEY
from altgrad.reporting import optimizer_roles as roles
from altgrad.reporting.compare import GAIN, Question, Questions, answer, ask
from altgrad.reporting.external import Family, study_of
from altgrad.reporting.load import Study
from altgrad.reporting.statistics import PairedLosses, Result, Run

NOISE, SEED_SHIFT, EFFECT = 0.01, 0.03, 4.0  # nats, nats, standard deviations of a run's noise
TABLE = "reports/simulation.csv"
DESIGNS = [(5, 2, 3), (5, 2, 5), (5, 2, 8), (8, 8, 5), (8, 8, 8)]  # formats, arms, seeds
BAD = 7.5  # nats: how far above the others a run ends that learned nothing
FORMATS = ("E0M7", "E1M6", "E2M5", "E3M4", "E4M3", "E5M2", "E6M1", "E7M0")
LAST, ALL = -1, slice(None)

Spread = Callable[[np.random.Generator, np.ndarray], np.ndarray]


def _times(factor: float, formats: slice | int, arms: slice | int) -> Spread:
    """Return a function that makes the noise of ``formats`` and ``arms`` (indices) ``factor`` times as large."""

    def spread(random: np.random.Generator, noise: np.ndarray) -> np.ndarray:
        noise[formats, arms] *= factor
        return noise

    return spread


def _bad(random: np.random.Generator, noise: np.ndarray) -> np.ndarray:
    noise[-1, -1, 0] += BAD
    return noise


def _unequal(axes: int) -> Spread:
    """Return a function that multiplies the noise by a random factor for each value of the first ``axes`` indices."""
    return lambda random, noise: noise * np.exp(0.7 * random.standard_normal((*noise.shape[:axes], *[1] * (3 - axes))))


#: By name, a function that changes a noise of shape (formats, arms, seeds), before that normal and equal everywhere.
NOISES: dict[str, Spread] = {
    "equal": lambda random, noise: noise,
    "one arm 2 times as noisy": _times(2, ALL, LAST),
    "one arm 5 times as noisy": _times(5, ALL, LAST),
    "one run 3 times as noisy": _times(3, LAST, LAST),
    "one run 10 times as noisy": _times(10, LAST, LAST),
    "one seed of one run 7.5 nats higher": _bad,
    "baseline 3 times as noisy": _times(3, 0, ALL),
    "baseline optimizer 3 times as noisy": _times(3, ALL, 0),
    "unequal from run to run": _unequal(axes=2),
    "unequal from format to format": _unequal(axes=1),
    "heavy tails (t, 3 degrees)": lambda random, noise: NOISE * random.standard_t(3, noise.shape) / np.sqrt(3),
    "a tenth of the cells lost": lambda random, noise: np.where(random.random(noise.shape) < 0.1, np.nan, noise),
}


@dataclass(frozen=True)
class Design:
    """A grid to draw losses for, whose formats are all quantized and whose optimizers are no controls.

    Everything is compared with the first format and with the optimizer ``plain``.
    """

    study: Study  # without losses
    questions: Questions  # that a report asks
    place: dict[Run, int]  # the row of each run in the losses

    @classmethod
    def of(cls, formats: int, arms: int, seeds: int) -> Self:
        """Return the grid of this many formats, optimizers and seeds."""
        names = ["plain", *(f"arm{i}" for i in range(arms - 1))]
        rows = pd.DataFrame(itertools.product(FORMATS[:formats], names, range(seeds)), columns=KEY).assign(loss=0.0)
        study = study_of(rows, None, Family(reference=FORMATS[0], reference_optimizer="plain"))
        best: dict[tuple[str, str], Run] = {run: (*run, 1) for run in itertools.product(FORMATS[:formats], names)}
        place = {run: i for i, run in enumerate(best.values())}
        return cls(study, ask(study, best, roles.references(study)), place)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The numbers of formats, optimizers and seeds."""
        return len(self.study.formats), len(self.study.optimizers), len(self.study.seeds)

    def drawn(self, random: np.random.Generator, noise: Spread, gains: np.ndarray | float = 0.0) -> PairedLosses[Run]:
        """Return random losses minus ``gains`` (nats, of shape (formats, arms, 1))."""
        chance = noise(random, NOISE * random.standard_normal(self.shape))
        losses = 3.5 + SEED_SHIFT * random.standard_normal(self.shape[2]) + chance - gains
        return PairedLosses(self.place, losses.reshape(-1, self.shape[2]))

    def read(self, runs: PairedLosses[Run]) -> dict[Question, Result]:
        """Return the results that a report of ``runs`` would have."""
        return answer(self.questions, runs, {}, tuned_here=False)


def worst_rate(file: Path, study: Study) -> float | None:
    """Return the share of simulated studies like ``study``, without any effect, that have a significant result.

    ``file`` is the table of `make simulate`; without it the result is ``None``. The design with the nearest number of
    seeds, then of runs, is used, and the noise with the largest share.
    """
    if not file.is_file():
        return None
    table = pd.read_csv(file)
    runs = table["formats"] * table["arms"] - len(study.formats) * len(study.optimizers)
    for distance in ((table["seeds"] - len(study.seeds)).abs(), runs.abs()):
        table = table[distance[table.index] == distance[table.index].min()]
    return float(table["false_significant"].max())


def rates(design: Design, noise: Spread, draws: int, seed: int = 0) -> dict[str, float]:
    """Return the module's three rates by name, over ``draws`` studies without an effect and as many with one."""
    random = np.random.default_rng(seed)
    formats, arms = design.study.formats, design.study.optimizers
    effect, noisiest = (GAIN, formats[-2], arms[1]), (GAIN, formats[-1], arms[-1])
    gains = np.zeros((*design.shape[:2], 1))
    gains[-2, 1] = EFFECT * NOISE
    without = [design.read(design.drawn(random, noise)) for _ in range(draws)]
    with_one = [design.read(design.drawn(random, noise, gains)) for _ in range(draws)]
    wrong = [any(claim.significant and not claim.exploratory for claim in study.values()) for study in without]
    last = [result.difference for study in without + with_one if (result := study.get(noisiest)) is not None]
    covered = [abs(difference.mean) <= difference.half_width for difference in last if difference.sd > 0]
    found = [(result := study.get(effect)) is not None and result.significant for study in with_one]
    shares = {"false_significant": wrong, "covered": covered, "found": found}
    return {name: float(np.mean(share)) for name, share in shares.items()}


def simulated(job: tuple[tuple[int, int, int], str, int]) -> dict[str, object]:
    """Return a row of the table. ``job`` is the shape of a design, the name of a noise and the number of draws."""
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
