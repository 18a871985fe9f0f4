"""Which method is ahead of which, in a paper and in our runs: order, leads by seed, and which pairs
of methods, or other differences that a claim is about, differ significantly.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fednet.papers.rendering import deviation, group_by_column, is_cost_to_target, mean
from fednet.papers.results import unrun
from fednet.plain import JsonMapping
from fednet.report import metrics

Row = JsonMapping
NEAR = 1.0  # points, which one seed does not tell apart
LESS_IS_BETTER = (
    "class_spread",
    "seconds_per_round",
    "best_round",
    "flat_after_round",
    "steady_after_round",
    "final_train_loss",
    "emd",
)


def less(measure: object) -> bool:
    """Whether less of it is better."""
    return measure in LESS_IS_BETTER or is_cost_to_target(measure)


def standing(runs: Sequence[JsonMapping]) -> float | None:
    """Our figure of a method, for its place among the others: the mean, or where some seeds never
    got to the target the median with those as infinite; the mean of the others would put it before
    a method that always gets there.
    """
    done = [r for r in runs if r["status"] == "done"]
    never = any(r["ours"] is None and is_cost_to_target(r["measure"]) for r in done)
    return (
        statistics.median(math.inf if r["ours"] is None else float(r["ours"]) for r in done)
        if never
        else mean(done, "ours")
    )


def plain(method: str) -> str:
    """The method's name without the settings that an earlier search chose: "FedCM [lr 1]"."""
    return method.partition(" [")[0]


def ranked(
    methods: Mapping[str, Sequence[JsonMapping]],
) -> dict[str, Sequence[JsonMapping]]:
    """Each method once: at the table's own values where it was run at these too, else as its search
    chose.
    """
    return {m: runs for m, runs in methods.items() if plain(m) == m or plain(m) not in methods}


def both(methods: Mapping[str, Sequence[JsonMapping]]) -> dict[str, tuple[float, float | None]]:
    """The paper's figure and ours, by method, where it prints one and nothing was changed."""
    return {
        method: (float(runs[0]["paper"]), standing(runs))
        for method, runs in ranked(methods).items()
        if runs[0]["paper"] is not None and not runs[0]["changed"]
    }


def sign(methods: Mapping[str, Sequence[JsonMapping]]) -> int:
    """-1 where less is better."""
    return -1 if less(next(iter(methods.values()))[0]["measure"]) else 1


def order(
    methods: Mapping[str, Sequence[JsonMapping]],
) -> tuple[int, int, bool | None] | None:
    """(pairs in the paper's order, pairs, whether ours has the same first): over the methods with
    both figures; None for fewer than two. A pair that the paper prints as equal is left out. The
    last is None where the paper's first was not run.
    """
    found = both(methods).values()
    ran = [(paper, ours) for paper, ours in found if ours is not None]
    pairs = [
        (a, b)
        for a, b in itertools.combinations(ran, 2)
        if a[0] != b[0] and not a[1] == b[1] == math.inf
    ]
    if not pairs:
        return None
    agree = sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs)
    better = sign(methods)
    best = max(better * paper for paper, _ in found)
    if all(better * paper != best for paper, _ in ran):
        return agree, len(pairs), None
    first, _ = max(ran, key=lambda pair: better * pair[1])
    return agree, len(pairs), better * first == best


def paired(methods: Mapping[str, Sequence[JsonMapping]]) -> str:
    """What the table's own method is ahead of each other one, seed by seed: "FedDC less FedAvg
    +3.10 ± 0.42, ... (3 seeds)". The methods share partition, initial weights and participants
    within a seed, so that this says more than the spread of either. Empty for fewer than two seeds
    of both, and for what is not an accuracy.
    """
    found: dict[str, dict[int, float]] = {
        m: {
            int(r["seed"]): float(r["ours"])
            for r in runs
            if r["status"] == "done" and r["ours"] is not None
        }
        for m, runs in methods.items()
        if "accuracy" in str(runs[0]["measure"])
    }
    own = own_method([runs[0] for runs in methods.values()])
    parts = []
    for method, values in found.items():
        seeds = sorted(values.keys() & found.get(own or "", {}).keys())
        if own is None or method == own or len(seeds) < 2:
            continue
        leads = [{"lead": found[own][s] - values[s]} for s in seeds]
        parts.append(
            f"less {method} {mean(leads, 'lead'):+.2f} ± {deviation(leads, 'lead'):.2f} "
            f"({len(seeds)})"
        )
    return (
        f"{own}'s lead seed by seed (mean ± standard deviation, seeds): {', '.join(parts)}"
        if parts
        else ""
    )


def near(methods: Mapping[str, Sequence[JsonMapping]]) -> str:
    """How many pairs of accuracies are too close here to say much."""
    found = [
        (paper, ours)
        for method, (paper, ours) in both(methods).items()
        if ours is not None and str(methods[method][0]["measure"]).endswith("accuracy")
    ]
    pairs = itertools.combinations(found, 2)
    near = sum(a[0] != b[0] and abs(a[1] - b[1]) < NEAR for a, b in pairs)
    return f" ({near} pair{'s' if near > 1 else ''} within {NEAR:g} point here)" if near else ""


def first(methods: Mapping[str, Sequence[JsonMapping]]) -> str:
    """Who is best in the paper and who is here, and of how many methods."""
    better = sign(methods)
    found = both(methods)
    printed = {m: better * paper for m, (paper, _) in found.items()}
    ours = {m: better * v for m, (_, v) in found.items() if v is not None}
    theirs = ", ".join(m for m, v in printed.items() if v == max(printed.values()))
    seeds = {frozenset(str(r["seed"]) for r in methods[m] if r["status"] == "done") for m in ours}
    of = f", of the {len(ours)} methods run of {len(printed)}" if len(ours) < len(printed) else ""
    unlike = " (not all over the same seeds)" if len(seeds) > 1 else ""
    best = max(ours, key=lambda m: ours[m])
    return f"best in the paper: {theirs}; best here: {best}{of}{unlike}"


def notes(rows: Sequence[Row]) -> Iterator[str]:
    """Lines below a table: searched settings, leads by seed, and how far our order agrees with the
    paper's.
    """
    if found_by_search := searched(rows):
        yield (
            f"Settings chosen by validation accuracy among the points that the file -chosen.json "
            f"of this table has: {found_by_search}."
        )
    for column, methods in group_by_column(rows).items():
        if leads := paired(methods):
            yield f"{setting(column)}: {leads}."
    for column, methods in group_by_column([r for r in rows if r["scale"] != "mini"]).items():
        found = order(methods)
        if found is not None:
            yield (
                f"{setting(column)}: {found[0]} of {found[1]} pairs of methods stand in the "
                f"paper's order{near(methods)}; {first(methods)}."
            )


def searched(rows: Sequence[Row]) -> str:
    """The settings that an earlier search chose, by setting and method: "FedProx alpha=0.2:
    train.lr 0.1, algorithm.mu 0.01; ..."; "" without a search. Where seeds differ, each is named.
    """
    chosen: dict[str, dict[str, list[str]]] = {}
    for r in rows:
        if unrun(r):
            continue
        cell = " ".join(
            str(r[k]) for k in ("dataset", "variant", "heterogeneity", "method") if r[k]
        )
        values = json.loads(str(r.get("hyperparameters") or "{}"))
        point = ", ".join(f"{k} {v}" for k, v in values.items())
        chosen.setdefault(cell, {}).setdefault(point, []).append(str(r["seed"]))
    lines = []
    for cell, seeds in chosen.items():
        if not any(seeds):
            continue
        if len(seeds) == 1:
            text = next(iter(seeds))
        else:
            text = "; ".join(
                f"{point or 'not searched'} (seed {','.join(of)})" for point, of in seeds.items()
            )
        lines.append(f"{cell}: {text}")
    return "; ".join(lines)


def setting(column: Sequence[str]) -> str:
    return " ".join(part for part in column if part)


# -- significant differences -----------------------------------------------------------------------
# A difference is significant where it was measured with at least two seeds and its 95 % interval
# (Student's t) over the seeds excludes 0.
@dataclass(frozen=True, slots=True)
class Counts:
    """Pairs of methods that the paper prints apart, or other differences that a claim is about:
    significant as printed, significant against it, all with two seeds or more, and those with one.
    """

    agree: int = 0
    against: int = 0
    pairs: int = 0
    single: int = 0

    @property
    def word(self) -> str:
        """The verdict; README.md explains it."""
        # Whether so many are significant in over one of twenty tables of pairs that do not differ.
        most = range(self.agree + self.against, self.pairs + 1)
        chance = (math.comb(self.pairs, k) * 0.05**k * 0.95 ** (self.pairs - k) for k in most)
        if sum(chance) > 0.05 + 1e-12:
            return "inconclusive"
        if self.against >= self.agree:
            return "not confirmed"
        return "confirmed" if self.agree == self.pairs else "partly confirmed"

    def said(self, what: str) -> str:
        """Returns "5 of 10 pairs, 2 against". what: of which kind the differences are, plural."""
        if not self.pairs:
            return f"one seed of {self.single} {what}" if self.single else f"no {what} to compare"
        text = f"{self.agree} of {self.pairs} {what}"
        if self.against:
            text += f", {self.against} against"
        if self.single:
            text += f", {self.single} with one seed"
        return text


def counted(rows: Sequence[Row]) -> tuple[Counts, Counts]:
    """Returns the pairs of the paper's own method with a baseline, and those of two baselines; all
    pairs are the former where the paper has no method of its own. rows: of a table, at one scale.
    Where its columns have a method each, columns are paired in place of methods.
    """
    rows = [r for r in rows if r.get("in_paper") != "no"]
    own = own_method(rows)
    rows = [r for r in rows if not r["changed"]]
    columns = [list(ranked(m).values()) for m in group_by_column(rows).values()]
    if all(len(c) < 2 for c in columns):
        columns = [[runs for c in columns for runs in c]]
        own = None
    ours = Counts()
    others = Counts()
    for methods in columns:
        for a, b in itertools.combinations(methods, 2):
            if None in (a[0]["paper"], b[0]["paper"]) or a[0]["paper"] == b[0]["paper"]:
                continue
            as_printed = 1 if float(a[0]["paper"]) > float(b[0]["paper"]) else -1
            # A run that never got to its target: the differences of the other seeds alone would
            # say nothing of that.
            never = any(r["ours"] is None and is_cost_to_target(r["measure"]) for r in (*a, *b))
            leads = differences([(as_printed, a), (-as_printed, b)])
            if own in (None, plain(str(a[0]["method"])), plain(str(b[0]["method"]))):
                ours = add(ours, leads, never)
            else:
                others = add(others, leads, never)
    return ours, others


def own_method(rows: Sequence[Row]) -> str | None:
    """Returns the method that the paper of these rows is about; None where it has none here."""
    names = {str(r["method"]) for r in rows}
    return next((m for m in names if m.lower() == str(rows[0]["table"]).partition("/")[0]), None)


def differences(
    terms: Sequence[tuple[float, Sequence[Row]]], measure: str = "ours"
) -> dict[int, float]:
    """Returns by seed the sum of factor times the measure of a method's row, for the seeds that all
    methods have.
    """
    found = [
        (factor, {int(r["seed"]): float(r[measure]) for r in rows if r.get(measure) is not None})
        for factor, rows in terms
    ]
    seeds = set.intersection(*(set(values) for _, values in found))
    return {s: math.fsum(factor * values[s] for factor, values in found) for s in sorted(seeds)}


def add(counts: Counts, leads: Mapping[int, float], never: bool = False) -> Counts:
    """Counts a difference, given by seed as the paper's claim has it: positive is as printed."""
    if len(leads) < 2:
        return replace(counts, single=counts.single + len(leads))
    counts = replace(counts, pairs=counts.pairs + 1)
    middle, half = metrics.interval(list(leads.values()))
    if never or half is None or abs(middle) <= half:
        return counts
    if middle > 0:
        return replace(counts, agree=counts.agree + 1)
    return replace(counts, against=counts.against + 1)


# -- claims of other kinds -------------------------------------------------------------------------
def contrasted(
    rows: Sequence[Row], contrasts: Sequence[JsonMapping]
) -> tuple[Counts, list[str], list[Row]]:
    """Returns how many of a claim's contrasts the runs show; what each comes to, as mean and
    standard deviation over seeds; and the rows that it was computed from. claims.yaml explains a
    contrast.
    """
    counts = Counts()
    texts = list[str]()
    used = list[Row]()
    for contrast in contrasts:
        measure = str(contrast.get("measure", "ours"))
        found = []
        for setting in contrast.get("each", [""]):
            terms = [(1.0, _rows_of(rows, one, setting)) for one in contrast["more"]]
            terms += [(-1.0, _rows_of(rows, one, setting)) for one in contrast["less"]]
            leads = differences(terms, measure)
            if not leads:
                continue
            if not contrast.get("aside"):
                counts = add(counts, leads)
            spread = f" ± {statistics.stdev(leads.values()):.1f}" if len(leads) > 1 else ""
            found.append(f"{statistics.fmean(leads.values()):+.1f}{spread}")
            used += [r for _, own in terms for r in own if int(r["seed"]) in leads]
        if found:
            texts.append(f"{contrast['what']} {', '.join(found)}")
    return counts, texts, used


def _rows_of(rows: Sequence[Row], which: Sequence[str], setting: str) -> list[Row]:
    """Returns the rows of a method whose setting has these words. which: the method, and words."""
    method, *words = which
    wanted = set(" ".join([*words, setting]).split())
    return [
        r
        for r in rows
        if r["method"] == method
        and not r["changed"]
        and wanted <= set(f"{r['dataset']} {r['variant'] or ''} {r['heterogeneity']}".split())
    ]
