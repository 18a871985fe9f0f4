"""Reads a user's own traces. Impossible values are refused with their line: seconds that go back
or are below 0, spells that overlap, clients that do not exist or are left out, missing seconds.

    availability  CSV `client,from,to`: seconds, by client, then by time; a client that is never
                  available has the line `client,0,0`
                  JSON of FedScale's client behaviour: {id: {active, inactive, finish_time}}
                  JSON of FLASH: {id: {trace_start, trace_end, ready_time: [[from, to], ...]}}
    devices       CSV `client,step_ms`; JSON of FedScale's capacity: {id: {computation, ...}}
    links         CSV `second,down_mbps,up_mbps`, for all, or `client,second,down_mbps,up_mbps`;
                  Mahimahi: a line for each 1,500 bytes that may pass, its millisecond;
                  JSON of FedScale's capacity: {id: {communication, ...}}

FedScale's files are pickles. Reading a pickle runs the code in it, so it is refused with the
command that converts it to JSON.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fednet import seeds
from fednet.descriptors import named
from fednet.errors import ConfigError, unknown
from fednet.world.presence import Presence, cyclic
from fednet.world.rates import Pace, Rates

PACKET_MBIT = 1500 * 8 / 1e6
LONGEST_S = 10**7  # of a trace of packets: sixteen weeks, a number for each second
TRAINED = 3.0  # FedScale counts a training step as three passes forward
JSON_OF = "python -c \"import json,pickle,sys; json.dump(pickle.load(open(sys.argv[1],'rb')),"


def text(path: str, key: str, names: Sequence[str]) -> str:
    """Returns the text of a file. key, names: for the error if there is no such file."""
    try:
        raw = named(path).read_bytes()
    except OSError as broken:
        if "/" not in path and "." not in path:
            raise ConfigError(f"{key}: {unknown('trace', path, names)}") from broken
        raise ConfigError(f"{key}: {path}: {broken.strerror}.") from broken
    if raw[:1] == b"\x80":
        raise ConfigError(
            f"{key}: {path} is a pickle, and reading it runs the code in it. If you trust it, "
            f"convert it to JSON: {JSON_OF} open(sys.argv[2],'w'))\" {path} {path}.json"
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as broken:
        raise ConfigError(f"{key}: {path} is no text ({broken.reason}).") from None


def clients(text: str, path: str) -> int:
    """Returns how many clients a file has; 1 if it names none."""
    if text.lstrip()[:1] == "{":
        return sum(1 for _ in _entries(text, path))
    lines = [line.partition(",") for line in text.splitlines() if line.strip()]
    if not lines or not lines[0][1] or lines[0][0].strip() == "second":
        return 1
    ids = [first.strip() for first, _, _ in lines if first.strip().isdecimal()]
    return max((int(i) for i in ids), default=0) + 1


# -- availability ----------------------------------------------------------------------------------
def availability(text: str, path: str, clients: int) -> list[Presence] | tuple[Presence, ...]:
    """Returns a list by client if the file has the federation's ids; a tuple if it has devices with
    ids of their own.
    """
    if text.lstrip()[:1] == "{":
        return tuple(_device(value, at) for value, at in _entries(text, path))
    spells: list[list[tuple[float, float]]] = [[] for _ in range(clients)]
    never = "; if it is never available, write `{},0,0`"
    for at, client, (start, end) in _by_client(
        text, path, ("client", "from", "to"), clients, never
    ):
        here = spells[client]
        if (start, end) == (0, 0):
            continue
        if start < 0:
            raise ConfigError(f"{at}: from second {start:g}; expected 0 or later.")
        if not end > start:
            raise ConfigError(f"{at}: to second {end:g}, which is not after second {start:g}.")
        if here and start < here[-1][1]:
            raise ConfigError(
                f"{at}: from second {start:g}, but the session before lasts until {here[-1][1]:g}."
            )
        here.append((start, end))
    return [Presence(tuple(each)) for each in spells]


def _device(value: Any, at: str) -> Presence:  # value: as read from a user's file
    """Returns the availability of one device of FedScale's or FLASH's JSON."""
    try:
        if "ready_time" in value:
            pairs = [(float(a), float(b)) for a, b in value["ready_time"] or ()]
            begin, end = 0.0, 1.0
            if pairs:
                begin, end = float(value["trace_start"]), float(value["trace_end"])
        else:
            begin, end = 0.0, float(value["finish_time"])
            active, inactive = value["active"], value["inactive"]
            if len(active) != len(inactive):
                raise ConfigError(
                    f"{at}: it becomes active {len(active)} times and inactive "
                    f"{len(inactive)} times; expected the same number."
                )
            pairs = [(float(a), float(b)) for a, b in zip(active, inactive)]
    except (KeyError, TypeError, ValueError, OverflowError) as broken:
        raise ConfigError(
            f"{at}: expected active, inactive and finish_time (FedScale), or "
            f"trace_start, trace_end and ready_time (FLASH); {type(broken).__name__}: {broken}."
        ) from None
    if not 0 <= begin < end < math.inf:
        raise ConfigError(f"{at}: its trace goes from second {begin:g} to {end:g}.")
    before = begin
    for number, (a, b) in enumerate(pairs, 1):
        if not before <= a <= b <= end:
            raise ConfigError(
                f"{at}, spell {number}: from second {a:g} to {b:g}; expected "
                f"ascending seconds from {before:g} to the trace's end, {end:g}."
            )
        before = b
    return cyclic(pairs, end - begin)


# -- devices ---------------------------------------------------------------------------------------
def paces(text: str, path: str, batches: Sequence[int]) -> Iterator[Pace]:
    """Yields the paces by client. batches: by client, the samples of a step, where the file has the
    time of one sample.
    """
    clients = len(batches)
    if text.lstrip()[:1] == "{":
        found = [_above(value, "computation", at) for value, at in _entries(text, path)]
        for c, batch in enumerate(batches):
            yield Pace(TRAINED * batch * found[c % len(found)] / 1e3)
        return
    last = -1
    for at, client, (step_ms,) in _by_client(text, path, ("client", "step_ms"), clients):
        if client == last:
            raise ConfigError(f"{at}: client {client} has a second line.")
        if not step_ms >= 0:
            raise ConfigError(f"{at}: {step_ms:g} ms a step; expected 0 or more.")
        last = client
        yield Pace(step_ms / 1e3)


# -- links -----------------------------------------------------------------------------------------
def link(paths: Sequence[str], seed: int, client: int, clients: int) -> tuple[Rates, Rates]:
    """Returns the rates (down, up) of a client. paths: the uplink's and the downlink's file, as for
    mm-link. If a file is not by client, each client begins at a second of its own, which is drawn:
    else all would be without service together.
    """
    made = []
    for path in paths:
        try:
            made.append(_series(path, clients))
        except ValueError as no_link:
            raise ConfigError(f"{path}: {no_link}.") from None
    up, down = made
    begin = float(seeds.rng(seed, "world/link", 0, client).random())

    def of(series: dict[int, tuple[Rates, Rates]], direction: int) -> Rates:
        if -1 not in series:
            return series[client % len(series)][direction]
        mbps = series[-1][direction].mbps
        return Rates(np.roll(mbps, -int(begin * len(mbps))))

    return of(down, 0), of(up, 1)


@functools.lru_cache(maxsize=4)
def _series(path: str, clients: int) -> dict[int, tuple[Rates, Rates]]:
    """Reads (down, up) by client, or of all under -1."""
    from fednet.world.shipped import LINKS

    found = text(path, "link.trace", LINKS)
    if found.lstrip()[:1] == "{":
        series = {}
        for number, (value, at) in enumerate(_entries(found, path)):
            rates = Rates([_above(value, "communication", at) / 1e3])
            series[number] = rates, rates
        return series
    first = next((line for line in found.splitlines() if line.strip()), "")
    if "," not in first:
        rates = mahimahi(found, path)
        return {-1: (rates, rates)}
    return _table(found, path, clients, len(first.split(",")) == 4)


def mahimahi(text: str, path: str) -> Rates:
    """Returns the rate in each second of a packet-delivery trace. The rest of a second at its end
    counts by its own length.
    """
    counts: dict[int, int] = {}
    last, at = 0, f"{path}:1"
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        at = f"{path}:{number}"
        try:
            ms = int(line)
        except ValueError:
            raise ConfigError(f"{at}: expected a millisecond, got {_cut(line)}.") from None
        if not last <= ms <= 1000 * LONGEST_S:
            raise ConfigError(
                f"{at}: millisecond {ms}; expected {last} to {1000 * LONGEST_S}, in order."
            )
        last = ms
        counts[ms // 1000] = counts.get(ms // 1000, 0) + 1
    if not last:
        raise ConfigError(f"{at}: the trace has no length; expected milliseconds above 0.")
    mbps = np.zeros(max(1, -(-last // 1000)))
    for second, packets in counts.items():
        mbps[min(second, len(mbps) - 1)] += packets * PACKET_MBIT
    mbps[-1] /= (last - 1000 * (len(mbps) - 1)) / 1000
    return Rates(mbps)


def _table(text: str, path: str, clients: int, single: bool) -> dict[int, tuple[Rates, Rates]]:
    """Reads a CSV that has each client's seconds from 0 on, none left out."""
    names = ("second", "down_mbps", "up_mbps")
    rows: Iterator[tuple[str, int, list[float]]]
    if single:
        rows = _by_client(text, path, ("client", *names), clients)
    else:
        rows = ((at, -1, numbers) for at, numbers in _rows(text, path, names))
    rates: dict[int, list[tuple[float, float]]] = {}
    for at, client, (second, down, up) in rows:
        here = rates.setdefault(client, [])
        if second != len(here):
            raise ConfigError(
                f"{at}: second {second:g}; expected second {len(here)}, so that none is left out."
            )
        if not (down >= 0 and up >= 0):
            raise ConfigError(f"{at}: {down:g} and {up:g} Mbit/s; expected 0 or more.")
        here.append((down, up))
    return {c: (Rates([d for d, _ in r]), Rates([u for _, u in r])) for c, r in rates.items()}


# -- lines -----------------------------------------------------------------------------------------
def _by_client(
    text: str, path: str, names: Sequence[str], clients: int, left_out: str = ""
) -> Iterator[tuple[str, int, list[float]]]:
    """Yields (place, client, the other numbers) of a CSV that has each client of the federation, in
    order. left_out: what to do about one that is left out, for the error.
    """
    last, at = -1, f"{path}:1"
    for at, (number, *others) in _rows(text, path, names):
        if number != int(number) or not 0 <= number < clients:
            raise ConfigError(
                f"{at}: there is no client {number:g}; this federation has clients 0 to "
                f"{clients - 1}."
            )
        client = int(number)
        if client < last:
            raise ConfigError(
                f"{at}: client {client} after client {last}; order the lines by client."
            )
        if client > last + 1:
            raise ConfigError(
                f"{at}: client {client} comes, and client {last + 1} is left out"
                f"{left_out.format(last + 1)}."
            )
        last = client
        yield at, client, others
    if last != clients - 1:
        raise ConfigError(
            f"{at}: the last client is {last}; this federation has clients 0 to {clients - 1}"
            f"{left_out.format(last + 1)}."
        )


def _rows(text: str, path: str, names: Sequence[str]) -> Iterator[tuple[str, list[float]]]:
    """Yields (place, numbers) of each line of a CSV; a first line with the names is a header."""
    empty = True
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        cells = [cell.strip() for cell in line.split(",")]
        at = f"{path}:{number}"
        try:
            numbers = [float(cell) for cell in cells]
            if len(cells) != len(names) or not all(math.isfinite(x) for x in numbers):
                raise ValueError
        except ValueError:
            if empty and cells == list(names):
                continue
            raise ConfigError(f"{at}: expected {', '.join(names)}, got {_cut(line)}.") from None
        empty = False
        yield at, numbers
    if empty:
        raise ConfigError(f"{path}: it is empty; expected lines of {', '.join(names)}.")


def _cut(line: str, most: int = 60) -> str:
    """Returns a line for an error, shortened if it is long."""
    line = line.strip()
    return repr(line) if len(line) <= most else f"{line[:most]!r} and {len(line) - most} more"


def _entries(text: str, path: str) -> Iterator[tuple[object, str]]:
    """Yields (value, place) of each device in a JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as broken:  # also: a number too long, nesting too deep
        line, why = getattr(broken, "lineno", 1), getattr(broken, "msg", broken)
        raise ConfigError(f"{path}:{line}: {why}; expected JSON.") from None
    if not found:
        raise ConfigError(f"{path}: it is empty; expected devices by id.")
    for key, value in found.items():
        yield value, f"{path}: device {_cut(key)}"


def _above(value: Any, key: str, at: str) -> float:  # value: as read from a user's file
    try:
        number = float(value[key])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ConfigError(f"{at}: expected computation and communication (FedScale).") from None
    if not 0 < number < math.inf:
        raise ConfigError(f"{at}: {key} {number:g}; expected a finite number above 0.")
    return number
