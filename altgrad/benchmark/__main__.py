"""``python -m altgrad.benchmark``: what this machine can do, to reports/bench/<machine>.json."""

from __future__ import annotations

from altgrad.benchmark.command_line import parse
from altgrad.config import run_stage


def main(arguments: list[str]) -> None:
    """Measure, write the record, print the tables."""
    options = parse(arguments)

    from altgrad.benchmark.page import write_page
    from altgrad.benchmark.session import Session  # torch, after run_stage has set what training runs under

    print(f"written to {Session(options, arguments).run()}, and {write_page()}")


if __name__ == "__main__":
    run_stage(main)
