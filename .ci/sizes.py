"""How large the parts of the code are: prints what is over a limit; status 1 where anything is.

At most 15 files in a folder, 350 lines in a file, 60 lines in a function, 8 arguments where the
docstring gives no reason for more ("arguments"); of a thousand lines at most one that names Any,
with which nothing is checked, and none without its reason: a comment on that line, or directly
above it. Imports do not count.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"folder": 15, "file": 350, "function": 60, "arguments": 8, "any": 1, "reason": 0}
UNITS = {
    "folder": "files",
    "file": "lines",
    "function": "lines",
    "arguments": "arguments",
    "any": "of a thousand lines with Any",
    "reason": "line with Any and without a comment that says why",
}
FREE = {"fednet/algorithms", "fednet/data/datasets", "fednet/cli"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def sizes(root: Path = ROOT, package: str = "fednet") -> Iterator[tuple[str, str, int]]:
    """(kind, name, size) of everything that has a limit."""
    top = root / package
    lines = named = 0
    for folder in sorted({top, *(p.parent for p in top.rglob("*.py"))}):
        name = folder.relative_to(root).as_posix()
        if name not in FREE:
            yield "folder", name, len([*folder.glob("*.py")])
        for file in sorted(folder.glob("*.py")):
            text = file.read_text(encoding="utf-8")
            where = file.relative_to(root).as_posix()
            yield "file", where, len(text.splitlines())
            lines += len(text.splitlines())
            for row, reason in _any(text):
                named += 1
                yield "reason", f"{where}:{row}", 0 if reason else 1
            for path, node in _functions(ast.parse(text), where):
                yield "function", path, (node.end_lineno or node.lineno) - node.lineno + 1
                if "arguments" not in (ast.get_docstring(node) or "").lower():
                    yield "arguments", path, _arguments(node)
    yield "any", package, -(-1000 * named // max(1, lines))


def _any(text: str) -> Iterator[tuple[int, bool]]:
    """(line, whether a comment there or directly above it says why) of each that names Any."""
    imports = {
        row
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for row in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    named, beside, alone = set[int](), set[int](), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            (beside if token.line[: token.start[1]].strip() else alone).add(token.start[0])
        elif token.type == tokenize.NAME and token.string == "Any":
            named.add(token.start[0])
    for row in sorted(named - imports):
        yield row, row in beside or row - 1 in alone


def _functions(
    node: ast.AST, path: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            here = f"{path}::{child.name}"
            if isinstance(child, FUNCTIONS):
                yield here, child
            yield from _functions(child, here)
        else:
            yield from _functions(child, path)


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    a = node.args
    names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return len([n for n in names if n not in ("self", "cls")])


def over(found: Iterator[tuple[str, str, int]]) -> list[str]:
    """A sentence for each that is larger than it may be."""
    return [
        f"{name}: {size} {UNITS[kind]}, at most {LIMITS[kind]}"
        for kind, name, size in found
        if size > LIMITS[kind]
    ]


if __name__ == "__main__":
    large = over(sizes())
    print("\n".join(large) or "sizes: nothing is over its limit")
    sys.exit(bool(large))
