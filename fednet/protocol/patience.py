"""How long is waited for a task: deadlines, tasks without progress, and tasks that no worker is
there to take.
"""

from __future__ import annotations

from fednet.protocol.roster import Roster, Worker
from fednet.protocol.rules import CALM, CLAIMS, FLOOR, LEFT, SLOWER
from fednet.protocol.tasks import Tasks
from fednet.protocol.turn import Turn
from fednet.protocol.work import ENDED, WITH_WORKER, Work, WorkStatus


class Patience:
    def __init__(self, turn: Turn, roster: Roster, tasks: Tasks) -> None:
        self._turn, self._roster, self._tasks = turn, roster, tasks
        self._of: dict[int, Work] = {}
        self._leaving: list[Work] = []

    def depart(self) -> None:
        """Drops the tasks of clients that are gone by now: what crossed of them was spent."""
        if self._of is not self._tasks.work:  # a phase was begun: of most, nobody leaves
            self._of = self._tasks.work
            self._leaving = [w for w in self._of.values() if w.job.leaves is not None]
        for w in self._leaving:
            if w.status not in (WorkStatus.ARRIVED, *ENDED) and self._gone(w):
                self._tasks.drop(w, LEFT)

    def _gone(self, w: Work) -> bool:
        leaves = w.job.leaves
        assert leaves is not None
        if leaves.at is not None:
            return self._turn.now >= leaves.at
        if w.up is not None:
            return w.up.cut
        if w.down is None:
            return False
        return w.down.cut or (leaves.down is None and leaves.up == 0 and w.down.whole)

    def expire(self) -> None:
        """Takes back, or drops, what has been waited for long enough."""
        self.depart()
        present, turn, rules = self._roster.present(), self._turn, self._tasks.rules
        # Twice as long each time, so that one that is slow everywhere gets done.
        stuck = {
            w.worker
            for w in self._tasks.open()
            if w.running
            and rules.stalled is not None
            and turn.over(w.moved, rules.stalled * 2**w.losses)
        }
        for name in sorted(stuck):
            worker = self._roster.workers.get(name)
            if worker is not None and worker.gone_at is None:
                self._unstall(worker)
        pace = self._pace()
        for w in self._tasks.open():
            if w.status in WITH_WORKER:
                if w.running and turn.over(w.since, rules.deadline):
                    self._tasks.drop(w, "deadline")
                elif w.running and self._too_slow(w, pace):
                    self._give_up(w)
                elif w.job.lost and w.running and turn.over(w.heard, rules.closed):
                    # Planned: the worker lives on, for its other clients.
                    self._tasks.drop(w, f"lost: {w.job.lost}")
            elif w.status is WorkStatus.WAITING and w.job.client not in present:
                missed = self._roster.missed(w.job.client, w.since, rules.join, turn.now)
                if missed:
                    self._tasks.drop(w, missed)

    def _pace(self) -> float | None:
        """Seconds a unit of cost that the slowest task took, once half of them are done."""
        work = self._tasks.work.values()
        done = [w for w in work if w.status is WorkStatus.DONE]
        if not done or 2 * len(done) < len(work):
            return None
        return max(w.took / max(1, w.job.cost) for w in done)

    def _too_slow(self, w: Work, pace: float | None) -> bool:
        """Whether a task takes longer than what is only said of its progress can excuse."""
        stalled, now = self._tasks.rules.stalled, self._turn.now
        if stalled is None:
            return False
        if w.up is not None:
            due = now - max(w.moved, w.asked) if w.up.ahead else 0.0
            return w.waited + due > CALM * stalled + w.up.got * w.up.part / FLOOR
        most = CLAIMS * stalled
        if pace is not None:
            most = min(most, max(CALM * stalled, SLOWER * pace * max(1, w.job.cost)))
        return now - w.since > most

    def _give_up(self, w: Work) -> None:
        """The worker said for too long that it was at it."""
        worker = self._roster.workers[w.worker]
        worker.stalled, w.sat_by = True, worker.name
        self._turn.note("stalled", worker=worker.name, clients=[w.job.client])
        if len(self._roster.hosts(w.job.client)) > 1:
            self._turn.call_off(worker.conn or b"", self._tasks.key(w))
            self._tasks.take_back(w, "stalled", lost=True)
        else:
            self._tasks.drop(
                w, "stalled: its worker said that it went on, for longer than is believed"
            )

    def _unstall(self, worker: Worker) -> None:
        """A worker that is heard of and makes no progress may be one that takes tasks to keep them:
        what it has goes to others that host the same clients. Where there is no other it is waited
        for, as long as `deadline` lets it.
        """
        worker.stalled = True
        given = [
            w for w in self._tasks.held_by(worker) if len(self._roster.hosts(w.job.client)) > 1
        ]
        for w in given:
            w.sat_by = worker.name
            self._turn.call_off(worker.conn or b"", self._tasks.key(w))
            self._tasks.take_back(w, "stalled", lost=True)
        if given:
            clients = sorted(w.job.client for w in given)
            self._turn.note("stalled", worker=worker.name, clients=clients)

    def waiting(self, offset: float) -> list[dict[str, object]]:
        """A row for each task whose part in the phase is not over. offset: of the clock that
        `since` is to be read on.
        """
        rows: list[dict[str, object]] = []
        rules, here = self._tasks.rules, self._roster.present()
        deadline = rules.deadline
        for w in self._tasks.open():
            worker = self._roster.workers.get(w.worker)
            # Handed to nobody yet: those who host it are at other tasks, or none is there.
            doing = ("queued" if w.job.client in here else w.status.value, 0, 0)
            if worker is not None:
                queued = ("queued" if not w.running else w.status.value, 0, 0)
                doing = worker.doing.get(w.job.client, queued)
            # Its deadline begins once its worker is free for it.
            left = deadline
            if deadline is not None and w.running:
                left = deadline - (self._turn.now - w.since)
            if w.status is WorkStatus.WAITING and w.job.client not in here:
                until = self._roster.waits_until(w.job.client, w.since, rules.join)
                left = None if until is None else until - self._turn.now
            rows.append(
                {
                    "client": w.job.client,
                    "host": worker.host if worker else "",
                    "pid": worker.pid if worker else 0,
                    "device": worker.device if worker else "",
                    "phase": doing[0] if w.status is not WorkStatus.ARRIVING else "uploading",
                    "step": doing[1],
                    "steps": doing[2],
                    "since": w.since + offset,
                    "deadline_s": left,
                }
            )
        return rows
