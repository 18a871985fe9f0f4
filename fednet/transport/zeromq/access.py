"""Who may connect to a server with CURVE: its answers to ZAP, rfc.zeromq.org/spec/27, from the
keyring as it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq
import zmq.utils.z85

from fednet.transport.keys import Keyring

_ADDRESS = "inproc://zeromq.zap.01"


class Access:
    """Asked by libzmq about each connection in its handshake. refuse(reason, address): told who was
    turned away.

    Made before the ROUTER is bound: a connection that found no handler would be let in unasked.
    """

    def __init__(
        self, context: zmq.Context[Any], keyring: Keyring, refuse: Callable[[str, str], None]
    ) -> None:
        self._keyring, self._refuse = keyring, refuse
        self._version = keyring.version
        self.socket = context.socket(zmq.REP)
        self.socket.bind(_ADDRESS)

    def guard(self, router: zmq.Socket[bytes]) -> None:
        """No one connects to that socket but through here."""
        router.setsockopt(zmq.ZAP_DOMAIN, b"fednet")
        router.curve_server = 1
        router.curve_secretkey = self._keyring.pair.secret.encode()

    def answer(self) -> None:
        """All that have asked. A connection waits for this in its handshake."""
        while True:
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            _version, request_id, _domain, address, _identity, mechanism, *credentials = request
            user = (
                zmq.utils.z85.encode(credentials[0])
                if mechanism == b"CURVE" and credentials
                else b""
            )
            if user and self.allows(user.decode()):
                self.socket.send_multipart([b"1.0", request_id, b"200", b"OK", user, b""])
            else:
                self._refuse(f"the key {user.decode()} is not allowed", address.decode())
                self.socket.send_multipart(
                    [b"1.0", request_id, b"400", b"key not allowed", b"", b""]
                )

    def allows(self, user: str) -> bool:
        return self._keyring.allows(user)

    def changed(self) -> bool:
        """Whether the keyring has, since the last time this was asked: who was let in may be
        welcome no more.
        """
        self._keyring.refresh()
        before, self._version = self._version, self._keyring.version
        return self._version != before
