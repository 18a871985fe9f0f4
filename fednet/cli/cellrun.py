"""One run of a table in a process of its own: `python -m fednet.cli.cellrun CONFIG OUT DEVICE
[--load F] [--set K=V]`.

As `fednet run --in-process --resume`, without the figures and the page that a single run ends with:
those of a table are drawn once, over all its runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fednet.cli.common import guarded


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="fednet reproduce")
    parser.add_argument("config", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("device")
    parser.add_argument("--load", action="append", default=[])
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args(words)
    return guarded("fednet reproduce", lambda: _run(args, words), args.out, True)


def _run(args: argparse.Namespace, words: list[str]) -> int:
    from fednet import config as configuration
    from fednet.cli.display import Display
    from fednet.errors import CannotGoOn, StateError, complain
    from fednet.launch.in_process import run_in_process
    from fednet.launch.start import open_directory
    from fednet.server.watch import Hosting
    from fednet.sweep.marks import TORN

    wanted = configuration.load(args.config, args.set, args.load)
    begun = _records(args.out / wanted.name)
    with open_directory(wanted, args.out, resume=True) as (config, directory, finished):
        if not finished:
            data = Path(config.data.root) if config.data.root else None
            line = ["python", "-m", "fednet.cli.cellrun", *words]
            try:
                with Display(True) as display:
                    run_in_process(config, directory, Hosting(display, line, args.device, data))
            except (StateError, CannotGoOn) as wrong:
                if begun is None or _records(directory) != begun:
                    raise
                complain(str(wrong))  # what was left of the run cannot be gone on with
                return TORN
    return 0


def _records(directory: Path) -> int | None:
    """Rounds that a run has on record; None where it was not begun."""
    if not directory.exists():
        return None
    path = directory / "rounds.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
