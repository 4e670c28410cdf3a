"""Checks each run's recipe, optimizer, device and process count against model and data before any run trains."""

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from altgrad.common.errors import UserError
from altgrad.config import Cell
from altgrad.model import GPT, Recipe, matched_layers, quantize_model, requantize_model
from altgrad.model.from_cell import arm_of, config_of, recipes_of
from altgrad.model.hardware import select_device
from altgrad.model.published import start_from
from altgrad.model.surgery import TORCHAO_DIVISOR
from altgrad.optim.weight_grid import weight_grids


def check_cells(cells: list[Cell], vocab_size: int, baseline: str) -> None:
    """Raise :class:`UserError` for the first cell that could not train.

    Args:
        cells: the runs of the grid.
        vocab_size: size of the tokenizer's vocabulary.
        baseline: the grid's baseline format. In its cells an arm that needs a format may find no quantized weight; the
            arm then trains in its plain form.
    """
    for cell in _distinct(cells):
        select_device(cell.train.device)
        with torch.device("meta"), _Undrawn():
            model = GPT(config_of(cell, vocab_size))
        if cell.model.start is not None:
            start_from(cell.model.start, cell.key, model)
        try:
            recipes = recipes_of(cell)
            for recipe in recipes:
                matched_layers(model, recipe)
        except ValueError as error:
            raise UserError(f"params.yaml: recipe of cell {cell.key}: {error}") from None
        _check_arm(cell, model, recipes, baseline)
        _check_devices(cell)
        tokens = cell.train.batch * cell.model.context
        if tokens % TORCHAO_DIVISOR and any(rule.torchao for recipe in recipes for rule in recipe.rules):
            raise UserError(
                f"params.yaml: cell {cell.key}: train.batch {cell.train.batch} times context {cell.model.context} is "
                f"{tokens} tokens, and torchao's recipes need a multiple of {TORCHAO_DIVISOR}; change one of the two"
            )


def _check_devices(cell: Cell) -> None:
    train, where = cell.train, f"params.yaml: cell {cell.key}: train.devices {cell.train.devices}"
    if train.devices == 1:
        return
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        raise UserError(f"{where}: torch {torch.__version__} cannot; install torch 2.13 or newer, or set devices to 1")
    if cell.schedule:
        raise UserError(f"{where}: a recipe that changes during a run is for one process alone; set devices to 1")
    if train.batch % train.devices:
        raise UserError(f"{where} must divide train.batch {train.batch}; change one of the two")
    if select_device(train.device).type == "cuda" and train.devices > torch.cuda.device_count():
        raise UserError(f"{where} is more than the {torch.cuda.device_count()} GPUs that are here; set it to that")
    if cell.model.dropout:
        raise UserError(f"{where}: the processes would drop other units than one alone; set model.dropout to 0")
    if cell.arm.store == "codes":
        raise UserError(f"{where}: {cell.optimizer} stores weights as codes, which one process reads; set it to 1")
    share = train.batch // train.devices * cell.model.context
    for rule in cell.rules:
        if rule.torchao:
            raise UserError(f"{where}: torchao's layers scale by what one process sees; remove torchao, or set it to 1")
        if rule.grad is not None and rule.grad.rounding == "MS-EDEN":
            raise UserError(f"{where}: MS-EDEN scales by what one process sees; round stochastically, or set it to 1")
        if any(tensor is not None and tensor.granularity == "head" for tensor in rule.tensors().values()):
            raise UserError(f"{where}: scales of heads are of what one process sees; take tensor, or set it to 1")
        for role in ("input", "grad"):
            tensor = getattr(rule, role)
            together = max(tensor.block if tensor is not None and tensor.keeps_scales else 1, rule.hadamard)
            if share % together:
                raise UserError(
                    f"{where} leaves each process {share} tokens, which are no whole blocks of {together}; take fewer "
                    "devices or a larger train.batch"
                )


def _distinct(cells: list[Cell]) -> list[Cell]:
    """Return ``cells`` without those that differ from an earlier cell only in their seed."""
    first: dict[str, Cell] = {}
    for cell in cells:
        first.setdefault(cell.model_copy(update={"key": "", "seed": 0}).to_json(), cell)
    return list(first.values())


class _Undrawn(TorchFunctionMode):
    """A mode in which `torch.nn.init` does nothing: the checks need only shapes, and drawing loads the compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def _check_arm(cell: Cell, model: GPT, recipes: list[Recipe], baseline: str) -> None:
    where = f"params.yaml: optimizers.{cell.optimizer}"
    try:
        arm = arm_of(cell)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    if not arm.needs_format:
        return
    try:
        grids = weight_grids(quantize_model(model, recipes[0]), on_grid=arm.weights == "quantized")
        for switch, recipe in zip(cell.schedule, recipes[1:], strict=True):
            if weight_grids(requantize_model(model, recipe), on_grid=False).keys() != grids.keys():
                raise ValueError(
                    f"the arm sees the spacing of a weight's format, and under {switch.recipe} other weights have one "
                    "than at first; let a format that no product quantizes to stand in, as virtual: true does"
                )
    except ValueError as error:
        raise UserError(f"{where}: cell {cell.key}: {error}") from None
    if not grids and (cell.format != baseline or arm.weights == "quantized"):
        other = "" if arm.weights == "quantized" else f", or set grid.baseline, which is {baseline}, to {cell.format}"
        raise UserError(
            f"{where}: cell {cell.key} has no quantized weight for this arm to act on; take {cell.format} out of "
            f"grid.formats or {cell.optimizer} out of grid.optimizers{other}"
        )
