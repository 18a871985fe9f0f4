"""Draw a curve for each method into one file, in the size, fonts and colours that a paper needs."""

from __future__ import annotations

import argparse

from fednet.cli import values
from fednet.cli.report import counted_and_labelled, open_runs, runs_argument
from fednet.records import METRICS


def add(parser: argparse.ArgumentParser) -> None:
    runs_argument(parser)
    parser.add_argument(
        "--x",
        choices=["mb", "rounds", "seconds"],
        default="rounds",
        help="unit of the horizontal axis [rounds]",
    )
    known = ", ".join(m.name for m in METRICS)
    parser.add_argument(
        "--y",
        default="accuracy",
        metavar="METRIC",
        help=f"the metric [accuracy]: {known}; one of evaluate.metrics such as f1_macro, or "
        f"client_f1_macro, received_f1_macro or personal_f1_macro on the clients' tests; or cost: "
        f"what each method needs to reach --target, in the unit of --x",
    )
    parser.add_argument(
        "--target", type=float, metavar="A", help="with --y cost: an accuracy, such as 0.8"
    )
    parser.add_argument(
        "--band",
        choices=["ci", "std", "minmax"],
        default="ci",
        help="what the band over seeds is: the 95 %% confidence interval, one standard deviation, "
        "or the lowest and the highest seed [ci]",
    )
    counted_and_labelled(parser)
    parser.add_argument(
        "--out",
        type=values.new_file("pdf", "svg", "png", "eps"),
        required=True,
        metavar="FILE",
        help="file to write; its ending (.pdf, .svg, .png or .eps) is the format",
    )
    parser.add_argument(
        "--width", default="3.4in", metavar="W", help="width, such as 3.4in or 86mm [3.4in]"
    )


def run(args: argparse.Namespace) -> None:
    from fednet.report import curves

    runs = open_runs(args.runs)
    caption = curves.figure(
        runs,
        args.out,
        args.x,
        args.y,
        args.width,
        bytes=args.bytes,
        labels=args.label,
        band=args.band,
        target=args.target,
    )
    print(caption)
