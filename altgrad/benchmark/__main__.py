"""Measure how fast this machine, and its GPU if it has one, does what training needs.

Results go to reports/bench/<machine>.json. A measurement that was interrupted goes on where it stopped.
"""

import argparse
from pathlib import Path

from altgrad.common.console import called
from altgrad.common.errors import UserError, run_stage


def main(arguments: list[str]) -> None:
    """Run the command: measure the items that the record lacks, then write the page."""
    parser = argparse.ArgumentParser(prog=called("benchmark"), description=__doc__)
    parser.add_argument("--only", default="", metavar="WORD", help="measure only items with WORD in their name")
    parser.add_argument("--list", action="store_true", help="list the names of the items and measure nothing")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="N", help="begin no item after N s")
    parser.add_argument("--again", action="store_true", help="measure everything anew")
    parser.add_argument("--gpu", action="store_true", help="end with an error on a machine without a GPU")
    parser.add_argument("--miniature", action="store_true", help="rehearse a GPU's items in miniature")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the record; default: reports/bench/<machine>.json")
    parser.add_argument("--pages", action="store_true", help="measure nothing; write the page from the records")
    options = parser.parse_args(arguments)

    try:  # only now: a rented machine may lack packages
        from altgrad.benchmark.records import write_page
        from altgrad.benchmark.session import Session, left_out
    except ModuleNotFoundError as error:
        raise UserError(
            f"not installed: {error.name}; run `make env`, or carry its wheel (`pip download --no-deps`) and name its "
            "folder in PYTHONPATH"
        ) from None
    if not options.pages:
        session = Session(options.output, options.miniature, arguments)
        if options.gpu and session.device.type != "cuda" and not options.miniature:
            raise UserError("this torch sees no GPU; `make bench` measures the processor, --miniature rehearses")
        if options.list:
            print("\n".join(item.name for item in session.items()))
            return
        if left_out():
            print("torchao is not installed: steps of torchao's layers are left out", flush=True)
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
        print(f"written: {write_page(Path())}")


if __name__ == "__main__":
    run_stage(main)
