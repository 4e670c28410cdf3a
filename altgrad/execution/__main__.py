"""Run what `dvc repro` would run, with several training runs at a time."""

from altgrad.common.console import STOPS, called, end_when_stopped

if __name__ == "__main__":
    end_when_stopped()

import argparse
import math
import sys
import time
from contextlib import closing, nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path

import psutil

from altgrad.common.errors import UserError, run_stage
from altgrad.config import load_params
from altgrad.execution import Task


def main(arguments: list[str]) -> None:
    """Write the ``-S`` settings to params.yaml and run the cells, then the other stages; or print an estimate."""
    parser = argparse.ArgumentParser(prog=called("execution"), description=__doc__)
    parser.add_argument("--jobs", type=int, metavar="N", help="training runs at a time; default: what is fastest here")
    parser.add_argument(
        "-S", "--set-param", action="append", default=[], metavar="NAME=VALUE",
        help="first change settings in params.yaml, with --estimate only for the estimate; may be given many times; if "
        "one is refused, none is changed",
    )  # fmt: skip
    parser.add_argument(
        "--engine", choices=("local", "ray"), default="local",
        help="where runs train: on this machine, or on the Ray cluster that RAY_ADDRESS names",
    )  # fmt: skip
    parser.add_argument("--estimate", action="store_true", help="estimate time, disk and cost; train nothing")
    parser.add_argument("--gpu", metavar="NAME", help="with --estimate: for this GPU, from its record by `make gpu`")
    options = parser.parse_args(arguments)
    if options.gpu and not options.estimate:
        raise UserError("--gpu says what `make estimate` is for; leave it out")
    if options.jobs is not None and options.jobs < 1:
        raise UserError(f"--jobs: expected 1 or more, got {options.jobs}")

    if options.engine == "ray" and (options.jobs or options.estimate):
        raise UserError("ENGINE=ray: a cluster runs as many cells as it has CPUs for; leave out JOBS and --estimate")

    from altgrad.execution.pending import copied_project  # loads DVC, which takes a moment

    with copied_project() if options.estimate else nullcontext():
        _run(options)


def _run(options: argparse.Namespace) -> None:
    from altgrad.execution import budget, cells, costs, local, on_ray, pending, settings
    from altgrad.execution.progress import tracked

    with redirect_stdout(StringIO() if options.estimate else sys.stdout):  # change_params prints the copy of a run
        settings.change_params(Path("params.yaml"), options.set_param)
    params = load_params()
    limit = params.budget.limit
    if options.engine == "ray" and limit < math.inf:
        raise UserError("params.yaml: budget: what fits is timed on this machine alone; leave it out with ENGINE=ray")
    models = [params.models[name].model_dump(mode="json") for name in params.all_models]
    measured = [local.measured_mb(model, params.train.batch) for model in models]
    takes = (*params.cell_takes, None if None in measured else max(mb for mb in measured if mb is not None))
    pool = local.LocalPool(options.jobs, *takes)
    executor = on_ray.RayCluster(*takes) if options.engine == "ray" else pool
    if options.estimate:
        record = budget.record_of(options.gpu) if options.gpu else None
        tasks, _ = pending.first_tasks()
        if tasks:
            if record:
                estimated = budget.estimate_on(record, tasks)
            else:
                before = time.time() - psutil.Process().create_time()
                estimated = budget.with_the_rest(budget.estimate(tasks, pool.jobs), before)
            disk = costs.disk_sentence(costs.disk_needed(tasks, pool.jobs))
            print(f"{budget.said(estimated, tasks, params.budget)}; {disk}")
        else:
            print("no cell has to run")
        if record:
            print(budget.sizes_table(record, params.budget))
        return

    def choose(tasks: list[Task]) -> list[Task]:
        chosen = budget.choose(tasks, pool.jobs, params.budget) if limit < math.inf else tasks
        costs.require_room(chosen, pool.jobs)
        return chosen

    with tracked(params.tracking), closing(pool):
        rest = cells.run_cells(executor, choose, limit, early_stop=params.budget.early_stop)
    cells.run_the_rest(rest)


if __name__ == "__main__":
    run_stage(main, stops=STOPS)
