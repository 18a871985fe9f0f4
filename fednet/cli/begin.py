"""Where each command begins: what it is made of is imported inside, so that Ctrl-C meanwhile ends
it in a sentence too.
"""

from __future__ import annotations

import importlib

from fednet.errors import complain


def fednet() -> int:
    return _begun("fednet", "main")


def server() -> int:
    return _begun("fednet-server", "server")


def client() -> int:
    return _begun("fednet-client", "client")


def _begun(prog: str, module: str) -> int:
    try:
        return int(importlib.import_module(f"fednet.cli.{module}").main())
    except KeyboardInterrupt:  # before `guarded`, which knows better, was reached
        complain(f"{prog}: stopped by Ctrl-C.")
        return 130
