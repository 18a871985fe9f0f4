"""`python -m fednet`: the same as the command `fednet`."""

from __future__ import annotations

import sys

from fednet.cli.begin import fednet

if __name__ == "__main__":
    sys.exit(fednet())
