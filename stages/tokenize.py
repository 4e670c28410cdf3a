"""Stage `tokenize`: write the tokens of the corpus in params.yaml to data/tokens.

This stage refuses a corpus that is too small for the model. The tokens do not depend on the model, so the model is not
among the stage's params in dvc.yaml. Stage `grid` checks the tokens when another model is picked.
"""

from pathlib import Path

from altgrad.common.errors import run_stage
from altgrad.common.fingerprint import link_ignored
from altgrad.config import load_params
from altgrad.config.models import LEAST_CONTEXT


def main(arguments: list[str]) -> None:
    params = load_params()
    link_ignored(Path("data/corpus"))
    from altgrad.data.tokens import write_tokens  # after the settings are checked: it is slow to import

    # An override may change the context, and weights to start from have their own: stage `grid` checks both.
    fixed = not any("model" in override for override in params.overrides.values())
    context = (fixed and params.models[params.model].context) or LEAST_CONTEXT
    corpus = params.corpora[params.corpus]
    meta = write_tokens(params.corpus, corpus, params.tokenizer, Path("data/tokens"), context, params.classify)
    if "near_copies" in meta:
        documents = meta["near_copies"] + sum(split["documents"] for split in meta["splits"].values())
        print(f"corpus {params.corpus}: {meta['near_copies']} of {documents} documents dropped, near copies of others")


if __name__ == "__main__":
    run_stage(main)
