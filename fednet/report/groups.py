"""Which runs differ in the seed only, whether two of them are comparable, and their settings in
words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from fednet.config import WHERE, flat
from fednet.errors import ConfigError
from fednet.records import Metric, metric
from fednet.report import costs
from fednet.report.read import Run

# Keys that do not change what a run computes, or that change with every run.
ASIDE = (
    "name",
    "seed",
    "load",
    "track",
    "report",
    "checkpoint",
    *WHERE,
    "security",
    "faults.replay",
    "extends",
)


LONG = 48  # characters: instead of a longer label, the name of the group's first run
SHOWN = 3  # values in which runs differ, in a line about all of them


@dataclass(frozen=True)
class Group:
    """Runs that differ in the seed only. label: in what they differ from the other groups."""

    label: str
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> list[int]:
        return [r.seed for r in self.runs]

    @property
    def clock(self) -> str:
        """A key of `costs.CLOCKS`."""
        return costs.seconds_key(self.runs[0])


def group(runs: Iterable[Run], labels: Sequence[str] = ()) -> list[Group]:
    """Groups the runs by everything except the seed, in the order of their first runs; each group
    is in the order of seeds. labels: of the groups, instead of their own. Raises ConfigError for
    another number of labels.
    """
    found: dict[bytes, list[Run]] = {}
    for run in runs:
        found.setdefault(msgspec.json.encode(sorted(flat(run.config, ASIDE).items())), []).append(
            run
        )
    sets = [tuple(sorted(rs, key=lambda r: (r.seed, r.name))) for rs in found.values()]
    found_labels = list(labels) or _labels([rs[0] for rs in sets])
    if len(found_labels) != len(sets):
        firsts = ", ".join(rs[0].name for rs in sets)
        raise ConfigError(
            f"--label: expected {len(sets)}, one for each group of runs that differ in the seed "
            f"only (their first runs: {firsts}), got {len(found_labels)}."
        )
    return [Group(text, rs) for text, rs in zip(found_labels, sets)]


def _labels(firsts: Sequence[Run]) -> list[str]:
    """Returns the algorithm's name, and each other setting in which the groups differ: "fedprox
    mu=0.1 alpha=0.3". A setting of one algorithm (mu) is named only if groups of this algorithm
    differ in it.
    """
    configs = [flat(run.config, ASIDE) for run in firsts]
    labels = []
    for run, mine in zip(firsts, configs):
        same = [c for c in configs if c.get("algorithm.name") == mine.get("algorithm.name")]
        words = [run.algorithm]
        for key, value in sorted(mine.items()):
            rivals = same if key.startswith("algorithm.") else configs
            if key != "algorithm.name" and any(c.get(key) != value for c in rivals):
                words.append(f"{key.rsplit('.', 1)[-1]}={word(value)}")
        text = " ".join(words)
        labels.append(text if len(text) <= LONG else run.name)
    taken: dict[str, int] = {}
    # Two groups have the same label if they differ in a key that one of them leaves out.
    for i, text in enumerate(labels):
        taken[text] = taken.get(text, 0) + 1
        if taken[text] > 1:
            labels[i] = f"{text} ({firsts[i].name})"
    return labels


def word(value: object) -> str:
    """Returns a value as a label has it: [topk(0.05), qsgd(8)] as topk(0.05)+qsgd(8)."""
    if isinstance(value, list):
        return "+".join(word(v) for v in value) or "none"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def pairs(a: Group, b: Group) -> list[tuple[Run, Run]]:
    """Pairs of runs with the same seed. Of several runs with one seed in a group, the first."""
    theirs = {r.seed: r for r in reversed(b.runs)}
    mine = {r.seed: r for r in reversed(a.runs)}
    return [(mine[s], theirs[s]) for s in sorted(mine) if s in theirs]


def differences_in_pair(a: Run, b: Run) -> list[str]:
    """In what two runs of one seed differ that should be the same in a pair."""
    reasons = []
    if a.partition_sha256 != b.partition_sha256:
        reasons.append("data partitions")
    models = [(r.config.get("model"), r.config.get("data", {}).get("dataset")) for r in (a, b)]
    if models[0] != models[1]:
        reasons.append("initial weights")
    theirs = {r.round: r.selected for r in b.rounds}
    apart = [
        r.round
        for r in a.rounds
        if r.round in theirs and sorted(r.selected) != sorted(theirs[r.round])
    ]
    if apart:
        reasons.append(f"participants from round {apart[0]} on")
    return reasons


def clocks(groups: Sequence[Group]) -> list[str]:
    """Returns the clocks by which these runs measure time: keys of `costs.CLOCKS`."""
    return sorted({g.clock for g in groups})


def comparable_costs(groups: Sequence[Group]) -> list[str]:
    """Returns the names of `costs.COSTS`, without seconds if the runs measure them by different
    clocks.
    """
    return [x for x in costs.COSTS if x != "seconds" or len(clocks(groups)) == 1]


def metric_of(groups: Sequence[Group], y: str) -> Metric:
    """Raises KeyError if no run has that metric."""
    return metric(y, (row for g in groups for run in g.runs for row in run.rounds))


def metric_label(groups: Sequence[Group], y: str) -> str:
    """Returns the label of a metric, which names the model whose accuracy it is, in each of these
    runs.
    """
    owns = sorted({r.own_model for g in groups for r in g.runs})
    return metric_of(groups, y).full_label(" or ".join(owns))


# -- settings in words -----------------------------------------------------------------------------
def setting(runs: Sequence[Run]) -> str:
    """Returns the experiment in a line: "digits, dirichlet alpha=0.3, 10 clients, participation
    0.5, lenet5, 1 local epoch". A word in which runs differ becomes all its values, SHOWN of them
    at most.
    """
    words = []
    for place in zip(*(_setting(r) for r in runs)):
        each = [word or "none" for word in dict.fromkeys(place)]
        if each != ["none"]:
            more = [f"{len(each) - SHOWN} others"] if len(each) > SHOWN else []
            words.append(" / ".join([*each[:SHOWN], *more]))
    return ", ".join(words)


def _setting(run: Run) -> list[str]:
    """Returns the words of a run's setting, the same number of them for each run; empty where one
    does not apply.
    """
    c = run.config
    data = c.get("data", {})
    train = c.get("train", {})
    if c.get("clients_per_round"):
        cohort = f"{c['clients_per_round']} clients per round"
    else:
        cohort = f"participation {c.get('participation')}"
    if train.get("steps"):
        count = train["steps"]
        noun = "local step"
    else:
        count = train.get("epochs", 1)
        noun = "local epoch"
    partition = data.get("partition", {})
    division = [str(partition.get("scheme") or "")]
    for key in ("alpha", "per_client"):
        if partition.get(key) is not None:
            division.append(f"{key}={word(partition[key])}")
    if data.get("dataset") == "site":
        division = ["each site's own data"]
    return [
        str(data.get("dataset") or ""),
        " ".join(division).strip(),
        f"{c.get('clients')} clients",
        cohort,
        str(c.get("model", {}).get("name") or ""),
        f"{count} {noun}{'' if count == 1 else 's'}",
        f"learning rate {word(train['lr'])}" if train.get("lr") else "",
    ]
