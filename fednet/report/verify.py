"""`fednet verify RUN RUN`: the first round and the first tensor in which two runs differ."""

from __future__ import annotations

from dataclasses import dataclass

from fednet.records import Round
from fednet.report.read import Run


@dataclass(frozen=True)
class Verdict:
    """rounds: how many were compared. same: the model and all clients' states are bit-identical in
    them, and neither run is longer. round, tensor: where the runs first differ; tensor None: not in
    a tensor of the model.
    """

    same: bool
    rounds: int
    round: int | None = None
    tensor: str | None = None
    text: str = ""


def compare(a: Run, b: Run) -> Verdict:
    """Compares the hashes of `rounds.jsonl` round by round."""
    ours, theirs = {r.round: r for r in a.rounds}, {r.round: r for r in b.rounds}
    shared = sorted(ours.keys() & theirs.keys())
    bases = [str(r.summary.get("base_sha256") or "") for r in (a, b)]
    if all(bases) and bases[0] != bases[1]:
        text = (
            f"{a.name} and {b.name} started from different base models: "
            f"base_sha256 {_short(bases[0])} and {_short(bases[1])}."
        )
        return Verdict(False, len(shared), text=text)
    for t in shared:
        found = _difference(ours[t], theirs[t])
        if found:
            tensor, text = found
            return Verdict(
                False,
                len(shared),
                t,
                tensor,
                f"{a.name} and {b.name} differ; the first difference is in round {t}: {text}.",
            )
    if not shared:
        text = f"{a.name} and {b.name} have no finished round in common."
        return Verdict(False, 0, text=text)
    unhashed = [t for t in shared if ours[t].model_sha256 is None or ours[t].clients_sha256 is None]
    if unhashed:
        text = (
            f"round {unhashed[0]} has no model_sha256 or no clients_sha256: "
            "so the runs cannot be compared."
        )
        return Verdict(False, len(shared), unhashed[0], text=text)
    if ours.keys() != theirs.keys():
        longer, more = (a, ours) if len(ours) > len(theirs) else (b, theirs)
        first = min(more.keys() - set(shared))
        text = (
            f"{a.name} and {b.name} are bit-identical in the {len(shared)} rounds of both, but "
            f"only {longer.name} has round {first}."
        )
        return Verdict(False, len(shared), first, text=text)
    text = (
        f"{a.name} and {b.name} are bit-identical in all {len(shared)} rounds (model and client "
        f"states)."
    )
    return Verdict(True, len(shared), text=text)


def _difference(a: Round, b: Round) -> tuple[str | None, str] | None:
    """Returns (tensor, text), in the order in which one difference causes the next."""
    if a.tensor_sha256 and b.tensor_sha256 and a.tensor_sha256 != b.tensor_sha256:
        apart = [n for n in a.tensor_sha256 if b.tensor_sha256.get(n) != a.tensor_sha256[n]]
        apart += [n for n in b.tensor_sha256 if n not in a.tensor_sha256]
        return (
            apart[0],
            f"tensor {apart[0]!r} ({len(apart)} of "
            f"{len(a.tensor_sha256.keys() | b.tensor_sha256.keys())} tensors differ){_why(a, b)}",
        )
    if a.model_sha256 != b.model_sha256:
        bare = not (a.tensor_sha256 and b.tensor_sha256)
        unnamed = " (set record.tensors to see which tensors differ)" if bare else ""
        both = f"model_sha256 {_short(a.model_sha256)} and {_short(b.model_sha256)}"
        return None, f"{both}{unnamed}{_why(a, b)}"
    if a.clients_sha256 != b.clients_sha256:
        return None, f"the models are the same, but the clients' states differ{_why(a, b)}"
    if a.evaluated_sha256 != b.evaluated_sha256:
        return None, "the models are the same, but the evaluated models differ"
    if sorted(a.completed or ()) != sorted(b.completed or ()):
        return None, f"the hashes are the same, but other clients completed{_why(a, b)}"
    return None


def _why(a: Round, b: Round) -> str:
    """Names the clients that differ, as the reason of a difference; "" for none."""
    if (a.restarted or []) != (b.restarted or []):
        which = [x.restarted or [] for x in (a, b)]
        return (
            f"; clients that lost their state were restarted: {which[0]} in the first run, "
            f"{which[1]} in the second"
        )
    if sorted(a.selected or ()) != sorted(b.selected or ()):
        return "; other clients were selected"
    only = [sorted(set(x.completed or ()) - set(y.completed or ())) for x, y in ((a, b), (b, a))]
    if any(only):
        return (
            f"; other clients completed: {only[0]} in the first run only, "
            f"{only[1]} in the second only"
        )
    return ""


def _short(value: str | None) -> str:
    return value[:12] if value else "nothing"
