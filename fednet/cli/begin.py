"""The entry points of the commands. The commands are imported inside, so that Ctrl-C during an
import also ends in a sentence.
"""

from __future__ import annotations

import importlib

from fednet.errors import complain


def fednet() -> int:
    return _run_command("fednet", "main")


def server() -> int:
    return _run_command("fednet-server", "server")


def client() -> int:
    return _run_command("fednet-client", "client")


def _run_command(prog: str, module: str) -> int:
    try:
        return int(importlib.import_module(f"fednet.cli.{module}").main())
    except KeyboardInterrupt:  # before `run_guarded` was reached
        complain(f"{prog}: stopped by Ctrl-C.")
        return 130
