"""Which runs are seeds of one thing, and whether two things were compared fairly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from fednet.config import WHERE
from fednet.errors import ConfigError
from fednet.plain import JsonDict
from fednet.report.read import Run

# What does not change what a run computes, or changes with every run.
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


LONG = 48  # characters: a longer label gives way to the name of the group's first run


@dataclass(frozen=True)
class Group:
    """Runs that differ in the seed only. `label` says what sets them apart from the other
    groups.
    """

    label: str
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> list[int]:
        return [r.seed for r in self.runs]


def group(runs: Iterable[Run], labels: Sequence[str] = ()) -> list[Group]:
    """The runs by everything but the seed, in the order of their first run, each group in order of
    seeds. labels: of the groups, in this order, in place of what sets them apart. Raises
    ConfigError for another number of them.
    """
    found: dict[bytes, list[Run]] = {}
    for run in runs:
        settings = {k: v for k, v in flat(run.config).items() if not _aside(k)}
        found.setdefault(msgspec.json.encode(sorted(settings.items())), []).append(run)
    sets = [tuple(sorted(rs, key=lambda r: (r.seed, r.name))) for rs in found.values()]
    found_labels = list(labels) or _labels([rs[0] for rs in sets])
    if len(found_labels) != len(sets):
        firsts = ", ".join(rs[0].name for rs in sets)
        raise ConfigError(
            f"--label: expected {len(sets)}, one for each group of runs that differ in the seed "
            f"only (their first runs: {firsts}), got {len(found_labels)}."
        )
    return [Group(text, rs) for text, rs in zip(found_labels, sets)]


def flat(config: JsonDict, prefix: str = "") -> JsonDict:
    """{"a": {"b": 1}} as {"a.b": 1}; an empty mapping is a value."""
    out: JsonDict = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[prefix + str(key)] = value
    return out


def _aside(key: str) -> bool:
    return any(key == a or key.startswith(a + ".") for a in ASIDE)


def _labels(firsts: Sequence[Run]) -> list[str]:
    """The algorithm's name, and each other setting in which the groups differ: "fedprox mu=0.1
    alpha=0.3".

    A setting that only one algorithm has (mu) is named where that algorithm itself stands with
    several values.
    """
    configs = [{k: v for k, v in flat(r.config).items() if not _aside(k)} for r in firsts]
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
    # The same label twice: runs that differ in what one of them leaves out.
    for i, text in enumerate(labels):
        taken[text] = taken.get(text, 0) + 1
        if taken[text] > 1:
            labels[i] = f"{text} ({firsts[i].name})"
    return labels


def word(value: object) -> str:
    """A value as a label has it: [topk(0.05), qsgd(8)] as topk(0.05)+qsgd(8)."""
    if isinstance(value, list):
        return "+".join(word(v) for v in value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def pairs(a: Group, b: Group) -> list[tuple[Run, Run]]:
    """Runs of one seed. Of several runs of a seed in a group the first stands."""
    theirs = {r.seed: r for r in reversed(b.runs)}
    mine = {r.seed: r for r in reversed(a.runs)}
    return [(mine[s], theirs[s]) for s in sorted(mine) if s in theirs]


def unpaired(a: Run, b: Run) -> list[str]:
    """What makes two runs of one seed no pair: the partition, the initial weights, the
    participants.
    """
    reasons = []
    if a.partition_sha256 != b.partition_sha256:
        reasons.append("their partitions differ")
    if _initial(a) != _initial(b):
        reasons.append("their initial weights differ")
    theirs = {r.round: r.selected for r in b.rounds}
    apart = [
        r.round
        for r in a.rounds
        if r.round in theirs and sorted(r.selected) != sorted(theirs[r.round])
    ]
    if apart:
        reasons.append(f"their participants differ from round {apart[0]}")
    return reasons


def _initial(run: Run) -> tuple[object, object, object]:
    """What the initial weights are drawn from."""
    return run.config.get("model"), run.config.get("data", {}).get("dataset"), run.seed
