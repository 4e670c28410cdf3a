"""Stage `code`: write digests of the sources that runs and diagnoses depend on to data/code."""

from pathlib import Path

from altgrad.common.errors import run_stage
from altgrad.common.fingerprint import write_digests


def main(arguments: list[str]) -> None:
    write_digests(Path(), Path("data/code"))


if __name__ == "__main__":
    run_stage(main)
