"""Sends the numbers of each round to trackers: `track: [tensorboard, mlflow, wandb]`.

Each writes into the run's directory, unless its own environment variables name a server
(MLFLOW_TRACKING_URI, WANDB_MODE). A tracker that fails does not stop the run: it is reported once
and left out from then on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fednet.config import Config, to_mapping
from fednet.errors import ConfigError, lacking
from fednet.files import write_aside
from fednet.plain import JsonDict
from fednet.records import COSTS, Round, all_metrics

log = logging.getLogger(__name__)


def numbers(record: Round) -> dict[str, float]:
    """The numbers of a round, by the name that trackers show."""
    found: dict[str, float] = {}
    for metric in (*all_metrics([record]), *COSTS):
        value = metric.of(record)
        if "track" in metric.places.split() and value is not None:
            found[metric.field.replace(".", "/")] = value
    for name, value in (record.client_accuracy or {}).items():
        found[f"client_accuracy/{name}"] = value
    for name, value in record.algorithm.items():
        if isinstance(value, (int, float)):
            found[f"algorithm/{name}"] = value
    return found


# (writes a round's numbers, closes)
Tracker = tuple[Callable[[int, dict[str, float]], None], Callable[[], None]]


def tensorboard(run: Path, config: JsonDict) -> Tracker:
    """Event files under OUT/NAME/tensorboard."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run / "tensorboard"))

    def write(round: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, round)
        writer.flush()

    return write, writer.close


def mlflow(run: Path, config: JsonDict) -> Tracker:
    """A run of the experiment `fednet`, in a file store under OUT/NAME/mlruns. A resumed run
    continues the same one.
    """
    # Newer releases write files only if this is set.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    uri = os.environ.get("MLFLOW_TRACKING_URI") or (run / "mlruns").resolve().as_uri()
    client = MlflowClient(tracking_uri=uri)
    known = client.get_experiment_by_name("fednet")
    of = known.experiment_id if known else client.create_experiment("fednet")
    begun = run / "mlflow-run"
    if not begun.exists():
        made = client.create_run(of, run_name=run.name)
        write_aside(begun, made.info.run_id)
        for name, value in config.items():
            client.log_param(made.info.run_id, name, str(value)[:500])
    id = begun.read_text(encoding="ascii")

    def write(round: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            client.log_metric(id, name, value, step=round)

    return write, lambda: client.set_terminated(id)


def wandb(run: Path, config: JsonDict) -> Tracker:
    """A run of the project `fednet`, offline under OUT/NAME/wandb unless WANDB_MODE is set."""
    import wandb

    # The variable may hold anything; wandb says what it allows.
    mode: Any = os.environ.get("WANDB_MODE") or "offline"
    begun = wandb.init(project="fednet", name=run.name, dir=str(run), config=config, mode=mode)
    return lambda round, numbers: begun.log(numbers, step=round), begun.finish


# By name, which is also that of the package.
KINDS: dict[str, Callable[[Path, JsonDict], Tracker]] = {
    "tensorboard": tensorboard,
    "mlflow": mlflow,
    "wandb": wandb,
}


class Trackers:
    """The trackers of a run. say: gets a sentence for one that fails. Raises ConfigError for one
    whose package is not installed.
    """

    def __init__(self, config: Config, run: Path, say: Callable[[str], None]) -> None:
        self._say = say
        whole = to_mapping(config)
        self._all: dict[str, Tracker] = {}
        for name in config.track:
            try:
                self._all[name] = KINDS[name](run, whole)
            except ImportError as absent:
                raise ConfigError(lacking(f"track: {name}", name)) from absent
            except Exception as broken:
                self._fails(name, broken)

    def round(self, record: Round) -> None:
        found = numbers(record)
        for name, (write, _) in list(self._all.items()):
            try:
                write(record.round, found)
            except Exception as broken:
                del self._all[name]
                self._fails(name, broken)

    def close(self) -> None:
        for name, (_, close) in self._all.items():
            try:
                close()
            except Exception as broken:
                self._fails(name, broken)

    def _fails(self, name: str, broken: Exception) -> None:
        """Reports it; the log has the traceback."""
        log.error("track: %s", name, exc_info=broken)
        text = " ".join(str(broken).split())[:200]
        self._say(f"track: {name} is left out from now on: {type(broken).__name__}: {text}")
