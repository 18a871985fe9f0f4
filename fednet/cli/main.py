"""`fednet`: the verbs, one file each. A verb's file imports what it needs when it runs, so that
help costs nothing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import fednet
from fednet.cli.common import GONE, WRONG_COMMAND, execute
from fednet.errors import complain, unknown

# What each verb does; its file is cli/VERB.py with `add(parser)` and `run(args)`, which returns the
# exit status, or None for 0.
VERBS = {
    "run": "run a whole federation on this machine",
    "list": "list algorithms, models, datasets, partitions, compressors, traces, metrics and keys",
    "partition": "show the data partition: samples per client and class",
    "report": "write an HTML page about one or several runs",
    "compare": "compare runs: accuracy, and rounds, MB and seconds to a target accuracy",
    "figure": "draw a figure for a paper",
    "sweep": "run every combination of settings; resumable",
    "reproduce": "run a paper's table and compare it with the printed figures",
    "serve": "run a server that works through a queue of runs, with a web page",
    "queue": "submit runs to a folder of `fednet serve`, list and cancel them",
    "status": "show what a run is doing",
    "runs": "list runs with their size and age, and delete old ones",
    "verify": "check whether two runs are bit-identical",
    "doctor": "check whether this machine is ready",
    "keys": "make and manage CURVE keys of the server and its clients",
    "new": "write a commented template of your own method, dataset or model",
    "check": "test your own method, model, dataset or partition",
}
FILES = {"list": "listing"}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        width = max(map(len, VERBS))
        print("usage: fednet COMMAND ...\n")
        print("Federated learning between real processes, every byte counted.\n\ncommands:")
        for name, what in VERBS.items():
            print(f"  {name:<{width}}  {what}")
        print(
            "\n`fednet COMMAND --help` says more; `fednet run` alone is the quick start; "
            "fednet-server and fednet-client run on several machines."
        )
        return 0 if words else WRONG_COMMAND
    if words[0] in ("-V", "--version"):
        print(f"fednet {fednet.__version__}")
        return 0
    name = words[0]
    if name in GONE:
        complain(f"fednet: the command {name} is gone: {GONE[name]}.")
        return WRONG_COMMAND
    if name not in VERBS:
        complain(f"fednet: {unknown('command', name, VERBS)}")
        return WRONG_COMMAND
    verb = importlib.import_module(f"fednet.cli.{FILES.get(name, name)}")
    return execute(f"fednet {name}", verb, words[1:], argv is None)


if __name__ == "__main__":
    sys.exit(main())
