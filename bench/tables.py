"""The tables of a bench, from its results; and one way to show them for each reader: a terminal, a log, a page."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

BEGIN, END = "<!-- bench {} -->", "<!-- end -->"
MOST_FUNCTIONS = 10

Results = dict[str, Any]


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(results: Results) -> list[Table]:
    """Those for which there are numbers, course by course."""
    found = [
        replace(table, title=f"{course['name'][0].upper()}{course['name'][1:]}: {table.title}")
        for course in results["courses"]
        for table in (
            contestants(course),
            rivals(course),
            predictions(course),
            ceilings(course),
            splits(course),
            *functions(course),
        )
    ]
    return [table for table in found if table.rows]


def interval(found: dict[str, float] | None, digits: int = 2) -> str:
    return f"{found['low']:.{digits}f} - {found['high']:.{digits}f}" if found else ""


def value(found: dict[str, float] | None, digits: int = 2) -> str:
    return f"{found['value']:.{digits}f}" if found else ""


def contestants(results: Results) -> Table:
    rows = []
    for row in results["contestants"]:
        loss = f"{row['first_losses'][0]:.4f}" if row["first_losses"] else ""
        off = f"{row['loss_gap']:.0e}" if row["loss_gap"] is not None else ""
        speed = row["tokens_per_s"]
        cores = ""
        if row["step_seconds"]:
            cores = f"{sum(row['cpu_seconds']) / sum(row['step_seconds']):.2f}"
        memory = " ".join(map(str, row["memory_mb"])) or ("out" if row["memory_trouble"] else "")
        rows.append(
            (row["label"], str(row["ranks"]), value(speed, 0), interval(speed, 0), value(row["of_ceiling"]),
             interval(row["of_ceiling"]), cores, loss, off, memory, str(len(row["step_seconds"])))
        )  # fmt: skip
    columns = (
        "contestant", "ranks", "tokens/s", "95 %", "of ceiling", "95 %", "cores used", "first loss", "loss off by",
        "memory, MB a rank", "rounds",
    )  # fmt: skip
    return Table("speed and memory", columns, tuple(rows))


def rivals(results: Results) -> Table:
    labels = {row["name"]: f"{row['label']}, {row['ranks']}" for row in results["contestants"]}
    rows = [
        (labels[row["ours"]], labels[row["theirs"]], value(row["ratio"], 3), interval(row["ratio"], 3),
         "" if row["bar"] is None else f"{row['bar']:.3g}", row["verdict"],
         "" if row["memory"] is None else f"{row['memory']:.2f}",
         "" if row["memory_bar"] is None else f"{row['memory_bar']:.3g}", row["memory_verdict"])
        for row in results["rivals"]
    ]  # fmt: skip
    return Table(
        "plait's speed over its peer's",
        ("plait", "peer", "ratio", "95 %", "bar", "", "memory, of the peer's", "at most", ""),
        tuple(rows),
    )


def predictions(results: Results) -> Table:
    rows = [
        (row["schedule"], f"{1000 * row['predicted']:.0f}", f"{1000 * row['measured']:.0f}", f"{row['ratio']:.3f}",
         row["verdict"])
        for row in results["predictions"]
    ]  # fmt: skip
    columns = ("schedule", "predicted, ms a step", "measured", "ratio", "within 10 %")
    return Table("steps predicted from the times of gpipe in halves", columns, tuple(rows))


def ceilings(results: Results) -> Table:
    rows = [
        (row["name"], *(f"{row[key]:.0f}" for key in ("least", "low_quarter", "middle", "high_quarter", "most")),
         f"{100 * row['share']:.1f} %")
        for row in results["ceilings"]
    ]  # fmt: skip
    columns = ("tokens/s of", "least", "1st quartile", "median", "3rd quartile", "most", "most - least of median")
    return Table("how far the ceiling itself spreads over the rounds", columns, tuple(rows))


def splits(results: Results) -> Table:
    """A row for each rank: where its step goes, in per cent."""
    rows, kinds = [], tuple[str, ...]()
    for one in results.get("profile", ()):
        for rank, parts in enumerate(one["split"]):
            kinds, step = tuple(parts), sum(parts.values())
            shares = (f"{100 * seconds / step:.1f}" for seconds in parts.values())
            rows.append((one["label"], str(rank), f"{1000 * step:.0f}", *shares))
    columns = ("run", "rank", "step, ms", *(f"{kind}, %" for kind in kinds))
    return Table("where a step goes, by plait's own clock", columns, tuple(rows))


def functions(results: Results) -> list[Table]:
    """A table for each run: the functions of rank 0 with most time of their own."""
    columns = ("function", "calls a step", "own ms a step", "with callees")
    found = []
    for one in results.get("profile", ()):
        rows = [
            (row["name"], f"{row['calls']:.1f}", f"{1000 * row['own']:.2f}", f"{1000 * row['with']:.2f}")
            for row in one["functions"][:MOST_FUNCTIONS]
        ]
        found.append(Table(f"functions of rank 0: {one['label']}", columns, tuple(rows)))
    return found


def heading(results: Results) -> str:
    """When, with what, on what."""
    here, turns = results["machine"], results["turns"]
    works = " and ".join(dict.fromkeys(course["work"]["name"] for course in results["courses"]))
    others = f"; others used up to {100 * here['others']:.0f} % of it in a turn" if here.get("others") else ""
    return (
        f"{results['date']}, `{results['command']}`: {works}, {turns['rounds']} rounds of {turns['steps']} steps "
        f"a turn, {results['seconds']:.0f} s in all. {here['cores']} cores ({here['processor']}), "
        f"Python {here['python']}, torch {here['torch']}, transformers {here['transformers']}, "
        f"plait {here['plait']}{others}."
    )


def troubles(results: Results) -> list[str]:
    """A sentence for each contestant that is not compared."""
    rows = [row for course in results["courses"] for row in course["contestants"]]
    absent = [f"{one['label']} took no part: {one['why']}." for one in results["absent"]]
    return (
        absent
        + [f"{row['name']} is not compared: {row['trouble']}." for row in rows if row["trouble"]]
        + [f"{row['name']} has no memory: {row['memory_trouble']}." for row in rows if row["memory_trouble"]]
    )


# --- three readers


def show(results: Results) -> None:
    """rich tables on a terminal, plain lines elsewhere."""
    if not sys.stdout.isatty():
        print(plain(results))
        return
    console = Console(markup=False, emoji=False, highlight=False)
    console.print(heading(results))
    for table in tables(results):
        drawn = RichTable(title=table.title)
        for number, column in enumerate(table.columns):
            drawn.add_column(column, justify="left" if number == 0 else "right")
        for row in table.rows:
            drawn.add_row(*row)
        console.print(drawn)
    for sentence in troubles(results):
        console.print(sentence)


def plain(results: Results) -> str:
    lines = [heading(results)]
    for table in tables(results):
        cells = [table.columns, *table.rows]
        widths = [max(len(row[column]) for row in cells) for column in range(len(table.columns))]
        lines += ["", table.title]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
    return "\n".join([*lines, *troubles(results)])


def markdown(results: Results) -> str:
    lines = [heading(results)]
    for table in tables(results):
        lines += ["", f"**{table.title}**", ""]
        lines += [_line(table.columns), _line("---" for _ in table.columns)]
        lines += [_line(_code(cell) for cell in row) for row in table.rows]
    lines += [f"\n{sentence}" for sentence in troubles(results)]
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _code(cell: str) -> str:
    """A name that a page would read as markup stands as code."""
    return f"`{cell.replace('|', '/')}`" if set(cell) & set("<>|_*{}") else cell


def around(page: Path, group: str) -> tuple[str, str]:
    """What stands before and after a page's place for the tables of a group; a `ValueError` where it marks none."""
    mark = BEGIN.format(group)
    before, begin, rest = page.read_text(encoding="utf-8").partition(mark)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} marks no place for the tables: it needs the lines {mark} and {END}")
    return before, after


def write(page: Path, results: Results, group: str) -> None:
    """Puts the tables of a group in their place on the page."""
    before, after = around(page, group)
    page.write_text(f"{before}{BEGIN.format(group)}\n\n{markdown(results)}\n\n{END}{after}", encoding="utf-8")
