"""Records as text, for the display."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from fednet.plain import JsonMapping
from fednet.records import line_parts, mb, percent
from fednet.records.table import OWN

if TYPE_CHECKING:
    from fednet.records.rows import Row

NOTHING = hashlib.sha256().hexdigest()
"""`clients_sha256` where no client keeps a state."""


def span(seconds: float) -> str:
    """`7s`, `3m05s`, `2h07m`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    return (
        f"{whole // 60}m{whole % 60:02d}s"
        if whole < 3600
        else f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    )


def took(seconds: float) -> str:
    """How long something took, rounded: `10.8 s`, `3m05s`, `2h07m`."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    return span(round(seconds) if round(seconds) < 3600 else 60 * round(seconds / 60))


def evaluated(name: str, own: str) -> str:
    """Returns the label of an accuracy on the clients, by its name in `EVALUATED_MODELS`. own: what
    the clients' own models are, `personal` or `local`.
    """
    return {
        "global": "global on clients' tests",
        "personal": f"{own} on clients' tests",
        "balanced": f"{own} on balanced tests",
        "finetuned": "fine-tuned on clients' tests",
        "finetuned_balanced": "fine-tuned on balanced tests",
    }[name]


def round_line(record: Row) -> str:
    """One line per round: its metrics and costs, and its clients."""
    pieces = [f"round {record.get('round', '?')}"]
    if record.get("void"):
        pieces.append("discarded: too few replies")
    pieces += line_parts(record)
    if "completed" in record and "selected" in record:
        pieces.append(f"{len(record['completed'])} of {len(record['selected'])} clients")
    pieces += line_parts(record, costs=True)
    for client, reason in dict(record.get("dropped") or {}).items():
        pieces.append(f"client {client} dropped ({reason})")
    return "  ".join(pieces)


def waiting_for(info: JsonMapping, now: float) -> str:
    """The clients that the round waits for: `waits for client 3 on b (train, step 7 of 20, 4s)`."""
    waiting = list(info.get("waiting") or ())
    pieces = []
    arrived = list(info.get("arrived") or ())
    if arrived or waiting:
        pieces.append(f"{len(arrived)} of {len(arrived) + len(waiting)} replies")
    if waiting:
        # The client that has worked longest.
        first = min(
            waiting, key=lambda w: (w.get("phase") == "queued", w.get("since") or float("inf"))
        )
        at = [str(first["phase"])] if first.get("phase") is not None else []
        if first.get("steps"):
            at.append(f"step {first['step']} of {first['steps']}")
        if first.get("since") is not None:
            at.append(span(max(0.0, now - first["since"])))
        host = f" on {first['host']}" if first.get("host") else ""
        more = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
        where = f" ({', '.join(at)})" if at else ""
        pieces.append(f"waits for client {first.get('client', '?')}{host}{where}{more}")
    return ", ".join(pieces)


def summary_rows(summary: JsonMapping) -> list[tuple[str, str]]:
    """The rows of the final table, without what the run did not measure."""
    rows: list[tuple[str, str]] = []

    def row(name: str, value: object) -> None:
        if value is not None:
            rows.append((name, str(value)))

    row("run", summary.get("dir") or summary.get("name"))
    row("algorithm", summary.get("algorithm"))
    row("rounds", summary.get("rounds"))
    row("stopped", summary.get("stopped"))
    accuracy = summary.get("accuracy") or {}
    at = f" in round {accuracy['best_round']}" if accuracy.get("best_round") is not None else ""
    for name, key, more in (
        ("final global accuracy", "final", ""),
        ("best global accuracy", "best", at),
        (f"global, mean of the last {accuracy.get('last10_of', 10)}", "last10", ""),
    ):
        if accuracy.get(key) is not None:
            row(name, percent(accuracy[key]) + more)
    own = summary.get("own_model") or OWN
    for name, value in dict(summary.get("personal") or {}).items():
        row(evaluated(name, own), percent(value))
    for name, value in dict(summary.get("held_out") or {}).items():
        row(f"held-out clients: {evaluated(name, own)}", percent(value))
    for name, value in dict(summary.get("metrics") or {}).items():
        row(f"final global {name}", f"{value:.4f}")
    for name, value in dict((summary.get("client_metrics") or {}).get("personal") or {}).items():
        row(f"{own} {name} on clients' tests", f"{value:.4f}")
    judged = dict(summary.get("judged") or {})
    if judged.get("never_took_part"):
        taken = dict(summary.get("personal_of_participants") or {}).get("personal")
        row(f"{own}, only clients that trained", None if taken is None else percent(taken))
        row("never trained", f"{judged['never_took_part']} of the clients evaluated")
    if judged and judged["clients"] < judged["of"]:
        found = f"{judged['clients']} of {judged['of']}; the others were absent or not sampled"
        row("clients evaluated", f"{found} (evaluate.most)")
    sent = summary.get("bytes") or {}
    for way in ("down", "up"):
        if way in sent:
            row(f"sent {way}", mb(sent[way]))
    for name, key in (("virtual time", "seconds_virtual"), ("wall-clock", "seconds")):
        if summary.get(key) is not None:
            row(name, took(summary[key]))
    row("model_sha256", summary.get("model_sha256"))
    kept = summary.get("clients_sha256")
    row("clients_sha256", None if kept == NOTHING else kept)
    return rows
