from __future__ import annotations

import json
from pathlib import Path

import pytest

from fednet import registry
from fednet.cli.main import main
from tests.conftest import forgotten

SELECTIONS = Path(__file__).parents[2] / "configs" / "examples" / "selections.py"


def sets(*texts: str) -> list[str]:
    return [word for text in texts for word in ("--set", text)]


def listed(capsys, *words: str) -> dict[str, list[str]]:
    """The words of each line of a list, by the first."""
    assert main(["list", *words]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    return {words[0]: words for words in lines}


@pytest.mark.parametrize("what", registry.ALL)
def test_every_part_has_a_line(what, capsys):
    load = ["--load", str(SELECTIONS)] if what == "selections" else []
    with forgotten():
        found = listed(capsys, what, *load).keys()
        names = registry.ALL[what].names()
    assert names
    assert set(names) <= found


def test_selections_are_those_of_loaded_files(capsys):
    with forgotten():
        assert main(["list", "selections"]) == 0
    assert "--load FILE.py" in capsys.readouterr().out


def test_algorithms_show_their_cost_and_what_each_side_keeps(capsys):
    found = listed(capsys, "algorithms")
    assert found["fedper"][1:6] == ["personal", "|base|", "|base|", "base", "head"]
    assert found["scaffold"][1:6] == ["global", "2|w|", "2|w|", "w,", "c"]


@pytest.mark.parametrize("given", [[], ["--set", "model=lenet5"]])
def test_a_method_that_cannot_be_imported_is_listed_with_the_error(given, capsys, monkeypatch):
    broken = registry.Entry("broken", "no_such_module", "")
    monkeypatch.setitem(registry.algorithm.index(), "broken", broken)
    found = listed(capsys, "algorithms", *given)
    said = " ".join(found["broken"])
    assert "cannot be imported from no_such_module (ModuleNotFoundError" in said
    assert "fedavg" in found


IMAGES = "data={dataset: synthetic, shape: [3, 32, 32], classes: 10}"


def costs(capsys, *texts: str) -> dict[str, list[str]]:
    """Method -> MB down, up and once."""
    mlp = "model={name: mlp, hidden: [64, 64], norm: batch}"
    found = listed(capsys, "algorithms", *sets(IMAGES, mlp, *texts))
    return {method: words[2:5] for method, words in found.items()}


@pytest.mark.long
def test_cost_in_mb_is_that_of_the_declared_payloads(capsys):
    """lenet5 on 10 classes: 248,024 bytes of weights; up, 24 bytes of n_i, K_i and loss."""
    found = listed(capsys, "algorithms", *sets(IMAGES))
    assert found["fedavg"][2:4] == ["0.248", "0.248"]
    assert found["scaffold"][2:4] == ["0.496", "0.496"]


def test_costs_are_those_of_the_methods_own_options(capsys):
    plain = costs(capsys)
    w = float(plain["fedavg"][0])
    stale = costs(capsys, "algorithm={name: fedga, mode: stale}")["fedga"]
    assert float(plain["fedga"][1]) == pytest.approx(2 * w, abs=0.01)
    assert float(stale[1]) == pytest.approx(w, abs=0.01)
    whole = costs(capsys, "algorithm={name: fedper, personal_layers: 0}")
    assert whole["fedper"][0] == plain["fedavg"][0] != plain["fedper"][0]


def test_costs_follow_what_becomes_of_buffers(capsys):
    of = {b: costs(capsys, f"model.buffers={b}")["fedavg"] for b in ("average", "server", "local")}
    assert of["average"][:2] == [of["server"][0], of["average"][1]]
    assert of["server"][1] == of["local"][1] < of["average"][1]
    assert of["local"][0] == of["local"][1]


@pytest.mark.long
def test_what_is_sent_once_is_in_the_costs(capsys):
    plain = costs(capsys)
    assert plain["local"] == ["0.000", "0.000", plain["fedavg"][0]]
    assert costs(capsys, "algorithm={name: local, init: own}")["local"][2] == "0.000"
    shared = costs(capsys, "algorithm=fedrds", "data.public.samples=1000")["fedrds"]
    assert float(shared[2]) == 500 * (3 * 32 * 32 + 8) / 1e6
    assert costs(capsys, "algorithm=fedrds", "data.public.fraction=0.1")["fedrds"][2] == "0.000+"


MINE = '''
import fednet

@fednet.algorithm("lists-mine")
class Mine(fednet.Algorithm):
    """Mine."""

    class Config(fednet.AlgorithmConfig):
        pass

    class Down(fednet.Payload):
        x: fednet.Weights
        c: fednet.Control

    class Up(fednet.Payload):
        dy: fednet.Delta
        sketch: fednet.kind("sketch", "array")
        run: fednet.Statistics

    class Server(fednet.State):
        x: fednet.Weights
        c: fednet.Tensors
'''


def test_a_loaded_method_is_listed_by_its_declarations(tmp_path, capsys):
    (tmp_path / "lists_mine.py").write_text(MINE)
    assert main(["list", "algorithms", "--load", str(tmp_path / "lists_mine.py")]) == 0
    lines = capsys.readouterr().out.splitlines()
    line = next(line for line in lines if line.startswith("lists-mine"))
    assert " ".join(line.split()) == "lists-mine global 2|w| |w| + sketch w, c - Mine."


def test_the_options_of_a_part_that_was_loaded_stand_with_the_others(tmp_path, capsys):
    (tmp_path / "lists_net.py").write_text(
        "import fednet\n\n\n"
        '@fednet.partitioner("lists-sorted")\n'
        "def by_label(y, clients, *, shuffled: float = 0.5):\n"
        "    return []\n"
    )
    loaded = ["--load", str(tmp_path / "lists_net.py")]
    assert main(["list", "keys", "data.partition", *loaded]) == 0
    assert "lists-sorted.shuffled: a float; default 0.5" in capsys.readouterr().out


@pytest.mark.parametrize(("method", "held"), [("fedavg", 200), ("fedrds", 100)])
def test_partition_shows_and_exports_the_division_that_the_method_runs_with(
    tmp_path, capsys, method, held
):
    pool = "baseline_pool: full, public: {fraction: 0.5}, partition: {scheme: iid}}"
    data = f"data={{dataset: synthetic, samples: 200, shape: [4], classes: 4, {pool}"
    given = sets(data, "clients=5", "model={name: mlp, hidden: [8]}", f"algorithm={method}")
    file = tmp_path / "p.json"
    assert main(["partition", *given, "--export", str(file)]) == 0
    parts = json.loads(file.read_text())["train"]
    assert [len(part) for part in parts] == [held // 5] * 5
    assert len({i for part in parts for i in part}) == held
    head, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head == ["client", "0", "1", "2", "3", "samples"]
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4", "all"]
    table = [[int(n.replace("·", "0")) for n in row[1:]] for row in rows]
    assert all(sum(row[:-1]) == row[-1] for row in table)
    assert [sum(column) for column in zip(*table[:-1])] == table[-1]


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("train.lr", ["train.lr: a float > 0 or null; default null"]),
        ("round", ["round.lost.closed: "]),
        ("algorithm", ["in algorithm, options of one part alone:", "fedprox.mu: "]),
        ("model", ["in model, options of one part alone:", "mlp.hidden: "]),
        ("data", ["in data, options of one part alone:", "synthetic.samples: "]),
        ("data.partition", ["in data.partition, options of one part alone:", "dirichlet.alpha: "]),
    ],
)
def test_a_key_or_the_keys_of_a_section_are_listed_with_the_options_of_its_parts(
    name, lines, capsys
):
    assert main(["list", "keys", name]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not any(x.startswith(line) for x in said)] == []


@pytest.mark.parametrize(
    ("part", "lines"),
    [
        (
            "algorithm.fedprox",
            ["weighting: one of ", "    Weights of ", "mu: a float >= 0; ", "    Strength of "],
        ),
        ("wire.topk", ["share: a float; default (needed) [share]", "    Share of the values "]),
        ("data.digits", ["digits has no options of its own"]),
    ],
)
def test_the_options_of_one_part_are_listed_by_its_name(part, lines, capsys):
    assert main(["list", "keys", part]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(lines)
    assert all(got.startswith(want) for got, want in zip(said, lines)), said


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["list", "keys", "algorithm.fedprx"], "Did you mean 'algorithm.fedprox'?"),
        (["list", "keys", "train.sched"], "Did you mean 'train.schedule'? Known: train.batch_size"),
        (["list", "keys", "trian"], "Did you mean 'train'? Known: aggregation"),
        (["reproduce", "fedab"], "Did you mean 'fedabc/figure2'? Known: fedabc"),
    ],
)
def test_of_an_unknown_name_the_nearest_is_said_first(typed, said, capsys):
    assert main(typed) == 2
    assert said in capsys.readouterr().err
