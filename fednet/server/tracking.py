"""Writes the numbers of each round to TensorBoard: `track: [tensorboard]`."""

from __future__ import annotations

from pathlib import Path

from fednet.errors import ConfigError, lacking
from fednet.records import COSTS, Round, known


def numbers(record: Round) -> dict[str, float]:
    """Returns the numbers of a round, by the name that TensorBoard shows."""
    found: dict[str, float] = {}
    for metric in (*known([record]), *COSTS):
        value = metric.of(record)
        if "track" in metric.places.split() and value is not None:
            found[metric.field.replace(".", "/")] = value
    for name, value in (record.client_accuracy or {}).items():
        found[f"client_accuracy/{name}"] = value
    for name, value in record.algorithm.items():
        if isinstance(value, (int, float)):
            found[f"algorithm/{name}"] = value
    return found


class TensorBoard:
    """Writes event files under OUT/NAME/tensorboard. Raises ConfigError if the package is not
    installed.
    """

    def __init__(self, run: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as absent:
            raise ConfigError(lacking("track: tensorboard", "tensorboard")) from absent
        self._writer = SummaryWriter(str(run / "tensorboard"))

    def round(self, record: Round) -> None:
        for name, value in numbers(record).items():
            self._writer.add_scalar(name, value, record.round)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
