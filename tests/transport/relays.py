"""Relays of TCP connections: one that can damage what passes, and a SOCKS5 proxy."""

from __future__ import annotations

import contextlib
import socket
import threading


class Relay:
    """Passes connections on to where `reached` leads, until it is closed. passed: bytes so far."""

    def __init__(self, port: int = 0) -> None:
        self._listening = socket.create_server(("127.0.0.1", port))
        self.port = self._listening.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.passed = 0
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def reached(self, near: socket.socket) -> socket.socket | None:
        """The connection that this one is passed on to; None: it is refused."""
        raise NotImplementedError

    def passing(self, data: bytes, direction: str) -> bytes:
        return data

    def _accept(self) -> None:
        while True:
            try:
                near = self._listening.accept()[0]
            except OSError:
                return
            far = self.reached(near)
            if far is None:
                near.close()
                continue
            self._sockets += [near, far]
            for way in ((near, far, "up"), (far, near, "down")):
                self._threads.append(threading.Thread(target=self._pass, args=way))
                self._threads[-1].start()

    def _pass(self, here: socket.socket, there: socket.socket, direction: str) -> None:
        try:
            while data := here.recv(65536):
                self.passed += len(data)
                there.sendall(self.passing(data, direction))
            there.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # one side is gone: so is the other, in a moment
        finally:
            here.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it is closed already
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for held in self._sockets:
            with contextlib.suppress(OSError):  # it ended by itself
                held.shutdown(socket.SHUT_RDWR)
            held.close()
        for thread in self._threads:
            thread.join()


class Flipping(Relay):
    """Passes on to `address` (tcp://HOST:PORT). `flip` is a direction, "up" or "down": the next
    bytes that go there have their last one changed, once.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._behind = host, int(port)
        self.flip = ""
        super().__init__()

    def reached(self, near: socket.socket) -> socket.socket:
        return socket.create_connection(self._behind)

    def passing(self, data: bytes, direction: str) -> bytes:
        if self.flip == direction:
            self.flip, data = "", data[:-1] + bytes([data[-1] ^ 1])
        return data


class Socks(Relay):
    """A SOCKS5 proxy that asks for a user and password. hidden: names that it alone knows. asked:
    what it was asked for.
    """

    def __init__(self, hidden: dict[str, str], port: int = 0) -> None:
        self._hidden, self.asked = hidden, list[tuple[str, int]]()
        super().__init__(port)

    def reached(self, near: socket.socket) -> socket.socket | None:
        def take(n: int) -> bytes:
            got = b""
            while len(got) < n:
                got += near.recv(n - len(got))
            return got

        _, count = take(2)
        if 2 not in take(count):
            near.sendall(b"\x05\xff")
            return None
        near.sendall(b"\x05\x02")
        take(1)
        known = [take(take(1)[0]) for _ in range(2)] == [b"site", b"se cret"]
        near.sendall(b"\x01\x00" if known else b"\x01\x01")
        if not known:
            return None
        _, _, _, kind = take(4)
        host = socket.inet_ntoa(take(4)) if kind == 1 else take(take(1)[0]).decode()
        port = int.from_bytes(take(2), "big")
        near.sendall(b"\x05\x00\x00\x01\x00\x00\x00\x00\x00\x00")
        self.asked.append((host, port))
        return socket.create_connection((self._hidden.get(host, host), port))
