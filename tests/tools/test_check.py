from __future__ import annotations

import re

import pytest

from fednet.cli.main import main
from fednet.errors import CannotGoOn, ConfigError
from fednet.tools import check


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """Checks a file with this text. kill: a run is really killed and resumed, which takes a process
    of its own; else it is run again.
    """

    def run(text: str, kill: bool = False, name: str = "part.py") -> str:
        if not kill:
            again = check.killed.trained
            monkeypatch.setattr(check.killed, "resumed", lambda changes, files: again(changes))
        (tmp_path / name).write_text(text)
        return "\n".join(check.check(tmp_path / name, lambda wrong: None))

    return run


@pytest.mark.parametrize(
    ("what", "result"),
    [
        ("algorithm", "up: dy (delta), run (statistics)"),
        ("model", "outputs (5,)"),
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
    assert ("NOTE: paper has no link" in said) is (what == "algorithm")


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
MODEL = """
import fednet, math
from torch import nn
@fednet.model("{}")
class Own(nn.Module):
    def __init__(self, *, input_shape, classes):
        super().__init__()
        self.{} = nn.Flatten()
        self.{} = nn.Linear(math.prod(input_shape), classes)
    def forward(self, x):
        return self.{}(x.flatten(1))
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
LAZY = """
import fednet
from torch import nn
@fednet.model("chk-lazy")
def lazy(*, input_shape, classes):
    return nn.LazyLinear(classes)
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
            method("chk-array", ARRAY.format(3)),
            r"Up\.sketch is of the form array, .* define sizes",
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
            MODEL.format("chk-head", "head", "last", "last"),
            r"expected \.head, the last nn\.Linear",
        ),
        (
            TOKENS.format("chk-dict", "", "{'logits': self.head(self.features(x)).tolist()}"),
            "it returns a dict; expected the outputs",
        ),
        (LAZY, r"^(?!.*weight is of a lazy layer.*weight is of a).*weight is of a lazy layer"),
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
            DRAWN.format("chk-flat", "numpy.zeros((4, 3), numpy.uint8)"),
            "NOTE: x: uint8 values are divided by 255",
        ),
        (
            "import fednet\nfrom fednet.training.tasks.regression import Regression\n"
            '@fednet.task("chk-degrees")\nclass Degrees(Regression):\n    tolerance = 0.1\n',
            "  ok  loss 0.0000, accuracy 1.0000 on four easy samples",
        ),
        (
            'import fednet\nfrom torch import nn\n@fednet.model("chk-fixed")\n'
            "def fixed():\n    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))\n",
            "  ok  inputs (1, 28, 28) give outputs (10,)",
        ),
    ],
)
def test_a_part_without_a_fault_passes_with_what_is_to_be_known_of_it(checked, text, said):
    assert said in checked(text)


def test_a_part_that_asks_for_what_fednet_does_not_give_is_told_what_it_gives(checked, capsys):
    text = """import fednet
@fednet.partitioner("mislabelled")
def mislabelled(labels, clients, *, share: float = 0.5):
    return [labels] * clients
"""
    gives = (
        "fednet itself gives a partitioner only y, groups, clients, rng and pool, by these names"
    )
    with pytest.raises(ConfigError, match=f"argument 'labels'.*{gives}"):
        checked(text)
    assert main(["run", "--set", "data.partition=mislabelled"]) == 2
    said = capsys.readouterr().err
    assert f"data.partition.labels is missing; expected a value. {gives}." in said


def test_a_dataset_is_read_from_the_folder_that_data_names(tmp_path, monkeypatch, capsys):
    (tmp_path / "own.py").write_text(
        "import fednet, numpy as np\n"
        '@fednet.dataset("chk-root")\n'
        "def own(root):\n"
        '    x = np.loadtxt(root / "x.csv", dtype="float32").reshape(-1, 1)\n'
        "    return fednet.Data((x, x[:, 0]), (x, x[:, 0]))\n"
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.csv").write_text("1\n2\n3\n")
    for name in ("FEDNET_DATA", "FEDNET_OUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    file = str(tmp_path / "own.py")
    assert main(["check", file, "--data", str(tmp_path / "data")]) == 0
    assert "3 training and 3 test samples" in capsys.readouterr().out
    assert main(["check", file]) == 3
    said = capsys.readouterr()
    assert f"its root is {tmp_path / 'cache' / 'fednet'} (--data, else FEDNET_DATA" in said.out
    assert "x.csv" in said.err


OWN_TASK = """
import fednet
from fednet.training.tasks.classification import Classification

@fednet.task("chk-task")
class Own(Classification):
    def {}:
        {}
"""


@pytest.mark.parametrize(
    ("function", "body", "said"),
    [
        ("loss(self, outputs, y)", "pass", r"gave NoneType, expected a scalar with a graph"),
        ("loss(self, outputs, y)", "return self.losses(outputs, y)", r"gave float32 of shape \(N,"),
        ("counts(self, outputs, y)", "pass", r"gave NoneType, expected \(2, C\) of int64"),
        ("counts(self, outputs, y)", "return super().counts(outputs, y) / 2", r"gave float32 of"),
    ],
)
def test_what_a_task_gives_is_held_before_anything_starts(tmp_path, capsys, function, body, said):
    """No counts were an accuracy of 0, and half counts a run whose own lines could not be read."""
    (tmp_path / "own.py").write_text(OWN_TASK.format(function, body))
    name = function.partition("(")[0]
    own = ["--load", str(tmp_path / "own.py"), "--set", "task=chk-task"]
    told = rf"task chk-task: {name} \(own\.py, line 7\) {said}"
    for samples, command in (
        ("2", ["run", "--check", *own, "--out", str(tmp_path)]),
        ("4", ["check", str(tmp_path / "own.py")]),
    ):
        assert main(command) == 2
        assert re.search(told.replace("(N,", f"({samples},"), capsys.readouterr().err)


def test_an_accuracy_of_a_tasks_own_is_said_not_to_be_asked(checked):
    text = OWN_TASK.replace("chk-task", "chk-acc").format("accuracy(self, counts)", "return 0.5")
    assert "accuracy() is not called" in checked(text)


@pytest.mark.parametrize(
    ("names", "lacks"),
    [
        (("body", "out"), ".head and features(x)"),
        (("features", "out"), ".head: methods that look at features"),  # as torchvision's VGG
        (("body", "head"), "features(x): methods that look at features"),
    ],
)
def test_a_plain_module_passes_with_what_it_cannot_be_used_for(checked, names, lacks):
    """It may use either name for a part of its own."""
    first, last = names
    said = checked(MODEL.format(f"chk-{first}-{last}", first, last, last))
    assert f"\n  NOTE: without {lacks}" in said
    assert "  ok  initialised by the seed" in said


@pytest.mark.parametrize(
    ("pooled", "outputs", "shape"),
    [
        (".mean(1)", "self.head(self.features(x))", "(5,)"),
        ("", "self.head(self.features(x))", "(16, 5)"),
        ("", "self.head(self.features(x)).transpose(1, 2)", "(5, 16)"),
    ],
)
def test_a_model_of_tokens_is_tried_on_tokens(checked, pooled, outputs, shape):
    said = checked(TOKENS.format("chk-tokens", pooled, outputs))
    assert f"  ok  inputs (16,) of whole numbers (tokens) give outputs {shape}" in said
    assert "  ok  body and head: head.weight, head.bias" in said


def test_every_part_that_is_refused_is_said(tmp_path, capsys):
    file = tmp_path / "three.py"
    file.write_text(
        "import fednet, numpy as np\n"
        "@fednet.partitioner('twice')\n"
        "def twice(y, clients, rng):\n"
        "    return [np.arange(len(y))] * clients\n"
        "@fednet.partitioner('breaks')\n"
        "def breaks(y, clients, rng):\n"
        "    raise TypeError('mine')\n"
        "@fednet.partitioner('far')\n"
        "def far(y, clients, rng):\n"
        "    return [np.arange(k, 10_000, clients) for k in range(clients)]\n"
        "@fednet.partitioner('fine')\n"
        "def fine(y, clients, rng):\n"
        "    return np.array_split(rng.permutation(len(y)), clients)\n"
    )
    assert main(["check", str(file)]) != 0
    told = capsys.readouterr()
    assert "a sample was given twice" in told.err
    assert "an index is outside" in told.err
    assert "TypeError: mine" in told.err
    assert told.out.count("  ok  ") == 2  # of the one that is fine
    assert main(["check", "--quiet", str(file)]) != 0


ON_CLASS = """
    v = None

    def server_update(self, accumulator, server, cohort, host):
        after = super().server_update(accumulator, server, cohort, host)
        step = (after.x - server.x).params
        self.v = step if self.v is None else 0.9 * self.v + step
        return after.replace(x=(server.x.params + self.v).with_buffers(after.x))
"""
# It is emptied when a run begins, so that two runs in one process agree.
IN_MODULE = """
    def init_server(self, x):
        KEPT.clear()
        return super().init_server(x)

    def server_update(self, accumulator, server, cohort, host):
        after = super().server_update(accumulator, server, cohort, host)
        step = (after.x - server.x).params
        KEPT['v'] = 0.9 * KEPT['v'] + step if KEPT else step
        return after.replace(x=(server.x.params + KEPT['v']).with_buffers(after.x))
"""


@pytest.mark.parametrize("body", [ON_CLASS, IN_MODULE], ids=["on its class", "in its module"])
def test_method_whose_memory_a_kill_loses_is_refused(checked, body):
    with pytest.raises(
        ConfigError, match=r"killed in round 3 .* other bits from round 3; what live"
    ):
        checked(method("chk-memory", body), kill=True)


def test_method_that_is_fedavg_after_all_is_said_to_be(checked):
    said = checked(method("chk-plain", "    pass")).splitlines()
    assert "  ok  killed in round 3 and resumed, it gives the same bits" in said
    assert any("the same bits as fedavg in every round" in line for line in said)
    # FedAvg's `asynchronous = True` is its heir's too.
    at = next(i for i, line in enumerate(said) if "5 updates without rounds" in line)
    assert said[at + 2] == "  ok  killed in update 3 and resumed, it gives the same bits"


def test_method_that_never_takes_the_clients_buffers_is_said_to(checked):
    body = """
    def server_update(self, accumulator, server, cohort, host):
        step = accumulator.x.mean() - server.x
        return server.replace(x=server.x + step)  # with the buffers of server.x
"""
    said = checked(method("chk-buffers", body))
    assert said.count("NOTE: the global model's BatchNorm statistics never change") == 1


@pytest.mark.long
def test_method_that_errs_on_stale_replies_alone_is_refused_where_it_is_asynchronous(checked):
    body = """
    asynchronous = {}

    def accumulate(self, accumulator, server, client_id, up, host):
        x = up.x * (1 + next(COUNT) / 1000) if host.staleness else up.x
        up = dataclasses.replace(up, x=x)
        return super().accumulate(accumulator, server, client_id, up, host)
"""
    assert "without rounds" not in checked(method("chk-sync", body.format(False)))
    with pytest.raises(ConfigError, match="without rounds, the same configuration gave other bits"):
        checked(method("chk-stale", body.format(True)), name="stale.py")


@pytest.mark.parametrize("whose", ["4", "4 if host.client_id == 1 else 3"], ids=["all", "one"])
def test_a_reply_that_is_refused_is_named_rather_than_the_loss_that_it_leaves(checked, whose):
    refused = "refused: field sketch: 16 bytes, expected 0 to 12"
    with pytest.raises((ConfigError, CannotGoOn), match=refused):
        checked(method("chk-long", ARRAY.format(whose) + SIZES))


UP = "return client, self.Up(dy=done.x - down.x, run=done.run)"
LOCAL = r"client_update of Fresh \(fresh\.py, line 51\) returned "


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("self.config.mu", "self.config.nu", r"no attribute 'nu' \(fresh\.py, line 53\)"),
        ("self.Up(dy=", "self.Up(dx=", r"argument 'dx' \(fresh\.py, line 54\)"),
        (UP, "return self.Up(dy=done.x - down.x, run=done.run)", LOCAL + "Up, expected"),
        (UP, UP.replace("return ", "return None, "), LOCAL + r"\(NoneType, Empty, Up\)"),
        (UP, UP.replace("client,", "down,"), LOCAL + r"\(Down, Up\), expected the client's next"),
        (
            "done.x - down.x",
            "done.x.vector",
            LOCAL + r"\(Empty, Up\), expected Tensors of .* as Fresh\.Up\.dy, not Tensor",
        ),
        ("run=done.run", "run=None", LOCAL + r".*, expected what .* as Fresh\.Up\.run, not None"),
        (
            "run=done.run",
            'run=type(done.run)(1, "2", 0.5)',
            LOCAL + r".*, expected what .*\.run, not Run\(n=1, steps='2', loss=0\.5\)",
        ),
        (
            "done.x - down.x",
            "(done.x - down.x).select(down.x.layout.without({down.x.layout.names[0]}))",
            LOCAL
            + r".*, expected the tensors that are sent .* Fresh\.Up\.dy; the difference is \S+",
        ),
        (
            "def init_accumulator(",
            "def begin(",
            r"Fresh\.Accumulator declares dy, .*; write init_accumulator and accumulate",
        ),
        (
            "class Accumulator",
            "class Client(State):\n        c: Weights\n\n    class Accumulator",
            r"Fresh\.Client declares c, but the default fills nothing; write init_client",
        ),
        (
            "return self.Accumulator(dy=accumulator",
            "self.Accumulator(dy=accumulator",
            r"accumulate of Fresh \(fresh\.py, line 59\) returned NoneType, expected Accumulator\(",
        ),
        (
            "return self.Server(x=",
            "self.Server(x=",
            r"server_update of Fresh \(fresh\.py, line 63\) returned NoneType, expected Server\(",
        ),
        (
            "return self.Server(x=accumulator",
            "return (accumulator",
            r"returned Tensors, expected Server",
        ),
        (
            "return self.Down(x=",
            "self.Down(x=",
            r"check: broadcast of Fresh \(fresh\.py, line 48\) returned NoneType, expected the",
        ),
        (
            "def client_update(self, phase, client",
            "def client_update(self, client",
            r"client_update of Fresh \(fresh\.py, line 51\) takes \(self, client, down",
        ),
        (
            "done = host",
            'host.report(a="b")\n        done = host',
            r"float: 'b' \(fresh\.py, line 53\)",
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
