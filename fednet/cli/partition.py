"""How the data are divided: samples of each client by class, as a table and a bubble chart."""

from __future__ import annotations

import argparse
import json

from fednet.cli import values
from fednet.cli.common import CONFIG, common_arguments, config_of, table
from fednet.files import write_aside


def add(parser: argparse.ArgumentParser) -> None:
    common_arguments(parser, CONFIG, out=False)
    parser.add_argument(
        "--out",
        type=values.new_file("png", "svg", "pdf"),
        metavar="FILE.png",
        help="draw the bubble chart into this file",
    )
    parser.add_argument(
        "--export",
        type=values.new_file("json"),
        metavar="FILE.json",
        help="write the partition: each client's indices",
    )


def run(args: argparse.Namespace) -> None:
    config = config_of(args)
    from fednet import registry
    from fednet.data import division, loading
    from fednet.report import figures

    data = loading.load(config.data, config.data.root, config.seed)
    uses_public = registry.algorithm.get(config.algorithm.name).uses_public
    federation = division.split(
        data, config.data, config.clients, config.seed, uses_public=uses_public
    )
    counts = federation.table()
    if not args.quiet:
        # By class, of each client and of all.
        sums = [*counts.tolist(), counts.sum(axis=0).tolist()]
        rows = [
            [who, *(f"{n}" if n else "·" for n in row), f"{sum(row)}"]
            for who, row in zip([*map(str, range(config.clients)), "all"], sums)
        ]
        header = ["client", *map(str, data.names or range(counts.shape[1])), "samples"]
        table(header, rows, right=range(1, len(header)))
    if args.out:
        figures.partition_file(counts, data.names, args.out)
    if args.export:
        write_aside(args.export, json.dumps(federation.export()))
