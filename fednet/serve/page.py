"""The page of `fednet serve`: the queue, the clients, and each run's curves, bytes and log.

It is read-only: `fednet queue` submits and cancels runs.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
import threading
import time
from collections import Counter
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from fednet.errors import ConfigError, FednetError
from fednet.files import last_lines
from fednet.plain import JsonDict
from fednet.records import line_parts
from fednet.report import open_run, page, status
from fednet.serve.queue import Queue

log = logging.getLogger(__name__)

NUMBER = "[0-9]{1,9}"
REFRESH_S = 5
REDRAWN_S = 60  # drawing takes seconds of a processor that the run needs
LOOPBACK = ("127.0.0.1", "::1", "localhost")
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:; form-action 'none'; base-uri 'none'",
}


class Server(ThreadingHTTPServer):
    """The HTTP server of the pages of a folder. One thread draws at a time, as matplotlib
    requires.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], queue: Queue) -> None:
        self.queue = queue
        self._drawing = threading.Lock()
        super().__init__(address, Handler)

    def index(self) -> str:
        entries = self.queue.entries()
        order = {entry.number: place for place, entry in enumerate(self.queue.open(entries))}
        shown = []
        for entry in reversed(entries):
            run = self.queue.run(entry)
            has = (run / "rounds.jsonl").exists()
            state: str = entry.state
            log: list[str] = []
            now = ""
            if entry.state == "waiting":
                before = order[entry.number]
                state += f", {before} before it" if before else ", it starts next"
            elif entry.state == "running":
                state += ", it is being stopped" * self.queue.cancelled(entry)
                log = last_lines(run / "log" / "server.log", 12)
                if (run / "status.json").exists():
                    now = status.text(status.read(run), run, time.time())
            found: JsonDict = {"entry": entry, "state": state, "status": now, "log": log}
            shown.append(found | {"has": has, "result": _result(run, _changed(run)) if has else ""})
        states = Counter(entry.state for entry in entries)
        return (
            page.templates()
            .get_template("serve.jinja")
            .render(
                folder=str(self.queue.folder),
                runs=shown,
                states=", ".join(f"{count} {state}" for state, count in states.items()),
                refresh=REFRESH_S,
            )
        )

    def run(self, number: int) -> str:
        """The report of a run, as far as it is."""
        run = self.queue.run(self.queue.entry(number))
        with self._drawing:
            return _report(run, _changed(run))

    def handle_error(self, request: object, client_address: tuple[str, int]) -> None:
        """Logs a line if the client left early, or sent what no browser sends."""
        log.warning("page: %s: %r", client_address[0], sys.exc_info()[1])


@functools.lru_cache(maxsize=10)
def _report(run: Path, changed: tuple[float, bool]) -> str:
    return page.render([open_run(run)], again=REDRAWN_S)


@functools.lru_cache(maxsize=1000)
def _result(run: Path, changed: tuple[float, bool]) -> str:
    """Returns the newest numbers of a run, and how long its rounds took so far."""
    try:
        rounds = open_run(run).rounds
    except (FednetError, OSError) as broken:
        return str(broken)
    pieces = [f"{len(rounds)} rounds in {status.span(sum(r.seconds or 0.0 for r in rounds))}"]
    measured = (parts for r in reversed(rounds) if (parts := line_parts(r)))
    return ", ".join(pieces + next(measured, []))


def _changed(run: Path) -> tuple[float, bool]:
    """Another value when the run has another round, or has ended."""
    rows = (run / "rounds.jsonl").stat().st_mtime if run.is_dir() else 0.0
    return rows, (run / "summary.json").exists()


class Handler(BaseHTTPRequestHandler):
    server: Server
    server_version = "fednet"
    sys_version = ""
    timeout = 30

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
        run = re.fullmatch(f"/runs/({NUMBER})", self.where)
        try:
            if self.where == "/":
                text = self.server.index()
            elif run:
                text = self.server.run(int(run[1]))
            else:
                raise ConfigError("There is no such page.")
        except (FednetError, OSError) as wrong:
            self._send(HTTPStatus.NOT_FOUND, str(wrong))
            return
        self._send(HTTPStatus.OK, text, "text/html")

    def _send(self, code: HTTPStatus, text: str, kind: str = "text/plain") -> None:
        data = text.encode()
        self.send_response(code)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        log.info("page: %s", format % args)


def serve(address: tuple[str, int], queue: Queue) -> Server:
    """Starts to serve, in threads of its own, until it is shut down. Raises ConfigError."""
    try:
        server = Server(address, queue)
    except OSError as taken:
        raise ConfigError(
            f"--page {address[0]}:{address[1]}: nothing can be served there "
            f"({taken.strerror or taken})."
        ) from taken
    threading.Thread(target=server.serve_forever, name="fednet-page", daemon=True).start()
    return server
