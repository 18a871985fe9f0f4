"""`fednet verify`: the first round and tensor in which two runs differ, and the bytes counted."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fednet.records import Round
from fednet.report.read import Run


class Comparison(NamedTuple):
    """same: the model and all clients' states are bit-identical in all rounds, and neither run is
    longer.
    """

    same: bool
    text: str


def names(a: Run, b: Run) -> tuple[str, str]:
    """Returns what tells two runs apart: their names, after as many folders as differ."""
    one = a.dir.absolute()
    other = b.dir.absolute()
    taken = 1
    if one != other:
        while one.parts[-taken:] == other.parts[-taken:]:
            taken += 1
    return str(Path(*one.parts[-taken:])), str(Path(*other.parts[-taken:]))


def compare(a: Run, b: Run) -> Comparison:
    """Compares the hashes of `rounds.jsonl` round by round."""
    first_name, second_name = names(a, b)
    ours = {r.round: r for r in a.rounds}
    theirs = {r.round: r for r in b.rounds}
    shared = sorted(ours.keys() & theirs.keys())
    both = f"{first_name} and {second_name}"
    bases = [str(r.summary.get("base_sha256") or "") for r in (a, b)]
    if all(bases) and bases[0] != bases[1]:
        return Comparison(
            False,
            f"{both} started from different base models: "
            f"base_sha256 {_short(bases[0])} and {_short(bases[1])}.",
        )
    for t in shared:
        if found := _difference(ours[t], theirs[t]):
            first = f"the first difference is in round {t}: {found}"
            return Comparison(False, f"{both} differ; {first}.")
    if not shared:
        return Comparison(False, f"{both} have no finished round in common.")
    for t in shared:
        if ours[t].model_sha256 is None or ours[t].clients_sha256 is None:
            return Comparison(
                False,
                f"round {t} has no model_sha256 or no clients_sha256: so the runs cannot be "
                f"compared.",
            )
    if ours.keys() != theirs.keys():
        longer = second_name
        more = theirs
        if len(ours) > len(theirs):
            longer = first_name
            more = ours
        return Comparison(
            False,
            f"{both} are bit-identical in the {len(shared)} rounds of both, but only {longer} "
            f"has round {min(more.keys() - set(shared))}.",
        )
    return Comparison(
        True, f"{both} are bit-identical in all {len(shared)} rounds (model and client states)."
    )


def kernel_counts(run: Run, name: str) -> str:
    """Says what the operating system counted on the server's connections, and what the run recorded
    of them; "" if nothing was counted, as in one process. name: what the run is called.
    """
    counts = [event for event in run.events if event.type == "kernel"]
    if not counts:
        return ""
    sent, received, down, up = (
        sum(event.details[key] for event in counts)
        for key in ("sent", "received", "booked_down", "booked_up")
    )
    recorded = "as many as are recorded"
    if (sent, received) != (down, up):
        recorded = f"recorded are {down:,} and {up:,}"
    uncounted = sum(event.type == "started" for event in run.events) - len(counts)
    killed = f" ({uncounted} killed before it was counted)" if uncounted > 0 else ""
    return (
        f"{name}: the operating system counted {sent:,} bytes sent and {received:,} received "
        f"by the server{killed}, {recorded}."
    )


def _difference(a: Round, b: Round) -> str:
    """Says in what two rounds differ, in the order in which one difference causes the next; "" for
    nothing.
    """
    one = a.tensor_sha256
    other = b.tensor_sha256
    if one and other and one != other:
        names = [*one, *(n for n in other if n not in one)]
        apart = [n for n in names if one.get(n) != other.get(n)]
        differ = f"({len(apart)} of {len(names)} tensors differ)"
        return f"tensor {apart[0]!r} {differ}{_why(a, b)}"
    if a.model_sha256 != b.model_sha256:
        unnamed = "" if one and other else " (set record.tensors to see which tensors differ)"
        both = f"model_sha256 {_short(a.model_sha256)} and {_short(b.model_sha256)}"
        return f"{both}{unnamed}{_why(a, b)}"
    if a.clients_sha256 != b.clients_sha256:
        return f"the models are the same, but the clients' states differ{_why(a, b)}"
    if a.evaluated_sha256 != b.evaluated_sha256:
        return "the models are the same, but the evaluated models differ"
    if sorted(a.completed) != sorted(b.completed):
        return f"the hashes are the same, but other clients completed{_why(a, b)}"
    return ""


def _why(a: Round, b: Round) -> str:
    """Names the clients that differ, as the reason of a difference; "" for none."""
    if (a.restarted or []) != (b.restarted or []):
        which = [x.restarted or [] for x in (a, b)]
        return (
            f"; clients that lost their state were restarted: {which[0]} in the first run, "
            f"{which[1]} in the second"
        )
    if sorted(a.selected) != sorted(b.selected):
        return "; other clients were selected"
    only = [sorted(set(x.completed) - set(y.completed)) for x, y in ((a, b), (b, a))]
    if any(only):
        return (
            f"; other clients completed: {only[0]} in the first run only, "
            f"{only[1]} in the second only"
        )
    return ""


def _short(value: str | None) -> str:
    return value[:12] if value else "nothing"
