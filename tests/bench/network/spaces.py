"""Two network namespaces, and a bad link between them in user space."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from fednet import seeds
from fednet.errors import ConfigError
from tests.bench.network.line import Bad, Line

# linux/if_tun.h: packets as they are, without a header before them.
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
SERVER, CLIENT = "10.77.0.1", "10.77.0.2"
LARGEST = 65_536


def refusal() -> str:
    """Why no such link can be made here; "" where it can."""
    if os.geteuid() != 0:
        return "it makes network namespaces, which only root may; start it as root"
    if not os.path.exists("/dev/net/tun"):
        return "this machine has no /dev/net/tun (load the kernel's tun module)"
    try:
        subprocess.run(["ip", "-V"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "there is no `ip` command (the package iproute2)"
    return ""


class Spaces:
    """A context in which two namespaces stand, joined by the link. Raises ConfigError where the
    machine does not let them be made.
    """

    def __init__(self, own: int, bad: Bad, seed: int, settings: Mapping[str, str]) -> None:
        """own: tells those apart that this process has at the same time; settings: of the kernel,
        in both namespaces, such as net.ipv4.tcp_rto_max_ms.
        """
        name = f"fn{os.getpid()}x{own}"  # no other process's: the names are the machine's
        self.names = (f"{name}s", f"{name}c")
        self.lines = tuple(Line(bad, seeds.rng(seed, f"bench/{way}")) for way in ("down", "up"))
        self._settings = dict(settings)
        self._over = threading.Event()

    def __enter__(self) -> Spaces:
        self._made = contextlib.ExitStack()
        try:
            self._make()
        except (OSError, subprocess.CalledProcessError) as broken:
            self._made.close()
            said = getattr(broken, "stderr", b"") or str(broken).encode()
            raise ConfigError(
                f"bench network: no link between namespaces can be made here: "
                f"{said.decode(errors='replace').strip()}."
            ) from broken
        return self

    def _make(self) -> None:
        ends = []
        for name, own, peer in zip(self.names, (SERVER, CLIENT), (CLIENT, SERVER)):
            _ip("netns", "add", name)
            self._made.callback(_ip, "netns", "del", name)
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            self._made.callback(os.close, end)
            ends.append(end)
            device = name[:15]
            flags = struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI)
            fcntl.ioctl(end, _TUNSETIFF, flags)
            _ip("link", "set", device, "netns", name)
            _ip("-n", name, "addr", "add", own, "peer", peer, "dev", device)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", device, "txqueuelen", "1000", "up")
            for key, value in self._settings.items():
                command = ["sysctl", "-q", "-w", f"{key}={value}"]
                subprocess.run([*self.within(name), *command], check=True, capture_output=True)
        carrier = threading.Thread(target=self._carry, args=(ends,), daemon=True)
        carrier.start()
        self._made.callback(carrier.join, 5.0)
        self._made.callback(self._over.set)  # before the join

    def __exit__(self, *_: object) -> None:
        self._made.close()

    def within(self, name: str) -> list[str]:
        """What a command begins with that runs in the namespace."""
        return ["ip", "netns", "exec", name]

    def kernel(self) -> dict[str, int]:
        """TCP's own counts of both namespaces: segments sent, and those sent again."""
        found = {"OutSegs": 0, "RetransSegs": 0}
        for name in self.names:
            command = [*self.within(name), "cat", "/proc/net/snmp"]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            rows = [line.split()[1:] for line in text.splitlines() if line.startswith("Tcp:")]
            counts = dict(zip(rows[0], rows[1]))
            for key in found:
                found[key] += int(counts[key])
        return found

    def _carry(self, ends: Sequence[int]) -> None:
        """Packets from each device to the other, until it is over."""
        ways = [(ends[0], ends[1], self.lines[0]), (ends[1], ends[0], self.lines[1])]
        while not self._over.is_set():
            dues = [due for _, _, line in ways if (due := line.due()) is not None]
            wait = max(0.0, min([0.1, *(due - time.monotonic() for due in dues)]))
            readable, _, _ = select.select(ends, [], [], wait)
            for source, target, line in ways:
                if source in readable:
                    for packet in _packets(source):
                        line.offer(packet, time.monotonic())
                for packet in line.ready(time.monotonic()):
                    with contextlib.suppress(OSError):  # its queue is full: one more that is lost
                        os.write(target, packet)


def _packets(end: int) -> Iterator[bytes]:
    for _ in range(64):
        try:
            yield os.read(end, LARGEST)
        except BlockingIOError:
            return


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
