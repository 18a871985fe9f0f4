"""A relay of TCP connections that can damage what passes."""

from __future__ import annotations

import contextlib
import socket
import threading


class Flipping:
    """Passes connections on to `address` (tcp://HOST:PORT), until it is closed. `flip` is a
    direction, "up" or "down": the next bytes that go there have their last one changed, once.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._behind = host, int(port)
        self.flip = ""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listening.accept()[0]
            except OSError:
                return
            far = socket.create_connection(self._behind)
            self._sockets += [near, far]
            for way in ((near, far, "up"), (far, near, "down")):
                self._threads.append(threading.Thread(target=self._pass, args=way))
                self._threads[-1].start()

    def _pass(self, here: socket.socket, there: socket.socket, direction: str) -> None:
        try:
            while data := here.recv(65536):
                if self.flip == direction:
                    self.flip = ""
                    data = data[:-1] + bytes([data[-1] ^ 1])
                there.sendall(data)
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
