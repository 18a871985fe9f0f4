"""TensorBoard event files, where `track: [tensorboard]` asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fednet.errors import ConfigError

CURVES = (
    "test_accuracy",
    "test_loss",
    "train_loss",
    "validation_accuracy",
    "seconds",
    "bytes_up",
    "bytes_down",
)


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

    def round(self, record: dict[str, Any]) -> None:
        for name in CURVES:
            if record.get(name) is not None:
                self._writer.add_scalar(name, record[name], record["round"])
        for name, value in (record.get("client_accuracy") or {}).items():
            self._writer.add_scalar(f"client_accuracy/{name}", value, record["round"])
        for name, value in record.get("algorithm", {}).items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(f"algorithm/{name}", value, record["round"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
