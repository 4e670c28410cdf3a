"""The report's table of formats."""

from __future__ import annotations

from altgrad.formats import Format
from altgrad.reporting.document import Column, Table
from altgrad.reporting.load import Study
from altgrad.reporting.tables import words
from altgrad.reporting.wording import NONE, joined, number, significant, whole

SPECIALS_IN_WORDS = {
    "finite": "every code is a number",
    "fn": "all-ones magnitude is NaN",
    "ieee": "top exponent is Inf and NaN",
    "fnuz": "only 0x80 is NaN, no −0",
    "p3109": "0x80 is NaN, top code is ±Inf",
}


def formats_table(study: Study) -> Table | None:
    """A row per format that the grid quantizes to, derived from its defining fields."""
    formats: dict[str, Format] = {}
    used: dict[str, set[str]] = {}
    for cell in study.resolved.values():
        for name, fields in cell["formats"].items():
            formats.setdefault(name, Format(**fields))
        for rule in cell["rules"]:
            for role in ("weight", "input", "grad"):
                if rule[role] is not None and not rule[role].get("virtual"):
                    used.setdefault(rule[role]["format"], set()).add(role)
    if not formats:
        return None
    columns = [
        words("format"), words("E/M"), Column("bias"), Column("largest"), Column("min normal"),
        Column("min subnormal"), Column("binades"), Column("worst rounding"), Column("values"),
        words("top codes"), words("used for"),
    ]  # fmt: skip
    rows = []
    for fmt in sorted(formats.values(), key=lambda fmt: (fmt.bits, fmt.exponent_bits, fmt.name)):
        step = NONE if fmt.half_step is None else f"{100 * fmt.half_step:.3g} %"
        rows.append([
            f"**{fmt.name}**", f"{fmt.exponent_bits}/{fmt.mantissa_bits}", number(fmt.bias, 0),
            significant(fmt.max, 6), significant(fmt.min_normal, 5), significant(fmt.min_subnormal, 5),
            number(fmt.binades, 1), step, whole(len(fmt.values)), SPECIALS_IN_WORDS[fmt.specials],
            joined([role for role in ("weight", "input", "grad") if role in used.get(fmt.name, ())]),
        ])  # fmt: skip
    note = (
        "Before scaling. Worst rounding: largest relative error of a normal value, 2^-(M+1). Binades: log2 of the "
        "largest over the smallest positive value."
    )
    return Table(columns, rows, note)
