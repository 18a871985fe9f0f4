"""The ledger beside what the kernel and the network interface counted, to the byte.

A small federation runs in processes of its own, plain and with CURVE. Three counts of it are
compared: the server's book, TCP_INFO of all its connections, and, where a network namespace can be
made in which nothing else speaks, the loopback interface's bytes less the headers of its packets.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fednet import config as configuration
from fednet.errors import CannotGoOn
from fednet.files import read_lines
from fednet.plain import JsonDict, JsonMapping

HEADERS = 20 + 32  # of IPv4, and of TCP with its timestamps; loopback has no Ethernet header
# /sys would show the interfaces of where it was mounted; /proc those of who reads.
INSIDE = """ip link set lo up || exit 97
"$@" || exit $?
sed -n 's/^ *lo: *//p' /proc/net/dev"""


@dataclass(frozen=True, slots=True)
class Reckoning:
    """Bytes of one run, by direction of the federation. booked: by the ledger; kernel: by TCP_INFO;
    interface: both directions together, without headers, and packets; None where no namespace could
    be made.
    """

    name: str
    booked: Mapping[str, int]
    kernel: Mapping[str, int]
    connections: int
    interface: int | None
    packets: int | None

    @property
    def exact(self) -> bool:
        return dict(self.booked) == dict(self.kernel)

    @property
    def off(self) -> float | None:
        """How far the interface is from the book, as a share of the book."""
        total = sum(self.booked.values())
        return None if self.interface is None else self.interface / total - 1


def namespace() -> list[str] | None:
    """The words that run a command in a network namespace of its own, as root or by a user
    namespace; None where neither can be made.
    """
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return None
    for words in (["unshare", "-n"], ["unshare", "-rn"]):
        if (
            subprocess.run(
                [*words, "ip", "link", "set", "lo", "up"], capture_output=True, check=False
            ).returncode
            == 0
        ):
            return words
    return None


def reckon(mapping: JsonMapping, folder: Path) -> Reckoning:
    """Runs that configuration and counts. Raises CannotGoOn where the run fails."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "config.yaml"
    text.write_text(
        configuration.to_yaml(configuration.from_mapping(dict(mapping), where="the bench")),
        encoding="utf-8",
    )
    words = [sys.executable, "-m", "tests.bench.transport", str(text), str(folder), "2"]
    apart = namespace()
    if apart is not None:
        words = [*apart, "sh", "-c", INSIDE, "sh", *words]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise CannotGoOn(f"the run for `bench transport` failed: {done.stderr.strip()[-2000:]}")
    directory = folder / str(mapping["name"])
    booked = {"up": 0, "down": 0}
    for row in read_lines(directory / "wire.jsonl"):
        booked[row["direction"]] += row["bytes"]
    events = list(read_lines(directory / "events.jsonl"))
    kernel = next(e for e in reversed(events) if e["type"] == "kernel")
    interface = packets = None
    if apart is not None:
        # Received, and that many packets.
        nbytes, packets = (int(n) for n in done.stdout.splitlines()[-1].split()[:2])
        interface = nbytes - packets * HEADERS
    return Reckoning(
        str(mapping["name"]),
        booked,
        {"up": kernel["received"], "down": kernel["sent"]},
        kernel["connections"],
        interface,
        packets,
    )


def configured(name: str, curve: bool, algorithm: str = "fedavg") -> JsonDict:
    """Five clients, two rounds of all, a model whose payload takes two parts."""
    return {
        "name": name,
        "rounds": 2,
        "clients": 5,
        "participation": 1.0,
        "algorithm": {"name": algorithm},
        "model": {"name": "mlp", "hidden": [400]},
        "data": {
            "dataset": "synthetic",
            "samples": 200,
            "shape": [1, 28, 28],
            "classes": 4,
            "partition": {"scheme": "iid"},
        },
        "evaluate": {"clients": "auto"},
        "checkpoint": {"best": False},
        "security": {"curve": curve},
    }


def lines(found: list[Reckoning]) -> Iterator[str]:
    """The table."""
    yield f"{'run':10} {'':5} {'ledger':>12} {'TCP_INFO':>12} {'difference':>11}"
    for r in found:
        for way in ("down", "up"):
            booked, kernel = r.booked[way], r.kernel[way]
            yield f"{r.name:10} {way:5} {booked:12,} {kernel:12,} {kernel - booked:11,}"
        total = sum(r.booked.values())
        if r.interface is None or r.off is None:
            yield (
                f"{r.name:10} both  {total:12,}  interface: no network namespace can be made here "
                "(needs unshare and ip, and root or user namespaces)"
            )
        else:
            yield (
                f"{r.name:10} both  {total:12,} {r.interface:12,} {100 * r.off:10.3f} %  at the "
                f"interface: {r.packets:,} packets "
                f"less {HEADERS} bytes of headers each"
            )


def main(folder: Path) -> Iterator[str]:
    """What `python -m tests.bench transport` prints."""
    yield from lines(
        [reckon(configured(name, name == "curve"), folder) for name in ("plain", "curve")]
    )


if __name__ == "__main__":
    from fednet.launch import start
    from fednet.server.watch import Hosting

    wanted = configuration.load(Path(sys.argv[1]), [])
    with start.open_directory(wanted, Path(sys.argv[2]), False) as (chosen, directory, _):
        sys.exit(
            start.Supervisor(
                chosen,
                directory,
                Hosting(start.Silent(), ["bench"], "cpu"),
                workers=int(sys.argv[3]),
            ).run()
        )
