"""`fednet bench`: what an argument names, run and printed."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from fednet.errors import ConfigError


def main(args: Any) -> int:
    """args.what: transport. Returns the exit status."""
    if args.what == "transport":
        from fednet.engine import reckoning

        with tempfile.TemporaryDirectory(prefix="fednet-bench-") as folder:
            for line in reckoning.main(Path(folder)):
                print(line, flush=True)
        return 0
    raise ConfigError(f"fednet bench {args.what}: expected transport.")
