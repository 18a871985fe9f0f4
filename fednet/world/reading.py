"""Reads a user's own traces. Impossible values are refused with their line: seconds that go back
or are below 0, spells that overlap, clients that do not exist or are left out, missing seconds.

    availability  CSV `client,from,to`: seconds, of each client in order of time; a client that is
                  never available has the line `client,0,0`
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
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from fednet import places, seeds
from fednet.errors import ConfigError, unknown
from fednet.world.presence import Presence, cyclic, merge_spells
from fednet.world.rates import Rates

PACKET_MBIT = 1500 * 8 / 1e6
LONGEST_S = 10**7  # of a trace of packets: sixteen weeks, a number for each second
TRAINED = 3.0  # FedScale counts a training step as three passes forward
JSON_OF = "python -c \"import json,pickle,sys; json.dump(pickle.load(open(sys.argv[1],'rb')),"

# The place of a line, for errors, and its numbers.
Line = tuple[str, list[float]]


def text(path: str, key: str, names: Sequence[str]) -> str:
    """Returns the text of a file. key, names: for the error if there is no such file."""
    try:
        raw = places.expand_home(path, key).read_bytes()
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


def is_json(text: str) -> bool:
    """Whether the text is a JSON object, of devices by id."""
    return text.lstrip()[:1] == "{"


def clients(text: str, path: str) -> int:
    """Returns how many clients a file has; 1 if it names none."""
    if is_json(text):
        return len(_devices(text, path))
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
    if is_json(text):
        return tuple(_presence(value, at) for at, value in _devices(text, path))
    found = []
    for lines in _by_client(text, path, ("client", "from", "to"), clients):
        spells = [(at, start, end) for at, (start, end) in lines]
        found.append(Presence(merge_spells(_ascending(spells, 0.0, math.inf))))
    return found


def _presence(value: Any, at: str) -> Presence:  # value: as read from a user's file
    """Returns the availability of one device of FedScale's or FLASH's JSON."""
    begin = 0.0
    try:
        if "ready_time" in value:
            pairs = value["ready_time"] or []
            if not pairs:  # its trace may lack a start and an end
                return Presence(())
            begin = float(value["trace_start"])
            end = float(value["trace_end"])
        else:
            pairs = list(zip(value["active"], value["inactive"], strict=True))
            end = float(value["finish_time"])
        spells = [(at, float(a), float(b)) for a, b in pairs]
    except (KeyError, TypeError, ValueError, OverflowError) as broken:
        raise ConfigError(
            f"{at}: expected active, inactive and finish_time (FedScale), or "
            f"trace_start, trace_end and ready_time (FLASH); {type(broken).__name__}: {broken}."
        ) from None
    if not 0 <= begin < end < math.inf:
        raise ConfigError(f"{at}: its trace goes from second {begin:g} to {end:g}.")
    return cyclic(_ascending(spells, begin, end), end - begin)


def _ascending(
    spells: Iterable[tuple[str, float, float]], begin: float, end: float
) -> list[tuple[float, float]]:
    """Returns the spells (place, from, to) without their places. Raises ConfigError if they
    overlap, go back or are not between begin and end.
    """
    found = []
    for at, a, b in spells:
        if not begin <= a <= b <= end:
            raise ConfigError(
                f"{at}: available from second {a:g} to {b:g}; expected ascending seconds from "
                f"{begin:g} to {end:g}."
            )
        begin = b
        found.append((a, b))
    return found


# -- devices ---------------------------------------------------------------------------------------
def steps_s(text: str, path: str, batches: Sequence[int]) -> list[float]:
    """Returns the seconds of a training step by client. batches: by client, the samples of a step,
    where the file has the time of one sample.
    """
    if is_json(text):
        found = _positive(text, path, "computation")
        return [TRAINED * batch * found[c % len(found)] / 1e3 for c, batch in enumerate(batches)]
    made = []
    for lines in _by_client(text, path, ("client", "step_ms"), len(batches)):
        at, (step_ms,) = lines[-1]
        if len(lines) > 1 or step_ms < 0:
            raise ConfigError(f"{at}: expected one line a client, with 0 ms or more.")
        made.append(step_ms / 1e3)
    return made


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
    if is_json(found):
        rates = [Rates([kbps / 1e3]) for kbps in _positive(found, path, "communication")]
        return {client: (one, one) for client, one in enumerate(rates)}
    first = next((line for line in found.splitlines() if line.strip()), "")
    if "," not in first:
        packets = mahimahi(found, path)
        return {-1: (packets, packets)}
    names = ("second", "down_mbps", "up_mbps")
    if len(first.split(",")) == 4:
        by_client = _by_client(found, path, ("client", *names), clients)
        return {client: _both(lines) for client, lines in enumerate(by_client)}
    return {-1: _both(_lines(found, path, names))}


def _both(lines: Iterable[Line]) -> tuple[Rates, Rates]:
    """Returns the rates (down, up) of lines that have all seconds from 0 on."""
    downs: list[float] = []
    ups: list[float] = []
    for at, (second, down, up) in lines:
        if second != len(downs) or down < 0 or up < 0:
            raise ConfigError(
                f"{at}: expected second {len(downs)}, so that none is left out, and 0 Mbit/s or "
                f"more; got second {second:g}, {down:g} and {up:g} Mbit/s."
            )
        downs.append(down)
        ups.append(up)
    return Rates(downs), Rates(ups)


def mahimahi(text: str, path: str) -> Rates:
    """Returns the rate in each second of a packet-delivery trace. The rest of a second at its end
    counts by its own length.
    """
    counts: dict[int, int] = {}
    last = 0.0
    for at, (ms,) in _lines(text, path, ("millisecond",)):
        if not last <= ms <= 1000 * LONGEST_S or ms != int(ms):
            raise ConfigError(
                f"{at}: millisecond {ms:g}; expected whole numbers from {last:g} to "
                f"{1000 * LONGEST_S}, in order."
            )
        last = ms
        second = int(ms) // 1000
        counts[second] = counts.get(second, 0) + 1
    if not last:
        raise ConfigError(f"{path}: the trace has no length; expected milliseconds above 0.")
    mbps = np.zeros(math.ceil(last / 1000))
    for second, packets in counts.items():
        mbps[min(second, len(mbps) - 1)] += packets * PACKET_MBIT
    mbps[-1] /= (last - 1000 * (len(mbps) - 1)) / 1000
    return Rates(mbps)


# -- lines, and devices by id ----------------------------------------------------------------------
def _by_client(text: str, path: str, names: Sequence[str], clients: int) -> list[list[Line]]:
    """Returns the lines of a CSV by client, without the client's id. Raises ConfigError for ids
    that the federation does not have, and for clients without a line.
    """
    found: list[list[Line]] = [[] for _ in range(clients)]
    for at, (client, *others) in _lines(text, path, names):
        if client not in range(clients):
            raise ConfigError(
                f"{at}: there is no client {client:g}; this federation has clients 0 to "
                f"{clients - 1}."
            )
        found[int(client)].append((at, others))
    if [] in found:
        raise ConfigError(
            f"{path}: there is no line of client {found.index([])}; this federation has clients 0 "
            f"to {clients - 1}."
        )
    return found


def _lines(text: str, path: str, names: Sequence[str]) -> Iterator[Line]:
    """Yields each line of a CSV; a first line with the names is a header."""
    empty = True
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        cells = [cell.strip() for cell in line.split(",")]
        if empty and cells == list(names):
            continue
        empty = False
        try:
            numbers = [float(cell) for cell in cells]
        except ValueError:
            numbers = []
        if len(numbers) != len(names) or not all(map(math.isfinite, numbers)):
            raise ConfigError(
                f"{path}:{number}: expected {', '.join(names)}, got {line.strip()[:60]!r}."
            )
        yield f"{path}:{number}", numbers
    if empty:
        raise ConfigError(f"{path}: it is empty; expected lines of {', '.join(names)}.")


def _devices(text: str, path: str) -> list[tuple[str, Any]]:
    """Returns (place, value) of each device in a JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as broken:  # also: a number too long, nesting too deep
        raise ConfigError(f"{path}: {broken}; expected JSON.") from None
    if not found:
        raise ConfigError(f"{path}: it is empty; expected devices by id.")
    return [(f"{path}: device {key[:60]!r}", value) for key, value in found.items()]


def _positive(text: str, path: str, key: str) -> list[float]:
    """Returns this number of each device of FedScale's capacity."""
    found = []
    for at, value in _devices(text, path):
        try:
            number = float(value[key])
        except (KeyError, TypeError, ValueError, OverflowError):
            number = math.nan
        if not 0 < number < math.inf:
            raise ConfigError(f"{at}: expected {key}, a finite number above 0 (FedScale).")
        found.append(number)
    return found
