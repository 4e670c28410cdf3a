"""``python -m altgrad.config``: is params.yaml valid by its schema? Takes a moment; stage `grid` checks the rest."""

from altgrad.config import load_params, run_stage


def main(arguments: list[str]) -> None:
    """Read params.yaml; raises UserError for what is wrong with it."""
    load_params()


if __name__ == "__main__":
    run_stage(main)
