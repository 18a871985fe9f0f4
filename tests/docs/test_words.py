"""Words that pages and messages do not use, because readers stop at them: each with plain words
instead. Messages are the strings of the package: errors, warnings, progress, labels of figures.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import ROOT
from tests.docs.test_links import PAGES, text_of

CHECKED = {
    name: page for page in PAGES if not (name := str(page.relative_to(ROOT))).startswith("configs/")
}
FOLDERS = sorted({path.relative_to(ROOT).parts[1] for path in (ROOT / "fednet").rglob("*.py")})

WORDS = {
    r"anew": "again, from the start",
    r"whoever|whomever|whom": "name the person, the client or the process",
    r"whatever": "for any",
    r"wherein|whereof|thereof|thereby|hereby": "in which, by this",
    r"of (no )?use": "used, wasted",
    r"worth": "name the benefit",
    r"lie|lies|lay|lying|liars?": "is in; malicious",
    r"stands?|stood|standing": "is, is listed",
    r"judges?|judged|judging": "evaluate",
    r"told": "says, is notified",
    r"cross|crosses|crossed|crossing": "send, be sent",
    r"books|booked|booking": "records, recorded",
    r"folds|folded|folding": "aggregate",
    r"void": "discarded",
    r"framing": "protocol overhead",
    r"by then": "name the time",
    r"go on|goes on|went on|going on": "continue, resume",
    r"hang up|hangs up|hung up": "disconnect",
    r"reckon|reckons|reckoned": "compute",
    r"virtual clock": "simulated time",
    r"quotients?": "ratio",
    r"amid|midst": "during",
    r"settled?|settling": "record, complete",
    r"believed?": "use, check",
}
# Where a word is right.
RIGHT = ["cross-entropy", "cross-site evaluation"]


def prose(page: str) -> str:
    """Without code in lines, and without the targets of links. Blocks of code go before."""
    page = re.sub(r"^ {4,}.*$", "", page, flags=re.MULTILINE)
    return re.sub(r"`[^`\n]*`|\]\([^)\s]*\)", " ", page)


def found(text: str) -> list[str]:
    text = re.sub("|".join(RIGHT), " ", text, flags=re.IGNORECASE)
    return [
        f"{hit[0]!r} in {text[max(0, hit.start() - 40) : hit.end() + 20]!r}: {plain}"
        for word, plain in WORDS.items()
        for hit in re.finditer(rf"\b({word})\b", text, re.IGNORECASE)
    ]


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string of three words or more, with `{}` for what is filled in. Without
    docstrings, which are strings that stand as statements.
    """
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = "" if id(node) in docstrings | parts else node.value
        else:
            continue
        if len(re.findall(r"\b[a-z]{2,}\b", text, re.IGNORECASE)) >= 3:
            yield node.lineno, text


@pytest.mark.parametrize("name", FOLDERS)
def test_a_message_has_none_of_these_words(name):
    folder = ROOT / "fednet" / name
    files: list[Path] = [folder] if folder.is_file() else sorted(folder.rglob("*.py"))
    hits = [
        f"{path.relative_to(ROOT)}:{line}: {hit}"
        for path in files
        for line, text in messages(path.read_text())
        for hit in found(prose(text))
    ]
    assert hits == []


@pytest.mark.parametrize("name", CHECKED)
def test_a_page_has_none_of_these_words(name):
    assert found(prose(text_of(CHECKED[name]))) == []


def test_a_word_is_found_in_prose_and_not_in_code():
    text = "A round is void.\n\n    # judged\n\nSee `judged` in [a table](lies.md), a standard."
    (hit,) = found(prose(text))
    assert hit.startswith("'void' in ")
    assert len(found("Models cross the network. Cross-entropy is the loss.")) == 1


def test_a_message_is_a_string_of_several_words_and_no_docstring():
    source = """'Judged here and there.'\nraise E(f'{x} is judged ' 'anew.')\nkind = 'anew'\n"""
    (said,) = messages(source)
    assert said == (2, "{} is judged anew.")
    assert len(found(said[1])) == 2
