"""`configs/papers/README.md`: a picture and a line for every table that was run, from the compact
results: whether the paper's order of methods held, did not, or is open.

A pair of methods is decided where at least two seeds of both were run and the mean of their
difference, seed by seed, is outside of its 95 % interval around 0 (Student's t), and no run of
either failed to get to the target that is counted to. Open: no more are
decided than chance decides of so many pairs that do not differ. Else held: no decided pair stands
against the paper's order; not: at least half of them do; else held in part. What full scale decides
goes before what mini scale does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fednet import papers
from fednet.papers.results import ranking, reproduction
from fednet.plain import JsonMapping
from fednet.report import metrics

Row = JsonMapping
HEAD = """\
# The papers' tables, at a glance

Written by `fednet reproduce --results` from `results/`; do not edit. [RESULTS.md](RESULTS.md) has
the tables, [FIELD.md](FIELD.md) what several sources say of the same cells.

A pair of methods is *decided* where two seeds or more were run of both, and their difference, seed
by seed, has a 95 % interval without 0. **Held**: no decided pair stands against the printed order.
**Did not hold**: at least half of them do. **Open**: no numbers are printed, or so few pairs are
decided that chance alone decides as many in more than one table of twenty (of pairs that do not
differ, one in twenty); one seed decides none. Mini scale is a small setting of our own, where only
the order of methods can be compared.
"""


@dataclass(frozen=True, slots=True)
class OrderVerdict:
    """Pairs of methods that the paper prints apart: decided and in its order, decided and against
    it, all that have two seeds or more, and those that have one. without: the paper's own method,
    where it was run with other settings only, and so is in no pair.
    """

    agree: int = 0
    against: int = 0
    pairs: int = 0
    single: int = 0
    without: str = ""

    @property
    def word(self) -> str:
        if self._by_chance():
            return "open"
        if not self.against:
            return "held"
        return "did not hold" if self.against >= self.agree else "held in part"

    def said(self, scale: str, seeds: Sequence[int]) -> str:
        many = f"{len(seeds)} seeds" if len(seeds) > 1 else "one seed"
        if not self.pairs + self.single:
            return f"{scale} scale, {many}: no two printed figures to compare"
        decided = self.agree + self.against
        return (
            f"{scale} scale, {many}: {decided} of {self.pairs or self.single} pairs decided"
            + (f", {self.agree} of them in the printed order" if decided else "")
            + (f", beside {self.single} of one seed" if self.pairs and self.single else "")
            + (f"; {self.without}, run with other settings, is in none" if self.without else "")
        )

    def _by_chance(self) -> bool:
        """Whether so many are decided in over one of twenty tables of pairs that do not differ."""
        most = range(self.agree + self.against, self.pairs + 1)
        return sum(math.comb(self.pairs, k) * 0.05**k * 0.95 ** (self.pairs - k) for k in most) > (
            0.05 + 1e-12
        )


def verdict(rows: Sequence[Row]) -> OrderVerdict:
    """rows: of a table, at one scale. Where its columns have a method each, columns are paired in
    place of methods.
    """
    printed_rows = [r for r in rows if r["in_paper"] == "yes"]
    rows = [r for r in printed_rows if not r["changed"]]
    others = {str(r["method"]) for r in printed_rows} - {str(r["method"]) for r in rows}
    own = next((m for m in others if str(printed_rows[0]["table"]).startswith(f"{m.lower()}/")), "")
    columns = [list(ranking.ranked(m).values()) for m in ranking.grouped(rows).values()]
    if all(len(c) < 2 for c in columns):
        columns = [[runs for c in columns for runs in c]]
    agree = against = pairs = single = 0
    for methods in columns:
        for a, b in itertools.combinations(methods, 2):
            printed = a[0]["paper"], b[0]["paper"]
            if None in printed or printed[0] == printed[1]:
                continue
            leads = _leads(a, b)
            pairs, single = pairs + (len(leads) > 1), single + (len(leads) == 1)
            whole = len(leads) > 1 and not _never(a, b)
            mean, half = metrics.interval(leads) if whole else (0.0, None)
            if half is None or abs(mean) <= half:
                continue
            right = (mean > 0) == (float(printed[0]) > float(printed[1]))
            agree, against = agree + right, against + (not right)
    return OrderVerdict(agree, against, pairs, single, own)


def _leads(a: Sequence[Row], b: Sequence[Row]) -> list[float]:
    """Seed by seed, of the seeds that both have."""
    one, other = (
        {int(r["seed"]): float(r["ours"]) for r in runs if r["ours"] is not None} for runs in (a, b)
    )
    return [one[s] - other[s] for s in sorted(one.keys() & other.keys())]


def _never(a: Sequence[Row], b: Sequence[Row]) -> bool:
    """Whether a run of either never got to the target: the differences of the other seeds alone
    would say nothing of that.
    """
    return any(r["ours"] is None and ranking.targeted(r["measure"]) for r in (*a, *b))


def page(folder: Path) -> str:
    """README.md, from the compact results in `folder`."""
    books = folder / "results"
    parts: list[str] = [HEAD.rstrip()]
    left: list[str] = []
    for paper, title in papers.NAMES.items():
        lines: list[str] = []
        for name in (n for n in papers.with_results() if n.startswith(f"{paper}/")):
            found = list(_line(name, books))
            lines += found
            left += [] if found else [name]
        for text in sorted(books.glob(f"{paper}-*.txt")):
            name = text.stem.replace("-", "/", 1)
            lines.append(
                f"| | [{name}](RESULTS.md#{name.replace('/', '')}): {papers.no_runs()[name]}.<br>"
                f"Measured, without runs.<br>`fednet reproduce {name}` |"
            )
        if lines:
            parts += [f"\n## {title}\n", "| | |", "|---|---|", *lines]
    if left:
        parts += ["\n## Not run here\n", ", ".join(f"`fednet reproduce {n}`" for n in left) + "."]
    return "\n".join(parts).rstrip() + "\n"


def _line(name: str, books: Path) -> Iterator[str]:
    stem = name.replace("/", "-")
    scales = {
        scale: [r for r in reproduction.read_csv(path) if r["status"] == "done"]
        for scale, suffix in (("full", ""), ("mini", "-mini"))
        if (path := books / f"{stem}{suffix}.csv").exists()
    }
    scales = {scale: rows for scale, rows in scales.items() if rows}
    if not scales:
        return
    found = {scale: verdict(rows) for scale, rows in scales.items()}
    word, at = next(((v.word, s) for s, v in found.items() if v.word != "open"), ("open", ""))
    at = f" at {at} scale" if at == "mini" else ""
    said = "; ".join(v.said(s, _seeds(scales[s])) for s, v in found.items())
    shown = books / f"{stem}{'' if 'full' in scales else '-mini'}.svg"
    picture = f'<img src="results/{shown.name}" width="240">' if shown.exists() else ""
    anchor = name.replace("/", "").lower()
    caption = papers.caption(name).replace("|", "\\|")
    commands = "<br>".join(f"`{_command(name, s, rows)}`" for s, rows in scales.items())
    yield (
        f"| {picture} | [{name}](RESULTS.md#{anchor}): {caption}.<br>**{word.capitalize()}**{at}"
        f" ({said}).<br>{commands} |"
    )


def _seeds(rows: Sequence[Row]) -> list[int]:
    return sorted({int(r["seed"]) for r in rows})


def _command(name: str, scale: str, rows: Sequence[Row]) -> str:
    """What runs these again."""
    every = dict.fromkeys(c.dataset for c in papers.cells(name))
    ran = dict.fromkeys(str(r["dataset"]) for r in rows)
    words = ["fednet reproduce", name]
    words += [f"--dataset {next(iter(ran))}"] if len(ran) == 1 < len(every) else []
    words += ["--scale mini"] if scale == "mini" else []
    seeds = ",".join(map(str, _seeds(rows)))
    return " ".join([*words, *([f"--seeds {seeds}"] if seeds != "0" else [])])
