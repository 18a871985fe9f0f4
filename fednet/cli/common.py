"""What all commands share: common arguments, the configuration, and how an error is printed."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fednet import places
from fednet.cli import values
from fednet.errors import (
    CannotGoOn,
    ConfigError,
    FednetError,
    StopRequested,
    complain,
    last_work,
    machine_error,
    nearest,
    nowhere,
)
from fednet.plain import align
from fednet.registry import first_paragraph

if TYPE_CHECKING:
    from fednet.config import Config

LOOPBACK = "tcp://127.0.0.1:5555"  # where a server listens that is given no address
WRONG_COMMAND = 2
BROKE = 3
BY_KEYBOARD = 130
# Commands whose --out is the folder of runs, which has the log of errors.
WRITING = ("fednet run", "fednet sweep", "fednet reproduce", "fednet-server")


class Parser(argparse.ArgumentParser):
    """argparse with errors in one sentence, and no abbreviations: a flag added later must not
    change what a script means.
    """

    # The arguments are argparse's own, and go to it as they are.
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        width = min(110, shutil.get_terminal_size().columns - 2)
        kwargs.setdefault(
            "formatter_class",
            lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=width),
        )
        kwargs["allow_abbrev"] = False
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        hint = ""
        if message.startswith("unrecognized arguments: -"):
            flag = message.split()[2].partition("=")[0]
            if flag in GONE:
                complain(f"{self.prog}: {flag} is gone: {GONE[flag]}.")
                self.exit(WRONG_COMMAND)
            close = nearest(flag, [s for a in self._actions for s in a.option_strings])
            hint = f" Did you mean {close}?" if close else ""
            if "--set" in self._option_string_actions:
                from fednet.config.schema import homes

                # A flag with the name of a key, such as --rounds.
                if paths := homes().get(flag.strip("-").replace("-", "_")):
                    key = min(paths, key=len)
                    hint = f" Keys are set with --set, such as --set {key}=VALUE."
        complain(f"{self.prog}: {message}.{hint} See {self.prog} --help.")
        self.exit(WRONG_COMMAND)


CONFIG = "a YAML configuration; without it, all keys have their defaults"
RESUMED = f"{CONFIG}; with --resume also the directory of a run"


TUNNEL = "lead the connection through a tunnel, such as ssh -L or socat, and give --server its end"
# What fednet had, and how it is done now.
GONE = {"--proxy": TUNNEL, "FEDNET_PROXY": TUNNEL, "world": "its table is fednet list world TRACE"}


# Flags that several commands have.
FLAGS: dict[str, dict[str, Any]] = {
    "--set": {
        "action": "append",
        "default": [],
        "metavar": "KEY=VALUE",
        "help": "set one key, such as train.lr=0.1 or 'algorithm={name: fedprox, mu: 0.1}'; may be "
        "repeated",
    },
    "--load": {
        "action": "append",
        "default": [],
        "metavar": "FILE.py",
        "help": "a file with your own methods, models or other parts; may be repeated",
    },
    "--quiet": {"action": "store_true", "help": "print errors only"},
    "--device": {"default": "auto", "metavar": "D", "help": "auto, cpu, cuda or cuda:0,2 [auto]"},
    # Without it data.root holds, and only then the variable: see `data.loading`.
    "--data": {
        "type": values.path,
        "metavar": "DIR",
        "help": "folder of the datasets [data.root, else FEDNET_DATA]",
    },
    "--workers": {
        "type": values.at_least_one,
        "metavar": "W",
        "help": "worker processes of a run, with --in-process threads [one per visible GPU, else "
        "one per core, at most one per client]",
    },
    "--in-process": {
        "action": "store_true",
        "help": "run everything in one process, without sockets",
    },
    "--seeds": {
        "type": values.seeds,
        "metavar": "0,1,2",
        "help": "seeds of each cell, such as 0,1,2 or 0-4 [0]",
    },
    "--jobs": {
        "type": values.at_least_one,
        "default": 1,
        "metavar": "J",
        "help": "runs to do at a time [1]",
    },
}


def add_flags(parser: argparse._ActionsContainer, *names: str) -> None:
    """Adds these of `FLAGS` to a parser, or to a group of one."""
    for name in names:
        parser.add_argument(name, **FLAGS[name])


def common_arguments(parser: argparse.ArgumentParser, config: str = "", out: bool = True) -> None:
    """Adds --set, --load, --out (if `out`) and --quiet; before them the configuration file, if
    `config` describes it.
    """
    if config:
        parser.add_argument("config", nargs="?", metavar="CONFIG", help=config)
    add_flags(parser, "--set", "--load")
    if out:
        parser.add_argument(
            "--out",
            type=values.path,
            default=places.runs_as_named(),
            metavar="DIR",
            help="folder for the runs' directories [FEDNET_OUT, else runs]",
        )
    add_flags(parser, "--quiet")


def path_argument(parser: argparse.ArgumentParser, flag: str, help: str, what: str = "DIR") -> None:
    """Adds a flag that names a path. Its default is the variable of its name, FEDNET_DATA for
    --data; None if that is not set or empty.
    """
    variable = f"FEDNET_{flag.removeprefix('--').upper()}"
    parser.add_argument(
        flag,
        type=values.path,
        default=os.environ.get(variable) or None,
        metavar=what,
        help=f"{help} [{variable}]",
    )


def bind_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --bind, --insecure and --keys."""
    parser.add_argument(
        "--bind",
        default=os.environ.get("FEDNET_SERVER") or LOOPBACK,
        metavar="ADDRESS",
        help="address to listen at; tcp://*:0 takes a free port, for fednet-server alone "
        f"[FEDNET_SERVER, else {LOOPBACK}]",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="allow an address beyond loopback without CURVE keys",
    )
    path_argument(parser, "--keys", "folder of the server's keys")


def config_of(
    args: argparse.Namespace, typed: Callable[[Config], None] = lambda config: None
) -> Config:
    """The configuration of a command line; without CONFIG, all defaults. With --resume, CONFIG may
    be a run's directory: then its configuration, its folder and its name are used. typed: see
    `config.load`.
    """
    from fednet.config import load

    if args.config is not None and Path(args.config, "config.yaml").is_file():
        if not getattr(args, "resume", False):
            raise ConfigError(
                f"{args.config} is the directory of a run; continue it with --resume, or start "
                f"another with the same configuration: {args.config}/config.yaml."
            )
        held = Path(args.config)
        if held.name in ("", ".."):  # "." or "..": the run has the name of that directory
            held = held.resolve()
        args.config = held / "config.yaml"
        args.out = held.parent
        args.set = [f"name={held.name}", *args.set]
    elif args.config is not None and Path(args.config).is_dir():
        raise ConfigError(
            f"{args.config} is a folder without a config.yaml; expected a configuration, or with "
            f"--resume the directory of a run."
        )
    return load(args.config, args.set, args.load, typed=typed)


def execute(prog: str, verb: Any, words: Sequence[str], ends: bool) -> int:
    """Runs a command. prog: its name; verb: its module; words: its arguments; ends: the process
    ends after it. Returns its exit status.
    """
    for name in GONE:
        if os.environ.get(name):
            complain(f"{prog}: the variable {name} is gone: {GONE[name]}; then unset it.")
            return WRONG_COMMAND
    about = first_paragraph(verb.__doc__).removeprefix(f"`{prog}`: ")
    parser = Parser(prog=prog, description=about)
    verb.add(parser)
    try:
        args = parser.parse_args(words)
    except SystemExit as done:  # argparse has said why
        return int(done.code or 0)
    args.command = as_text([*prog.split(), *words])
    # No command opens a window, and what a notebook asks of its own processes need not be here.
    os.environ.pop("MPLBACKEND", None)
    out = args.out if prog in WRITING else None
    return run_guarded(prog, lambda: int(verb.run(args) or 0), out, ends)


def run_guarded(
    prog: str, main: Callable[[], int], out: Path | None = None, ends: bool = False
) -> int:
    """Runs `main`, and turns what it raises into one or two sentences and an exit status. ends:
    the process ends with that status.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream := getattr(sys, name), "reconfigure"):  # a notebook's have none
            stream.reconfigure(errors="backslashreplace")  # also if they take only ASCII
    # Without a handler Python would print warnings that are for the log.
    logging.getLogger("fednet").addHandler(logging.NullHandler())
    level = (os.environ.get("FEDNET_LOG") or "").upper()
    if level in ("DEBUG", "INFO", "WARNING", "ERROR"):
        logging.basicConfig(
            level=level, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s"
        )
    try:
        with last_work(ends):
            return main()
    except FednetError as wrong:
        fault = wrong.exit_status == BROKE and not isinstance(wrong, CannotGoOn)
        _note(out, wrong, whole=fault)
        _own_frames(wrong)
        complain(f"{prog}: {wrong}")
        return wrong.exit_status
    except KeyboardInterrupt as asked:
        complain(f"{prog}: {str(asked) or 'stopped by Ctrl-C'}.")
        return asked.exit_status if isinstance(asked, StopRequested) else BY_KEYBOARD
    except BrokenPipeError:  # `fednet list | head`: the reader has gone
        nowhere(sys.stdout)
        return 0
    except Exception as broken:
        if (said := machine_error(broken)) is not None:
            complain(f"{prog}: {said}")
            return BROKE
        # the outermost frame: a traceback is for the log, unless a user's own file raised it
        where = _note(out, broken, whole=True)
        own = _own_frames(broken)
        what = f"{type(broken).__name__}: {broken}".splitlines()[0]
        tail = "raised in your own file" if own else "this is a fault of fednet"
        complain(f"{prog}: {what} ({tail}; the whole traceback is in {where}).")
        return BROKE


def as_text(words: Sequence[str]) -> list[str]:
    """The command line as text: a path may hold bytes that are no letters in the locale."""
    return [os.fsencode(word).decode("utf-8", "replace") for word in words]


def _note(out: Path | None, error: BaseException, whole: bool) -> str:
    """Writes the whole traceback to OUT/fednet.log, or to stderr with FEDNET_LOG=debug. Returns
    where it is.
    """
    text = "".join(traceback.format_exception(error))
    if (os.environ.get("FEDNET_LOG") or "").lower() == "debug":
        complain(text, whole=True)
        return "the lines above"
    if not whole:
        return ""
    path = (out or places.runs()) / "fednet.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{' '.join(as_text(sys.argv))}\n{text}\n")
    except OSError:
        complain(text, whole=True)
        return "the lines above"
    return str(path)


def _own_frames(error: BaseException) -> bool:
    """Prints the traceback from the first frame in a user's own file on; of an error of fednet's
    own, that frame only. Returns whether there was one.
    """
    from fednet import loading

    seen: BaseException | None = error
    while seen is not None:
        at = next(loading.own_frames(seen), None)
        if at is not None:
            text = [f'  File "{at.tb_frame.f_code.co_filename}", line {at.tb_lineno}\n']
            if not isinstance(seen, FednetError):
                text = traceback.format_exception(type(seen), seen, at, chain=False)
            complain("".join(text), whole=True)
            return True
        seen = seen.__cause__
    return False


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Prints a table as plain lines of any width, which other programs can cut and search."""
    print("\n".join(align([columns, *rows], right)))
