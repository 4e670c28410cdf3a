"""Stage `tokenize`: the corpus of params.yaml to token files in data/tokens."""

from pathlib import Path

from altgrad.config import load_params, run_stage


def main(arguments: list[str]) -> None:
    params = load_params()
    from altgrad.data import write_tokens  # after the settings are checked: it is slow to import

    write_tokens(params.corpus, params.corpora[params.corpus], params.tokenizer, Path("data/tokens"))


if __name__ == "__main__":
    run_stage(main)
