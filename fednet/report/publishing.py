"""The table of `fednet compare` for a paper: Markdown, or LaTeX with the package booktabs.

A cell is the mean over seeds, the half-width of its 95 % confidence interval, and in parentheses
the standard deviation over seeds. The best mean of a column is bold. What is missing is said below
the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fednet.report import metrics
from fednet.report.tables import Column, Table, TableCell

NOTE = "Mean over seeds ± half-width of the 95 % confidence interval (standard deviation)."
SPECIAL = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
}


def as_markdown(t: Table) -> str:
    """Returns the table as Markdown has it (GitHub's tables)."""
    rows = _rows(t, lambda text: f"**{text}**", lambda text: text.replace("|", "\\|"))
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    rule = f"| --- |{' ---: |' * (len(rows[0]) - 1)}"
    notes = [f"- {note}" for note in _notes(t)]
    return "\n".join([head, rule, *body, "", *notes]) + "\n"


def as_latex(t: Table) -> str:
    """Returns the table as LaTeX, to be put into a `table` environment."""
    rows = _rows(t, lambda text: rf"\textbf{{{text}}}", _escape)
    head, *body = [f"{' & '.join(row)} \\\\" for row in rows]
    lines = [
        "% \\usepackage{booktabs}",
        f"\\begin{{tabular}}{{l{'r' * (len(rows[0]) - 1)}}}",
        "\\toprule",
        head,
        "\\midrule",
        *body,
        "\\bottomrule",
        "\\end{tabular}",
        "",
        *(f"{_escape(note)}\\\\" for note in _notes(t)),
    ]
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return "".join(SPECIAL.get(c, c) for c in text)


def _rows(t: Table, bold: Callable[[str], str], plain: Callable[[str], str]) -> list[list[str]]:
    rows = [[plain(text) for text in ("method", "seeds", *(c.title for c in t.columns))]]
    best = [best_of(column, [cells[i] for cells in t.cells]) for i, column in enumerate(t.columns)]
    for row, (group, cells) in enumerate(zip(t.groups, t.cells)):
        texts = []
        for cell, winners in zip(cells, best):
            text = plain(cell_text(cell))
            texts.append(bold(text) if row in winners else text)
        rows.append([plain(group.label), str(len(group.runs)), *texts])
    return rows


def cell_text(cell: TableCell) -> str:
    """Returns the mean, half-width and deviation of a cell whose seeds all have a value."""
    if not is_complete(cell):
        return "–"
    mean, half = metrics.interval(cell.got)
    text = f"{mean:.{cell.digits}f}"
    if half is None:
        return text
    spread = metrics.deviation(cell.got)
    return f"{text} ± {half:.{cell.digits}f} ({spread:.{cell.digits}f})"


def is_complete(cell: TableCell) -> bool:
    """Whether each seed has a value."""
    return bool(cell.values) and len(cell.got) == len(cell.values)


def best_of(column: Column, cells: Sequence[TableCell]) -> set[int]:
    """Returns the rows with the best mean, as it is printed, of at least two; none where it is not
    known whether more is better.
    """
    means = {
        row: round(metrics.interval(cell.got)[0], cell.digits)
        for row, cell in enumerate(cells)
        if is_complete(cell)
    }
    if column.lower is None or len(means) < 2:
        return set()
    best = min(means.values()) if column.lower else max(means.values())
    return {row for row, mean in means.items() if mean == best}


def _notes(t: Table) -> list[str]:
    """Returns a sentence for each kind of gap, then the table's own notes."""
    gaps = []
    for group, cells in zip(t.groups, t.cells):
        for column, cell in zip(t.columns, cells):
            if is_complete(cell):
                continue
            if not cell.values:
                gaps.append(f"{group.label}, {column.title}: does not apply, or was not measured.")
            elif not cell.got:
                gaps.append(f"{group.label}, {column.title}: no seed reached it.")
            else:
                found = f"{len(cell.got)} of {len(cell.values)} seeds"
                gaps.append(
                    f"{group.label}, {column.title}: {found} reached it, so there is no mean."
                )
    told = [note for note in t.notes if not note.startswith("Mean over seeds")]
    return [*gaps, NOTE, "Bold: the best mean of a column.", *told]
