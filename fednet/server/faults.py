"""Planned faults: `faults:` in a configuration, executed for real.

Which fault strikes which client in which round follows from the configuration alone.
The server sends a client's faults with its task, and the client's process then falls silent, kills
itself or cuts its upload short. The server kills itself at the named points of a round. A fault
that has struck is recorded in events.jsonl, and does not strike again after a resume. `Replay`
repeats who took part in another run.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from fednet import seeds
from fednet.config import Config, FaultKind, ServerPoint
from fednet.errors import ConfigError
from fednet.experiment import selection
from fednet.files import read_lines
from fednet.places import expand_home
from fednet.plain import JsonDict
from fednet.records import reading
from fednet.wire.messages import Fault

POINTS: tuple[str, ...] = get_args(ServerPoint)
KINDS: tuple[str, ...] = get_args(FaultKind)
# As they come in a task.
DROPS = ("drop_before_training", "crash", "drop_before_sending", "drop_during_upload")
LATER = ("delay", "slow")  # cost time only: on the virtual clock they are counted, not waited for
# Where the configuration says nothing.
AMOUNTS = {"crash": 1.0, "delay": 1.0, "slow": 2.0, "drop_during_upload": 0.5}


def drops(faults: Iterable[Fault]) -> str:
    """Returns the fault among these that loses the client's reply; "" if none does."""
    for fault in faults:
        if fault.kind in DROPS:
            return fault.kind
    return ""


def struck(run: Path) -> set[tuple[int, int, str]]:
    """Returns (round, client, kind) of the faults that have struck a run; of the server's the kind
    is `server_crash POINT`.
    """
    faults = reading.events(run, "fault")
    return {(event["round"], event["client"], event["kind"]) for event in faults}


@dataclass(frozen=True)
class Replay:
    """Repeats the rounds of a recorded run: who completed each exchange, and why others did not."""

    rounds: dict[int, JsonDict]

    @classmethod
    def of(cls, config: Config, exchanges: int) -> Replay | None:
        """Reads the record; None if nothing is replayed. exchanges: of a round of this run. Raises
        ConfigError where the record has fewer rounds than this run, or rounds of another kind.
        """
        where = config.faults.replay
        if where is None:
            return None
        folder = expand_home(where, "faults.replay")
        path = folder / "rounds.jsonl"
        try:
            rows = list(read_lines(path))
        except OSError as broken:
            raise ConfigError(
                f"faults.replay: {path}: {broken.strerror}; expected the directory of a run."
            ) from broken
        for event in reading.events(folder, "clients_added"):
            raise ConfigError(
                f"faults.replay: clients joined {where} after round {event['round']}; a run whose "
                f"number of clients changed cannot be replayed."
            )
        if len(rows) < config.rounds:
            raise ConfigError(
                f"faults.replay: {where} has {len(rows)} rounds, this run asks for {config.rounds}."
            )
        mode = config.schedule.mode
        if any((row.get("staleness") is None) != (mode == "sync") for row in rows):
            made = "another schedule" if mode == "sync" else "schedule: sync"
            raise ConfigError(
                f"faults.replay: {where} was made with {made}, this run is to be made with {mode}."
            )
        if mode != "sync":
            return cls({row["round"]: row for row in rows})
        planned = selection.is_planned(config)
        for row in rows[: config.rounds]:
            if planned and row["selected"] != selection.cohort(config, row["round"]):
                raise ConfigError(
                    f"faults.replay: round {row['round']} of {where} asked clients "
                    f"{row['selected']}, this configuration asks "
                    f"{selection.cohort(config, row['round'])}; seed, clients and availability "
                    f"must be the same."
                )
            found = len(row["completed_by_phase"])
            if found > exchanges or (found < exchanges and not row["void"]):
                raise ConfigError(
                    f"faults.replay: in round {row['round']} of {where} the method had exchanges "
                    f"with its clients: {found}; here it has {exchanges}, and who completes one is "
                    f"on record for as many only."
                )
        return cls({row["round"]: row for row in rows})

    def selected_clients(self, round: int) -> list[int]:
        """Returns the clients that were asked."""
        return list(self.rounds[round]["selected"])

    def out(self, round: int, index: int, cohort: Iterable[int]) -> dict[int, str]:
        """Returns the clients of an exchange's cohort that did not complete it, and why."""
        row = self.rounds[round]
        phases = row["completed_by_phase"]
        completed = phases[index] if index < len(phases) else []
        return {
            c: row["dropped"].get(str(c), "not completed") for c in cohort if c not in completed
        }


class Faults:
    """The planned faults of a running server: which fault strikes which client, what has struck
    already, and a replay. A fault strikes a client only in a round in which it has a task.
    """

    def __init__(
        self,
        config: Config,
        struck: set[tuple[int, int, str]],  # before a resume: round, client and kind
        # records a crash of the server in a round, before it happens
        note: Callable[[int, str], None],
        usual: int,  # the exchange in which faults strike that name none
        exchanges: int,  # of a round
    ) -> None:
        self.config = config
        self.replay = Replay.of(config, exchanges)
        self.any_planned = bool(config.faults.random or config.faults.schedule)
        self._usual = usual
        self._struck = struck
        self._note = note
        self._away: dict[tuple[int, int], bool] = {}

    # -- the plan ----------------------------------------------------------------------------------
    def strike(self, round: int, client: int, exchange: int | None = None) -> list[Fault]:
        """Returns the faults of a client, in the order of `KINDS`; of those that lose its reply
        only the earliest. exchange: of the round; None: any.
        """
        if not self.any_planned:
            return []
        found = dict[str, float]()
        if exchange in (None, self._usual):
            for kind in KINDS:
                if kind != "server_crash" and self._is_drawn(kind, round, client):
                    found[kind] = AMOUNTS.get(kind, 0.0)
        for planned in self.config.faults.schedule:
            where = self._usual if planned.exchange is None else planned.exchange
            if (planned.round, planned.client) != (round, client) or exchange not in (None, where):
                continue
            given = {
                "crash": planned.rounds,
                "delay": planned.seconds,
                "slow": planned.factor,
                "drop_during_upload": planned.share,
            }.get(planned.kind)
            found[planned.kind] = float(AMOUNTS.get(planned.kind, 0.0) if given is None else given)
        first = next((kind for kind in DROPS if kind in found), None)
        struck = [kind for kind in KINDS if kind in found and (kind not in DROPS or kind == first)]
        return [Fault(kind, found[kind]) for kind in struck]

    def away(self, round: int, client: int) -> bool:
        """Returns whether the client crashed in an earlier round and is not back yet."""
        if not self.any_planned:
            return False
        if (round, client) not in self._away:
            lasted = [f.rounds or 1 for f in self.config.faults.schedule if f.kind == "crash"]
            self._away[round, client] = any(
                fault.kind == "crash" and before + fault.amount >= round
                for before in range(max(1, round - max([1, *lasted])), round)
                if client in selection.cohort(self.config, before) and not self.away(before, client)
                for fault in self.strike(before, client)
            )
        return self._away[round, client]

    def _is_drawn(self, kind: str, round: int, client: int) -> bool:
        rate = self.config.faults.random.get(kind, 0.0)
        if rate <= 0:
            return False
        rng = seeds.rng(self.config.seed, f"fault/{kind}", round, client)
        return bool(rng.random() < rate)

    # -- what is left of it ------------------------------------------------------------------------
    def out(self, round: int, index: int, cohort: Iterable[int]) -> dict[int, str]:
        """Returns the clients of an exchange's cohort that are not asked, and why. In a replay
        these are also those who would lose their replies by a fault that is planned here.
        """
        replay = self.replay
        if replay is not None and self.config.schedule.mode != "sync":
            return {}  # see `fednet.server.asynchronous`
        found = {} if replay is None else replay.out(round, index, cohort)
        if not self.any_planned:
            return found
        for client in cohort:
            if client in found:
                continue
            lost = drops(self.strike(round, client, index))
            if not index and self.away(round, client):
                found[client] = "away: crash"
            elif lost and (replay is not None or (round, client, lost) in self._struck):
                # Its reply was lost before the resume, and stays lost.
                found[client] = f"lost: {lost}"
        return found

    def of(self, round: int, index: int, client: int) -> list[Fault]:
        """Returns the faults to send with a client's task: those that have not struck yet."""
        if not self.any_planned or self.replay is not None:
            return []
        virtual = self.config.link.clock == "virtual"
        return [
            f
            for f in self.strike(round, client, index)
            if (round, client, f.kind) not in self._struck and not (virtual and f.kind in LATER)
        ]

    def time(self, round: int, index: int, client: int) -> tuple[float, float]:
        """Returns (factor of slowness, seconds of delay), for the virtual clock."""
        found = {f.kind: f.amount for f in self.strike(round, client, index)}
        return found.get("slow", 1.0), found.get("delay", 0.0)

    def crash_server_at(self, point: str, round: int) -> None:
        """Kills the server, at a point of a round (of `POINTS`), where that is planned."""
        kind = f"server_crash {point}"
        if not self.any_planned or (round, -1, kind) in self._struck:
            return
        crashes = [f for f in self.config.faults.schedule if f.kind == "server_crash"]
        points = [str(crash.at) for crash in crashes if crash.round == round]
        if self._is_drawn("server_crash", round, -1):
            rng = seeds.rng(self.config.seed, "fault/point", round)
            points.append(POINTS[int(rng.integers(len(POINTS)))])
        if point in points:
            self._note(round, kind)
            os.kill(os.getpid(), signal.SIGKILL)
