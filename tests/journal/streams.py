"""Events as a server writes them, drawn by hypothesis: tasks leave, replies come and are accepted,
rounds end, connections break, servers are killed and others go on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from fednet.journal.events import (
    Accepted,
    AccountsClosed,
    CountsClosed,
    Crossed,
    Cut,
    Event,
    Forgotten,
    Over,
    Revoked,
    Started,
    Undone,
    Verdict,
)
from fednet.wire.messages import Key, Reply

CONNS = (b"one", b"two")
STEPS = (
    "task",
    "task",
    "reply",
    "reply",
    "accept",
    "accept",
    "verdict",
    "cohort",
    "cohort",
    "part",
    "beat",
    "beats",
    "once",
    "undo",
    "cut",
    "spend",
    "revoke",
    "round",
    "restart",
)


@dataclass
class Server:
    """What a server knows that writes such events. down, up: by task, the connections. settled:
    tasks with a verdict, which this process gives to nobody again.
    """

    events: list[Event] = field(default_factory=lambda: [Started(1)])
    incarnation: int = 1
    round: int = 1
    saved: int | None = None
    taken: dict[str, int] = field(default_factory=dict)
    down: dict[Key, bytes] = field(default_factory=dict)
    up: dict[Key, bytes] = field(default_factory=dict)
    accepted: list[Key] = field(default_factory=list)
    settled: set[Key] = field(default_factory=set)
    numbers: int = 0

    def step(self, kind: str, client: int, n: int) -> None:
        conn = CONNS[client % 2]
        key = Key(self.round, 0, 0, client)
        known = key in self.down or key in self.accepted or key in self.settled
        if kind == "task" and not known:
            self.down[key] = conn
            self.events.append(Crossed([(conn, "down", "task", key)], "task", 5, {"state": n}, n))
        elif kind == "part" and key in self.down:
            name = self.down[key], "up", "pull", key
            self.events.append(Crossed([name], "pull", 3))
        elif kind == "reply" and key in self.down and key not in self.up:
            self.up[key] = conn
            name = conn, "up", "reply", key
            self.events.append(Crossed([name], "reply", 7, {"delta": n}, 2 * n))
        elif kind == "accept" and key in self.up:
            message = Reply(key=key, form=[], size=n)
            self.events.append(Accepted(message, self.down.pop(key), self.up.pop(key)))
            self.accepted.append(key)
        elif kind == "verdict" and self.accepted:
            settled = [self.accepted.pop(n % len(self.accepted))]
            if client == 0:
                settled += self.accepted
                self.accepted = []
            replies = []
            for k, whose in enumerate(settled):
                reason = "left out" if (n + k // 2) % 3 == 0 else ""
                replies.append((whose, reason, n + k if n % 2 else None))
            self.events.append(Verdict(replies))
            self.settled.update(settled)
        elif kind == "cohort":
            for part in ("task", "reply", "accept"):
                for other in range(client + 1):
                    self.step(part, other, n + other * (n % 2))
        elif kind == "beat":
            self.events.append(Crossed([(conn, "up", "beat", 0)], "beat", n, counted=True))
        elif kind == "beats":
            self.events.append(CountsClosed([(c, "up", "beat", 0) for c in CONNS], self.round))
        elif kind in ("once", "undo"):
            self.numbers += 1
            name = conn, "down", "once", self.numbers
            self.events.append(Crossed([name], "cancel", n, key=key))
            self.events.append(Undone(name, n) if kind == "undo" else AccountsClosed([name]))
        elif kind == "cut":
            self.events.append(Cut(conn, "down"))
        elif kind == "spend" and key in self.down:
            name = self.down.pop(key), "down", "task", key
            self.events.append(AccountsClosed([name], reason="deadline"))
            if key in self.up:
                self.events.append(
                    AccountsClosed([(self.up.pop(key), "up", "reply", key)], reason="late")
                )
        elif kind == "revoke" and key in self.accepted:
            self.events.append(Revoked(key))
        elif kind == "round":
            self.events.append(Over(self.round))
            if n % 2:
                self.saved = self.round
            self.events.append(Forgotten(self.round))
            self.round += 1
        elif kind == "restart":
            self.incarnation += 1
            self.down = {}
            self.up = {}
            self.accepted = []
            self.settled = set()
            self.events.append(Started(self.incarnation, self.saved))
            self.round = (self.saved or 0) + 1


@st.composite
def streams(draw: st.DrawFn) -> list[Event]:
    server = Server()
    steps = st.tuples(st.sampled_from(STEPS), st.integers(0, 4), st.integers(1, 50))
    for kind, client, n in draw(st.lists(steps, max_size=60)):
        server.step(kind, client, n)
    return server.events
