"""``make gpu``: what the GPU of this machine can do, to reports/bench/gpu_<name>.json, in parts that can be resumed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from altgrad.benchmark.gpu.needs import left_out, missing

SECONDS = 570.0


def main(arguments: list[str]) -> None:
    """Measure what the record lacks, or write the pages that show what is there."""
    from altgrad.config import UserError

    parser = argparse.ArgumentParser(prog="python -m altgrad.benchmark.gpu", description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="begin nothing after them; default: %(default)g")
    parser.add_argument("--again", action="store_true", help="measure also what the record has")
    parser.add_argument("--miniature", action="store_true", help="rehearse the list with small sizes, on any device")
    parser.add_argument("--output", type=Path, help="the record; default: reports/bench/gpu_<name>.json")
    parser.add_argument("--pages", action="store_true", help="only write what the two READMEs say of it")
    options = parser.parse_args(arguments)

    from altgrad.benchmark.gpu.pages import write_pages

    if not options.pages:
        from altgrad.benchmark.gpu.session import Session

        for name, what in left_out().items():
            print(f"{name} is not installed: {what} are left out", flush=True)
        session = Session(options.output, options.miniature, arguments)
        try:
            left = session.run(options.seconds, options.again)
        except KeyboardInterrupt:
            raise UserError("interrupted; the same command goes on where it was") from None
        print(f"written to {session.record.path}", flush=True)
        if left:
            print(f"still to be measured: {', '.join(left)}; the same command goes on with them", flush=True)
    if not options.miniature and options.output is None:
        for page in write_pages(Path()):
            print(f"{page} says what the records have")


if __name__ == "__main__":
    if words := missing():
        sys.exit(f"error: {words}")
    from altgrad.config import run_stage

    run_stage(main)
