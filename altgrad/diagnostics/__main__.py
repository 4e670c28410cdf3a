"""Explain a finished run: which tensor went wrong first, and what other formats would do to it.

    altgrad diagnostics explain E4M3-adamw-0-1     which tensor left its band first, and how early
    altgrad diagnostics what-if E4M3-adamw-0-1     every tensor in every 8-bit format, and a recipe
    altgrad diagnostics mantissas bf16-adamw-0-1   which tensors a scale that is rounded down would clamp
    altgrad diagnostics ptq bf16-adamw-0-1         the loss, or F1, of its weights quantized after training
    altgrad diagnostics prune E4M3-adamw-0-1       the loss with its smallest weights set to zero

It reads what the pipeline left in data/ and trains nothing. Each command has its own --help.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from altgrad.common.console import called
from altgrad.common.errors import UserError, did_you_mean, run_stage
from altgrad.common.files import read_json
from altgrad.config import Cell
from altgrad.config.tasks import Compared
from altgrad.formats import UnknownFormatError, get_format

if TYPE_CHECKING:
    import pandas as pd


def main(arguments: list[str]) -> None:
    """Run the command ``arguments[0]`` with the other arguments; without arguments print the help.

    Raises :class:`altgrad.config.UserError` for a cell that does not exist or is not finished.
    """
    about, layout = (__doc__ or "").replace("altgrad diagnostics", called("diagnostics")), RawDescriptionHelpFormatter
    parser = ArgumentParser(called("diagnostics"), description=about, formatter_class=layout)
    parser.add_argument("command", choices=list(COMMANDS), help="what to do")
    parser.add_argument("arguments", nargs="*", help="of that command")
    command = parser.parse_args(arguments[:1] or ["--help"]).command
    COMMANDS[command](arguments[1:])


def explain(arguments: list[str]) -> None:
    """Tell which tensor of a run left its band first, and how long before the loss showed it; draw it."""
    from altgrad.reporting import anomalies

    anomalies.main(arguments)


def what_if(arguments: list[str]) -> None:
    """Measure every tensor of a run in every format of 8 bits, or fewer; write table and heat map, print a recipe."""
    from altgrad.diagnostics import what_if
    from altgrad.reporting.figures.layers import main as draw

    parser = _parser("what-if", "cell", "a finished run, such as E4M3-adamw-0-1")
    parser.add_argument("--granularity", choices=list(what_if.GRANULARITIES), default="tensor", help="what has a scale")
    parser.add_argument("--bits", type=int, choices=range(2, 9), default=8, help="of a format (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=what_if.TOKENS, help="measured on (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("scratch/what-if"), help="folder (default %(default)s)")
    settings = parser.parse_args(arguments)
    cell, run = _finished(settings.data, settings.cell)
    layers = what_if.probe(cell, run, settings.data / "tokens", settings.tokens)
    found = what_if.what_if(layers, what_if.splits(settings.bits))
    text = what_if.as_yaml(what_if.recommended(found, settings.granularity))
    settings.out.mkdir(parents=True, exist_ok=True)
    table, recipe = (settings.out / f"{cell.key}.{end}" for end in ("csv", "yaml"))
    found.to_csv(table, index=False)
    recipe.write_text(text, encoding="utf-8")
    draw([str(table), settings.granularity])
    shown = found[(found.granularity == settings.granularity) & (found.rounding == "nearest-even")]
    print(f"Mean SQNR in dB over layers, one scale per {settings.granularity}, rounded to nearest:")
    print(shown.pivot_table(index="role", columns="format", values="sqnr_db", sort=False).round(1).to_string())
    print(f"\nThe split with the highest SQNR for each layer and role, for params.yaml ({recipe}):\n{text}")
    print(f"table: {table}\nfigure: {settings.out / cell.key}.png")


def mantissas(arguments: list[str]) -> None:
    """Tell which tensors of a run scales that are rounded down would clamp, by where their largest elements lie."""
    from altgrad.diagnostics import what_if

    parser = _parser("mantissas", "cell", "a finished run, such as bf16-adamw-0-1")
    parser.add_argument("--format", type=_format_name, default="E4M3", help="of the elements (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("scratch/mantissas"), help="folder (default %(default)s)")
    settings = parser.parse_args(arguments)
    cell, run = _finished(settings.data, settings.cell)
    found = what_if.mantissas(cell, run, settings.data / "tokens")
    shown = (100 * what_if.clamped(found, settings.format)).round(1).reset_index()
    path = settings.out / f"{cell.key}.csv"
    _write(found, path)
    blocks, magnitude = what_if.spread_evenly(settings.format)
    print(f"What scales by floor would clamp in {settings.format}, in per cent of a tensor's blocks, and of the sum of")
    print("their largest elements; mean over the run's snapshots. Elements spread evenly over their binades give")
    print(f"{blocks:.0f} and {magnitude:.0f}.")
    print(shown.to_string(index=False))
    print(f"\nby part of a binade: {path}")


def ptq(arguments: list[str]) -> None:
    """Evaluate a trained run with its weights in other formats, beside runs that were trained in them."""
    from altgrad.diagnostics import evaluated
    from altgrad.diagnostics.what_if import GRANULARITIES, SPLITS

    parser = _parser("ptq", "cell", "finished runs, such as bf16-adamw-0-1; seeds are averaged", nargs="+")
    parser.add_argument("--granularity", choices=list(GRANULARITIES), default="tensor", help="what has a scale")
    parser.add_argument(
        "--formats", nargs="+", type=_format_name, default=SPLITS, metavar="FORMAT", help="default: all of 8 bits"
    )
    parser.add_argument("--weights-only", action="store_true", help="quantize no inputs of layers")
    parser.add_argument("--out", type=Path, help="CSV file to write the losses to")
    settings = parser.parse_args(arguments)
    rows = []
    finished = [_finished(settings.data, key) for key in dict.fromkeys(settings.cell)]
    asked = read_json(settings.data / "grid/index.json").get("params", {})
    compared, metric = Compared.of(asked), asked.get("primary")
    for cell, run in finished:
        after = evaluated.quantized(
            cell, run, settings.data / "tokens", settings.formats, settings.granularity,
            weights_only=settings.weights_only, metric=metric,
        )  # fmt: skip
        trained = evaluated.trained(settings.data, cell, settings.formats, compared.final)
        rows += [
            {"cell": cell.key, "format": name, "after": value, "cost": value - after[evaluated.UNQUANTIZED],
             "trained_so": trained.get(name)} for name, value in after.items()
        ]  # fmt: skip
    unit = f"{compared.title} of test documents, higher is better" if metric else compared.unit
    what = f"{unit}; `after` is quantized after training"
    _show(rows, ["format"], ["after", "cost", "trained_so"], what, settings.out)


def prune(arguments: list[str]) -> None:
    """Evaluate trained runs with the smallest weights of each layer set to zero."""
    from altgrad.diagnostics import evaluated

    parser = _parser("prune", "cell", "finished runs, such as E4M3-adamw-0-1; seeds are averaged", nargs="+")
    parser.add_argument(
        "--shares", nargs="+", type=_share, default=evaluated.SHARES, metavar="SHARE", help="default: 0.1 0.3 0.5 0.7"
    )
    parser.add_argument("--out", type=Path, help="CSV file to write the losses to")
    settings = parser.parse_args(arguments)
    rows = []
    for key in dict.fromkeys(settings.cell):
        cell, run = _finished(settings.data, key)
        after = evaluated.pruned(cell, run, settings.data / "tokens", settings.shares)
        identity = {"cell": key, "format": cell.format, "optimizer": cell.optimizer, "seed": cell.seed}
        rows += [
            identity | {"share": share, "after": loss, "cost": loss - after[0.0]} for share, loss in after.items()
        ]
    what = "nats per token; this share of each layer's weights zero"
    _show(rows, ["format", "optimizer", "share"], ["after", "cost"], what, settings.out)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "explain": explain,
    "what-if": what_if,
    "mantissas": mantissas,
    "ptq": ptq,
    "prune": prune,
}


def _parser(command: str, argument: str, meaning: str, **options: Any) -> ArgumentParser:
    parser = ArgumentParser(f"{called('diagnostics')} {command}", description=COMMANDS[command].__doc__)
    parser.add_argument(argument, metavar=argument.upper(), help=meaning, **options)
    parser.add_argument("--data", type=Path, default=Path("data"), help="the pipeline's folder (default %(default)s)")
    return parser


def _show(rows: list[dict[str, Any]], groups: list[str], values: list[str], what: str, out: Path | None) -> None:
    """Print the mean of ``values`` over cells, and write all ``rows`` to ``out``."""
    import pandas as pd

    table = pd.DataFrame(rows)
    if out:
        _write(table, out)
    count = table["cell"].nunique()
    print(f"Mean of {count} cell{'' if count == 1 else 's'}, {what}:")
    mean = table.groupby(groups, sort=False)[values].mean()
    print(mean.to_string(float_format="{:.4f}".format, na_rep="-"))


def _write(table: pd.DataFrame, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table.round(6).to_csv(path, index=False, lineterminator="\n")


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise ArgumentTypeError(f"a share is a number above 0 and at most 1, not {text!r}")
    return share


def _format_name(name: str) -> str:
    try:
        return get_format(name).name
    except UnknownFormatError as error:
        raise ArgumentTypeError(str(error)) from None


def _finished(data: Path, key: str) -> tuple[Cell, Path]:
    """Return the cell ``key`` and its run's folder, and set torch's threads to the number that it trained with.

    Raises :class:`UserError` if there is no such cell or it is not finished.
    """
    path, run = data / "grid" / f"{key}.json", data / "runs" / key
    if not path.is_file():
        known = [file.stem for file in (data / "grid").glob("*.json") if file.stem != "index"]
        raise UserError(f"{data}/grid has no cell {key!r}{did_you_mean(key, known) if known else '; run `dvc repro`'}")
    if not (run / "metrics.json").is_file():
        raise UserError(f"{key} is not finished; run `dvc repro` to train it")
    import torch

    cell = Cell.read(path)
    torch.set_num_threads(cell.model.threads)  # so losses have the run's bits, and small products wait for no thread
    return cell, run


if __name__ == "__main__":
    run_stage(main)
