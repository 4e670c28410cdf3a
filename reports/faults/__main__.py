"""``make faults``: every fault at every moment, and what came of it, to reports/faults.md; most of an hour."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from altgrad.common.files import write_text
from altgrad.common.machine import environment, usable_cores
from reports.faults import campaign, damages
from reports.faults.campaign import Bench, Outcome

OUT = Path("reports/faults.md")


def cases(bench: Bench, kills: int, seconds: float, disks: int) -> dict[str, Callable[[], Outcome]]:
    """Return all cases, ready to be called, by what each is."""
    found: dict[str, Callable[[], Outcome]] = {}
    for moment in campaign.MOMENTS:
        for signum in campaign.SIGNALS:
            found[f"{signum.name} {moment}"] = partial(campaign.stopped_at, bench, moment, signum)
    for fault, place in damages.DAMAGES:
        found[f"{fault} {place}"] = partial(damages.damaged, bench, fault, place)
    for fault in ("cut", "bit flipped"):
        found[f"{fault} checkpoints"] = partial(damages.damaged_checkpoint, bench, fault)
        found[f"{fault} loops in C++"] = partial(damages.damaged_loops, bench, fault)
    found["worker killed"] = partial(campaign.worker_killed, bench)
    found["two at once"] = partial(campaign.two_at_once, bench)
    if damages.may_mount(bench.folder):
        found["read-only"] = partial(damages.read_only, bench)
        for free_mb in (round(0.02 * 1.45**i, 3) for i in range(disks)):
            found[f"disk full {free_mb}"] = partial(damages.disk_full, bench, free_mb)
    for number in range(kills):
        found[f"kill by chance {number}"] = partial(campaign.killed_by_chance, bench, seconds, number)
    return found


def page(rows: list[Outcome], command: str, folder: str) -> str:
    """Return the table, in which the projects' ``folder`` is the user's."""
    found = environment("reports.faults", [])
    bad = [row for row in rows if not row.good]
    lead = (
        f"{len(rows)} faults, {len(bad)} with another outcome than the same bits or one sentence, after one further "
        "command. A project of two runs, trained anew in each."
    )
    lines = [
        "# Faults at chosen moments", "", lead, "",
        "| fault | moment or place | how it was stopped | after one further command | |",
        "| :--- | :--- | :--- | :--- | :--- |",
    ]  # fmt: skip
    for row in rows:
        cells = [row.fault, row.moment, row.stopped or "–", row.outcome, "" if row.good else "**bad**"]
        cells = [re.sub(rf"{re.escape(folder)}/[\w-]+/?", "", cell).replace("|", "\\|") for cell in cells]
        lines.append("| " + " | ".join(cells) + " |")
    machine = f"{found['processor']}, torch {found['torch']}"
    lines += ["", f"`{command}`, commit `{(found['commit'] or '')[:10]}`, {machine}."]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run all cases, several at a time; return 1 if one ended badly."""
    parser = argparse.ArgumentParser(prog="python -m reports.faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="kills by chance; default: %(default)s")
    parser.add_argument("--disks", type=int, default=20, help="amounts of free space; default: %(default)s")
    parser.add_argument("--jobs", type=int, default=max(1, usable_cores() // 2), help="cases at a time")
    parser.add_argument("--only", default="", help="cases whose fault or moment has this in it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="altgrad-faults-") as folder:
        bench = Bench(Path(folder))
        began = time.perf_counter()
        campaign.run(bench.copy(bench.fresh.folder))
        seconds = time.perf_counter() - began
        print(f"a run takes {seconds:.0f} s", flush=True)
        every = cases(bench, options.kills, seconds, options.disks)
        todo, rows = {name: case for name, case in every.items() if options.only in name}, []
        if any("compil" in name or "loops" in name for name in todo):
            bench.compiled  # noqa: B018 - made once, before cases share it
        with ThreadPoolExecutor(options.jobs) as pool:
            for row in pool.map(lambda case: case(), todo.values()):
                rows.append(row)
                well = "ok " if row.good else "BAD"
                print(f"{well} {row.fault}, {row.moment}: {row.stopped} -> {row.outcome}", flush=True)
    if not options.only:
        write_text(OUT, page(rows, " ".join(["python -m reports.faults", *sys.argv[1:]]), folder))
    bad = sum(not row.good for row in rows)
    print(f"{len(rows)} faults, {bad} of them with a bad end")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
