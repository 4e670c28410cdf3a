"""Stage `grid`: resolve and check params.yaml; write one file per cell to data/grid.

``python -m stages.grid FILE`` checks FILE in place of params.yaml and writes nothing.
"""

from pathlib import Path

from altgrad.common.errors import run_stage
from altgrad.common.files import read_json
from altgrad.common.fingerprint import link_ignored
from altgrad.config import Resolver, load_params, write_grid
from altgrad.config.cell import clamped_heads, idle_biases
from altgrad.config.tasks import ComparedOn


def main(arguments: list[str]) -> None:
    params = load_params(Path(*arguments or ["params.yaml"]))
    link_ignored(Path("data/weights"))
    from altgrad.data.batches import require_sequences
    from altgrad.optim.checks import check_cells

    resolver = Resolver(params)
    cells = list(resolver.cells())
    check_cells(cells, params.tokenizer.vocab_size, params.grid.baseline)
    if arguments:
        return
    meta = read_json(Path("data/tokens/meta.json"))
    if not params.classify:
        require_sequences(meta, max(cell.model.context for cell in cells))
    write_grid(cells, resolver.selected(), Path("data/grid"))
    print(f"{len(cells)} cells")
    for setting in resolver.idle():
        print(f"note: {setting} selects no cell of this grid")
    for clamped, entries in clamped_heads(cells).items():
        print(f"note: {', '.join(entries)}: {clamped}")
    for said, entries in idle_biases(cells).items():
        print(f"note: {', '.join(entries)}: {said}")
    chunks = params.classify.chunks if params.classify else None
    for asked, context in sorted({(cell.train.eval_sequences, cell.model.context) for cell in cells}):
        for note in ComparedOn.of_splits(meta["splits"], asked, context, chunks).notes(asked):
            print(f"note: {note}")


if __name__ == "__main__":
    run_stage(main)
