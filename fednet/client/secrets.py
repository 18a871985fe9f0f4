"""The secrets of a process's clients in the current rounds of secure aggregation. They are only in
memory: when the process ends they are gone, and its clients have dropped out.

Another process, or this one started again, has other keys; the site's account on disk says what has
left before (`books.Masked`).
"""

from __future__ import annotations

import threading

from fednet import secagg
from fednet.client.books import Masked
from fednet.errors import LeftRound
from fednet.secagg import SecureClient, Terms


class Secrets:
    """The secrets of all clients that this process hosts in one run. Any thread may call it.
    account: of what left this site; configuration: the digest of the run's.
    """

    def __init__(self, account: Masked, configuration: str) -> None:
        self._account = account
        self._configuration = configuration
        self._lock = threading.Lock()
        self._machines: dict[int, tuple[int, SecureClient]] = {}

    def machine(self, terms: Terms, round_number: int, client: int, fresh: bool) -> SecureClient:
        """Returns the client's machine of this round. fresh: makes it if there is none, and forgets
        those of earlier rounds; else raises LeftRound if it is not here.
        """
        with self._lock:
            known, machine = self._machines.get(client, (0, None))
            if machine is not None and known == round_number:
                return machine
            if not fresh:
                raise LeftRound(
                    f"secure aggregation: client {client}'s keys of round {round_number} were with "
                    f"another process, or with this one before it was started again"
                )
            for other in [c for c, (r, _) in self._machines.items() if r < round_number]:
                del self._machines[other]
            machine = secagg.client(terms, client)
            self._machines[client] = round_number, machine
            return machine

    def leaves(self, client: int, round_number: int, vector: bytes) -> None:
        """Writes down that this client's vector leaves in this round. Raises LeftRound if one did
        before.
        """
        self._account.leaves(client, self._configuration, round_number, vector)
