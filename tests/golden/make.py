"""Writes what this release sends and leaves behind, for later releases to read:
`python -m tests.golden.make` from the top of the repository. What earlier ones wrote stays.

    protocol-N.json    a header of each message, and what it says
    defaults-N.json    every configuration key's default, under protocol N
    run-F/             a run's directory, killed after two of four rounds; F: its format
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from fednet import registry
from fednet.config import from_mapping
from fednet.config.keys import keys
from fednet.config.parts import BESIDE, own_defaults
from fednet.launch.in_process import run_in_process
from fednet.launch.start import Silent, open_directory
from fednet.records.manifest import FORMATS
from fednet.server.hosting import Hosting
from fednet.wire import messages as m
from fednet.wire.frames import encode
from tests.wire.test_messages import FROM_CLIENT, FROM_SERVER

HERE = Path(__file__).parent
ROUNDS, KILLED = 4, 3
CONFIG: dict[str, Any] = {
    "name": "golden",
    "rounds": ROUNDS,
    "clients": 3,
    "participation": 1.0,
    "algorithm": {"name": "scaffold"},
    "model": {"name": "mlp", "hidden": [4]},
    "data": {
        "dataset": "synthetic",
        "samples": 60,
        "shape": [4],
        "classes": 3,
        "partition": {"scheme": "iid"},
    },
}


def messages() -> dict[str, list[dict[str, Any]]]:
    """By who says it: a header in hexadecimal digits, and its fields."""

    def shown(message: m.Message) -> dict[str, Any]:
        fields = msgspec.to_builtins(message, builtin_types=())
        return {"header": encode(message).hex(), "fields": fields}

    return {
        "client": [shown(message) for message in FROM_CLIENT],
        "server": [shown(message) for message in FROM_SERVER],
    }


def defaults() -> dict[str, str]:
    """Of the configuration's keys, and of the parts' own options."""
    found = {key.path: key.default for key in keys()}
    for section, kind in BESIDE.items():
        for name in getattr(registry, kind).names():
            for option, value in own_defaults(name, kind).items():
                found[f"{section}: {name}.{option}"] = str(value)
    return found


class Killed(BaseException):
    """Ends the run where it stands."""


class Killer(Silent):
    def round_done(self, record: Any) -> None:
        if record.round == KILLED:
            raise Killed


def run(folder: Path) -> None:
    """A run that dies in its third round, in that folder, without the name of this machine."""
    config = from_mapping(CONFIG)
    with (
        patch("socket.gethostname", lambda: "golden"),
        contextlib.suppress(Killed),
        open_directory(config, folder, resume=False) as (own, directory, _),
    ):
        run_in_process(
            own,
            directory,
            Hosting(Killer(), ["golden"], "cpu"),
        )


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    write(HERE / f"protocol-{m.SPEAKS[1]}.json", messages())
    write(HERE / f"defaults-{m.SPEAKS[1]}.json", defaults())
    home = HERE / f"run-{FORMATS[1]}"
    if not home.exists():
        run(HERE)
        shutil.move(HERE / "golden", home)
        shutil.rmtree(home / "log")


if __name__ == "__main__":
    main()
