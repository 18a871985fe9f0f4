from __future__ import annotations

import csv
import io

import pytest

from fednet.errors import ConfigError
from fednet.files import read_lines
from fednet.report.groups import group
from fednet.report.publishing import as_latex, as_markdown
from fednet.report.read import open_run
from fednet.report.tables import as_csv, as_text, table
from tests.report.fake_run import jsonl, opened, write


def two_methods(path):
    """Three seeds of FedAvg, and three of FedProx."""
    runs = [opened(path / f"avg-{s}", seed=s, rounds=3, accuracy=[0.2, 0.4, 0.5]) for s in range(3)]
    for s in range(3):
        accuracy = [0.3, 0.5, 0.6 + 0.01 * s]
        own = {"algorithm": "fedprox", "seed": s, "rounds": 3, "accuracy": accuracy}
        runs.append(opened(path / f"prox-{s}", **own))
    return runs


def text_of(runs, *more, **by_name):
    return as_text(table(runs, *more, **by_name))


def test_runs_are_grouped_by_everything_but_the_seed(tmp_path):
    groups = group(two_methods(tmp_path))
    assert [(g.label, g.seeds) for g in groups] == [("fedavg", [0, 1, 2]), ("fedprox", [0, 1, 2])]


def test_a_label_names_what_the_groups_differ_in_and_no_more(tmp_path):
    runs = [
        opened(tmp_path / f"r{i}", algorithm="fedprox", options={"mu": mu}, train={"lr": 0.1})
        for i, mu in enumerate((0.1, 1.0))
    ]
    runs.append(opened(tmp_path / "avg", train={"lr": 0.1}))
    assert [g.label for g in group(runs)] == ["fedprox mu=0.1", "fedprox mu=1", "fedavg"]


def test_differences_are_paired_by_seed(tmp_path):
    t = table(two_methods(tmp_path))
    final = t.differences[0][0]
    assert final.values == pytest.approx((0.1, 0.11, 0.12))
    assert not any("warning" in note for note in t.notes)
    assert final.text == "+0.1100 ±0.0248"  # 4.302653 * 0.01 / sqrt(3)


def test_a_target_some_seeds_never_reach_is_said_and_not_averaged(tmp_path):
    runs = [
        opened(tmp_path / f"a{seed}", seed=seed, rounds=2, accuracy=[0.5, last])
        for seed, last in enumerate((0.7, 0.6))
    ]
    assert "1 of 2 seeds (2.0, -)" in text_of(runs, targets=[0.7], by="rounds")
    rows = list(csv.DictReader(io.StringIO(as_csv(table(runs, targets=[0.7], by="rounds")))))
    row = next(r for r in rows if r["metric"] == "rounds to 0.7")
    assert (row["mean"], row["reached"], row["values"]) == ("", "1", "2.0 never")


def test_the_mean_of_the_last_says_of_how_many_rounds_it_is(tmp_path):
    three = opened(tmp_path / "three", rounds=3, accuracy=[0.5] * 3)
    twelve = opened(tmp_path / "twelve", rounds=12, accuracy=[0.5] * 12)
    assert table([three]).columns[2].title == "last 3 global"
    assert table([three, twelve]).columns[2].title == "last 3-10 global"


def test_a_run_without_test_accuracies_is_not_said_to_never_reach_a_target(tmp_path):
    judged = opened(tmp_path / "a", rounds=2, accuracy=[0.5, 0.8])
    bare = opened(tmp_path / "b", algorithm="fedper", rounds=2, accuracy=[None, None])
    t = table([judged, bare], targets=[0.7])
    assert [c.title for c in t.columns][2] == "last 2 global"
    for i, column in enumerate(t.columns):
        if not column.title.startswith("MB") or " to " in column.title:
            assert (t.cells[1][i].text, t.differences[0][i].text) == ("-", "-")


def test_without_a_test_set_at_the_server_the_accuracies_are_those_on_the_clients_tests(tmp_path):
    path = write(tmp_path / "a", rounds=2, clients=2, share=1.0, accuracy=[0.5, 0.8])
    lines = [{**r, "test_accuracy": None} for r in read_lines(path / "rounds.jsonl")]
    for line, received in zip(lines, (0.25, 0.75)):
        line["client_accuracy"] = {"received": received}
    jsonl(path / "rounds.jsonl", lines)
    t = table([open_run(path)], targets=[0.7], by="rounds")
    found = {c.title: cell.values for c, cell in zip(t.columns, t.cells[0])}
    assert "final global" not in found
    assert found["final on clients"] == (17 / 21,)  # 8 of 10 and 9 of 11
    assert found["best on clients"] == (0.75,)
    assert found["rounds to 0.7"] == (2.0,)


def test_megabytes_are_shown_in_total_and_by_kind(tmp_path):
    # 2 clients of which each gets and returns 1000 bytes of state, and 24 of statistics
    run = opened(tmp_path / "a", rounds=1, clients=2, share=1.0)
    for bytes, state in (("total", 4000), ("up", 2000)):
        t = table([run], bytes=bytes)
        found = {c.title: cell.values[0] for c, cell in zip(t.columns, t.cells[0])}
        way = "" if bytes == "total" else " up"
        assert found[f"MB{way} state"] == state / 1e6
        parts = [v for name, v in found.items() if name.startswith(f"MB{way} ")]
        assert sum(parts) == pytest.approx(found[f"MB{way}"])
        assert (
            found[f"MB{way}"]
            == sum(w.bytes for w in run.wire if bytes in ("total", w.direction)) / 1e6
        )


def test_a_wide_table_is_several_below_each_other_of_120_columns(tmp_path):
    text = text_of(two_methods(tmp_path), targets=[0.3, 0.4, 0.5, 0.55])
    assert max(map(len, text.splitlines())) <= 120
    assert text.count("method ") > 1
    assert all(f"{unit} to 0.55" in text for unit in ("rounds", "MB", "s"))


def test_runs_on_other_partitions_are_named(tmp_path):
    a = opened(tmp_path / "a", seed=0)
    b = opened(tmp_path / "b", algorithm="scaffold", seed=0)
    (b.dir / "partition.json").write_text((a.dir / "partition.json").read_text().replace("a", "b"))
    assert "used different data partitions (seed 0)" in text_of([a, open_run(b.dir)])


def test_other_participants_are_named_with_the_first_round(tmp_path):
    a = opened(tmp_path / "a", clients=6)
    b = write(tmp_path / "b", algorithm="scaffold", clients=6)
    rows = list(read_lines(b / "rounds.jsonl"))
    rows[2]["selected"] = [99]
    jsonl(b / "rounds.jsonl", rows)
    assert "used different participants from round 3 on" in text_of([a, open_run(b)])


def test_unequal_seeds_are_named(tmp_path):
    runs = two_methods(tmp_path)
    assert "share only the seeds [0, 1]" in text_of(runs[:-1])


def test_a_target_that_is_no_accuracy_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="above 0 and at most 1, got 60"):
        table([opened(tmp_path / "a")], targets=[60])


def test_a_list_in_a_label_reads_as_a_chain_and_a_long_label_gives_way_to_the_runs_name(tmp_path):
    chains = {"sparse": ["topk(0.05)", "qsgd(8)"], "plain": []}
    runs = [
        opened(tmp_path / name, wire={"up": {"state": chain}}) for name, chain in chains.items()
    ]
    assert [g.label for g in group(runs)] == [
        "fedavg state=topk(0.05)+qsgd(8)",
        "fedavg state=none",
    ]
    long = [
        opened(tmp_path / f"run{k}", wire={"up": {"state": [f"topk(0.{k})"] * 6}}) for k in (1, 2)
    ]
    assert [g.label for g in group(long)] == ["run1", "run2"]


def test_labels_are_those_that_are_given(tmp_path):
    runs = [opened(tmp_path / m, algorithm=m) for m in ("fedavg", "scaffold")]
    text = text_of(runs, labels=("ours", "theirs"))
    assert "theirs - ours" in text
    with pytest.raises(
        ConfigError, match=r"expected 2, one for each group.*fedavg, scaffold.*got 1"
    ):
        table(runs, labels=("ours",))


def test_accuracies_of_local_and_of_personal_models_are_not_said_to_be_of_one_kind(tmp_path):
    runs = [
        opened(tmp_path / name, algorithm=name, rounds=1, personalised=True)
        for name in ("fedavg", "ditto")
    ]
    assert "personal" in [c.title for c in table(runs).columns]
    runs[0].rounds[0].own_model = "local"
    runs[0].__dict__.pop("own_model")
    made = table(runs)
    assert "local/personal" in [c.title for c in made.columns]
    assert any(
        "of the local models of fedavg and of the personal models of the others" in n
        for n in made.notes
    )
    assert "local" in [c.title for c in table(runs[:1]).columns]


def test_a_run_that_went_on_says_that_its_bytes_were_spent_twice(tmp_path):
    path = write(tmp_path / "a", accuracy=[0.5], rounds=1)
    rows = list(read_lines(path / "wire.jsonl"))
    again = [{**r, "incarnation": 2} for r in rows]
    jsonl(path / "wire.jsonl", rows + again)
    spent, useful = (table([open_run(path)], [0.5], bytes=b) for b in ("total", "useful"))
    assert any("a was resumed, so repeated traffic is counted twice" in n for n in spent.notes)
    assert not any("resumed" in n for n in useful.notes)
    (column,) = [i for i, c in enumerate(spent.columns) if c.title.startswith("MB to")]
    whole, once = (t.cells[0][column].values[0] for t in (spent, useful))
    assert whole == pytest.approx(2 * sum(r["bytes"] for r in rows) / 1e6)
    assert once == pytest.approx(sum(r["bytes"] for r in rows if r["useful"]) / 1e6)


def test_seconds_of_two_clocks_are_not_compared(tmp_path):
    real = write(tmp_path / "real", accuracy=[0.5], rounds=1)
    slow = write(tmp_path / "slow", accuracy=[0.5], rounds=1, link={"clock": "virtual"})
    (row,) = read_lines(slow / "rounds.jsonl")
    jsonl(slow / "rounds.jsonl", [{**row, "seconds_virtual": 90}])

    def units(*paths):
        made = table([open_run(path) for path in paths], [0.5])
        return [c.title for c in made.columns if c.title.endswith("s to 0.5")], made.notes

    assert units(real)[0] == ["rounds to 0.5", "s to 0.5"]
    assert units(slow)[0] == ["rounds to 0.5", "virtual s to 0.5"]
    titles, notes = units(real, slow)
    assert titles == ["rounds to 0.5"]
    assert any("by different clocks" in note for note in notes)


def three_methods(tmp_path):
    """Two that reach 0.7, one of them with both seeds, and one without a global model."""
    runs = [
        opened(
            tmp_path / f"{name}{seed}", algorithm=name, seed=seed, rounds=2, accuracy=[0.5, last]
        )
        for name, lasts in (("fedavg", [0.7, 0.9]), ("fedprox", [0.8, 0.6]), ("fedper", [None] * 2))
        for seed, last in enumerate(lasts)
    ]
    return table(runs, targets=[0.7], by="rounds")


def test_a_table_for_a_paper_has_mean_interval_and_deviation_and_the_best_in_bold(tmp_path):
    said = as_markdown(three_methods(tmp_path)).splitlines()
    assert said[0].startswith("| method | seeds | final global | best global |")
    assert said[1].startswith("| --- | ---: | ---: |")
    # 0.7 and 0.9: s = 0.2 / sqrt(2); half = 12.7062 s / sqrt(2)
    assert "| fedavg | 2 | **0.8000 ± 1.2706 (0.1414)** |" in said[2]
    assert "| fedprox | 2 | 0.7000 ± 1.2706 (0.1414) |" in said[3]
    assert "- fedprox, rounds to 0.7: 1 of 2 seeds reached it, so there is no mean." in said
    assert "- Bold: the best mean of a column." in said


def test_a_table_for_latex_compiles_by_its_braces_and_escapes(tmp_path):
    said = as_latex(three_methods(tmp_path))
    assert r"fedavg & 2 & \textbf{0.8000 $\pm$ 1.2706 (0.1414)} &" in said
    assert said.count("{") == said.count("}")
    assert r"95 \% confidence" in said
    widths = {line.count("&") for line in said.splitlines() if line.endswith(r"\\") and "&" in line}
    assert len(widths) == 1
