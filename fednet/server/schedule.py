"""Who is asked when, and whose reply is in time. Events and the time go in; nothing here sends or
waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Cohort:
    """One exchange of a round. It closes when `first` of its clients have replied, or else when the
    tasks of all are over. This is the only place that decides who is in time, on any clock.

    training: clients whose tasks are under way. replied: who was in time, in the order of the
    replies. dropped: by client, why it was not. at: the second of the last event that counted; once
    it is closed, that at which it did.
    """

    training: set[int]
    first: int | None = None
    replied: list[int] = field(default_factory=list)
    dropped: dict[int, str] = field(default_factory=dict)
    at: float = 0.0

    @property
    def closed(self) -> bool:
        return not self.training

    def on(self, at: float, client: int, reason: str = "") -> None:
        """A client's task is over at this second, which is not before that of the last event.
        reason: why it has no reply. After the close nothing changes.
        """
        if client not in self.training:
            return
        self.at = at
        self.training.remove(client)
        if reason:
            self.dropped[client] = reason
            return
        self.replied.append(client)
        if len(self.replied) == self.first:
            late = f"not among the first {self.first}"
            self.dropped |= dict.fromkeys(sorted(self.training), late)
            self.training.clear()

    @classmethod
    def of(cls, ends: Mapping[int, tuple[float, str]], first: int | None) -> Cohort:
        """The closed exchange of clients whose tasks ended so: by client the second, and why
        without a reply.
        """
        cohort = cls(set(ends), first)
        for client in in_order(ends):
            at, reason = ends[client]
            cohort.on(at, client, reason)
        return cohort


def in_order(ends: Mapping[int, tuple[float, str]]) -> Iterable[int]:
    """Clients in the order in which their tasks ended. Of several at one second first those who
    have no reply, then the smaller ids.
    """

    def when(client: int) -> tuple[float, bool, int]:
        at, reason = ends[client]
        return at, not reason, client

    return sorted(ends, key=when)
