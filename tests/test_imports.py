"""Who may import whom, and what costs nothing to ask for."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fednet

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "torchvision", "zmq", "matplotlib")


def imported_by(code: str) -> str:
    probe = f"import sys\n{code}\nprint('HEAVY', *[m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.rpartition("HEAVY")[2].strip()


@pytest.mark.parametrize(
    "code",
    [
        "import fednet",
        "import fednet.config",
        "from fednet.cli.main import main; main(['--help'])",
        "from fednet.cli.main import main; main(['run', '--help'])",
        "from fednet.cli.server import main; main(['--help'])",
        "from fednet.cli.client import main; main(['--help'])",
        *[
            f"from fednet.cli.main import main; assert main(['list', '{what}']) == 0"
            for what in ("algorithms", "models", "datasets", "partitions", "tasks")
        ],
    ],
)
def test_help_and_lists_import_nothing_heavy(code):
    assert imported_by(code) == ""


def test_the_probe_sees_torch_where_it_is_imported():
    assert "torch" in imported_by("import fednet; fednet.Tensors")


def test_imports_run_downwards():
    beside = Path(sys.executable).parent
    tool = shutil.which("lint-imports", path=str(beside)) or shutil.which("lint-imports")
    assert tool is not None, "import-linter is in the test extra: pip install '.[test]'"
    done = subprocess.run(
        [tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def imports() -> dict[str, set[str]]:
    """By module of fednet, those that it imports anywhere: at its top, in a function, for types.

    `fednet` itself is left out: it is imported before all others, and looks its names up when they
    are asked for.
    """
    files = {}
    for path in (ROOT / "fednet").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts).removesuffix(".__init__")] = path
    del files["fednet"]
    found: dict[str, set[str]] = {}
    for module, path in files.items():
        named: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= whole & set(files) or {node.module}
        found[module] = named & set(files) - {module}
    return found


def circles(imported: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules that reach each other: their strongly connected components."""
    left = {module: set(others) for module, others in imported.items()}
    found = []
    while left:
        start = next(iter(left))
        forward, back = reached(left, start), reached(reverse(left), start)
        if len(circle := forward & back) > 1:
            found.append(circle)
        for module in circle | {start}:
            left.pop(module)
        for others in left.values():
            others -= circle | {start}
    return found


def reverse(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    return {a: {b for b, others in graph.items() if a in others} for a in graph}


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    seen, todo = {start}, [start]
    while todo:
        for other in graph[todo.pop()] - seen:
            seen.add(other)
            todo.append(other)
    return seen


def test_no_module_imports_itself_through_others_not_even_for_types():
    assert circles(imports()) == []


def test_a_circle_is_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert circles(graph) == [{"b", "c"}]


def test_top_level_names_are_those_that_are_promised():
    import fednet

    promised = [
        "run",
        "open_run",
        "algorithm",
        "model",
        "dataset",
        "partitioner",
        "compressor",
        "task",
        "Algorithm",
        "AlgorithmConfig",
        "Payload",
        "State",
        "Tensors",
        "mean",
        "Data",
        "kind",
        "Sum",
        "Empty",
        "Exchange",
        "__version__",
        "Weights",
        "Delta",
        "Control",
        "Condensed",
        "Accuracy",
        "Shared",
        "Statistics",
    ]
    assert set(promised) <= set(dir(fednet))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fednet.nothing  # noqa: B018
    assert fednet.Algorithm.__module__ == "fednet.algorithms.base"
    assert fednet.Delta is not None


def test_everything_that_is_exported_is_there():
    code = "from fednet import *\nimport fednet\nassert set(fednet.__all__) <= set(globals())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert set(fednet._HOME) == set(fednet.__all__) - {"__version__"}


def test_each_folder_of_tests_is_a_package_so_that_two_files_may_have_one_name():
    folders = {file.parent for file in (ROOT / "tests").rglob("test_*.py")}
    assert [str(f) for f in sorted(folders) if not (f / "__init__.py").exists()] == []


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
    found = {
        name.partition(".")[0]
        for path in (ROOT / "fednet").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in imported_names(node)
    }
    foreign = found - sys.stdlib_module_names - {"fednet"}
    assert {name for name in foreign if PACKAGES.get(name, name).lower() not in declared} == set()


def imported_names(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [node.module]
    return []
