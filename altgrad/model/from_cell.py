"""Build the model of a resolved cell, with its size, recipe and initial weights, and the cell's arm."""

import torch

from altgrad.common.errors import UserError
from altgrad.config import Cell
from altgrad.config.arms import Arm
from altgrad.config.recipe import Recipe
from altgrad.model import GPT, GPTConfig, quantize_model
from altgrad.model.layers import add_adapters
from altgrad.model.published import start_from

PADDING = 128  # a vocabulary may be rounded up to a multiple of this, for speed


def recipe_of(cell: Cell) -> Recipe:
    """Return the recipe of a resolved cell."""
    return Recipe(rules=tuple(rule.with_formats(cell.formats) for rule in cell.rules))


def recipes_of(cell: Cell) -> list[Recipe]:
    """Return the recipe that a resolved cell begins with, then the recipes of its schedule."""
    return [recipe_of(cell.under(place)) for place in range(1 + len(cell.schedule))]


def arm_of(cell: Cell) -> Arm:
    """Return the arm of a resolved cell with the learning rate multiplied by the cell's ``lr_scale``.

    Raises ``ValueError`` for settings that do not go together.
    """
    return cell.arm.with_formats(cell.formats).but(lr=cell.peak_lr)


def config_of(cell: Cell, vocab_size: int, labels: tuple[float, ...] = (1.0,)) -> GPTConfig:
    """Return the size of a resolved cell's model; ``labels``, as in `GPTConfig`, are used only if the cell has a task.

    ``vocab_size``: tokens of the tokenizer. Raises :class:`UserError` if the cell starts from weights with another
    vocabulary; up to ``PADDING - 1`` more tokens are allowed.
    """
    sizes = cell.model.sizes
    if cell.task:
        sizes |= {"labels": labels, "pooling": cell.task.pooling, "end": vocab_size - 1}
    start = cell.model.start
    if start is not None:
        if not 0 <= start.vocab_size - vocab_size < PADDING:
            raise UserError(
                f"params.yaml: model: the weights in {start.folder} have {start.vocab_size} tokens, and "
                f"tokenizer.vocab_size is {vocab_size}; make the two the same, but for up to {PADDING - 1} of padding"
            )
        vocab_size = start.vocab_size
    return GPTConfig(vocab_size=vocab_size, **sizes)


def build_model(
    cell: Cell, vocab_size: int, device: torch.device, labels: tuple[float, ...] = (), *, shared: bool = False
) -> GPT:  # fmt: skip
    """Return the quantized model of ``cell`` on ``device``; ``labels`` belong to its task, as in `GPTConfig`.

    ``shared``: whether several processes share each batch. The model has the weights that the cell starts from, or
    initial weights that depend only on the cell's seed.
    """
    config, recipe = config_of(cell, vocab_size, labels), recipe_of(cell)
    torch.manual_seed(cell.seed)
    model = GPT(config)
    if cell.model.start is not None:
        start_from(cell.model.start, cell.key, model)
    # Quantize on ``device``: a torchao layer is made for the device of its weight.
    quantize_model(model.to(device), recipe, seed=cell.seed, sync_amax=shared)
    if cell.lora is not None:
        add_adapters(model, cell.lora)
    return model
