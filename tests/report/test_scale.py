"""What a report of a run of many clients holds at once, in counts and bytes, not in seconds."""

from __future__ import annotations

import tracemalloc

import pytest

from fednet.records import reading
from fednet.report import costs, figures, page, parallel
from fednet.report.read import open_run
from tests.books import together
from tests.report.fake_run import jsonl, write
from tests.report.fake_run import row as wire_row


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """2,000 clients and 100 rounds: 200,000 cells in a grid of who took part."""
    path = tmp_path_factory.mktemp("large") / "a"
    accuracy = [None] * 99 + [0.8]
    return write(path, rounds=100, clients=2000, accuracy=accuracy, share=0.01)


def undrawn(figure, own):
    return ["", ""] if figure.wide else [""]


def test_the_book_is_read_once_for_all_that_a_page_shows_of_it(large, monkeypatch):
    opened = []

    def counting(run, path, *more):
        opened.append(path.name)
        return rows(run, path, *more)

    rows = reading.rows
    monkeypatch.setattr(reading, "rows", counting)
    run = open_run(large)
    monkeypatch.setattr(parallel, "inline", undrawn)
    page.render([run])
    assert opened.count("wire.jsonl") == opened.count("rounds.jsonl") == 1
    assert "wire" not in run.__dict__  # its rows passed one at a time


def test_what_a_message_says_of_its_use_keeps_it_apart(tmp_path):
    path = write(tmp_path / "a", rounds=1, clients=2)
    rows = [
        wire_row(1, 0, "down", "task", {"state": 5}, 1),
        wire_row(1, 0, "up", "reply", {"state": 7}, 1, useful=False, reason="late: by 1 s"),
        wire_row(1, 1, "up", "reply", {"state": 7}, 1, useful=False, reason="late: by 2 s"),
        wire_row(1, 1, "up", "reply", {"state": 14}, 1),
    ]
    jsonl(path / "wire.jsonl", rows)
    book = costs.ledger(open_run(path))
    assert book.by("round", "direction", kind="state") == {(1, "up"): 28, (1, "down"): 5}
    assert book.messages == {"up": 3, "down": 1}
    assert book.by("use") == {"used": 6 + 15, "late": 16}
    assert book.by("direction", kind="state", use="used") == {"up": 14, "down": 5}


def test_who_is_not_judged_at_the_end_of_a_large_run_has_no_line_in_the_figure(tmp_path):
    path = write(tmp_path / "a", rounds=2, clients=4, share=1.0, personalised=True)
    rows = [r.line() for r in open_run(path).clients]
    end = [{**r, "final": True} for r in rows if r["round"] == 2 and r["client"] in (1, 3)]
    jsonl(path / "clients.jsonl", [*rows, *end])
    last = {r["client"]: r["accuracy_personal"] for r in end}
    (figure,) = figures.client_accuracy(open_run(path))
    shown = dict(zip(figure.hover["c"], figure.hover["v"][0]))
    assert shown == {str(client): round(value, 4) for client, value in last.items()}
    assert list(shown.values()) == sorted(shown.values(), reverse=True)


def test_figures_make_no_cell_that_a_page_does_not_show(large):
    run = open_run(large)
    list(figures.details(run))  # what the run keeps: its rows, its grids of numbers
    tracemalloc.start()
    try:
        made = {f.name: f for f in figures.details(run)}
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert made["participation"].hover is None
    cells = len(run.rounds) * 2000
    # A cell in a list weighs 8 bytes.
    assert held < 8 * cells


def test_messages_in_one_line_cost_what_they_cost_each_in_its_own(tmp_path):
    path = write(tmp_path / "a", rounds=2, clients=6, share=1.0, drop={2: {3: "late"}})
    rows = [
        *[r.line() for r in open_run(path).wire],
        *[wire_row(2, k, "up", "reply", {"state": 7 + k}, k, useful=False) for k in range(3)],
        *[wire_row(3, k, "up", "pull", {}, 9, raw_bytes=k, staleness=k) for k in (5, 1, 0)],
    ]
    jsonl(path / "wire.jsonl", rows)
    apart = costs.ledger(open_run(path))
    lines = together(rows)
    assert len(lines) < len(rows) / 3
    jsonl(path / "wire.jsonl", lines)
    one = costs.ledger(open_run(path))
    assert (one.bytes, one.raw, one.messages) == (apart.bytes, apart.raw, apart.messages)


@pytest.mark.parametrize("swapped", [False, True])
def test_rounds_done_again_are_of_use_once(tmp_path, swapped):
    path = write(tmp_path / "a", rounds=3, clients=4)
    before = costs.ledger(open_run(path))
    rows = [r.line() for r in open_run(path).wire]
    repeated = [r for r in rows if r["round"] == 2]
    sent_twice = [r for r in repeated if r["useful"]]
    again = [
        {**r, "incarnation": 2, "envelope": r["envelope"] + 1, "bytes": r["bytes"] + 1}
        for r in repeated
    ]
    late = wire_row(2, 9, "up", "reply", {"state": 7}, 1)  # by the first server alone
    first = [*rows, late]
    jsonl(path / "wire.jsonl", [*again, *first] if swapped else [*first, *again])
    after = costs.ledger(open_run(path))
    used = before.by_round("useful")
    assert after.by_round("useful") == {**used, 2: used[2] + len(sent_twice) + 8}
    ways = [book.by("direction", kind="state", use="used") for book in (before, after)]
    assert ways[1] == {**ways[0], "up": ways[0]["up"] + 7}
    assert after.by_round()[2] == 2 * before.by_round()[2] + len(again) + 8
    assert "round repeated" not in before.by("use")
    assert after.by("use")["round repeated"] == sum(r["bytes"] for r in sent_twice)
    assert (before.servers, after.servers) == ({1}, {1, 2})
