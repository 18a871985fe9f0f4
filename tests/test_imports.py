"""Which commands import nothing heavy, what is exported, and that no imports run in a circle."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fednet
from tests.report import fake_run

ROOT = Path(__file__).parents[1]
FILES = [*(ROOT / "fednet").rglob("*.py")]


LIGHT = """
import sys
heavy = ("torch", "torchvision", "zmq", "matplotlib")
def check(what):
    found = [name for name in heavy if name in sys.modules]
    assert not found, f"{what} imports {found}"
import fednet
check("fednet")
import fednet.config
check("fednet.config")
from fednet.cli import client, main, server
for words in (["--help"], ["run", "--help"]):
    main.main(words)
    check(words)
# What a method sends is listed from its declarations, which need torch.
for words in ("models", "datasets", "partitions", "tasks"):
    assert main.main(["list", words]) == 0
    check(words)
for command in (server, client):
    command.main(["--help"])
    check(command)
fednet.Tensors
assert "torch" in sys.modules
# Nor does training by SGD import torch's compiler.
import torch
from fednet.training.optimizers import optimizer
p = torch.ones(2, requires_grad=True)
p.grad = torch.ones(2)
optimizer("sgd", [p], lr=0.1).step()
assert "torch._dynamo" not in sys.modules
"""


def test_help_and_lists_import_nothing_heavy_and_sgd_no_compiler():
    subprocess.run([sys.executable, "-c", LIGHT], cwd=ROOT, timeout=120, check=True)


PLAIN = """
import sys
from fednet.cli import main
from fednet.data import ahead
here = []
read = ahead.Wanted.read
def recorded(wanted):
    here.append(wanted)
    return read(wanted)
ahead.Wanted.read = recorded
words = ["run", "--in-process", "--out", sys.argv[1], "--quiet"]
assert main.main([*words, "--set", "rounds=1", "--set", "report=false"]) == 0
assert not here, "the samples were made in this process, after the import of torch"
print(*sorted(sys.modules))
"""
# What is imported where a run asks for it: masks, schedules without rounds, metrics, pages and
# figures, compilers, readers of data.
ASKED_FOR = """
fednet.algorithms.secure fednet.secagg cryptography fednet.server.asynchronous fednet.cli.metrics
fednet.serve http.server html prometheus_client fednet.report.page jinja2 matplotlib PIL
torch._dynamo torch._inductor torchvision pandas scipy datasets
zstandard dp_accounting ray
"""


def test_a_plain_run_imports_what_it_is_configured_with_and_makes_its_data_beside(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(tmp_path)],
        cwd=ROOT,
        timeout=120,
        check=True,
        capture_output=True,
        text=True,
    )
    found = set(done.stdout.split())
    assert "fednet.server.process" in found
    assert found.isdisjoint(ASKED_FOR.split())


REPORTS = """
import sys
from fednet.cli import main
run, page = sys.argv[1:]
assert main.main(["report", run, "--out", page, "--quiet"]) == 0
assert main.main(["compare", run]) == 0
assert main.main(["verify", run, run]) == 0
assert "torch" not in sys.modules
"""


def test_what_reads_run_directories_does_not_import_torch(tmp_path):
    run = fake_run.write(tmp_path / "a", rounds=2)
    words = [sys.executable, "-c", REPORTS, str(run), str(tmp_path / "a.html")]
    subprocess.run(words, cwd=ROOT, timeout=120, check=True)


def test_everything_that_is_exported_is_there():
    assert set(fednet._HOME) == set(fednet.__all__) - {"__version__"}
    assert all(getattr(fednet, name) is not None for name in fednet.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fednet.nothing  # noqa: B018
    assert set(PROMISED.split()) <= set(dir(fednet))


PROMISED = """
run open_run __version__ algorithm model dataset partitioner compressor task Algorithm
AlgorithmConfig Payload State Tensors Data Exchange Empty Sum mean kind Weights Delta Control
Condensed Accuracy Shared Statistics
"""


def imported(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of what a file imports anywhere: at its top, in a function, for types.
    name: "" where the whole module is.
    """
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, alias.name) for alias in node.names)


def test_no_module_imports_itself_through_others_not_even_for_types():
    """`fednet` itself is left out: it is imported before all others, and looks its names up when
    they are asked for.
    """
    files = {}
    for file in FILES:
        parts = file.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts).removesuffix(".__init__")] = file
    del files["fednet"]
    graph: dict[str, set[str]] = {}
    for module, file in files.items():
        named = set[str]()
        for other, name in imported(file):
            inner = f"{other}.{name}"
            named.add(inner if inner in files else other)
        graph[module] = named & set(files) - {module}
    assert len(graph) > 100
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the circle
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()


# By the name that is imported, where the package is called otherwise or comes with another one.
PACKAGES = {
    "yaml": "pyyaml",
    "zmq": "pyzmq",
    "prometheus_client": "prometheus-client",
    "dp_accounting": "dp-accounting",
    "PIL": "matplotlib",
    "markupsafe": "jinja2",
    "huggingface_hub": "datasets",
}


def test_every_package_that_is_imported_is_declared():
    """What another package happens to bring is gone when that one is."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    declared = {name.lower() for name in re.findall(r'"([A-Za-z0-9_-]+)>=', text)}
    found = {module.partition(".")[0] for file in FILES for module, _ in imported(file)}
    foreign = found - sys.stdlib_module_names - {"fednet"}
    assert {name for name in foreign if PACKAGES.get(name, name).lower() not in declared} == set()
