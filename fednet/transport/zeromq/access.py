"""Who may connect to a server with CURVE: its answers to ZAP, rfc.zeromq.org/spec/27, from the
keyring as it stands.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq
import zmq.utils.z85

from fednet.transport.keys import Keyring

TRIES, AGAIN_S = 100, 0.02
_ADDRESS = "inproc://zeromq.zap.01"


class Access:
    """Asked by libzmq about each connection in its handshake. refuse(reason, address): told who was
    turned away.

    Made before the ROUTER is bound: a connection that found no handler would be let in unasked.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keyring: Keyring,
        refuse: Callable[[str, str], None],
    ) -> None:
        self._keyring, self._refuse = keyring, refuse
        self._version = keyring.version
        self._public = keyring.pair.public
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
                reason = self.described(user.decode()) if user else "no key"
                self._refuse(reason, address.decode())
                self.socket.send_multipart(
                    [b"1.0", request_id, b"400", b"key not allowed", b"", b""]
                )

    def allows(self, user: str) -> bool:
        return self._keyring.allows(user)

    def why_not(self, user: str) -> str:
        return self._keyring.why_not(user)

    def described(self, user: str) -> str:
        """Why that key may not connect, and which it is."""
        return f"{self._keyring.why_not(user)}: {self._keyring.described(user)}"

    def changed(self) -> bool:
        """Whether the keyring has, since the last time this was asked: who was let in may be
        welcome no more.
        """
        self._keyring.refresh()
        before, self._version = self._version, self._keyring.version
        return self._version != before

    def renewed(self, router: zmq.Socket[bytes], address: str) -> bool:
        """Whether the server has another pair, with which `router` listens at `address` from now
        on. All connections have ended then: libzmq ends them with what listened, and has no event
        for it.
        """
        pair = self._keyring.pair
        if self._public == pair.public:
            return False
        self._public = pair.public
        self._listen_anew(router, address)
        return True

    def _listen_anew(self, router: zmq.Socket[bytes], address: str) -> None:
        """What listens has copied the pair that it began with."""
        self.guard(router)
        router.unbind(address)
        for last in (False,) * TRIES + (True,):
            try:
                router.bind(address)
                return
            except zmq.ZMQError as error:  # libzmq ends what listened in a thread of its own
                if last or error.errno != zmq.EADDRINUSE:
                    raise
                time.sleep(AGAIN_S)
