"""The page of `fednet serve`: the queue, the clients, and each run's curves, bytes and log.

It is read-only. With a token, users who know it can also submit and cancel runs.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from fednet import config as configuration
from fednet.descriptors import named
from fednet.errors import ConfigError, FednetError
from fednet.plain import JsonDict
from fednet.records import line_parts
from fednet.report import open_run, page, status
from fednet.serve.queue import Queue, QueuedRun, newest_log
from fednet.transport.keys import owners_alone

log = logging.getLogger(__name__)

NUMBER = "[0-9]{1,9}"
MOST = 1 << 20  # bytes of a submitted form
REFRESH_S = 5
REDRAWN_S = 60  # drawing takes seconds of a processor that the run needs
LOOPBACK = ("127.0.0.1", "::1", "localhost")
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:; form-action 'self'; base-uri 'none'",
}


class RunPages:
    """The pages of a folder. One thread draws at a time, as matplotlib requires, and a run is drawn
    again only if it has more rounds, or has ended.
    """

    def __init__(self, queue: Queue, writable: bool) -> None:
        self.queue, self.writable = queue, writable
        self._drawing = threading.Lock()
        self._drawn: dict[int, tuple[tuple[float, bool], str]] = {}
        self._results: dict[int, tuple[tuple[float, bool], str]] = {}

    def index(self) -> str:
        entries = self.queue.entries()
        order = {entry.number: place for place, entry in enumerate(self.queue.open(entries))}
        shown = [self._row(entry, order) for entry in reversed(entries)]
        states = Counter(entry.state for entry in entries)
        return (
            page.templates()
            .get_template("serve.jinja")
            .render(
                folder=str(self.queue.folder),
                runs=shown,
                states=", ".join(f"{count} {state}" for state, count in states.items()),
                writable=self.writable,
                refresh=REFRESH_S,
            )
        )

    def _row(self, entry: QueuedRun, order: Mapping[int, int]) -> JsonDict:
        """order: of the runs that are running or waiting, the place of each in the queue."""
        run = self.queue.run(entry)
        found: JsonDict = {"entry": entry, "has": (run / "rounds.jsonl").exists()}
        found["state"] = entry.state
        if entry.state == "waiting":
            before = order[entry.number]
            found["state"] += f", {before} before it" if before else ", it starts next"
        elif entry.state == "running" and self.queue.cancelled(entry):
            found["state"] += ", it is being stopped"
        found["result"] = self._result(entry, run) if found["has"] else ""
        found["log"] = newest_log(run) if entry.state == "running" else []
        found["status"] = ""
        if entry.state == "running" and (run / "status.json").exists():
            found["status"] = status.text(status.read(run), run, time.time())
        return found

    def run(self, number: int) -> str:
        """The report of a run, as far as it is."""
        entry = self.queue.entry(number)
        run = self.queue.run(entry)
        changed = _changed(run)
        with self._drawing:
            if self._drawn.get(number, (None,))[0] != changed:
                self._drawn[number] = changed, page.render([open_run(run)], again=REDRAWN_S)
            return self._drawn[number][1]

    def _result(self, entry: QueuedRun, run: Path) -> str:
        """The newest numbers of a run, and how long its rounds took so far."""
        changed = _changed(run)
        if self._results.get(entry.number, (None,))[0] != changed:
            try:
                rounds = open_run(run).rounds
            except (FednetError, OSError) as broken:
                return str(broken)
            pieces = [
                f"{len(rounds)} rounds in {status.span(sum(r.seconds or 0.0 for r in rounds))}"
            ]
            measured = (parts for r in reversed(rounds) if (parts := line_parts(r)))
            self._results[entry.number] = changed, ", ".join(pieces + next(measured, []))
        return self._results[entry.number][1]

    def facts(self) -> str:
        """The queue as JSON."""
        names = ("number", "name", "state", "status", "reason", "at")
        rows = [{name: getattr(e, name) for name in names} for e in self.queue.entries()]
        return json.dumps(rows)


def _changed(run: Path) -> tuple[float, bool]:
    """Another value when the run has another round, or has ended."""
    rows = (run / "rounds.jsonl").stat().st_mtime if run.is_dir() else 0.0
    return rows, (run / "summary.json").exists()


class Server(ThreadingHTTPServer):
    """token: users who know it may submit and cancel; None: nobody may."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], queue: Queue, token: str | None) -> None:
        self.pages, self.queue, self.token = RunPages(queue, token is not None), queue, token
        super().__init__(address, Handler)

    def handle_error(self, request: object, client_address: tuple[str, int]) -> None:
        """Logs a line if the client left early, or sent what no browser sends."""
        log.warning("page: %s: %r", client_address[0], sys.exc_info()[1])


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
        if self.where == "/":
            self._answer(self.server.pages.index)
        elif self.where == "/queue.json":
            self._answer(self.server.pages.facts, "application/json")
        elif run := re.fullmatch(f"/runs/({NUMBER})", self.where):
            self._answer(lambda: self.server.pages.run(int(run[1])))
        else:
            self._send(HTTPStatus.NOT_FOUND, "There is no such page.")

    def do_POST(self) -> None:
        given = self._form()
        if given is None:
            return
        token = self.server.token
        if token is None or not hmac.compare_digest(
            given.get("token", "").encode(), token.encode()
        ):
            self._send(HTTPStatus.FORBIDDEN, "This page is read-only without the token.")
            return
        try:
            if self.where == "/submit":
                config = configuration.from_text(given.get("config", ""), "the form")
                if config.load:
                    raise ConfigError("load: files are named by fednet queue submit only.")
                self.server.queue.submit(config)
            elif self.where == "/cancel" and re.fullmatch(NUMBER, given.get("number", "")):
                self.server.queue.cancel(int(given["number"]))
            else:
                self._send(HTTPStatus.NOT_FOUND, "There is no such page.")
                return
        except FednetError as wrong:
            self._send(HTTPStatus.BAD_REQUEST, str(wrong))
            return
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", "/")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _form(self) -> dict[str, str] | None:
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(NUMBER, length) or int(length) > MOST:
            self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"At most {MOST} bytes.")
            return None
        text = self.rfile.read(int(length)).decode("utf-8", errors="replace")
        return {name: values[0] for name, values in parse_qs(text, keep_blank_values=True).items()}

    def _answer(self, made: Callable[[], str], kind: str = "text/html") -> None:
        try:
            text = made()
        except (FednetError, OSError) as wrong:
            self._send(HTTPStatus.NOT_FOUND, str(wrong))
            return
        self._send(HTTPStatus.OK, text, kind)

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


def serve(address: tuple[str, int], queue: Queue, token: str | None) -> Server:
    """Starts to serve, in threads of its own, until it is shut down. Raises ConfigError."""
    try:
        server = Server(address, queue, token)
    except OSError as taken:
        raise ConfigError(
            f"--page {address[0]}:{address[1]}: nothing can be served there "
            f"({taken.strerror or taken})."
        ) from taken
    threading.Thread(target=server.serve_forever, name="fednet-page", daemon=True).start()
    return server


def token_of(file: Path) -> str:
    """The token in a file that only its owner may read. Raises ConfigError."""
    try:
        owners_alone(file)
        found = named(file).read_text(encoding="utf-8").strip()
    except OSError as absent:
        raise ConfigError(f"--token {file}: cannot be read ({absent.strerror}).") from absent
    except UnicodeDecodeError:
        raise ConfigError(f"--token {file}: it is not text; use the output of uuidgen.") from None
    if len(found) < 16:
        raise ConfigError(f"--token {file}: expected at least 16 characters, such as of uuidgen.")
    return found
