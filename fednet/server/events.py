"""What is written, and shown, of client processes: that they come and go, and what was refused.

Peers can bring about some events at will. Of these so many lines a second are written of each kind
and worker. Refusals are counted by their cause instead: the first is told at once, the next ones
with their number, after a minute, then after twice as long each time, up to an hour.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from fednet.errors import with_time
from fednet.ids import as_text
from fednet.plain import JsonDict, JsonMapping

log = logging.getLogger(__name__)

# Keys, addresses, connections and causes that are counted: those that were seen last.
PEERS = 4096
# Events that a peer can bring about at will; of those, lines of one kind and worker.
LOUD = ("refused", "late", "doubled", "failed", "data_changed", "asked_to_join", "explained")
LOUD_A_SECOND = 1
LOUD_AT_ONCE = 10
# Refusals of one cause: seconds between the first two lines, and the most between two.
REFUSED_S = 60.0
REFUSED_MOST_S = 3600.0
# Lines on refusals of all causes: so many a minute, and at once.
CAUSES_A_MINUTE = 10
CAUSES_AT_ONCE = 20
SHOWN = 20  # causes that are shown in the run's status

# What is shown of a site, by event; `why`, if the event has it.
SITES = {
    "joined": "joined, getting ready",
    "rejoined": "connected again",
    "ready": "ready",
    "away": "",
    "key_ends": "",
    "back": "heard of again",
    "asked_to_join": "asks to join the run",
    "explained": "asked what leaves the site (--explain), and left",
}
# Shown where others start the clients, or of clients that were away.
COMING = ("joined", "ready")


class Rate:
    """Counts messages by who sent them: so many a second, and up to `at_once` saved up."""

    def __init__(self, a_second: float, at_once: float) -> None:
        self._a_second = a_second
        self._at_once = at_once
        self._known: OrderedDict[object, tuple[float, float]] = OrderedDict()  # (left, when)

    def allows(self, who: object, now: float) -> bool:
        """Counts one more message; False where it is one too many."""
        left, then = self._known.pop(who, (self._at_once, now))
        left = min(self._at_once, left + (now - then) * self._a_second)
        allowed = left >= 1
        self._known[who] = (left - 1 if allowed else left), now
        if len(self._known) > PEERS:
            self._known.popitem(last=False)
        return allowed


@dataclass(slots=True)
class Cause:
    """Why peers were refused, and how often."""

    what: str
    reason: str
    who: str
    """The peer, in words."""
    first: float
    """When the first of them was refused, in seconds since 1970."""
    last: float
    """When the last of them was refused, in seconds since 1970."""
    count: int = 0
    told: int = 0
    """How many of them were in lines until now."""
    next: float = 0.0
    """On the monotonic clock, when the next line may be written."""
    pause: float = REFUSED_S
    """How long after that one the following."""


class Events:
    """Writes the run's events. Called by one thread. note(event, fields): writes one. say(text):
    shows a sentence on a site that comes, goes or is refused, until it is set to None.
    external_clients: they are started by others, who want to know that they have come.

    refused: how many were refused since the server started, by what was refused.
    """

    def __init__(
        self,
        note: Callable[[str, JsonDict], None],
        say: Callable[[str], None] | None = None,
        external_clients: bool = False,
    ) -> None:
        self._write = note
        self.say = say
        self._external = external_clients
        self._loud = Rate(LOUD_A_SECOND, LOUD_AT_ONCE)
        self._lines = Rate(CAUSES_A_MINUTE / 60, CAUSES_AT_ONCE)
        self._causes: OrderedDict[tuple[str, str, str], Cause] = OrderedDict()
        self._away: set[int] = set()  # clients of which it was said
        self.refused: Counter[str] = Counter()

    def tell(self, event: str, fields: JsonDict) -> None:
        if event == "refused":
            self.refused[fields["what"]] += 1
            if fields["what"] != "reply":
                self._tell_refused(fields)
                return
        if event in LOUD:
            kind = event, str(fields.get("what", "")), str(fields.get("worker", ""))
            if not self._loud.allows(kind, time.monotonic()):
                return
        self._write(event, fields)
        if event in SITES:
            self._tell_site(event, fields)

    def refusals(self) -> list[JsonDict]:
        """Returns a row for each cause that was seen last, the newest first."""
        return [
            {
                "who": cause.who,
                "what": cause.what,
                "reason": cause.reason,
                "count": cause.count,
                "first": cause.first,
                "last": cause.last,
            }
            for cause in self._newest()
        ]

    def close(self) -> None:
        """Writes the refusals that are in no line yet."""
        for cause in self._newest():
            if cause.count > cause.told:
                self._write_cause(cause, {"what": cause.what, "reason": cause.reason})

    # -- sites -------------------------------------------------------------------------------------
    def _tell_site(self, event: str, fields: JsonMapping) -> None:
        clients = fields["clients"]
        text = f"{subject_of(fields)}: {fields.get('why') or SITES[event]}"
        log.info("%s", text)
        show = self._external or event not in COMING or not self._away.isdisjoint(clients)
        if event == "away":
            self._away.update(clients)
        elif event in ("ready", "back"):
            self._away.difference_update(clients)
        if self.say is not None and show:
            self.say(with_time(text))

    # -- refusals ----------------------------------------------------------------------------------
    def _newest(self) -> list[Cause]:
        return sorted(self._causes.values(), key=lambda cause: -cause.last)[:SHOWN]

    def _tell_refused(self, fields: JsonDict) -> None:
        now = time.monotonic()
        who = refused_peer(fields)
        key = fields["what"], fields["reason"], who
        cause = self._causes.pop(key, None)
        if cause is None:
            cause = Cause(*key, first=time.time(), last=0.0, next=now)
        self._causes[key] = cause
        if len(self._causes) > PEERS:
            self._causes.popitem(last=False)
        cause.count += 1
        cause.last = time.time()
        if now < cause.next or not self._lines.allows("", now):
            return
        cause.next = now + cause.pause
        cause.pause = min(2 * cause.pause, REFUSED_MOST_S)
        self._write_cause(cause, fields)
        if cause.what not in ("join", "connection", "ready"):
            return
        more = f" {cause.count} times" if cause.count > 1 else ""
        text = f"refused {who}{more}: {cause.reason}"
        log.info("%s", text)
        if self.say is not None:
            self.say(with_time(text))

    def _write_cause(self, cause: Cause, fields: JsonDict) -> None:
        self._write("refused", {**fields, "count": cause.count - cause.told})
        cause.told = cause.count


def subject_of(fields: JsonMapping) -> str:
    """Returns whom the fields of an event are about: `client(s) 0-4 on site-a, process 4711`."""
    who = f"client(s) {as_text(fields['clients'])}"
    if fields.get("site"):
        who += f" ({fields['site']})"
    if fields.get("host"):
        who += f" on {fields['host']}"
    if fields.get("pid"):
        who += f", process {fields['pid']}"
    return who


def refused_peer(fields: JsonMapping) -> str:
    """Returns who was refused: its clients and host, the name of its process, or its address,
    without the port and the process id, which are others at each try.
    """
    if fields.get("clients"):
        return subject_of({**fields, "pid": 0})
    if fields.get("host"):
        return f"a client process on {fields['host']}"
    address = str(fields.get("address") or "")
    host, _, port = address.rpartition(":")
    if port.isdecimal() and (":" not in host or host.startswith("[")):
        address = host
    if address and address != "unknown":
        return address
    return str(fields.get("worker") or "a connection")
