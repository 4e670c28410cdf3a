"""The report's tables. Each takes the study or the comparison and returns rows of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from altgrad.formats import SCALE_FORMATS, Format
from altgrad.reporting import optimizer_roles as roles
from altgrad.reporting.compare import Comparison
from altgrad.reporting.document import Column, Table, words
from altgrad.reporting.fairness import Met
from altgrad.reporting.load import DIVERGED, MISSING, Study, every_rule
from altgrad.reporting.select import memory
from altgrad.reporting.wording import NONE, change, interval, joined, number, shown, significant, whole

ROLES, SPLITS = ("weight", "input", "grad"), ("train", "val", "test")
SPECIALS_IN_WORDS = {
    "finite": "every code is a number",
    "fn": "all-ones magnitude is NaN",
    "ieee": "top exponent is Inf and NaN",
    "fnuz": "only 0x80 is NaN, no −0",
    "p3109": "0x80 is NaN, top code is ±Inf",
}


def results_table(study: Study, comparison: Comparison) -> Table | None:
    """Format x optimizer at its best learning rate: seeds, loss, paired difference to the baseline format."""
    rates, measure = len(study.lr_scales) > 1, study.measure
    paired, kept = not comparison.best["difference"].isna().all(), memory(study, comparison)
    columns = [words(measure.entry), words("optimizer"), *[Column(measure.delta), words("95 % CI")] * paired,
               Column(f"{measure.noun} ± sd"), words("seeds"), *[Column("peak lr")] * rates,
               *[Column("perplexity")] * measure.in_nats,
               *[Column("bytes"), Column("ms")] * bool(len(kept))]  # fmt: skip
    rows = [([
        f"**{row.format}**", row.optimizer, *[change(row.difference), interval(row.difference)] * paired,
        number(row.primary, 4) + (f" ± {number(row.primary_sd, 4)}" if shown(row.primary_sd) else ""),
        _seeds(row), *[f"{row.peak_lr:.3g}"] * rates, *[number(row.perplexity, 2)] * measure.in_nats,
        *[number(kept[name].get((row.format, row.optimizer)), 2) for name in kept if len(kept)],
    ], comparison.behind(row.format, row.optimizer)) for row in comparison.best.itertuples()]  # fmt: skip
    base = str(study.baseline)
    plain = [f"`{arm}`" for arm in study.optimizers if paired and roles.is_plain_in(study, base, arm)]
    baseline = f" {measure.delta}: minus `{base}` with the same optimizer, over shared seeds"
    baseline += f"; none under {joined(plain)}, whose runs there follow no format." if plain else "."
    costs = " bytes: of a parameter in training; ms: a step's median time." if len(kept) else ""
    return Table.of(columns, rows, "Means over completed seeds." + (baseline if paired else "") + costs)


def _seeds(row: Any) -> str:
    lost = [f"{getattr(row, status)} {status}" for status in (DIVERGED, MISSING) if getattr(row, status)]
    return f"{row.completed} of {row.planned}" + (f" ({', '.join(lost)})" if lost else "")


def fairness_table(conditions: Mapping[str, Met]) -> Table:
    """The conditions of a fair comparison."""
    rows = [[name, f"**{met}**", reason] for name, (met, reason) in conditions.items()]
    return Table([words("condition"), words("met"), words("because")], rows)


def formats_table(study: Study) -> Table | None:
    """A row per format that the grid quantizes to, derived from its defining fields."""
    formats: dict[str, Format] = {}
    used = set()
    for cell in study.resolved.values():
        formats |= {name: Format(**fields) for name, fields in cell["formats"].items() if name not in formats}
        used |= {
            (spec["format"], role) for rule in every_rule(cell) for role in ROLES
            if (spec := rule[role]) is not None and not spec.get("virtual")
        }  # fmt: skip
    if not formats:
        return None
    columns = [
        words("format"), words("E/M"), Column("bias"), Column("largest"), Column("min normal"),
        Column("min subnormal"), Column("binades"), Column("worst rounding"), Column("values"),
        words("top codes"), words("used for"),
    ]  # fmt: skip
    rows = [[
        f"**{fmt.name}**", f"{fmt.exponent_bits}/{fmt.mantissa_bits}", number(fmt.bias, 0),
        significant(fmt.max, 6), significant(fmt.min_normal, 5), significant(fmt.min_subnormal, 5),
        number(fmt.binades, 1), NONE if fmt.half_step is None else f"{100 * fmt.half_step:.3g} %",
        whole(len(fmt.values)), SPECIALS_IN_WORDS[fmt.specials],
        joined([role for role in ROLES if (fmt.name, role) in used]),
    ] for fmt in sorted(formats.values(), key=lambda fmt: (fmt.bits, fmt.exponent_bits, fmt.name))]  # fmt: skip
    note = (
        "Before scaling. Worst rounding: largest relative error of a normal value, 2^-(M+1). Binades: log2 of the "
        "largest over the smallest positive value."
    )
    return Table(columns, rows, note)


def recipe_table(study: Study) -> Table | None:
    """The quantization rules of the first entry of each recipe in the grid, and of every one that changes."""
    first: dict[str, dict[str, Any]] = {}
    for cell in study.resolved.values():
        entry = cell["format"]
        alone = cell.get("schedule") or entry in study.params.get("recipes", ())
        if every_rule(cell):
            first.setdefault(entry if alone else entry.rpartition(".")[0], cell)
    if not first:
        return None
    heads = ("layers", "weight", "input", "incoming gradient", "through rounding", "output", "product by")
    rows = []
    for cell in first.values():
        own = f"{cell['format']}: " if len(first) > 1 else ""
        recipes = [(own, cell["rules"]), *((f"{s['recipe']}: ", s["rules"]) for s in cell.get("schedule", []))]
        for name, rule in ((name, rule) for name, rules in recipes for rule in rules):
            by = f"torchao, {rule['torchao']}" if rule.get("torchao") else rule.get("backend", "emulated")
            by += f", after a Hadamard transform of {rule['hadamard']}" if rule.get("hadamard") else ""
            share = f", the last {100 * rule['last']:g} %" if rule.get("last", 1) < 1 else ""
            quantized = [_operand(rule[role]) for role in ROLES]
            rows.append([f"{name}`{rule['layers']}`{share}", *quantized, rule["gradient"], rule["accumulate"], by])
    resolved = joined([f"`{cell['key']}`" for cell in first.values()])
    note = f"As resolved for {resolved}; the last matching rule wins. Everything else stays in the compute dtype."
    return Table([words(head) for head in heads], rows, note)


def _operand(spec: dict[str, Any] | None) -> str:
    if spec is None:
        return "not quantized"
    of_group = {"block": f"block of {spec['block']}", "tile": f"tile of {spec['block']} x {spec['block']}"}
    per = of_group.get(spec["granularity"], spec["granularity"])
    per += "" if spec["scale"] in SCALE_FORMATS else " under a float32 one per tensor"
    rounded = f", {spec['rounding']} rounding" if spec.get("rounding", "nearest") != "nearest" else ""
    rounded += ", the better of two scales (4/6)" if spec.get("scale_rounding") == "4/6" else ""
    seen = " (the arm sees it, no product does)" if spec.get("virtual") else ""
    rule = f" by {spec['scale_rounding']}" if spec["scale"] == "E8M0" else ""
    return f"{spec['format']}, {spec['scaling']} scaling, {spec['scale']} scale{rule} per {per}{rounded}{seen}"


def changes_table(study: Study) -> Table | None:
    """What each recipe that changes during a run changes to, and in which runs it did."""
    rows = []
    for entry in study.formats:
        keys = study.cells.index[study.cells["format"] == entry]
        runs = [study.switches[key] for key in keys if key in study.switches]
        for place, switch in enumerate(study.entry(entry).get("schedule", []), 1):
            steps = sorted(made["step"] for run in runs for made in run if made["place"] == place)
            waits = {name: limit for name, limit in (switch["when"] or {}).items() if limit}
            due = [f"{name} > {limit:g}" if limit is not True else name for name, limit in waits.items()]
            due = due or [f"after {100 * switch['after']:g} % of the steps"]
            seen = " to ".join(whole(step) for step in dict.fromkeys([*steps[:1], *steps[-1:]])) or NONE
            rows.append([entry, switch["recipe"], " or ".join(due), f"{len(steps)} of {len(runs)}", seen])
    if not rows:
        return None
    columns = [words("recipe"), words("changes to"), words("when"), Column("runs"), Column("first step in it")]
    return Table(columns, rows, "Weights and optimizer state go on; overflow is what instrumented passes see.")


def machine_table(study: Study, revision: str | None) -> Table:
    """Where the numbers come from: machine, versions, revision."""
    fields = ("device", "machine", "devices", "threads", "compiled")
    seen: dict[str, list[str]] = {}
    for timing in study.timing.values():
        for name, value in [*((field, str(timing[field])) for field in fields), *timing["versions"].items()]:
            seen.setdefault(name, []).append(value)
    rows = [[name, joined(list(dict.fromkeys(values)))] for name, values in seen.items()]
    rows.append(["git revision", f"`{revision}`" if revision else "not a git checkout"])
    return Table([words("what"), words("value")], rows)


def corpus_table(study: Study) -> Table:
    """The sizes of the splits."""
    units = ("documents", "characters", "tokens")
    splits = study.corpus["splits"]
    rows = [[name, *(whole(splits[name][unit]) for unit in units)] for name in SPLITS if name in splits]
    note = f"Corpus `{study.corpus['corpus']}`, vocabulary {whole(study.corpus['vocab_size'])}."
    return Table([words("split"), *(Column(unit) for unit in units)], rows, note)
