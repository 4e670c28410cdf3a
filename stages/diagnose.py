"""Stage `diagnose`: analyse the saved files of one cell; write data/diag/<key>.json and .parquet."""

from pathlib import Path

from altgrad.common.errors import UserError, run_stage
from altgrad.common.fingerprint import discard_finished, project_root
from altgrad.config import load_params


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise UserError("usage: python -m stages.diagnose CELL, such as E4M3-adamw-0-1")
    key = arguments[0]
    params = load_params()
    from altgrad.diagnostics import diagnose_cell

    cell_path, out = Path("data/grid") / f"{key}.json", Path("data/diag")
    files = out / f"{key}.json", out / f"{key}.parquet"
    diagnose_cell(cell_path, Path("data/runs") / key, *files, Path("data/tokens"), params.diagnose)
    discard_finished(project_root(), key)


if __name__ == "__main__":
    run_stage(main)
