"""A way out through a SOCKS5 proxy (RFC 1928, 1929), for a site that has no other, by a small relay
in this process. libzmq's own SOCKS5 is not used: once a proxy has refused, libzmq 4.3.5 aborts the
process when the socket is closed ("Bad file descriptor (src/epoll.cpp:86)").

FEDNET_PROXY names it, as `socks5://HOST:PORT`, with `USER:PASSWORD@` before the host where it asks
for them. It looks up the server's name, and what passes is what would pass without it, CURVE
included.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import threading
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from fednet.errors import ConfigError, why

VARIABLE = "FEDNET_PROXY"
ANSWER_S = 30.0
PIECE = 65536
SOCKS = {  # RFC 1928, 6
    2: "not allowed",
    3: "network unreachable",
    4: "host unreachable",
    5: "connection refused",
    6: "too far",
}

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class Proxy:
    host: str
    port: int
    user: str | None = None
    password: str = ""

    def __str__(self) -> str:
        return f"the proxy at {self.host}:{self.port}"


def read(text: str) -> Proxy:
    """Raises ConfigError for what is no proxy."""
    try:
        found = urlsplit(text)
        port = found.port
    except ValueError:
        found, port = urlsplit(""), None
    shown = text.rpartition("@")[2]
    if found.scheme in ("http", "https"):
        raise ConfigError(
            f"--proxy {shown}: HTTP proxies are not supported; expected socks5://HOST:PORT."
        )
    if found.scheme != "socks5" or not found.hostname or port is None:
        raise ConfigError(f"--proxy {shown}: expected socks5://HOST:PORT.")
    user = None if found.username is None else unquote(found.username)
    return Proxy(found.hostname, port, user, unquote(found.password or ""))


def of_this_process() -> Proxy | None:
    text = os.environ.get(VARIABLE)
    return read(text) if text else None


class WayOut:
    """Where one client's sockets connect to reach an address: the address, or a relay through a
    proxy.
    """

    def __init__(self, proxy: Proxy | None) -> None:
        self._proxy = proxy
        self._relay: Relay | None = None

    def to(self, address: str) -> str:
        """What a socket is to connect to."""
        if self._proxy is None or not address.startswith("tcp://"):
            return address
        if self._relay is None:
            self._relay = Relay(self._proxy)
        self._relay.target = address.removeprefix("tcp://")
        return f"tcp://127.0.0.1:{self._relay.port}"

    @property
    def trouble(self) -> str:
        """Why the proxy did not connect when it was last asked; "" where it did."""
        return "" if self._relay is None else self._relay.trouble

    def close(self) -> None:
        if self._relay is not None:
            self._relay.close()


class Relay:
    """Listens on loopback, and carries each connection to `target` through the proxy. trouble: why
    not, the last time.
    """

    def __init__(self, proxy: Proxy) -> None:
        self._proxy, self.target, self.port, self.trouble = proxy, "", 0, ""
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="fednet-proxy", daemon=True
        )
        self._thread.start()
        started.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._carry, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        self._loop.run_forever()
        server.close()
        for task in (tasks := asyncio.all_tasks(self._loop)):
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _carry(self, here: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        """What fails ends the connection, which the socket behind it then tries again."""
        with contextlib.suppress(OSError):
            there, out = await self._through()
            ways = [
                asyncio.ensure_future(_pump(here, out)),
                asyncio.ensure_future(_pump(there, back)),
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            out.close()
        back.close()

    async def _through(self) -> Streams:
        """A connection to the target. Raises OSError, and says why in `trouble`."""
        proxy = self._proxy
        try:
            there, out = await asyncio.wait_for(
                asyncio.open_connection(proxy.host, proxy.port), ANSWER_S
            )
        except (OSError, asyncio.TimeoutError) as error:
            said = why(error) if isinstance(error, OSError) else ""
            self.trouble = f"{proxy} cannot be reached ({said or 'no answer'})"
            raise ConnectionRefusedError(self.trouble) from error
        try:
            await asyncio.wait_for(_socks5(there, out, proxy, self.target), ANSWER_S)
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            out.close()
            said = str(error) if isinstance(error, ProxyRefused) else "gives an invalid answer"
            self.trouble = f"{proxy} {said}"
            raise ConnectionRefusedError(self.trouble) from error
        self.trouble = ""
        return there, out


class ProxyRefused(OSError):
    """The proxy says no."""


async def _socks5(
    there: asyncio.StreamReader, out: asyncio.StreamWriter, proxy: Proxy, target: str
) -> None:
    def text(words: str) -> bytes:
        data = words.encode()[:255]
        return bytes([len(data)]) + data

    out.write(b"\x05\x01\x00" if proxy.user is None else b"\x05\x02\x00\x02")
    version, method = await there.readexactly(2)
    if version != 5:
        raise ProxyRefused("speaks no SOCKS5")
    if method == 2:
        out.write(b"\x01" + text(proxy.user or "") + text(proxy.password))
        if (await there.readexactly(2))[1]:
            raise ProxyRefused("refuses that user and password")
    elif method:
        raise ProxyRefused("requires a user and password, or another kind of authentication")
    host, _, port = target.rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
        where = (b"\x01" if address.version == 4 else b"\x04") + address.packed
    except ValueError:
        where = b"\x03" + text(host)
    out.write(b"\x05\x01\x00" + where + int(port).to_bytes(2, "big"))
    _, code, _, kind = await there.readexactly(4)
    if code:
        raise ProxyRefused(
            f"does not connect to {target} ({SOCKS.get(code, f'SOCKS code {code}')})"
        )
    length = {1: 4, 4: 16}[kind] if kind in (1, 4) else (await there.readexactly(1))[0]
    await there.readexactly(length + 2)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(PIECE):
        sink.write(data)
        await sink.drain()
