"""A way out through a SOCKS5 proxy (RFC 1928, 1929), for a site that has no other, by a small relay
in this process. libzmq's own SOCKS5 is not used: once a proxy has refused, libzmq 4.3.5 aborts the
process when the socket is closed ("Bad file descriptor (src/epoll.cpp:86)").

FEDNET_PROXY names it, as `socks5://HOST:PORT`, with `USER:PASSWORD@` before the host where it asks
for them. It looks up the server's name, and what passes is what would pass without it, CURVE
included.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from urllib.parse import SplitResult, unquote, urlsplit

from fednet.errors import ConfigError, why

VARIABLE = "FEDNET_PROXY"
ANSWER_S = 30.0
PIECE = 65536


def read(text: str) -> SplitResult:
    """Raises ConfigError for what is no proxy."""
    try:
        found = urlsplit(text)
        port = found.port
    except ValueError:
        found, port = urlsplit(""), None
    if found.scheme != "socks5" or not found.hostname or port is None:
        raise ConfigError(f"--proxy {text.rpartition('@')[2]}: expected socks5://HOST:PORT.")
    return found


class WayOut:
    """Where one client's sockets connect to reach an address: the address or, where FEDNET_PROXY
    names a proxy, a relay on loopback that carries each connection through the proxy. trouble: why
    the proxy did not connect when it was last asked; "" where it did.
    """

    def __init__(self) -> None:
        text = os.environ.get(VARIABLE)
        self._proxy = read(text) if text else None
        self._target = ""
        self._listener: socket.socket | None = None
        self.trouble = ""

    def to(self, address: str) -> str:
        """What a socket is to connect to."""
        if self._proxy is None:
            return address
        self._target = address.removeprefix("tcp://")
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", 0))
            threading.Thread(
                target=self._relay,
                args=(self._listener, self._proxy),
                name="fednet-proxy",
                daemon=True,
            ).start()
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
            self._listener.close()

    def _relay(self, listener: socket.socket, proxy: SplitResult) -> None:
        """Carries each connection that comes. One that fails ends, and its socket tries again."""
        while True:
            try:
                here, _ = listener.accept()
            except OSError:
                return
            try:
                there = _through(proxy, self._target)
            except OSError as error:
                self.trouble = f"the proxy at {proxy.hostname}:{proxy.port} {error}"
                here.close()
                continue
            self.trouble = ""
            for ends in ((here, there), (there, here)):
                threading.Thread(target=_pump, args=ends, daemon=True).start()


def _through(proxy: SplitResult, target: str) -> socket.socket:
    """A connection to the target. Raises OSError, which says what the proxy does."""
    try:
        there = socket.create_connection((proxy.hostname, proxy.port or 0), ANSWER_S)
    except OSError as error:
        raise OSError(f"cannot be reached ({why(error)})") from error
    try:
        _socks5(there, proxy, target)
    except OSError:
        there.close()
        raise
    there.settimeout(None)
    return there


def _socks5(there: socket.socket, proxy: SplitResult, target: str) -> None:
    def answer(nbytes: int) -> bytes:
        found = b""
        while len(found) < nbytes:
            data = there.recv(nbytes - len(found))
            if not data:
                raise OSError("gives an invalid answer")
            found += data
        return found

    def text(words: str) -> bytes:
        data = words.encode()[:255]
        return bytes([len(data)]) + data

    there.sendall(b"\x05\x01\x00" if proxy.username is None else b"\x05\x02\x00\x02")
    version, method = answer(2)
    if version != 5 or method not in (0, 2):
        raise OSError("requires a user and password, or is no SOCKS5 proxy")
    if method == 2:
        there.sendall(
            b"\x01" + text(unquote(proxy.username or "")) + text(unquote(proxy.password or ""))
        )
        if answer(2)[1]:
            raise OSError("refuses that user and password")
    host, _, port = target.rpartition(":")
    there.sendall(b"\x05\x01\x00\x03" + text(host.strip("[]")) + int(port).to_bytes(2, "big"))
    _, code, _, kind = answer(4)
    if code:
        raise OSError(f"does not connect to {target} (SOCKS code {code})")
    length = {1: 4, 4: 16}.get(kind) or answer(1)[0]
    answer(length + 2)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(PIECE):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    source.close()
