"""Words that the pages do not use, because readers stop at them: each with plain words instead."""

from __future__ import annotations

import re

import pytest

from tests.docs.test_links import PAGES, ROOT, text_of

LEFT_OUT = {"CHANGELOG.md"}
CHECKED = {
    name: page
    for page in PAGES
    if (name := str(page.relative_to(ROOT))) not in LEFT_OUT and not name.startswith("configs/")
}

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


@pytest.mark.parametrize("name", CHECKED)
def test_a_page_has_none_of_these_words(name):
    assert found(prose(text_of(CHECKED[name]))) == []


def test_a_word_is_found_in_prose_and_not_in_code():
    text = "A round is void.\n\n    # judged\n\nSee `judged` in [a table](lies.md), a standard."
    (hit,) = found(prose(text))
    assert hit.startswith("'void' in ")
    assert len(found("Models cross the network. Cross-entropy is the loss.")) == 1
