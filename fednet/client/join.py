"""`fednet-client`: finds the server, connects, and talks to the user until the run is over."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fednet import capacity, ids, loading
from fednet.client import preparing
from fednet.client.loop import ClientLoop, given_up, read_server
from fednet.client.policy import Policy
from fednet.client.slots import MAX_TASKS
from fednet.client.states import StatesHold
from fednet.errors import (
    CannotGoOn,
    ConfigError,
    complain,
    log_line,
    speaker,
    stop_signals,
    why,
    with_time,
)
from fednet.experiment import determinism
from fednet.protocol.client import ClientProtocol
from fednet.wire import messages as m

if TYPE_CHECKING:
    from fednet.client.loop import Prepared
    from fednet.transport.keys import KeyPair

LEFT = -1  # instead of an exit status: this process was asked to end before the run did


def main(
    id: str,
    policy: Policy,
    *,
    server: str | None = None,
    run: Path | None = None,
    device: str = "cpu",
    state: Path | None = None,
    keys: Path | None = None,
    load: Sequence[Path] = (),
    explain: bool = False,
    status: bool = False,
    quiet: bool = True,
    give_up_s: float | None = None,
    gpu_share: float | None = None,
) -> int:
    """Runs a client process. Returns 0 when the run is over, LEFT when the process is asked to end
    before. Reconnects for as long as it lives, or until no server has accepted it for give_up_s.

    The arguments are the options of `fednet-client`, whose --help explains each. server: its
    address, or, if that is None, run: the directory of its run. gpu_share: None if a user started
    this process; else the launcher that did starts others too, which may host the same clients, and
    each may use this share of its GPU.
    """
    from fednet.experiment.placement import place
    from fednet.transport.zeromq.client import ZmqClient

    capacity.require_linux()
    asked = ids.parse(id)
    loading.load_parts(load)
    capacity.keep_freed_memory()
    determinism.set_switches()
    devices = place(device)
    say = speaker(quiet)
    address, pair = _server(server, run, keys, give_up_s, say)
    states = StatesHold(shared=gpu_share is not None)
    prepare: Callable[[ClientLoop, m.Welcome], Prepared]
    if explain:
        prepare = partial(preparing.explain, policy, asked, state)
    else:
        prepare = partial(preparing.prepare, policy, asked, devices, state, say=say, hold=states)
    join = m.Join(
        worker=secrets.token_hex(6),
        ids=list(asked.listed),
        share=asked.share,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=",".join(devices),
        slots=len(devices),
        versions=determinism.versions(),
        files=loading.loaded_files(),
        explain=explain,
        status=status,
    )
    join = without(join, policy.hide)
    complained: set[str] = set()

    def complain_once(reason: str, address: str) -> None:
        """Tells the user each reason once, however often the connection is tried."""
        if reason not in complained:
            complained.add(reason)
            sentence = f"fednet-client: not connected to {address}: {reason}; still trying"
            complain(with_time(sentence))

    loop = ClientLoop(
        ClientProtocol(join),
        ZmqClient(address, keys=pair, on_refused=complain_once),
        prepare,
        curve=pair is not None,
        run=run,
        faults=policy.faults,
        devices=devices,
        gpu_share=gpu_share or 1.0,
        most=len(asked.listed) or MAX_TASKS,
    )
    # Ctrl-C and a closed terminal reach all processes; a launcher stops those that it started.
    for number in stop_signals() if gpu_share is None else [signal.SIGTERM]:
        with contextlib.suppress(ValueError):  # not the main thread: the caller has the signals
            signal.signal(number, lambda *_: loop.leave())
    say(log_line(f"connecting to {address}"))
    try:
        end = loop.run(say, give_up_s)
    except preparing.Explained:
        return 0
    except OSError as broken:
        raise CannotGoOn(
            f"this client stops: {why(broken)}. To continue, start it again with the same --state."
        ) from broken
    finally:
        loop.close()
        states.release()
    if isinstance(end, m.Standing):
        print(end.text.replace("; ", "\n"))
        return 0
    if isinstance(end, m.Refuse):
        raise ConfigError(f"the server refused this client: {end.reason}")
    say(log_line("the run is over" if end.over else "left"))
    return 0 if end.over else LEFT


def without(join: m.Join, hide: Collection[str]) -> m.Join:
    """Returns the join without what the site's policy hides of its process and machine."""
    nothing = {"host": "", "pid": 0, "device": "", "versions": {}}
    return msgspec.structs.replace(join, **{name: nothing[name] for name in hide})


def _server(
    server: str | None,
    run: Path | None,
    keys: Path | None,
    give_up_s: float | None,
    say: Callable[[str], None],
) -> tuple[str, KeyPair | None]:
    """Returns the server's address and the keys for it; waits for a run's server.json."""
    pair = public = None
    if run is None:
        address = str(server)
    else:
        began = time.monotonic()
        if (found := read_server(run)) is None:
            say(f"waiting for {run / 'server.json'}")
        while found is None:
            if give_up_s is not None and time.monotonic() - began > give_up_s:
                raise given_up(give_up_s)
            time.sleep(0.02)
            found = read_server(run)
        address, public = found
    if keys is not None:
        from fednet.transport.keys import load

        pair = load(keys)
        if public and pair.server is None:
            pair = replace(pair, server=public)
    if run is not None and (pair is None) != (public is None):
        wants = "has no CURVE keys: leave --keys out"
        if pair is None:
            wants = "has CURVE keys, and so must its clients: give --keys FILE"
        raise ConfigError(f"{run}: the server there {wants}.")
    return address, pair
