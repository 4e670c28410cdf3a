"""No stage, but a few timed steps of the cells named, which `make estimate` runs: see `altgrad.benchmark.probe`."""

from altgrad.common.errors import run_stage


def main(arguments: list[str]) -> None:
    from altgrad.benchmark.probe import main

    main(arguments)


if __name__ == "__main__":
    run_stage(main)
