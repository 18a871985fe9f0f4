"""Write a commented template of your own algorithm, dataset or model."""

from __future__ import annotations

import argparse
import re
from importlib.resources import files

from fednet.cli import values
from fednet.errors import ConfigError
from fednet.files import write_new


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["algorithm", "dataset", "model"], help="what to write")
    parser.add_argument(
        "file",
        type=values.path,
        metavar="FILE.py",
        help="the file to write; its name is the part's name",
    )


def run(args: argparse.Namespace) -> None:
    name = re.sub(r"[^a-z0-9_-]+", "-", args.file.stem.lower()).strip("-") or "mine"
    if args.file.suffix != ".py":
        raise ConfigError(f"{args.file}: expected a file whose name ends in .py.")
    if not args.file.parent.is_dir():
        raise ConfigError(f"{args.file}: there is no directory {args.file.parent}.")
    kind = "".join(word.capitalize() for word in re.split(r"[-_]", name))
    kind = kind if kind[0].isalpha() else f"My{kind}"
    text = (files("fednet.cli") / "templates" / f"{args.what}.txt").read_text(encoding="utf-8")
    try:
        write_new(
            args.file,
            text.replace("@NAME@", name)
            .replace("@CLASS@", kind)
            .replace("@FUNCTION@", re.sub(r"\W", "_", f"make_{name}"))
            .replace("@FILE@", args.file.name),
        )
    except FileExistsError:
        raise ConfigError(
            f"{args.file}: there is such a file already; nothing is overwritten."
        ) from None
    print(f"{args.file}: {args.what} {name!r}; now `fednet check {args.file}`.")
