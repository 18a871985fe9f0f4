"""What a client process knows of the rounds of secure aggregation that are under way, in memory
alone: with the process it is gone, and its clients have dropped out.

On disk is only, for each client, the last round in which a vector of its left under masks. Another
process, or this one started anew, has other keys: a second sum with the same vector, over other
clients, would show the difference of the two.
"""

from __future__ import annotations

import threading
from pathlib import Path

from fednet import secagg
from fednet.errors import LeftRound
from fednet.files import read_record, write_record
from fednet.secagg import SecureClient, Terms

LEFT = "masked.json"  # in a client's folder


class Secrets:
    """The secrets, for secure aggregation, of all clients that this process hosts in one run. root:
    the folder of their states. Any thread may call it.
    """

    def __init__(self, root: Path) -> None:
        self._root, self._lock = root, threading.Lock()
        self._machines: dict[int, tuple[int, SecureClient]] = {}

    def machine(self, terms: Terms, round: int, client: int, fresh: bool) -> SecureClient:
        """The client's machine of this round; fresh: made where there is none, and those of earlier
        rounds are forgotten. Raises LeftRound where it is not here.
        """
        with self._lock:
            known, machine = self._machines.get(client, (0, None))
            if machine is not None and known == round:
                return machine
            if not fresh:
                raise LeftRound(
                    f"secure aggregation: client {client}'s keys of round {round} were with "
                    f"another process, or with this one before it was started anew"
                )
            for other in [c for c, (r, _) in self._machines.items() if r < round]:
                del self._machines[other]
            machine = secagg.client(terms, client)
            self._machines[client] = round, machine
            return machine

    def leaves(self, client: int, round: int) -> None:
        """Notes that this client's vector leaves in this round. Raises LeftRound where one did
        before.
        """
        path = self._root / f"client-{client}" / LEFT
        with self._lock:
            last = 0
            if path.exists():
                last = int(read_record(path, "remove the client's folder")["round"])
            if round <= last:
                raise LeftRound(
                    f"secure aggregation: client {client}'s vector left in round {last} already, "
                    f"under other keys; a second time would show it"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            write_record(path, {"round": round}, fsync=True)
