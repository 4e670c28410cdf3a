"""Write STACKS.md of what every stack does."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.model import fully_sharded
from tests.model.stacks import (
    HOW,
    OF_PROCESSES,
    PAGE,
    RECIPES,
    REFUSED,
    STACKS,
    TRACED,
    WAYS,
    cell_of,
    cell_of_processes,
    joined,
)


def page(found: dict[int, dict[str, Any]]) -> str:
    """Return STACKS.md."""
    rows = []
    for stack in STACKS:
        by_recipe = [joined({way: cell_of(stack, recipe, run) for way, run in WAYS.items()}) for recipe in RECIPES]
        rows.append((stack.__doc__ or "", stack.__name__, by_recipe))
    rows += [(stack.__doc__ or "", stack.__name__, [cell_of(stack, recipe) for recipe in RECIPES]) for stack in TRACED]
    rows += [(said, what, [cell_of_processes(found, what, r) for r in RECIPES]) for said, what in OF_PROCESSES.items()]
    table = [["stack", *RECIPES, "instead"], ["---"] * (len(RECIPES) + 2)]
    for said, what, cells in rows:
        table.append([said.rstrip("."), *cells, HOW.get(what, "") if any(REFUSED in cell for cell in cells) else ""])
    return TEXT + "\n".join("| " + " | ".join(row) + " |" for row in table) + "\n"


TEXT = """# Quantized layers in training stacks

What a stack does to a model of `quantize_model`, by the kind of recipe. **works**: outputs and gradients have the bits
that the model has without the stack, unless the row says how far they are apart. **refused**: one sentence says so,
and the last column what to do instead. Each cell is a test, and `python -m tests.model.stacks` writes this page of what
they find on a CPU.

**compiled** is `torch.compile`, and a cell with one word is so both ways.

Other tests hold that `model.to(dtype)`, another default dtype of torch, `nn.TransformerEncoder` and transformers'
`resize_token_embeddings` work. `torch.jit.trace` is refused: take `torch.export.export` or `torch.compile`.

Hugging Face's Trainer, PEFT, Lightning, torchtitan and Accelerate have
[a page of their own](../integrations/README.md). With FSDP2 quantize the model first and shard it then; optimizers
step the shards to the bit as one process would (`altgrad/optim/sharded.py`). With
`quantize_model(..., gather_codes=True)` it gathers a weight as codes, one byte per element, with a message of four
bytes for the scale whenever it is gathered, also between and inside of compiled graphs; an integer
`reshard_after_forward` and a `shard_placement_fn` are refused for such weights. A compiled block inside of a checkpoint
that is not compiled ends in torch's `CheckpointError`: compile the model around its checkpoints.

"""

if __name__ == "__main__":
    os.environ |= fully_sharded.PRODUCTS
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(page(fully_sharded.run(Path(folder))), encoding="utf-8")
    print(PAGE, file=sys.stderr)
