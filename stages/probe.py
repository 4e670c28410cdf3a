"""No stage: `make estimate` runs this to time a few steps of the given cells with `altgrad.benchmark.runs`."""

from altgrad.common.errors import run_stage


def main(arguments: list[str]) -> None:
    from altgrad.benchmark.runs import main

    main(arguments)


if __name__ == "__main__":
    run_stage(main)
