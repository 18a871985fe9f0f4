"""What a client process knows of the rounds of secure aggregation that are under way, in memory
alone: with the process it is gone, and its clients have dropped out.

Another process, or this one started anew, has other keys: what left before is in the site's account
on disk (`books.Masked`).
"""

from __future__ import annotations

import threading

from fednet import secagg
from fednet.client.books import Masked
from fednet.errors import LeftRound
from fednet.secagg import SecureClient, Terms


class Secrets:
    """The secrets, for secure aggregation, of all clients that this process hosts in one run.
    account: of what left this site; configuration: digest of the run's. Any thread may call it.
    """

    def __init__(self, account: Masked, configuration: str) -> None:
        self._account, self._configuration = account, configuration
        self._lock = threading.Lock()
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

    def leaves(self, client: int, round: int, vector: bytes) -> None:
        """Notes that this client's vector leaves in this round. Raises LeftRound where one did
        before.
        """
        self._account.leaves(client, self._configuration, round, vector)
