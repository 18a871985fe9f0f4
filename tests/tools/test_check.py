from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from fednet.cli.main import main
from fednet.config import from_mapping
from fednet.errors import CannotGoOn, ConfigError, FednetError
from fednet.experiment.build import build
from fednet.tools import check
from fednet.wire.body import SMALL_BYTES


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """Checks a file with this text. kill: a run is really killed and resumed, which takes a process
    of its own; else it is run again.
    """

    def run(text: str, kill: bool = False, sets: Sequence[str] = ()) -> str:
        if not kill:
            again = check.run_small_federation
            monkeypatch.setattr(
                check, "run_killed_and_resumed", lambda changes, files: again(changes)
            )
        (tmp_path / "part.py").write_text(text)
        return "\n".join(check.check(tmp_path / "part.py", sets=sets))

    return run


@pytest.mark.parametrize(
    ("what", "result"),
    [
        ("algorithm", "up: dy (delta), run (statistics)"),
        ("model", "images of shape (3, 32, 32) give outputs (5,)"),
        ("dataset", "800 training and 200 test samples, classes 4"),
    ],
)
def test_templates_pass(what, result, tmp_path, capsys):
    file = tmp_path / f"Fresh-{what}.py"
    assert main(["new", what, str(file)]) == 0
    assert "@" not in file.read_text().replace(f"@{what}(", "")
    assert main(["check", str(file)]) == 0
    said = capsys.readouterr().out
    assert f"{what} 'fresh-{what}'" in said
    assert result in said
    assert "BatchNorm statistics" not in said


def method(name: str, body: str) -> str:
    """A file with a method that is FedAvg but for its body."""
    return f"""
import dataclasses, itertools
import fednet, torch
from fednet.algorithms.fedavg import FedAvg

COUNT, KEPT = itertools.count(), {{}}

@fednet.algorithm("{name}")
class Mine(FedAvg):
{body}
"""


ON_SELF = """
    def __init__(self, config=None, clients=1):
        super().__init__(config, clients)
        self.memory = {}
"""
OTHER_BITS = """
    def server_update(self, accumulator, server, cohort, host):
        after = super().server_update(accumulator, server, cohort, host)
        return after.replace(x=after.x * (1 + next(COUNT) / 1000))
"""
ARRAY = """
    class Up(fednet.Payload):
        x: fednet.Weights
        sketch: fednet.kind("sketch", "array")
        run: fednet.Statistics

    def client_update(self, phase, client, down, host):
        y = host.train(down.x)
        return client, self.Up(x=y.x, sketch=torch.ones({}), run=y.run)
"""
SIZES = """
    def sizes(self, payload, client):
        return {"sketch": 12} if payload is self.Up else {}
"""
WRITES = """
    def client_update(self, phase, client, down, host):
        client, up = super().client_update(phase, client, down, host)
        down.x.vector.data.mul_(1.5)
        return client, up
"""
PARTITION = """
import fednet
@fednet.partitioner("{}")
def deal(y, clients, rng):
    return {}
"""
DRAWN = """
import fednet, numpy
@fednet.dataset("{}")
def drawn(root):
    x = {}
    return fednet.Data((x, numpy.arange(4) % 2), (x, numpy.arange(4) % 2), classes=2)
"""
TOKENS = """
import fednet
from torch import nn
@fednet.model("{}")
class Tokens(nn.Module):
    def __init__(self, *, classes):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, classes)
    def features(self, x):
        return self.embed(x){}
    def forward(self, x):
        return {}
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            method("chk-self", ON_SELF),
            "keeps memory on self; what lives between rounds belongs in Server or Client",
        ),
        (
            method("chk-bits", OTHER_BITS),
            "the same configuration gave other bits the second time",
        ),
        (
            PARTITION.format("chk-twice", "[list(range(10)) for _ in range(clients)]"),
            "chk-twice: a sample was given twice",
        ),
        (
            DRAWN.format("chk-own-rng", "numpy.random.default_rng().random((4, 3))"),
            "chk-own-rng: two readings gave other samples; draw from",
        ),
        (
            TOKENS.format("chk-dict", "", "{'logits': self.head(self.features(x)).tolist()}"),
            "it returns a dict; expected the outputs",
        ),
        ("x = 1\n", "registers nothing; expected a decorator"),
    ],
)
def test_a_part_with_a_fault_is_refused_with_the_reason(checked, text, said):
    with pytest.raises(ConfigError, match=said):
        checked(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            PARTITION.format(
                "chk-deal", "[list(range(len(y)))[c::clients] for c in range(clients)]"
            ),
            "  ok  3 disjoint parts of 67, 67, 66 samples",
        ),
        (
            DRAWN.format("chk-drawn", "numpy.random.random((4, 3))"),
            "  ok  loading the data twice gives the same data",
        ),
        (
            "import fednet\nfrom fednet.training.tasks.regression import Regression\n"
            '@fednet.task("chk-degrees")\nclass Degrees(Regression):\n    tolerance = 0.1\n',
            "  ok  loss 0.0000, accuracy 1.0000 on four easy samples",
        ),
        (
            'import fednet\nfrom torch import nn\n@fednet.model("chk-fixed")\n'
            "def fixed():\n    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))\n",
            "  ok  images of shape (1, 28, 28) give outputs (10,)",
        ),
    ],
)
def test_a_part_without_a_fault_passes_with_what_is_to_be_known_of_it(checked, text, said):
    assert said in checked(text)


def test_a_dataset_is_read_from_the_folder_that_data_names(tmp_path, capsys):
    (tmp_path / "own.py").write_text(
        "import fednet, numpy as np\n"
        '@fednet.dataset("chk-root")\n'
        "def own(root):\n"
        '    x = np.loadtxt(root / "x.csv", dtype="float32").reshape(-1, 1)\n'
        "    return fednet.Data((x, x[:, 0]), (x, x[:, 0]))\n"
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.csv").write_text("1\n2\n3\n")
    assert main(["check", str(tmp_path / "own.py"), "--data", str(tmp_path / "data")]) == 0
    said = capsys.readouterr().out
    assert f"its root is {tmp_path / 'data'} (--data, else" in said
    assert "3 training and 3 test samples" in said


def test_a_model_of_tokens_is_tried_on_tokens(checked):
    said = checked(TOKENS.format("chk-tokens", "", "self.head(self.features(x)).transpose(1, 2)"))
    assert "  ok  tokens of shape (16,) give outputs (5, 16)" in said
    assert "without .head" not in said


ON_CLASS = """
    v = None

    def server_update(self, accumulator, server, cohort, host):
        after = super().server_update(accumulator, server, cohort, host)
        step = (after.x - server.x).params
        self.v = step if self.v is None else 0.9 * self.v + step
        return after.replace(x=(server.x.params + self.v).with_buffers(after.x))
"""


@pytest.mark.long
def test_a_method_that_writes_to_what_it_was_sent_by_way_of_data_is_refused(checked):
    with pytest.raises(CannotGoOn, match="changes tensors that it was sent"):
        checked(method("chk-data", WRITES))


def test_methods_are_tried_with_a_model_whose_tensors_are_handed_over():
    assert build(from_mapping(check.SMALL)).setting.initial.layout.nbytes > SMALL_BYTES


def test_method_whose_memory_a_kill_loses_is_refused(checked):
    with pytest.raises(ConfigError, match=r"killed in round 3 .* other bits from round 3"):
        checked(method("chk-memory", ON_CLASS), kill=True)


def test_method_that_is_fedavg_after_all_is_said_to_be(checked):
    said = checked(method("chk-plain", "    pass")).splitlines()
    assert "  ok  killed in round 3 and resumed, it gives the same bits" in said
    assert any("the same bits as fedavg in every round" in line for line in said)
    # FedAvg's `asynchronous = True` is its heir's too.
    assert any("killed in update 3 and resumed, it gives the same bits" in line for line in said)


def test_method_that_divides_by_all_clients_and_takes_no_buffers_of_theirs_is_said_to(checked):
    body = """
    def server_update(self, accumulator, server, cohort, host):
        share = accumulator.x.count / host.clients
        step = share * (accumulator.x.mean() - server.x)
        return server.replace(x=server.x + step)  # with the buffers of server.x
"""
    more = """
    def with_more_clients(self, server, before, now):
        return server
"""
    note = "NOTE: server_update uses the number of clients, and with_more_clients is not defined."
    said = checked(method("chk-all", body))
    assert said.count(note) == 1
    assert said.count("NOTE: the global model's BatchNorm statistics never change") == 1
    assert note not in checked(method("chk-more", body + more))


def test_a_reply_that_is_refused_is_named_rather_than_the_loss_that_it_leaves(checked):
    body = ARRAY.format("4 if host.client_id == 1 else 3") + SIZES
    with pytest.raises(ConfigError, match="refused: field sketch: 16 bytes, expected 0 to 12"):
        checked(method("chk-long", body))


UP = "return client, self.Up(dy=done.x - down.x, run=done.run)"
LOCAL = r"client_update of Fresh \(fresh\.py, line 51\) returned "


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("self.config.mu", "self.config.nu", r"no attribute 'nu' \(fresh\.py, line 53\)"),
        ("self.Up(dy=", "self.Up(dx=", r"argument 'dx' \(fresh\.py, line 54\)"),
        (UP, "return self.Up(dy=done.x - down.x, run=done.run)", LOCAL + "Up, expected"),
        (UP, UP.replace("return ", "return None, "), LOCAL + r"\(NoneType, Empty, Up\)"),
        (
            "done.x - down.x",
            "done.x.vector",
            LOCAL + r"\(Empty, Up\), expected Tensors of .* as Fresh\.Up\.dy, not Tensor",
        ),
        (
            "run=done.run",
            'run=type(done.run)(1, "2", 0.5)',
            LOCAL + r".*, expected what .*\.run, not LocalRun\(n=1, steps='2', loss=0\.5\)",
        ),
        (
            "done.x - down.x",
            "(done.x - down.x).select(down.x.layout.without({down.x.layout.names[0]}))",
            LOCAL
            + r".*, expected the tensors that are sent .* Fresh\.Up\.dy; the difference is \S+",
        ),
        (
            "dy: Sum\n",
            "dy: list\n",
            r"Fresh\.Accumulator declares dy, .*; write init_accumulator",
        ),
        (
            "return self.Accumulator(dy=accumulator",
            "self.Accumulator(dy=accumulator",
            r"accumulate of Fresh \(fresh\.py, line 56\) returned NoneType, expected Accumulator\(",
        ),
        (
            "return self.Server(x=",
            "self.Server(x=",
            r"server_update of Fresh \(fresh\.py, line 60\) returned NoneType, expected Server\(",
        ),
        (
            "def client_update(self, phase, client",
            "def client_update(self, client",
            r"TypeError: Fresh\.client_update\(\) takes 4 positional arguments but 5 were given",
        ),
        (
            "NonNegative = 0.01",
            "NonNegative = -1.0",
            r"a default of fresh is not what",
        ),
    ],
)
def test_what_is_wrong_with_the_template_is_said_with_its_place(
    tmp_path, capsys, right, wrong, said
):
    file = tmp_path / "fresh.py"
    assert main(["new", "algorithm", str(file)]) == 0
    text = file.read_text()
    assert right in text
    file.write_text(text.replace(right, wrong))
    assert main(["check", str(file)])
    assert re.search(said, capsys.readouterr().err)


TIED = method(
    "chk-tied",
    """
    def client_update(self, phase, client, down, host):
        assert hasattr(host.model(down.x), "mine")
        return super().client_update(phase, client, down, host)


@fednet.dataset("chk-named")
def named(*, classes: int = 3):
    y = torch.arange(48) % classes
    x = {"words": y[:, None].repeat(1, 5), "shown": torch.ones(48, 5)}
    return fednet.Data(train=(x, y), test=(x, y), classes=classes)


@fednet.model("chk-reads")
class Reads(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.mine = torch.nn.Embedding(classes, 4)
        self.head = torch.nn.Linear(4, classes)

    def forward(self, words, shown):
        return self.head((self.mine(words) * shown[..., None]).mean(1))
""",
)


def test_a_files_own_dataset_and_model_are_those_that_its_method_and_model_are_tried_with(checked):
    said = checked(TIED)
    assert "tried with the model chk-reads and the dataset chk-named" in said
    assert "samples of the dataset 'chk-named' give outputs (3,)" in said


def test_what_a_file_is_tried_with_can_be_set(checked):
    sets = ["model={name: mlp, hidden: [4]}", "train.lr=0.01"]
    with pytest.raises(FednetError, match="AssertionError"):  # its own model is not used
        checked(TIED, sets=sets)
    tokens = TOKENS.format("chk-tokens", "", "self.head(self.features(x)).transpose(1, 2)")
    said = checked(tokens, sets=["data={dataset: synthetic, shape: [16], samples: 20}"])
    assert "tokens of shape (16,)" in said
