"""The report's tables of results, conditions and settings, and how a result stands in a table."""

from collections.abc import Mapping
from typing import Any

from altgrad.config.tasks import ON_TEST, TITLES
from altgrad.formats import SCALE_FORMATS, FloatFormat, Format, from_definition
from altgrad.reporting import optimizer_roles as roles
from altgrad.reporting.compare import Comparison, at_best, memory
from altgrad.reporting.fairness import Met
from altgrad.reporting.load import COMPLETED, DIVERGED, MISSING, Study, every_rule
from altgrad.reporting.markdown import (
    NONE,
    Block,
    Column,
    Table,
    integer,
    listed,
    number,
    plural,
    shown,
    signed,
    significant,
    words,
)
from altgrad.reporting.statistics import IDENTICAL, INCONCLUSIVE, LEVEL, UNTESTED, Difference, Result

ROLES, SPLITS = ("weight", "input", "grad"), ("train", "val", "test")
SPECIALS_IN_WORDS = {
    "finite": "every code is a number",
    "fn": "all-ones magnitude is NaN",
    "ieee": "top exponent is Inf and NaN",
    "fnuz": "only 0x80 is NaN, no −0",
    "p3109": "0x80 is NaN, top code is ±Inf",
}


def _place(fmt: Format) -> tuple[int, int, str]:
    return fmt.bits, fmt.exponent_bits if isinstance(fmt, FloatFormat) else fmt.bits, fmt.name


def _of_bits(fmt: Format) -> list[str]:
    if not isinstance(fmt, FloatFormat):
        return [NONE, NONE]
    return [f"{fmt.exponent_bits}/{fmt.mantissa_bits}", number(fmt.bias, 0)]


def heads(delta: str) -> list[Column]:
    """Return the columns for `cells`; ``delta`` is the head of the first."""
    return [Column(delta), words("result"), Column("p"), words("95 % CI"), Column("n")]


def cells(result: Result) -> list[str]:
    """Return a result as the cells of a table: Δ, outcome, p, interval and n."""
    return [
        change(result.difference), outcome(result),
        NONE if result.outcome in (*UNTESTED, IDENTICAL) else p_value(result.adjusted), interval(result.difference),
        str(result.difference.n),
    ]  # fmt: skip


def change(difference: Difference | None) -> str:
    """Return a mean difference with its sign, ``identical`` if it is zero in every seed, a dash if it is not known."""
    if difference is None:
        return NONE
    return IDENTICAL if difference.is_zero else signed(difference.mean, 4)


def interval(difference: Difference | None) -> str:
    """Return the unadjusted 95 % interval of a difference as ``[low, high]``, or a dash for none."""
    if difference is None or not shown(half := difference.half_width):
        return NONE
    return f"[{signed(difference.mean - half, 4)}, {signed(difference.mean + half, 4)}]"


def p_value(p: float | None) -> str:
    """Return ``p`` with two significant digits, or more if that would be 0.05; below 0.0001 as ``< 0.0001``."""
    if not shown(p):
        return NONE
    texts = (f"{p:.{digits}g}" for digits in range(2, 6))
    text = next((text for text in texts if float(text) != LEVEL), f"{p:.2g}")
    return "< 0.0001" if p < 1e-4 else text if p < 0.995 else "1"


def outcome(result: Result) -> str:
    """Return the outcome of a result in words; ``result.visible`` follows an inconclusive one in brackets."""
    text = f"**{result.outcome}**" if result.significant else result.outcome
    text += f" ({number(result.visible, 4)})" if result.outcome == INCONCLUSIVE else ""
    apart = result.outcome not in UNTESTED and result.difference.p_value() <= LEVEL < result.adjusted
    text += f", p alone {p_value(result.difference.p_value())}" if apart else ""
    return f"{text}, exploratory" if result.exploratory else text


def brief(result: Result | None) -> str:
    """Return a result in one cell: Δ, interval and outcome."""
    if result is None or result.outcome == IDENTICAL:
        return NONE if result is None else IDENTICAL
    return f"{change(result.difference)} {interval(result.difference)} {outcome(result)}"


def results_table(study: Study, comparison: Comparison) -> Table | None:
    """Return a row per format and optimizer at its best learning rate: Δ to the baseline format, loss, seeds, costs."""
    rates, metric = len(study.lr_scales) > 1, study.primary
    paired, costs = not comparison.best["difference"].isna().all(), memory(study, comparison)
    columns = [words(metric.entry), words("optimizer"), *[Column(metric.delta), words("95 % CI")] * paired,
               Column(f"{metric.noun} ± sd"), words("seeds"), *[Column("peak lr")] * rates,
               *[Column("perplexity")] * metric.in_nats,
               *[Column("bytes"), Column("ms")] * bool(len(costs))]  # fmt: skip
    rows = [[
        f"**{row.format}**", row.optimizer, *[change(row.difference), interval(row.difference)] * paired,
        number(row.primary, 4) + (f" ± {number(row.primary_sd, 4)}" if shown(row.primary_sd) else ""),
        _seeds(row), *[f"{row.peak_lr:.3g}"] * rates, *[number(row.perplexity, 2)] * metric.in_nats,
        *[number(costs[name].get((row.format, row.optimizer)), 2) for name in costs if len(costs)],
    ] for row in comparison.best.itertuples()]  # fmt: skip
    base, note = str(study.baseline), "Means over completed seeds."
    if paired:
        note += f" {metric.delta}: minus `{base}` with the same optimizer, over shared seeds"
        plain = [f"`{arm}`" for arm in study.optimizers if roles.is_plain_in(study, base, arm)]
        note += f"; none under {listed(plain)}, whose runs there follow no format." if plain else "."
    note += " bytes: of a parameter in training; ms: a step's median time." if len(costs) else ""
    return Table(columns, rows, note)


def _seeds(row: Any) -> str:
    lost = [f"{getattr(row, status)} {status}" for status in (DIVERGED, MISSING) if getattr(row, status)]
    return f"{row.completed} of {row.planned}" + (f" ({', '.join(lost)})" if lost else "")


def fairness_table(conditions: Mapping[str, Met]) -> Table:
    """Return the conditions of a fair comparison, whether each is met, and why."""
    rows = [[name, f"**{met}**", reason] for name, (met, reason) in conditions.items()]
    return Table([words("condition"), words("met"), words("because")], rows)


def formats_table(study: Study) -> Table | None:
    """Return a row per format that an entry of the grid uses, with its range and precision; None without any."""
    formats: dict[str, Format] = {}
    used = set()
    for cell in study.resolved.values():
        formats |= {name: from_definition(fields) for name, fields in cell["formats"].items() if name not in formats}
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
        f"**{fmt.name}**", *_of_bits(fmt),
        significant(fmt.max, 6), significant(fmt.min_normal, 5), significant(fmt.min_subnormal, 5),
        number(fmt.binades, 1), NONE if fmt.half_step is None else f"{100 * fmt.half_step:.3g} %",
        integer(len(fmt.values)), SPECIALS_IN_WORDS[fmt.specials] if isinstance(fmt, FloatFormat) else "table",
        listed([role for role in ROLES if (fmt.name, role) in used]),
    ] for fmt in sorted(formats.values(), key=_place)]  # fmt: skip
    note = (
        "Before scaling. Worst rounding: largest relative error of a normal value, 2^-(M+1). Binades: log2 of the "
        "largest over the smallest positive value."
    )
    return Table(columns, rows, note)


def recipe_table(study: Study) -> Table | None:
    """Return the quantization rules of the first entry of each recipe in the grid, and of each recipe that changes."""
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
        name = f"{cell['format']}: " if len(first) > 1 else ""
        recipes = [(name, cell["rules"]), *((f"{s['recipe']}: ", s["rules"]) for s in cell.get("schedule", []))]
        for name, rule in ((name, rule) for name, rules in recipes for rule in rules):
            by = f"torchao, {rule['torchao']}" if rule.get("torchao") else rule.get("backend", "emulated")
            by += f", after a Hadamard transform of {rule['hadamard']}" if rule.get("hadamard") else ""
            share = f", the last {100 * rule['last']:g} %" if rule.get("last", 1) < 1 else ""
            quantized = [_operand(rule[role], cell["formats"]) for role in ROLES]
            rows.append([f"{name}`{rule['layers']}`{share}", *quantized, rule["gradient"], rule["accumulate"], by])
    resolved = listed([f"`{cell['key']}`" for cell in first.values()])
    note = f"As resolved for {resolved}; the last matching rule wins. Everything else stays in the compute dtype."
    return Table([words(head) for head in heads], rows, note)


def _operand(spec: dict[str, Any] | None, formats: dict[str, Any]) -> str:
    if spec is None:
        return "not quantized"
    of_group = {"block": f"block of {spec['block']}", "tile": f"tile of {spec['block']} x {spec['block']}"}
    per = of_group.get(spec["granularity"], spec["granularity"])
    per += "" if spec["scale"] in SCALE_FORMATS else " under a float32 one per tensor"
    rounded = f", {spec['rounding']} rounding" if spec.get("rounding", "nearest") != "nearest" else ""
    rounded += ", the better of two scales (4/6)" if spec.get("scale_rounding") == "4/6" else ""
    seen = " (the arm sees it, no product does)" if spec.get("virtual") else ""
    rule = f" by {spec['scale_rounding']}" if spec["scale"] == "E8M0" else ""
    if spec["format"] in formats:
        scale_to = spec.get("scale_to") or from_definition(formats[spec["format"]]).scale_to
        rule += f" to {scale_to}" if scale_to != "max" else ""
    return f"{spec['format']}, {spec['scaling']} scaling, {spec['scale']} scale{rule} per {per}{rounded}{seen}"


def changes_table(study: Study) -> Table | None:
    """Return a row per change of recipe during a run: the new recipe, when it is due, how many runs changed."""
    rows = []
    for entry in study.formats:
        keys = study.cells.index[study.cells["format"] == entry]
        runs = [study.switches[key] for key in keys if key in study.switches]
        for place, switch in enumerate(study.entry(entry).get("schedule", []), 1):
            steps = sorted(made["step"] for run in runs for made in run if made["place"] == place)
            waits = {name: limit for name, limit in (switch["when"] or {}).items() if limit}
            due = [f"{name} > {limit:g}" if limit is not True else name for name, limit in waits.items()]
            due = due or [f"after {100 * switch['after']:g} % of the steps"]
            seen = " to ".join(integer(step) for step in dict.fromkeys([*steps[:1], *steps[-1:]])) or NONE
            rows.append([entry, switch["recipe"], " or ".join(due), f"{len(steps)} of {len(runs)}", seen])
    if not rows:
        return None
    columns = [words("recipe"), words("changes to"), words("when"), Column("runs"), Column("first step in it")]
    return Table(columns, rows, "Weights and optimizer state go on; overflow is what instrumented passes see.")


def machine_table(study: Study, revision: str | None) -> Table:
    """Return a table of the machines, library versions and git revision that the numbers come from."""
    fields = ("device", "machine", "devices", "threads", "compiled")
    seen: dict[str, list[str]] = {}
    for timing in study.timing.values():
        for name, value in [*((field, str(timing[field])) for field in fields), *timing["versions"].items()]:
            seen.setdefault(name, []).append(value)
    rows = [[name, listed(list(dict.fromkeys(values)))] for name, values in seen.items()]
    rows.append(["git revision", f"`{revision}`" if revision else "not a git checkout"])
    return Table([words("what"), words("value")], rows)


def corpus_table(study: Study) -> Table:
    """Return a row per split: its numbers of documents, characters and tokens."""
    units = ("documents", "characters", "tokens")
    splits = study.corpus["splits"]
    rows = [[name, *(integer(splits[name][unit]) for unit in units)] for name in SPLITS if name in splits]
    note = f"Corpus `{study.corpus['corpus']}`, vocabulary {integer(study.corpus['vocab_size'])}."
    return Table([words("split"), *(Column(unit) for unit in units)], rows, note)


def against_words(study: Study, comparison: Comparison) -> str | None:
    """Return a sentence: does the baseline run beat the linear model of words? None if the corpus has no such model."""
    linear = study.corpus.get("baseline")
    run = comparison.best_runs.get((study.baseline or "", comparison.reference or ""))
    if linear is None or run is None or not comparison.runs.completed(run):
        return None
    name = study.params["primary"]
    trained, of_words = comparison.runs.of_run(run).mean(), linear["test"][name]
    does = "beats" if trained > of_words else "**does not beat**"
    return (
        f"`{run[0]}` under `{run[1]}` {does} {linear['name']} on whole documents: {TITLES[name]} {number(trained, 4)} "
        f"against {number(of_words, 4)}."
    )


def metrics_table(study: Study, comparison: Comparison) -> Table | None:
    """Return every metric of every format and optimizer at its best rate, and the linear model's; None without one."""
    linear = study.corpus.get("baseline")
    if linear is None:
        return None
    completed = at_best(study.of_status(COMPLETED), comparison)
    means = completed.groupby(["format", "optimizer"], sort=False)[list(ON_TEST.values())].mean()
    rows = [
        [f"**{entry}**", arm, *(number(value, 4) for value in values)]
        for (entry, arm), values in means.iterrows()
    ]
    rows.append([f"**{linear['name']}**", NONE, *(number(linear["test"][name], 4) for name in TITLES)])
    primary = TITLES[study.params["primary"]]
    note = (
        "Means over completed seeds, of test documents at thresholds chosen on validation documents; all but "
        f"{primary} are exploratory. The last row reads whole documents: {integer(linear['words'])} words, "
        f"C = {linear['C']:g} chosen on validation documents."
    )
    return Table([words("format"), words("optimizer"), *(Column(title) for title in TITLES.values())], rows, note)


def labels_table(study: Study) -> list[Block]:
    """Return a paragraph on how much of a document is read, and a table of labels; no block for text."""
    if "labels" not in study.corpus:
        return []
    labels, cell = study.corpus["labels"], next(iter(study.resolved.values()))
    rows = [[f"`{label['name']}`", *(integer(label[split]) for split in SPLITS)] for label in labels]
    pieces, context = cell["task"]["chunks"], cell["model"]["context"]
    left_out, without = study.corpus["labels_left_out"], study.corpus["unlabelled"]
    read = study.cells["read_frac"].max()
    text = (
        f"A document is read in up to {plural(pieces, 'piece')} of {context} tokens from its start, "
        f"{number(100 * read, 0)} % of all tokens of test documents; what is behind them is cut off. Its score is the "
        f"mean over pieces. {plural(left_out, 'rarer label')} left out; documents without a label: "
        f"{listed([f'{without[split]} in {split}' for split in SPLITS])}."
    )
    return [text, Table([words("label"), *(Column(f"in {split}") for split in SPLITS)], rows, "Documents.")]
