"""Starting a federation: the server alone, or a server and workers on this machine, or all in one process.

`fednet run` is a small supervisor. It imports what all need, and nothing more, then forks the server and the workers,
which so share the pages of torch; it starts anew a worker that died, and once a round a server that died. Nothing of
zmq, CUDA or a thread exists before a fork.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fednet import __version__, loading
from fednet import config as configuration
from fednet.config import Config
from fednet.engine import determinism, memory, placement
from fednet.engine.rundir import RunDirectory, claim, cut, forget, read_lines, write_json
from fednet.errors import CannotGoOn, ConfigError, FednetError, Stopped

log = logging.getLogger(__name__)
MAY_CHANGE = ("rounds", "stop", "round", "evaluate", "name", "load", "track")  # on resume
SLOW_BEAT_S = 3600.0  # in one process: neither side hears the other while it works, and neither can be gone
LOOPBACK = ("127.", "localhost", "[::1]")


# -- the server's process ------------------------------------------------------------------------------------------------
def host_rounds(config: Config, directory: Path, *, bind: str | None, device: str, data: Path | None, keys: Path | None, insecure: bool,
                until: float | None, command: Sequence[str], display: Any, callback: Callable[[Any], None] | None = None,
                welcome_ids: bool = True) -> dict[str, Any]:
    """Everything the server does in one process of its own; returns the summary. `bind` None: clients live in this process."""
    from fednet.algorithms.hosts import HubHost
    from fednet.engine import experiment as experiments
    from fednet.engine import privacy
    from fednet.engine.checkpoint import Checkpoints, Spool
    from fednet.engine.faults import Faults, struck
    from fednet.engine.hub import Events, Hub
    from fednet.engine.server import Residuals, Rounds
    from fednet.engine.summary import finish
    from fednet.engine.track import Tracker
    from fednet.protocol.server import ServerProtocol
    from fednet.transport.framing import connection_bytes, framing
    from fednet.wire import messages as m
    from fednet.wire.ledger import Ledger
    from fednet.wire.link import Link

    rounds: Any = None

    def heed(number: int, _: Any) -> None:
        if rounds is None:
            stop_early(number, _)
        rounds.stop_requested = signal.Signals(number).name, number == signal.SIGINT

    before = on_stop(heed)
    switches = determinism.settle(config.train.threads, config.train.precision)
    checkpoints, spool = Checkpoints(directory / "checkpoint", config.checkpoint.fsync), Spool(directory / "checkpoint")
    if checkpoints.exists:
        cut(directory, checkpoints.progress().lengths)
    files = RunDirectory(directory)
    logs = _log_to(directory / "log" / "server.log")
    incarnation = checkpoints.incarnation()
    keyring = _keyring(config, keys) if bind is not None else None
    curve = config.security.curve  # within one process nothing is encrypted, and the bytes are counted as if it were
    events = Events(lambda event, fields: files.event(event, **fields))
    transport: Any
    pump, loop = None, None
    if bind is None:
        from fednet.transport.inproc import Inproc

        network = Inproc(config.seed)
        transport, client_end = network.server(), network.client()
    else:
        from fednet.transport.zeromq import ZmqServer

        _check_bind(bind, curve, insecure)
        transport = ZmqServer(bind, keyring=keyring, on_refused=lambda reason, address: events.tell("refused", {"what": "connection", "reason": reason,
                                                                                                         "address": address}))
        write_json(directory / "server.json", {"address": transport.address, "host": socket.gethostname(), "pid": os.getpid(),
                                               "public_key": keyring.pair.public if keyring is not None else None,
                                               "incarnation": incarnation}, mode=0o600)
        if not welcome_ids:
            display.note(f"{config.name}: listening at {transport.address}; clients join by: fednet-client --id K --server {transport.address}")
    exp = experiments.build(config, data)
    privacy.check(exp)
    chosen = placement.place(device)[0] if device != "auto" else placement.place("auto")[0]
    resumed = None
    if checkpoints.exists:
        resumed = checkpoints.load(exp.algorithm.Server, Residuals)
        run_id = resumed[1].run
    else:
        run_id = secrets.token_hex(8)
    text = configuration.to_yaml(config)
    protocol = ServerProtocol(run_id, incarnation, config.clients,
                              lambda ids, session: m.Welcome(run=run_id, inc=incarnation, session=session, name=config.name, config=text, ids=ids,
                                                             beat_s=SLOW_BEAT_S if bind is None else _beat(config)),
                              time.monotonic(), files=experiments.required_files(loading.loaded()), layout=exp.digest,
                              may_speak_for=keyring.may_speak_for if keyring is not None else None, declared=_declared(exp))
    ledger = Ledger(files.wire.append, incarnation)
    for row in read_lines(directory / "wire.jsonl") if resumed is not None else ():
        ledger.recall(row)
    link = Link("server", transport.send, lambda n: framing(n, curve=curve), ledger, connection_bytes(curve, "server"))
    if bind is None:
        from fednet.engine import client as clients
        from fednet.protocol.client import ClientProtocol
        from fednet.protocol.rules import Rules

        protocol.rules = Rules(silent=None)  # until the first phase gives its own: loading the data may take longer
        worker = ClientProtocol("in-process", ids=list(range(config.clients)), host=socket.gethostname(), pid=os.getpid(), device=chosen,
                                versions=clients.versions(), files=loading.loaded())
        prepare = clients.preparer(lambda: loop, data=data, state=directory / "state", device=chosen, state_lost=False, allow=None,  # type: ignore[arg-type,return-value]
                                   quiet=True, say=display.note)
        loop = clients.ClientLoop(worker, client_end, lambda n: framing(n, curve=curve), prepare,
                                  greeting=connection_bytes(curve, "client"), inline=True)

        def pump() -> bool:
            moved = loop.step(0.0)
            if loop.broken is not None:
                raise loop.broken
            return moved

    faults = Faults(config, struck(directory / "events.jsonl"), lambda round, kind: files.event("fault", round, kind=kind))
    hub = Hub(protocol, transport, link, spool, _checker(exp, lambda client: rounds.sent.get(client)), events, pump, faults.at, files.wire.flush)
    host = HubHost(exp.setting, exp.scratch(chosen), config.clients, exp.federation.public_data() if exp.federation is not None else None)
    test, validation = _judges(exp, chosen)
    tracker = Tracker(directory / "tensorboard") if "tensorboard" in config.track else None
    told = [*([callback] if callback is not None else []), *([tracker.round] if tracker is not None else [])]
    rounds = Rounds(exp, files, hub, checkpoints, spool, run_id=run_id, host=host, display=display, faults=faults, test=test, validation=validation, told=told)
    rounds.until = until
    files.event("started", incarnation=incarnation, resumed=resumed is not None)
    over, why = False, ""
    try:
        if resumed is not None:
            for record in resumed[1].records.get("rounds", ()):
                files.rounds.append(record)
            for record in resumed[1].records.get("clients", ()):
                files.clients.append(record)
        if exp.federation is not None:
            write_json(directory / "partition.json", exp.federation.to_json())
        rounds.begin(resumed)
        rounds.run()
        over = True
        summary = finish(rounds, exp, directory, command, switches, [str(p) for p in loading.paths()])
        display.finished({**summary, "dir": str(directory)})
        return summary
    except OSError as broken:
        why = f"{broken.strerror} ({broken.filename or directory})"
        raise CannotGoOn(f"the run stopped: {why}; the last checkpoint is whole, --resume goes on.") from broken
    except FednetError as broken:
        over = isinstance(broken, CannotGoOn)
        why = str(broken)
        raise
    finally:
        with contextlib.suppress(OSError):  # a full disk must not hide what happened
            files.event("stopped", reason=why)
            rounds._status("done" if over and not why else "stopped")
        hub.call(lambda now: protocol.finish(over, why))
        if bind is None:
            hub._step(0.0)
            assert loop is not None
            loop.step(0.0)
            loop.close()
        else:
            hub.farewell(1.0 if over else 0.05)  # where rounds are left, the workers stay and wait for a server
        endings: list[Callable[[], object]] = [hub.close, files.flush, files.close, *([tracker.close] if tracker is not None else [])]
        for last in endings:
            with contextlib.suppress(OSError):
                last()
        logging.getLogger("fednet").removeHandler(logs)
        logs.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def on_stop(handler: Callable[[int, Any], None]) -> dict[int, Any]:
    """What SIGTERM, SIGUSR1 and Ctrl-C do from now on; returns what they did."""
    before: dict[int, Any] = {}
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        with contextlib.suppress(ValueError):  # in a thread of a caller's own, who has the signals
            before[number] = signal.signal(number, handler)
    return before


def stop_early(number: int, _: Any) -> None:
    """Before there is anything to be saved."""
    raise Stopped(f"stopped: {signal.Signals(number).name}; go on with --resume.", by_keyboard=number == signal.SIGINT)


def _beat(config: Config) -> float:
    lost = config.round.lost
    return max(0.1, min([2.0, *([lost.silent / 4] if lost.silent is not None else []), *([lost.closed / 2] if lost.closed is not None else [])]))


def _declared(exp: Any) -> Callable[[Any, Any], None]:
    """Refuses a reply whose form and sizes are not what the method declares, before its body is asked for."""
    from fednet.engine.experiment import Judgement

    def check(key: Any, form: Any) -> None:
        kind = Judgement if key.purpose == "evaluate" else exp.algorithm.exchanges[key.phase].up
        exp.up.check(kind, form, exp.bounds(kind, key.client))

    return check


def _checker(exp: Any, sent: Callable[[int], Any]) -> Callable[[Any, bytearray], None]:
    """What a reply must be, beyond its form: finite values, samples as this federation has them, no more of them than
    there can be, and an update within `security.max_norm`. What passes, the methods can fold. sent(client): the weights
    that a client was sent in this phase."""
    from fednet.engine.experiment import Judgement
    from fednet.engine.privacy import updates
    from fednet.errors import RemoteProtocolError
    from fednet.wire.payload import Run, Samples

    reference = exp.setting.initial.select(exp.shared)

    def check(reply: Any, body: bytearray) -> None:
        key = reply.key
        kind = Judgement if key.purpose == "evaluate" else exp.algorithm.exchanges[key.phase].up
        payload = exp.up.decode(kind, reply.form, body, reference, fill=reference)
        if isinstance(payload, Judgement):
            return payload.check(max(1, exp.setting.classes))
        for name in payload.fields:
            value = getattr(payload, name)
            if isinstance(value, Samples) and not isinstance(value.x, dict):
                labels = value.y
                wrong = exp.setting.classes and len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < exp.setting.classes
                if tuple(value.x.shape[1:]) != tuple(exp.input_shape) or wrong:
                    raise RemoteProtocolError(f"field {name}: samples of shape {tuple(value.x.shape[1:])} or labels that this federation does not have")
        run = getattr(payload, "run", None)
        if isinstance(run, Run) and exp.federation is not None:
            facts = exp.facts(key.client)
            if run.n > facts.n + facts.public_n:
                raise RemoteProtocolError(f"client {key.client} says it has {run.n} samples; the partition gave it {facts.n}")
        most = exp.config.security.max_norm
        if most is not None and key.purpose == "train":
            x = sent(key.client)
            if x is not None:  # a compressed state is a difference to x
                payload = exp.up.decode(kind, reply.form, body, x, fill=reference)
            for name, _, norm in updates(payload, x):
                if norm > most:
                    raise RemoteProtocolError(f"client {key.client}: {name} is an update of norm {norm:.4g}; security.max_norm allows {most:g}")

    return check


def _judges(exp: Any, device: str) -> tuple[Any, Any]:
    """The server's test set and validation set as model inputs, where it has them."""
    if exp.federation is None:
        return None, None
    data = exp.data
    test = (data.inputs(data.test[0], device), data.test[1].to(device)) if data.n_test else None
    held = exp.federation.validation_data()
    return test, (held.inputs(held.train[0], device), held.train[1].to(device)) if held is not None else None


def _check_bind(bind: str, curve: bool, insecure: bool) -> None:
    scheme, _, rest = bind.partition("://")
    if scheme != "tcp" or curve or insecure or rest.startswith(LOOPBACK):  # what is no address at all, the transport refuses
        return
    raise ConfigError(f"--bind {bind}: beyond loopback anyone could take part; use CURVE keys (security.curve: true and --keys DIR), or --insecure.")


def _keyring(config: Config, keys: Path | None) -> Any:
    if not config.security.curve:
        if keys is not None:  # whoever gives keys believes that they are used
            raise ConfigError(f"--keys {keys}: is given while security.curve is false; add --set security.curve=true.")
        return None
    from fednet.transport.keys import Keyring

    where = keys or (Path(config.security.keys) if config.security.keys else None)
    if where is None:
        raise ConfigError("security.curve: true needs the server's keys: --keys DIR or security.keys (make them by: fednet keys server DIR).")
    return Keyring(where)


def run_keys(config: Config, directory: Path) -> Path | None:
    """With CURVE, the keys of a run whose server and workers are in one hand: those that the configuration names, as `fednet
    keys lab` lays them, or new ones in the run's directory."""
    if not config.security.curve:
        return None
    from fednet.transport import keys

    if config.security.keys:
        given = Path(config.security.keys)
        keys.load(given / "clients" / "all.key")  # an error now rather than in each worker
        return given
    folder = directory / "keys"
    if not (folder / "clients" / "all.key").exists():
        shutil.rmtree(folder, ignore_errors=True)  # half made by one that was interrupted
        server = keys.make_server_keys(folder)
        keys.allow(folder, range(config.clients), keys.make_client_keys(folder / "clients" / "all.key", server))
    return folder


def _log_to(path: Path) -> logging.Handler:
    """Everything fednet logs in this process goes to `path` too, until the handler is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    root = logging.getLogger("fednet")
    root.addHandler(handler)
    root.setLevel(min(root.level or logging.INFO, logging.INFO))
    return handler


# -- a run's directory ---------------------------------------------------------------------------------------------------
def open_directory(config: Config, out: Path, resume: bool) -> tuple[Config, Path, bool]:
    """The run's directory with its configuration in it. Returns (configuration, directory, already finished)."""
    path = claim(out, config.name, resume)
    known = path / "config.yaml"
    if known.exists():
        old = configuration.load(known, [])
        check_resumable(old, config)
        if (path / "summary.json").exists() and config.rounds <= old.rounds and config.stop == old.stop:
            return old, path, True
        (path / "summary.json").unlink(missing_ok=True)
    code = path / "code"
    code.mkdir(parents=True, exist_ok=True)
    copies = []
    for file in loading.paths():
        target = code / Path(file).name
        if Path(file).resolve() != target.resolve():
            shutil.copyfile(file, target)
        copies.append(str(Path("code") / target.name))
    written = config.replace(load=tuple(copies)) if copies else config
    aside = path / "config.yaml.part"
    aside.write_text(configuration.to_yaml(written), encoding="utf-8")
    aside.replace(known)
    return config, path, False


def check_resumable(old: Config, new: Config) -> None:
    """Raises ConfigError that lists the keys in which a resumed run would differ."""
    before, after = _flat(configuration.to_mapping(old)), _flat(configuration.to_mapping(new))
    changed = sorted(k for k in {**before, **after} if k.split(".")[0] not in MAY_CHANGE and before.get(k) != after.get(k))
    if changed:
        raise ConfigError(f"--resume: {', '.join(changed)} differ from the run's own configuration; a resumed run may change only "
                          f"{', '.join(k for k in MAY_CHANGE if k not in ('name', 'load'))} and where it runs.")


def _flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested mappings as one, by dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, Mapping) and value else {above + key: value}
    return flat


# -- commands ------------------------------------------------------------------------------------------------------------
def serve(config: Config, *, bind: str, insecure: bool, keys: Path | None, device: str, data: Path | None, resume: bool, until_s: float | None,
          out: Path, quiet: bool, command: list[str], display: Any, report: Callable[[Path], None]) -> int:
    """`fednet-server`. Returns the exit status; raises FednetError with one. report: called with a finished run's directory."""
    on_stop(stop_early)
    _keyring(config, keys)  # what is wrong with keys or address is said before a directory is claimed
    _check_bind(bind, config.security.curve, insecure)
    config, directory, finished = open_directory(config, out, resume)
    if finished:
        display.note(f"{directory} is finished.")
        return 0
    until = None if until_s is None else time.monotonic() + until_s
    with _refusable(directory), display:
        host_rounds(config, directory, bind=bind, device=device, data=data, keys=keys, insecure=insecure, until=until, command=command,
                    display=display, welcome_ids=False)
    report(directory)
    return 0


def run_command(config: Config, *, workers: int | None, device: str, in_process: bool, resume: bool, until_s: float | None, out: Path,
                on: str | None, quiet: bool, command: list[str], display: Any, report: Callable[[Path], None]) -> int:
    """`fednet run`. Returns the exit status; raises FednetError with one. report: called with a finished run's directory."""
    on_stop(stop_early)
    config, directory, finished = open_directory(config, out, resume)
    if finished:
        display.note(f"{directory} is finished.")
        return 0
    until = None if until_s is None else time.monotonic() + until_s
    data = Path(config.data.root) if config.data.root else None
    with _refusable(directory):
        if in_process:
            with display:
                host_rounds(config, directory, bind=None, device=device, data=data, keys=None, insecure=False, until=until, command=command,
                            display=display)
            status = 0
        elif on == "ray":
            from fednet.engine.ray import run_on_ray

            status = run_on_ray(config, directory, workers=workers, device=device, until=until, command=command, display=display)
        else:
            status = Supervisor(config, directory, workers=workers, device=device, data=data, until=until, command=command, display=display).run()
    if status == ConfigError.exit_status:  # a process of the run's has said why
        forget(directory)
    if status == 0:
        report(directory)
    return status


@contextlib.contextmanager
def _refusable(directory: Path) -> Iterator[None]:
    """A run that is refused before its first round leaves no directory behind."""
    try:
        yield
    except FednetError as wrong:
        if wrong.exit_status == ConfigError.exit_status:
            forget(directory)
        raise


class Silent:
    """A display that shows nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _nothing(self, *_: object) -> None:
        pass

    round_started = progress = round_done = note = finished = _nothing


# -- the supervisor ------------------------------------------------------------------------------------------------------
class Supervisor:
    """Forks the server and the workers, and looks after them."""

    def __init__(self, config: Config, directory: Path, *, workers: int | None, device: str, data: Path | None, until: float | None,
                 command: list[str], display: Any) -> None:
        self.config, self.directory, self.data, self.until = config, directory, data, until
        self.command, self.display, self.device = command, display, device
        self.wanted = workers
        self.pids: dict[int, str] = {}  # pid -> "server", or a worker's device
        self.server_rounds: list[int] = []  # the rounds in which a server died
        self.planned = 0  # of these, the ones that the configuration asked for
        self.stopping: int | None = None
        self.keys: Path | None = None
        self.deaths = 0  # workers that ended with an error

    def run(self) -> int:
        devices = self._devices()
        places = placement.workers(self.wanted, devices, self.config.clients)
        (self.directory / "server.json").unlink(missing_ok=True)
        self._warm_up(places)
        self.keys = run_keys(self.config, self.directory)
        on_stop(self._pass_on)
        status = 3
        try:
            self._fork("server", self._server)
            for place in places:
                self._fork(place, functools.partial(self._worker, place))
            if self.stopping is not None:
                self._pass_on(self.stopping, None)
            status = self._watch()
            return status
        finally:
            self._end_all(3.0 if status == 0 else 0.0)  # where rounds are left, the workers would wait for a server

    def _devices(self) -> list[str]:
        """Found in a process of its own: asking CUDA here would forbid to fork."""
        if self.device == "cpu" or (self.device == "auto" and not _has_gpu()):
            return ["cpu"]
        words = [sys.executable, "-c", "import sys, json; from fednet.engine import placement; print(json.dumps(placement.place(sys.argv[1])))", self.device]
        asked = subprocess.run(words, capture_output=True, text=True, check=False)
        if asked.returncode:
            raise ConfigError(asked.stderr.strip().splitlines()[-1].partition(": ")[2])
        found: list[str] = json.loads(asked.stdout)
        return found

    def _warm_up(self, places: list[str]) -> None:
        """Imports, and imports only, what the children share."""
        import torch._dynamo  # every torch optimizer imports it when it is made: 3 s, once here instead of once a worker
        import torch.optim  # noqa: F401

        import fednet.algorithms.hosts
        import fednet.data.loading
        import fednet.engine.client
        import fednet.engine.server
        import fednet.engine.summary
        import fednet.transport.zeromq  # noqa: F401

    def _fork(self, name: str, work: Callable[[], int]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            self.pids[pid] = name
            return
        status = 3
        try:
            _die_with_parent()
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL if name == "server" else signal.SIG_IGN)
            status = work()
        except FednetError as wrong:
            print(f"fednet run: {wrong}", file=sys.stderr, flush=True)
            status = wrong.exit_status
        except KeyboardInterrupt:
            status = 130
        except BaseException:  # a forked child must never return into the supervisor's stack
            import traceback

            text = traceback.format_exc()
            with contextlib.suppress(OSError), (self.directory / "log" / f"{name.replace(':', '-')}.log").open("a", encoding="utf-8") as file:
                file.write(text)
            print(f"fednet run: {text.strip().splitlines()[-1]} (the whole traceback is in {self.directory / 'log'}).", file=sys.stderr, flush=True)
        finally:
            sys.stdout.flush()
            os._exit(status)

    def _server(self) -> int:
        memory.keep_freed()
        with self.display:
            host_rounds(self.config, self.directory, bind="tcp://127.0.0.1:*", device=self.device, data=self.data, keys=self.keys, insecure=False,
                        until=self.until, command=self.command, display=self.display)
        return 0

    def _worker(self, device: str) -> int:
        from fednet.engine import client

        _log_to(self.directory / "log" / f"worker-{os.getpid()}.log")
        keys = self.keys / "clients" / "all.key" if self.keys is not None else None
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return client.main(f"0-{self.config.clients - 1}", server=None, run=self.directory, device=device, data=self.data,
                           state=self.directory / "state", keys=keys, allow=None, explain=False, load=[], state_lost=None, quiet=True)

    def _watch(self) -> int:
        """Until the server ends: with 0 the run is done."""
        while True:
            pid, raw = os.waitpid(-1, 0)
            name = self.pids.pop(pid, None)
            if name is None:
                continue
            status = os.waitstatus_to_exitcode(raw)
            if name == "server":
                if status >= 0 or self.stopping is not None:
                    return status if status >= 0 else 4
                self._server_died(status)
            elif self.stopping is None and status != 0:
                self._worker_died(name, pid, status)

    def _server_died(self, status: int) -> None:
        from fednet.engine.faults import struck

        planned = sum(1 for _, client, _ in struck(self.directory / "events.jsonl") if client < 0)
        manifest = self.directory / "checkpoint" / "manifest.json"
        round = 0
        with contextlib.suppress(OSError, ValueError, KeyError):
            round = json.loads(manifest.read_text())["progress"]["round"]
        if planned > self.planned:
            self.planned = planned
        elif self.server_rounds.count(round) >= 1:
            raise CannotGoOn(f"the server died twice in round {round + 1} ({signal.Signals(-status).name}); what was finished is saved, --resume goes on.")
        else:
            self.server_rounds.append(round)
        self._fork("server", self._server)

    def _worker_died(self, device: str, pid: int, status: int) -> None:
        self.deaths += status > 0
        if self.deaths > 20:
            raise CannotGoOn(f"workers keep ending with status {status}; see {self.directory / 'log'}.")
        self._fork(device, lambda: self._worker(device))

    def _pass_on(self, number: int, _: Any) -> None:
        self.stopping = number
        for pid, name in self.pids.items():
            if name == "server":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _end_all(self, grace_s: float) -> None:
        """Nothing that was started here outlives this. grace_s: for those that end by themselves."""
        until = time.monotonic() + grace_s
        while self.pids and time.monotonic() < until:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid:
                self.pids.pop(pid, None)
            else:
                time.sleep(0.02)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in list(self.pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            until = time.monotonic() + 2.0
            while self.pids and time.monotonic() < until:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid:
                    self.pids.pop(pid, None)
                else:
                    time.sleep(0.02)


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia/version").exists()


def _die_with_parent() -> None:
    """Linux ends this process when its parent ends, however that ends."""
    if sys.platform == "linux":
        import ctypes

        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def provenance(config: Config, command: Sequence[str], switches: Mapping[str, Any], device: str) -> dict[str, Any]:
    """What repeats a run: versions, host, device, switches, the user's own files."""
    import torch

    return {"command": list(command), "fednet": __version__, "torch": str(torch.__version__), "python": platform.python_version(),
            "host": socket.gethostname(), "platform": platform.platform(), "device": device, "cuda": torch.version.cuda,
            "git": _git(), "code_sha256": loading.loaded(), "determinism": dict(switches)}


def _git() -> str | None:
    """The commit of a source checkout; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    asked = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None
