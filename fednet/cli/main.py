"""`fednet`: the verbs, one file each. A verb's file imports what it needs when it runs, so that
help costs nothing.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import fednet
from fednet.cli.common import WRONG_COMMAND, Parser, guarded, said
from fednet.errors import complain, unknown

# What each verb does; its file is cli/VERB.py with `add(parser)` and `run(args) -> exit status`.
VERBS = {
    "run": "one whole federation on this machine",
    "list": "what there is: algorithms, models, datasets, partitions, compressors, tasks",
    "partition": "who holds what: samples per client per class",
    "world": "a trace: who is there when, how fast devices and links are",
    "report": "one HTML page over one or several runs",
    "compare": "accuracy, rounds, MB and seconds to targets, over seeds",
    "figure": "one figure fit for a paper",
    "sweep": "every combination of settings, resumable",
    "frontier": "accuracy against bytes, a point a chain of compressors",
    "reproduce": "the runs behind one table of a paper, the paper's figure beside ours",
    "serve": "one long-lived server with a queue of runs, and a page about them",
    "queue": "submit runs to a folder of `fednet serve`, list and cancel them",
    "status": "what a live or dead run is doing",
    "verify": "whether two runs are the same to the bit, and where not",
    "doctor": "whether this machine is ready",
    "keys": "CURVE keys for the server and its clients",
    "new": "a commented template for a part of your own",
    "check": "the contract suite run over a part of your own",
}
FILES = {"list": "listing"}
# Commands of earlier versions, and what to do instead.
GONE = {
    "bench": "benchmarks are for developers: run `python -m tests.bench` in a clone",
    "submit": "write `fednet queue submit`",
    "cancel": "write `fednet queue cancel`",
}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else WRONG_COMMAND
    if words[0] in ("-V", "--version"):
        print(f"fednet {fednet.__version__}")
        return 0
    name = words[0]
    if name in GONE:
        complain(f"fednet {name}: {GONE[name]}.")
        return WRONG_COMMAND
    if name not in VERBS:
        complain(f"fednet: {unknown('command', name, VERBS)}")
        return WRONG_COMMAND
    verb = importlib.import_module(f"fednet.cli.{FILES.get(name, name)}")
    what = " ".join((verb.__doc__ or "").split("\n\n")[0].split())
    parser = Parser(prog=f"fednet {name}", description=what)
    verb.add(parser)
    try:
        args = parser.parse_args(words[1:])
    except SystemExit as done:  # argparse has said why
        return int(done.code or 0)
    args.command = said(["fednet", *words])
    # No command opens a window, and what a notebook asks of its own processes need not be here.
    os.environ.pop("MPLBACKEND", None)
    return guarded(
        f"fednet {name}",
        lambda: int(verb.run(args)),
        getattr(args, "out", None) if name in ("run", "sweep", "frontier", "reproduce") else None,
        argv is None,
    )


def usage() -> str:
    wide = max(map(len, VERBS))
    lines = [f"  {name:<{wide}}  {what}" for name, what in VERBS.items()]
    return "\n".join(
        [
            "usage: fednet COMMAND ...",
            "",
            "Federated learning between real processes, every byte counted.",
            "",
            "commands:",
            *lines,
            "",
            "`fednet COMMAND --help` says more; `fednet run` alone is the quick start; "
            "fednet-server and fednet-client run on several machines.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
