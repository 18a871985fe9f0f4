"""Run chains of compressors over seeds and draw accuracy against MB, with the Pareto-optimal
chains. Run it again to continue.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fednet.cli import sweep as sweeps
from fednet.cli import values
from fednet.cli.common import table
from fednet.errors import ConfigError
from fednet.options import each

if TYPE_CHECKING:
    from fednet.config import Config

NONE = "none"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chains",
        nargs="+",
        required=True,
        metavar="CHAIN",
        help="compressors from clients to the server: none, 'ef21+sign', or two chains"
        " at once by 'topk(0.01|0.05)+int8'",
    )
    parser.add_argument(
        "--down",
        nargs="+",
        default=[NONE],
        metavar="CHAIN",
        help="compressors from the server to clients [none]",
    )
    parser.add_argument(
        "--link",
        metavar="UP,DOWN",
        help="each client's rates in Mbit/s; seconds are then simulated, "
        "without training time unless the configuration has link.step_ms",
    )
    parser.add_argument(
        "--x",
        choices=["up", "down", "both"],
        default="both",
        help="direction whose MB are drawn [both]",
    )
    parser.add_argument(
        "--figure",
        type=values.new_file("pdf", "svg", "png", "eps"),
        metavar="FILE.svg",
        help="figure; its numbers go to a .csv file of the same name [frontier.svg in "
        "the sweep's folder]",
    )
    sweeps.shared_arguments(parser, "a YAML configuration")


def run(args: argparse.Namespace) -> int:
    from fednet import config as configuration
    from fednet.sweep import grid, running

    if args.config is None:
        raise ConfigError("expected a configuration, such as configs/quickstart.yaml.")
    config = configuration.load(args.config, args.set, args.load)
    _check_evaluated(config)
    args.set = [*args.set, *_link(args.link, config)]
    kinds = {way: _kinds(config, way) for way in ("up", "down")}
    ups = _chains(args.chains, "--chains", "up", kinds["up"])
    downs = _chains(args.down, "--down", "down", kinds["down"])
    vary = {
        f"wire.{way}": [{kind: items for kind in kinds[way] if items} for items in found.values()]
        for way, found in (("up", ups), ("down", downs))
    }
    made = grid.Sweep(
        base=str(Path(args.config).resolve()),
        vary=vary,
        seeds=args.seeds or [0],
        name=f"{Path(args.config).stem}-frontier",
    )
    if args.plan:
        print(running.plan(made, args.out, args.cell, args.load, args.set))
        return 0
    done = sweeps.run_cells(made, args)
    home, cells = running.home(made, args.out), grid.cells(made)
    labels = [
        " / ".join([up, *([down] if len(downs) > 1 else [])])
        for up, down in itertools.product(ups, downs)
    ]
    items = [up for up, _ in itertools.product(ups.values(), downs)]
    finished = {path.name for path in done.done}
    by_chain: dict[str, list[Path]] = {}
    for variation, cell in zip(itertools.cycle(labels), cells):
        if cell.name in finished:
            by_chain.setdefault(variation, []).append(home / cell.name)
    if by_chain:
        _shown(args, home, by_chain, dict(zip(labels, items)))
    return 0


def _shown(
    args: argparse.Namespace, home: Path, runs: dict[str, list[Path]], items: dict[str, list[str]]
) -> None:
    """Prints the table, and draws the figure with its numbers, of the cells that are done."""
    from fednet.report import frontier, open_run
    from fednet.sweep import chains

    points, of = [], None
    for label, folders in runs.items():
        of = of or chains.shapes(folders[0] / "model.safetensors")
        took = chains.seconds(items[label], of)
        points.append(frontier.point(label, [open_run(f) for f in folders], *took))
    picture = Path(args.figure) if args.figure else home / "frontier.svg"
    frontier.draw(points, args.x, picture)
    frontier.write(points, args.x, picture.with_suffix(".csv"))
    if args.quiet:
        return
    numbers = ("seeds", "global accuracy %", "MB up", "MB down", "s", "encode ms", "decode ms")
    head = ("chain", *numbers, "Pareto-optimal in")
    table(head, frontier.table(points, args.x), right=range(1, 1 + len(numbers)))
    print(picture)


def _chains(
    texts: list[str], flag: str, way: str = "up", kinds: Sequence[str] = ("state",)
) -> dict[str, list[str]]:
    """The chains by their names: `a+b(1|2)` is a+b(1) and a+b(2). Raises ConfigError for a text
    that is no chain, or none for these kinds in that direction.
    """
    from fednet.wire import compress

    found: dict[str, list[str]] = {}
    for text in texts:
        parts = [each(part) for part in text.replace(" ", "").split("+")]
        for chosen in itertools.product(*parts):
            items = [] if list(chosen) == [NONE] else list(chosen)
            try:
                compress.chains(dict.fromkeys(kinds, items), f"wire.{way}")
            except ConfigError as wrong:
                raise ConfigError(f"{flag} {text}: {wrong}") from None
            found["+".join(chosen)] = items
    return found


def _check_evaluated(config: Config) -> None:
    """Raises ConfigError if no run would have the accuracy that is drawn."""
    from fednet import registry

    if not registry.algorithm.get(config.algorithm.name).has_global:
        raise ConfigError(
            f"algorithm: {config.algorithm.name} has no global model, whose accuracy on the "
            f"server's test set `fednet frontier` draws; choose one that `fednet list algorithms` "
            f"lists as global."
        )
    if not (config.evaluate.every and config.evaluate.global_):
        key = "evaluate.global: false" if config.evaluate.every else "evaluate.every: 0"
        raise ConfigError(
            f"{key}: `fednet frontier` draws the global model's accuracy on the server's test set; "
            f"leave the key out."
        )


def _kinds(config: Config, way: str) -> list[str]:
    """The ledger kinds that the method sends that way as tensors of the model."""
    from fednet import registry

    method = registry.algorithm.get(config.algorithm.name)
    fields = [f for e in method.exchanges for f in getattr(e, way).fields.values()]
    return sorted({f.kind for f in fields if f.form in ("tensors", "parameters")})


def _link(text: str | None, config: Config) -> list[str]:
    """The settings of `--link UP,DOWN`. Raises ConfigError."""
    if text is None:
        return []
    found = re.fullmatch(r"([0-9.]+),([0-9.]+)", text.replace(" ", ""))
    if found is None:
        raise ConfigError(f"--link {text}: expected two rates in Mbit/s, such as 10,50.")
    sets = ["link.clock=virtual", f"link.up_mbps={found[1]}", f"link.down_mbps={found[2]}"]
    timed = config.link.step_ms is not None or config.devices.trace is not None
    return sets if timed else [*sets, "link.step_ms=0"]
