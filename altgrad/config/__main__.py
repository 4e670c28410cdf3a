"""``python -m altgrad.config``: check params.yaml, in a moment, before anything runs."""

from altgrad.config import load_params, run_stage


def main(arguments: list[str]) -> None:
    load_params()


if __name__ == "__main__":
    run_stage(main)
