"""Writes the pages that follow from the code: `python docs/pages.py`. With --check it writes
nothing and names those that are not up to date.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import grimp

from fednet import records, registry
from fednet.cli import client, server
from fednet.cli.common import Parser
from fednet.cli.main import FILES, VERBS
from fednet.config import keys as declared
from fednet.protocol import table

HERE = Path(__file__).parent
for variable in [name for name in os.environ if name.startswith("FEDNET_")]:
    del os.environ[variable]  # the page has what stands where none is set
BEGIN, END = "<!-- the picture: python docs/pages.py -->", "<!-- end of the picture -->"
STATES, END_STATES = "<!-- the states: python docs/pages.py -->", "<!-- end of the states -->"
COLUMNS, END_COLUMNS = "<!-- the columns: python docs/pages.py -->", "<!-- end of the columns -->"


COMMANDS = """\
`python docs/pages.py` writes this page from the commands themselves; `--help` of each says the
same, and `fednet --version` the release.

| exit status | means |
|---|---|
| 0 | done |
| 1 | `fednet verify` alone: the runs differ |
| 2 | the command line or the configuration is wrong, or the data; the error names the key or the file, and nothing was started; of `fednet doctor`: the machine is not ready |
| 3 | the federation could not continue, with the reason; a disk is full; or a fault of fednet, whose traceback is in `OUT/fednet.log` |
| 4 | stopped with rounds left (`--until`, SIGTERM, SIGUSR1, SIGHUP unless `nohup` has it ignored); `--resume` continues |
| 130 | the same, by Ctrl-C |
| 5 | `fednet run --resume` alone: files of the run are damaged, and it cannot be continued |

| variable | replaces |
|---|---|
| `FEDNET_OUT` | `--out` |
| `FEDNET_DATA` | `--data` of a client; elsewhere `data.root`, where that is null and `--data` is not given |
| `FEDNET_SERVER` | `--bind` of a server, `--server` of a client |
| `FEDNET_KEYS` | `--keys` |
| `FEDNET_PROXY` | gone, and refused: a [tunnel](howto/machines.md#server-and-clients) |
| `FEDNET_LOG` | no flag: `debug`, `info`, `warning` or `error` has what modules log written to stderr; `debug` also the whole traceback of an error |
"""  # noqa: E501


METHODS = """\
# Methods

`python docs/pages.py` writes this page from what the methods declare. `fednet list algorithms` prints
the same list and shows which model of each method is evaluated, the global one or the personal ones;
`fednet list algorithms --set model=resnet18_gn` prints the cost in MB.

*Down* and *up* are per client and round, before compression; *once* is sent with a client's first task.
|w| is the size of the model, |base| or |upper layers| that of the part of it that is shared. Other names are
the fields that the method's file declares, and describes.
"""  # noqa: E501


CONFIGURATION = """\
# Configuration

Every key with its type, default and unit, and what it does. `python docs/pages.py` writes this page from
`fednet/config/schema.py`; `fednet list keys [PREFIX]` prints the same.

- Methods, models, datasets and partitions have options of their own, written beside their name; compressors
  have numbers in parentheses. [Methods](methods.md#options) describes the options of the methods, this page
  those of the others. `fednet list keys model.mlp` prints those of one.
- `extends: OTHER.yaml` reads that file first, relative to this one. This file replaces its keys one by one,
  and `--set` replaces keys of both. If another method, model, dataset or partition is named, the options of
  the earlier one are dropped.
- `algorithm: fedprox` is short for `algorithm: {name: fedprox}`, likewise `model`, `data`, `data.partition`,
  `selection`, `availability` and `schedule`.
- YAML is read strictly: a key that is written twice is an error, only `true` and `false` are booleans, and
  `1e-3` is a number. Inside `{}` and `[]`, a value with a comma needs quotes: `{up_mbps: "lognormal(10, 1)"}`.
"""  # noqa: E501


# The sections of the page of keys that name parts, and what these are called.
OPTIONS = {
    "model": "the models",
    "data": "the datasets",
    "data.partition": "the partitions",
    "wire": "the compressors, in the order of their numbers",
}


def methods() -> str:
    """docs/methods.md: one row a method, from its declarations."""
    lines = [
        *METHODS.splitlines(),
        "",
        "| method | what it does | down | up | server keeps | client keeps | paper |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in registry.algorithm.entries():
        method = registry.algorithm.get(entry.name)()
        sends, keeps = method.sends(), method.keeps()
        lines.append(
            _row(f"`{entry.name}`", entry.summary.rstrip("."), *sends, *keeps, method.paper)
        )
    lines += [
        "",
        "## Options",
        "",
        "An option is written beside the method's name: `algorithm: {name: fedprox, mu: 0.1}`.",
        "`fednet list keys algorithm.fedprox` prints the same.",
        "",
        *_options("algorithm"),
    ]
    return "\n".join(lines) + "\n"


def configuration() -> str:
    """docs/configuration.md: a table of keys for each section."""
    about = declared.sections()
    keys: dict[str, list[declared.DocumentedKey]] = {name: [] for name in about}
    for key in declared.keys():  # noqa: SIM118 (a function)
        top = key.path.partition(".")[0]
        keys[top if top in about else ""].append(key)
    lines = CONFIGURATION.splitlines()
    for name, found in keys.items():
        lines += ["", f"## `{name}`" if name else "## The run", ""]
        lines += [about[name], ""] if name else []
        lines += ["| key | type | default | unit | what it does |"]
        lines += ["|---|---|---|---|---|"]
        for k in found:
            lines.append(_row(f"`{k.path}`", k.type, f"`{k.default}`", k.unit, k.about))
        for section, what in OPTIONS.items():
            if section.partition(".")[0] == name:
                lines += ["", f"Options of {what}:", "", *_options(section)]
    return "\n".join(lines) + "\n"


def _options(section: str) -> list[str]:
    """A table of the options of a section's parts."""
    lines = ["| name | option | type | default | unit | what it does |"]
    lines += ["|---|---|---|---|---|---|"]
    for name, options in declared.options(section).items():
        for o in options:
            lines.append(
                _row(f"`{name}`", f"`{o.path}`", o.type, f"`{o.default}`", o.unit, o.about)
            )
    return lines


def _row(*cells: object) -> str:
    """A row of a table in Markdown."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def commands() -> str:
    """docs/commands.md: every command with its arguments, from the parsers themselves."""
    lines = ["# Commands", "", *COMMANDS.splitlines()]
    for name in VERBS:
        verb = importlib.import_module(f"fednet.cli.{FILES.get(name, name)}")
        lines += _command(f"fednet {name}", verb)
    for name, verb in (("fednet-server", server), ("fednet-client", client)):
        lines += _command(name, verb)
    return "\n".join(lines) + "\n"


def _command(name: str, verb: ModuleType) -> list[str]:
    parser = Parser(prog=name)
    verb.add(parser)
    about = registry.first_paragraph(verb.__doc__)
    return ["", f"## `{name}`", "", about, "", *_arguments(parser, "")]


def _arguments(parser: argparse.ArgumentParser, before: str) -> list[str]:
    lines = [] if before else ["| argument | what it does |", "|---|---|"]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                said = {a.dest: a.help for a in action._choices_actions}.get(word)
                lines.append(_row(f"`{before}{word}`", said or ""))
                lines += _arguments(inner, f"{before}{word} ")
        elif not isinstance(action, argparse._HelpAction):
            value = action.metavar or ("|".join(map(str, action.choices or ())) or action.dest)
            shown = action.option_strings or [str(value)]
            takes = f" {value}" if action.option_strings and action.nargs != 0 else ""
            about = (action.help or "").replace("%%", "%")
            lines.append(_row(f"`{before}{', '.join(shown)}{takes}`", about))
    return lines


def imports() -> dict[str, set[str]]:
    """Which folder below fednet/ imports which, also through a file beside the folders. What only
    type checkers see is left out.
    """
    graph = grimp.build_graph("fednet", exclude_type_checking_imports=True)
    folders = {module for module in graph.find_children("fednet") if graph.find_children(module)}
    for folder in folders:
        graph.squash_module(folder)
    below = {f: graph.find_upstream_modules(f) & folders for f in folders}
    return {f.removeprefix("fednet."): {o.removeprefix("fednet.") for o in below[f]} for f in below}


def arrows(below: dict[str, set[str]]) -> list[str]:
    """The lines of the picture: each folder and those that it imports, but for what also follows
    from another line.
    """
    lines = []
    for folder, found in sorted(below.items()):
        own = [o for o in sorted(found) if not any(o in below[other] for other in found)]
        if own:
            lines.append(f"{folder} --> {' & '.join(own)}")
    return lines


def states() -> list[str]:
    """A table of the changes of a task's state at each side. Events of the same changes share a
    row.
    """
    sides: dict[str, tuple[table.Table[Any, Any], type[Enum]]] = {
        "server": (table.TASK, table.TaskEvent),
        "client": (table.CLIENT_TASK, table.ClientTaskEvent),
    }
    lines = []
    for name, (changes, events) in sides.items():
        alike: dict[tuple[str, str], list[str]] = {}  # events by the states from and to
        for event in events:
            before: dict[str, list[str]] = {}  # states by those that may follow
            for state, row in changes.items():
                if event in row:
                    to = " or ".join(after.value for after in row[event])
                    before.setdefault(to, []).append(state.value)
            for to, found in before.items():
                alike.setdefault((", ".join(found), to), []).append(event.value)
        lines += ["", f"| event of a task at the {name} | from | to |", "|---|---|---|"]
        lines += [_row(", ".join(same), *ends) for ends, same in alike.items()]
    return lines


def _with_part(text: str, begin: str, end: str, lines: list[str]) -> str:
    """The text with what is between two marks replaced."""
    head, _, rest = text.partition(begin)
    return "\n".join([head + begin, *lines, end + rest.partition(end)[2]])


def architecture() -> str:
    """docs/architecture.md with its picture and its states; the rest of it is written by hand."""
    text = (HERE / "architecture.md").read_text(encoding="utf-8")
    picture = ["", "```mermaid", "flowchart TD", *arrows(imports()), "```"]
    text = _with_part(text, BEGIN, END, picture)
    return _with_part(text, STATES, END_STATES, states())


def api() -> str:
    """docs/api.md with the columns of the data frames; the rest of it is written by hand."""
    lines = []
    for name, row in records.FILES.items():
        types: dict[str, list[str]] = {}
        for column, kind in row.columns().items():
            types.setdefault(kind, []).append(f"`{column}`")
        lines += ["", f"`frame({name!r})`:", "", "| type | columns |", "|---|---|"]
        lines += [f"| {kind} | {', '.join(columns)} |" for kind, columns in types.items()]
    text = (HERE / "api.md").read_text(encoding="utf-8")
    return _with_part(text, COLUMNS, END_COLUMNS, lines)


PAGES: dict[str, Callable[[], str]] = {
    "api.md": api,
    "architecture.md": architecture,
    "commands.md": commands,
    "configuration.md": configuration,
    "methods.md": methods,
}


def stale() -> list[str]:
    """The pages whose file is not what the code says now."""
    found = []
    for name, made in PAGES.items():
        file = HERE / name
        if not file.exists() or file.read_text(encoding="utf-8") != made():
            found.append(name)
    return found


def main() -> int:
    old = stale()
    if "--check" in sys.argv:
        print("\n".join(f"docs/{name} is out of date: run python docs/pages.py" for name in old))
        return bool(old)
    for name in old:
        (HERE / name).write_text(PAGES[name](), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
