"""What this machine can do, its GPU if it has one: to reports/bench/<machine>.json, in parts that can be resumed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from altgrad.benchmark.needs import left_out, missing


def main(arguments: list[str]) -> None:
    """Measure what the record lacks, or write the pages that show what is there."""
    from altgrad.config import UserError

    parser = argparse.ArgumentParser(prog="python -m altgrad.benchmark", description=__doc__)
    parser.add_argument("--only", default="", metavar="WORD", help="items with this in their name; --list names all")
    parser.add_argument("--list", action="store_true", help="name the items and measure none")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after them; default: no end")
    parser.add_argument("--again", action="store_true", help="measure also what the record has")
    parser.add_argument("--gpu", action="store_true", help="refuse to measure a machine without a GPU")
    parser.add_argument("--miniature", action="store_true", help="rehearse a GPU's list with small sizes, anywhere")
    parser.add_argument("--output", type=Path, help="the record; default: reports/bench/<machine>.json")
    parser.add_argument("--pages", action="store_true", help="only write what the pages say of the records")
    options = parser.parse_args(arguments)

    from altgrad.benchmark.pages import write_pages

    if not options.pages:
        from altgrad.benchmark.session import Session

        session = Session(options.output, options.miniature, arguments)
        if options.gpu and session.device.type != "cuda" and not options.miniature:
            raise UserError("this torch sees no GPU; `make bench` measures the processor, --miniature rehearses")
        if options.list:
            print("\n".join(item.name for item in session.items()))
            return
        for name, what in left_out().items():
            print(f"{name} is not installed: {what} are left out", flush=True)
        for name, scales in session.without_products().items():
            print(f"this device has no products of {scales}: {name} is left out", flush=True)
        try:
            left = session.run(options.seconds, options.again, options.only)
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
