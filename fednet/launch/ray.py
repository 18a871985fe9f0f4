"""`fednet run --on ray`: the workers are actors of a Ray cluster.

Ray places the actors, grants them CPUs and (shares of) GPUs, and tells which have died; these are
replaced wherever there is room. The server runs in this process, and messages go over ZeroMQ, as
without Ray. Each actor makes its own CURVE key: only the public half goes through Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from fednet import loading, places
from fednet.config import Config
from fednet.errors import CannotGoOn, ConfigError, lacking
from fednet.server.watch import ServerOptions

log = logging.getLogger(__name__)

WATCH_S = 0.5  # how often to look for workers that have ended
FAILURES = 5  # of workers that ended by an error, not killed, until the run is given up

# A handle of Ray's, whose methods are made at run time.
Actor = Any


class ClientActor:
    """Runs in an actor: a client process like any other. Its folder has its key, and on a node that
    does not see the run's directory its clients' states.
    """

    def __init__(self, directory: str, files: Mapping[str, str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="fednet-ray-"))
        self._directory = Path(directory)
        for name, text in files.items():
            (self._folder / name).write_text(text, encoding="utf-8")
        self._load = [self._folder / name for name in files]

    def sees(self, mark: str) -> bool:
        """Returns whether this node sees the run's directory."""
        return (self._directory / mark).exists()

    def make_key(self, server: str) -> str:
        from fednet.transport import keys

        return keys.make_client_keys(self._folder / "client.key", server)

    def work(
        self,
        ids: str,
        server: str,
        device: str,
        data: str | None,
        shared: bool,
        curve: bool,
        share: float,
    ) -> int:
        """Hosts `ids` until the run is over. share: of the GPU, which Ray does not enforce."""
        from fednet.client import join
        from fednet.client.policy import Policy

        # Ray shows an actor only the GPU that it may use.
        here = "cpu" if device == "cpu" else "cuda"
        own = "~/.fednet/ray-state"
        state = self._directory / "state" if shared else places.expand_home(own, "clients' states")
        try:
            status = join.main(
                ids,
                Policy.of_run(Path(data) if data else None),
                server=server,
                device=here,
                state=state,
                keys=self._folder / "client.key" if curve else None,
                load=self._load,
                gpu_share=share,
            )
            return max(0, status)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


def gpu_share(workers: int, gpus: int) -> float:
    """Returns the share of a GPU for each worker, so that every GPU holds a whole number of them: 5
    on 2 GPUs get a third each. Ray counts in ten-thousandths and rounds down, so all fit.
    """
    return 1 / -(-workers // gpus)


class Fleet:
    """Starts the actors, and watches them in a thread."""

    def __init__(
        self,
        ray: ModuleType,
        config: Config,
        directory: Path,
        how: ServerOptions,
        wanted: int | None,
        keys: Path | None,
    ) -> None:
        self.ray = ray
        self.config = config
        self.directory = directory
        self.keys = keys
        self._note = how.display.note
        devices = how.device
        there = ray.cluster_resources()
        gpus = int(there.get("GPU", 0)) if devices != "cpu" else 0
        if devices.startswith("cuda") and not gpus:
            raise ConfigError(f"--device {devices}: the Ray cluster has no GPU.")
        if ":" in devices:
            raise ConfigError(
                f"--device {devices}: Ray chooses the GPUs; expected auto, cpu or cuda."
            )
        threads = config.train.threads
        fit = max(1, int(there.get("CPU", 1)) // threads)
        self.workers = max(1, min(wanted or (gpus or fit), fit, config.clients))
        self.device = "cuda" if gpus else "cpu"
        self.asks: dict[str, float] = {"num_cpus": threads}
        if gpus:
            self.asks["num_gpus"] = gpu_share(self.workers, gpus)
        self.failure = ""
        self._failures = 0
        # By the task's reference: its number and its actor.
        self._running: dict[object, tuple[int, Actor]] = {}
        self._over = threading.Event()
        self.thread = threading.Thread(target=self._look_after, name="fednet-ray", daemon=True)

    def stop(self) -> None:
        self._over.set()
        self.thread.join(10.0)
        for _, actor in self._running.values():
            self.ray.kill(actor)

    def _look_after(self) -> None:
        try:
            self._watch()
        except Exception as broken:  # in a thread nobody would see it: the run reports it
            log.exception("ray")
            self._give_up(f"Ray: {broken}".splitlines()[0])

    def _watch(self) -> None:
        from fednet.client.loop import read_server

        while (found := read_server(self.directory)) is None and not self._over.is_set():
            time.sleep(0.02)
        # The server's address, as other nodes see it.
        here = self.ray.util.get_node_ip_address()
        address = (found or ("",))[0].replace("0.0.0.0", here)
        actors = {k: self._actor() for k in range(self.workers)}
        mark = f".ray-{os.getpid()}"
        (self.directory / mark).touch()
        shared = all(self.ray.get([a.sees.remote(mark) for a in actors.values()]))
        (self.directory / mark).unlink()
        if not shared:
            self._note(
                "not all nodes see the run's directory: each worker keeps its own clients' states"
            )
        for k, actor in actors.items():
            self._send_to_work(k, actor, address, shared)
        while not self._over.is_set():
            ended, _ = self.ray.wait(list(self._running), timeout=WATCH_S)
            for reference in ended:
                k, actor = self._running.pop(reference)
                try:
                    self.ray.get(reference)
                    if not self._running:
                        return
                    continue
                except self.ray.exceptions.RayActorError:
                    log.warning("worker %d died; another replaces it", k)
                except self.ray.exceptions.RayTaskError as broken:
                    self._failures += 1
                    if broken.cause is not None:
                        reason = str(broken.cause)
                    else:
                        reason = str(broken).strip().splitlines()[-1]
                    log.warning("worker %d ended: %s", k, reason)
                    if self._failures >= FAILURES:
                        return self._give_up(f"workers keep ending: {reason}")
                    self.ray.kill(actor)
                self._send_to_work(k, self._actor(), address, shared)

    def _actor(self) -> Actor:
        parts = loading.paths()
        texts = (Path(p).read_text(encoding="utf-8") for p in parts)
        files = dict(zip(loading.names(parts), texts))
        return (
            self.ray.remote(ClientActor)
            .options(**self.asks, max_restarts=0)
            .remote(str(self.directory.resolve()), files)
        )

    def _send_to_work(self, k: int, actor: Actor, address: str, shared: bool) -> None:
        if self.keys is not None:
            from fednet.transport import keys

            public = self.ray.get(actor.make_key.remote(keys.load(self.keys / "server.key").public))
            keys.allow(self.keys, range(self.config.clients), public)
        # With one directory of states, any worker may host any client; else each hosts a share.
        ids = f"0-{self.config.clients - 1}" if shared else f"{k + 1}/{self.workers}"
        reference = actor.work.remote(
            ids,
            address,
            self.device,
            self.config.data.root,
            shared,
            self.keys is not None,
            self.asks.get("num_gpus", 1.0),
        )
        self._running[reference] = k, actor

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        os.kill(os.getpid(), signal.SIGTERM)  # the server saves everything and stops


def run_on_ray(config: Config, directory: Path, how: ServerOptions, workers: int | None) -> int:
    """Runs a federation on Ray; returns the exit status. Connects to the cluster that RAY_ADDRESS
    or this machine names, or starts a local one. Raises ConfigError without Ray, and for a cluster
    of several hosts without CURVE.
    """
    from fednet.server.endpoint import listen, listening, run_keys
    from fednet.server.process import run_server

    (directory / "server.json").unlink(missing_ok=True)
    with _cluster() as ray:
        nodes = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
        hosts = set(nodes)
        beyond = hosts != {ray.util.get_node_ip_address()}
        if beyond and not config.security.curve:
            raise ConfigError(
                f"--on ray: the cluster has {len(hosts)} hosts; set security.curve: true (the "
                f"keys are made for you)."
            )
        keys = run_keys(config, directory)
        fleet = Fleet(ray, config, directory, how, workers, keys)
        how.display.note(
            f"{fleet.workers} workers on {len(nodes)} Ray node{'s' if len(nodes) > 1 else ''}, "
            f"each with "
            + ", ".join(f"{n:.3g} {what.removeprefix('num_')}" for what, n in fleet.asks.items())
        )
        fleet.thread.start()
        try:
            transport = listen(config, "tcp://*:*" if beyond else "tcp://127.0.0.1:*", keys, False)
            here = replace(how, device="cpu" if fleet.device == "cpu" else "auto")
            with how.display:
                run_server(config, directory, listening(config, directory, transport), here)
        finally:
            fleet.stop()
            if fleet.failure:
                raise CannotGoOn(f"--on ray: {fleet.failure}")
    return 0


@contextlib.contextmanager
def _cluster() -> Iterator[ModuleType]:
    """Yields the module of Ray, connected to a cluster."""
    try:
        import ray
    except ImportError:
        raise ConfigError(lacking("--on ray", "ray")) from None
    import ray.exceptions
    import ray.util

    mine = not ray.is_initialized()
    if mine:
        ray.init(
            log_to_driver=False,
            configure_logging=False,
            include_dashboard=False if "RAY_ADDRESS" not in os.environ else None,
        )
    try:
        yield ray
    finally:
        if mine:
            ray.shutdown()
