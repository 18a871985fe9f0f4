from __future__ import annotations

import json

import pytest

from fednet import registry
from fednet.cli.main import main


@pytest.mark.parametrize(
    "what", ["algorithms", "models", "datasets", "partitions", "compressors", "tasks"]
)
def test_every_part_has_a_line(what, capsys):
    assert main(["list", what]) == 0
    said = capsys.readouterr().out
    first = [line.split()[0] for line in said.splitlines() if line.strip()]
    assert registry.ALL[what].names()
    assert set(registry.ALL[what].names()) <= set(first)


def test_algorithms_show_their_cost_and_what_each_side_keeps(capsys):
    assert main(["list", "algorithms"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = [line.split() for line in lines if line.startswith(("scaffold", "fedper"))]
    assert [line[1:6] for line in found] == [
        ["personal", "|base|", "|base|", "base", "head"],
        ["global", "2|w|", "2|w|", "w,", "c"],
    ]


@pytest.mark.parametrize("given", [[], ["--model", "lenet5"]])
def test_a_method_that_cannot_be_imported_is_listed_with_the_error(given, capsys, monkeypatch):
    broken = registry.Entry("broken", "no_such_module", "")
    monkeypatch.setitem(registry.algorithm.index(), "broken", broken)
    assert main(["list", "algorithms", *given]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert "cannot be imported from no_such_module (ModuleNotFoundError" in lines["broken"]
    assert "fedavg" in lines


@pytest.mark.long
def test_cost_in_mb_is_that_of_the_declared_payloads(capsys):
    assert (
        main(
            [
                "list",
                "algorithms",
                "--model",
                "lenet5",
                "--set",
                "data={dataset: synthetic, shape: [3, 32, 32], classes: 10}",
            ]
        )
        == 0
    )
    lines = {
        line.split()[0]: line.split()
        for line in capsys.readouterr().out.splitlines()
        if line.strip()
    }
    # lenet5 on 10 classes: 248,024 bytes of weights; up, 24 bytes of n_i, K_i
    # and loss beside them.
    assert lines["fedavg"][2:4] == ["0.248", "0.248"]
    assert lines["scaffold"][2:4] == ["0.496", "0.496"]


SMALL = [
    "--set",
    "data={dataset: synthetic, shape: [3, 32, 32], classes: 10}",
    "--set",
    "model={name: mlp, hidden: [64, 64], norm: batch}",
]


def costs(capsys, *sets: str) -> dict[str, list[str]]:
    """Method -> MB down, up and once."""
    given = [word for text in sets for word in ("--set", text)]
    assert main(["list", "algorithms", *SMALL, *given]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    return {words[0]: words[2:5] for words in lines}


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


def test_partition_shows_and_exports_what_each_client_holds(tmp_path, capsys):
    sets = [
        "--set",
        "data={dataset: synthetic, samples: 200, shape: [4], classes: 4, partition: {scheme: iid}}",
        "--set",
        "clients=5",
        "--set",
        "model={name: mlp, hidden: [8]}",
    ]
    file = tmp_path / "p.json"
    assert main(["partition", *sets, "--export", str(file)]) == 0
    said = capsys.readouterr().out
    held = json.loads(file.read_text())
    assert [len(part) for part in held["train"]] == [40] * 5
    assert sorted(i for part in held["train"] for i in part) == list(range(200))
    assert (
        len([line for line in said.splitlines() if line.split() and line.split()[0].isdigit()]) == 5
    )


def test_partition_shows_the_division_that_the_method_runs_with(tmp_path):
    pool = "baseline_pool: full, public: {fraction: 0.5}, partition: {scheme: iid}}"
    data = f"data={{dataset: synthetic, samples: 200, shape: [4], classes: 4, {pool}"
    sets = ["--set", data, "--set", "clients=5", "--set", "model={name: mlp, hidden: [8]}"]
    for method, held in (("fedavg", 200), ("fedrds", 100)):
        file = tmp_path / f"{method}.json"
        words = [*sets, "--set", f"algorithm={method}", "--export", str(file), "--quiet"]
        assert main(["partition", *words]) == 0
        assert sum(len(part) for part in json.loads(file.read_text())["train"]) == held


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ("algorithm", "fedprox.mu: "),
        ("model", "mlp.hidden: "),
        ("data", "synthetic.samples: "),
        ("data.partition", "dirichlet.alpha: "),
    ],
)
def test_a_parts_own_options_stand_with_the_keys_of_its_section(section, line, capsys):
    assert main(["list", "keys", section]) == 0
    said = capsys.readouterr().out.splitlines()
    assert f"in {section}, options of one part alone:" in said
    assert any(x.startswith(line) and "default" in x for x in said), said


@pytest.mark.parametrize(
    ("part", "lines"),
    [
        (
            "algorithm.fedprox",
            ["mu: a float >= 0; ", "    Strength of ", "weighting: one of ", "    Weights of "],
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
