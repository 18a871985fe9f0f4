"""TensorBoard event files, where `track: [tensorboard]` asks for them."""

from __future__ import annotations

from pathlib import Path

from fednet.errors import ConfigError
from fednet.records import COSTS, METRICS, Round


class Tracker:
    """Writes the numbers of each round under OUT/NAME/tensorboard."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as absent:
            raise ConfigError(
                "track: tensorboard needs the extra: pip install 'fednet[tensorboard]'."
            ) from absent
        self._writer = SummaryWriter(str(folder))

    def round(self, record: Round) -> None:
        for metric in (*METRICS, *COSTS):
            value = metric.of(record)
            if "track" in metric.places.split() and value is not None:
                self._writer.add_scalar(metric.field.replace(".", "/"), value, record.round)
        for name, value in (record.client_accuracy or {}).items():
            self._writer.add_scalar(f"client_accuracy/{name}", value, record.round)
        for name, value in record.algorithm.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(f"algorithm/{name}", value, record.round)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
