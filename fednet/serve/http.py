"""An HTTP server of pages that are only read: those of `fednet serve`, and the numbers of
`--metrics`.

However many connect, and whatever they send or leave out, it holds a few connections at a time: a
new one takes the place of the oldest that waits.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from fednet.errors import ConfigError, FednetError

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 16  # connections at a time: each has a thread and a descriptor
TIMEOUT_S = 30  # for which a connection may send, or take, nothing
LOOPBACK = ("127.0.0.1", "::1", "localhost")
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:; form-action 'none'; base-uri 'none'",
}


class Pages(ThreadingHTTPServer):
    """Serves in threads of its own from `begin` on, until `end`. flag: what the user gave, such as
    `--page 8420`. Raises ConfigError if nothing can be served at that address.
    """

    daemon_threads = True
    request_queue_size = 128  # of a longer queue the kernel lets the rest try again a second later

    def __init__(self, address: tuple[str, int], flag: str) -> None:
        self._changed = threading.Condition()
        self._open: set[Any] = set()  # connections
        self._waiting: dict[Any, None] = {}  # those whose page is not being made, the oldest first
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        try:
            super().__init__(address, Handler)
        except OSError as taken:
            raise ConfigError(
                f"{flag}: nothing can be served there ({taken.strerror or taken})."
            ) from taken

    def page(self, path: str, accept: str) -> tuple[bytes, str]:
        """Returns (text, content type). accept: the types that are asked for. Raises FednetError or
        OSError where there is no such page.
        """
        raise NotImplementedError

    def begin(self) -> None:
        threading.Thread(target=self.serve_forever, name="fednet-pages", daemon=True).start()

    def end(self) -> None:
        self.shutdown()
        self.server_close()

    @contextlib.contextmanager
    def making(self, connection: Any) -> Iterator[None]:
        """Inside, the page that a connection asked for is made."""
        with self._changed:
            self._waiting.pop(connection, None)
        try:
            yield
        finally:
            with self._changed:
                self._waiting[connection] = None
                self._changed.notify()

    # -- called by socketserver --------------------------------------------------------------------
    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:  # no descriptor is free: it is tried again
            time.sleep(0.05)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            while len(self._open) >= MAX_CONNECTIONS:
                oldest = next(iter(self._waiting), None)
                if oldest is not None:
                    del self._waiting[oldest]
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)
                self._changed.wait(1.0)
            self._open.add(request)
            self._waiting[request] = None
        super().process_request(request, client_address)

    def close_request(self, request: Any) -> None:
        with self._changed:
            self._open.discard(request)
            self._waiting.pop(request, None)
            self._changed.notify()
        super().close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs a line if the other side left early, or sent what no browser sends."""
        log.info("page: %s: %r", client_address[0], sys.exc_info()[1])


class Handler(BaseHTTPRequestHandler):
    server: Pages
    server_version = "fednet"
    sys_version = ""
    timeout = TIMEOUT_S

    def parse_request(self) -> bool:
        """Refuses other host names than those of loopback, if it listens there: another page may
        lead a browser here under its own name.
        """
        if not super().parse_request():
            return False
        try:
            self.where = urlsplit(self.path).path
            name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError as wrong:
            self._send(HTTPStatus.BAD_REQUEST, f"{wrong}.")
            return False
        if str(self.server.server_address[0]) in LOOPBACK and name not in LOOPBACK:
            self._send(HTTPStatus.FORBIDDEN, "This page was requested under another host name.")
            return False
        return True

    def do_GET(self) -> None:
        try:
            with self.server.making(self.connection):
                text, kind = self.server.page(self.where, self.headers.get("Accept", ""))
        except (FednetError, OSError) as wrong:
            self._send(HTTPStatus.NOT_FOUND, str(wrong))
            return
        self._answer(HTTPStatus.OK, text, kind)

    def _send(self, code: HTTPStatus, sentence: str) -> None:
        self._answer(code, sentence.encode(), "text/plain; charset=utf-8")

    def _answer(self, code: HTTPStatus, text: bytes, kind: str) -> None:
        self.send_response(code)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        log.debug("page: %s", format % args)
