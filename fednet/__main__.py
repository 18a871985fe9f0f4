"""`python -m fednet`: the same as the command `fednet`."""

from __future__ import annotations

import sys

from fednet.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
