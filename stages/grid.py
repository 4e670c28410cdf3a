"""Stage `grid`: params.yaml to one resolved file per cell in data/grid, everything checked.

``python -m stages.grid FILE`` checks another file, and writes nothing.
"""

from pathlib import Path

from altgrad.config import Resolver, load_params, run_stage, write_grid
from altgrad.config.files import read_json


def main(arguments: list[str]) -> None:
    params = load_params(Path(*arguments or ["params.yaml"]))
    from altgrad.data.batches import require_sequences
    from altgrad.training.plan import check_cells

    resolver = Resolver(params)
    cells = list(resolver.cells())
    check_cells(cells, params.tokenizer.vocab_size, params.grid.baseline)
    if arguments:
        return
    if not params.classify:
        require_sequences(read_json(Path("data/tokens/meta.json")), max(cell.model.context for cell in cells))
    write_grid(cells, resolver.selected(), Path("data/grid"))
    print(f"{len(cells)} cells")
    for setting in resolver.idle():
        print(f"note: {setting} selects no cell of this grid")


if __name__ == "__main__":
    run_stage(main)
