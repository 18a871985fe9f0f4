"""The progress of a run: one live line at a terminal, lines elsewhere, nothing with --quiet."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fednet.errors import complain, nowhere, with_time
from fednet.ids import as_text
from fednet.plain import JsonDict, JsonMapping
from fednet.records import line_parts, mb, percent
from fednet.records.table import OWN

if TYPE_CHECKING:
    from fednet.records import Round

ERASE = "\r\x1b[2K"


class Display:
    """Called by the engine's loop; holds nothing that the run needs. live: whether it draws a line
    on how the run goes on. Only the process that has entered it does, so that there is one.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.live = False
        # Whether a line can be drawn over. A notebook is no terminal: Jupyter claims to be one for
        # `!fednet` in a cell, but keeps every line.
        notebook = "JPY_PARENT_PID" in os.environ
        dumb = os.environ.get("TERM") == "dumb"
        self._redrawn = sys.stdout.isatty() and not notebook and not dumb
        self.round = 0
        self.head = "starting"
        self.waiting: JsonDict = {}
        self.started = time.monotonic()

    def __enter__(self) -> Display:
        self.live = self._redrawn and not self.quiet
        return self

    def __exit__(self, *what: object) -> None:
        self._end_line()

    # -- called by the engine ----------------------------------------------------------------------
    def round_started(self, round: int, rounds: int, cohort: Sequence[int]) -> None:
        self.round = round
        noun = "client" if len(cohort) == 1 else "clients"
        self.head = f"round {round}/{rounds}: {noun} {as_text(cohort)}"
        self.waiting = {}
        self._draw()

    def progress(self, info: JsonMapping) -> None:
        """info: `waiting`, a list of records (client, host, pid, device, phase, step, steps,
        since), and `arrived`, a list of ids.
        """
        self.waiting = dict(info)
        self._draw()

    def round_done(self, record: Round) -> None:
        if record.round == self.round:  # else the next has been opened before
            self.head = f"{self.head.partition(':')[0]} is done"
            self.waiting = {}
        line = round_line(record)
        self.note(line if self.live else with_time(line))

    def note(self, text: str) -> None:
        if not self.quiet:
            # Another process may be drawing its line.
            self._write(f"{ERASE if self._redrawn else ''}{text}\n")
            self._draw()

    def warn(self, text: str) -> None:
        """On stderr, with --quiet too."""
        complain(with_time(text))

    def finished(self, summary: JsonMapping) -> None:
        """The final table."""
        self._end_line()
        rows = summary_rows(summary)
        width = max((len(name) for name, _ in rows), default=0) + 2
        for name, value in rows:
            self.note(f"{name:<{width}}{value}")

    # -- how it looks ------------------------------------------------------------------------------
    def _end_line(self) -> None:
        if self.live:
            self._write(ERASE)
        self.live = False

    def _draw(self) -> None:
        if self.live:
            spent = span(time.monotonic() - self.started)
            line = f"{self.head}  {waiting_for(self.waiting, time.time())}  {spent}".strip()
            self._write(f"{ERASE}{line[: shutil.get_terminal_size().columns - 1]}")

    def _write(self, text: str) -> None:
        """A reader that has gone, such as a closed terminal or a full disk, stops no run."""
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError:
            self.quiet = True
            self.live = False
            nowhere(sys.stdout)


# -- records as text -------------------------------------------------------------------------------
# `clients_sha256` where no client keeps a state.
NOTHING = hashlib.sha256().hexdigest()


def span(seconds: float) -> str:
    """`7s`, `3m05s`, `2h07m`."""
    minutes, rest = divmod(int(seconds), 60)
    if not minutes:
        return f"{rest}s"
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def took(seconds: float) -> str:
    """How long something took, rounded: `10.8 s`, `3m05s`, `2h07m`."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    return span(round(seconds) if round(seconds) < 3600 else 60 * round(seconds / 60))


def label_of_evaluation(name: str, own: str) -> str:
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


def round_line(record: Round) -> str:
    """One line per round: its metrics and costs, and its clients."""
    pieces = [f"round {record.round}"]
    if record.void:
        pieces.append("discarded: too few replies")
    pieces += line_parts(record)
    pieces.append(f"{len(record.completed)} of {len(record.selected)} clients")
    pieces += line_parts(record, costs=True)
    pieces += [f"client {client} dropped ({why})" for client, why in record.dropped.items()]
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
    if loss := summary.get("loss"):
        row("final test loss", f"{loss['final']:.4f}")
        row("best test loss", f"{loss['best']:.4f} in round {loss['best_round']}")
    own = summary.get("own_model") or OWN
    for name, value in dict(summary.get("personal") or {}).items():
        row(label_of_evaluation(name, own), percent(value))
    for name, value in dict(summary.get("held_out") or {}).items():
        row(f"held-out clients: {label_of_evaluation(name, own)}", percent(value))
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
