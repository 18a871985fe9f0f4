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

    def run(text: str, name: str, kill: bool = False) -> list[str]:
        if not kill:
            again = check.killed.trained
            monkeypatch.setattr(check.killed, "resumed", lambda changes, files: again(changes))
        (tmp_path / name).write_text(text)
        return list(check.check(tmp_path / name, lambda wrong: None))

    return run


@pytest.mark.parametrize("what", ["algorithm", "model", "dataset"])
def test_templates_pass(what, tmp_path, capsys):
    file = tmp_path / f"Fresh-{what}.py"
    assert main(["new", what, str(file)]) == 0
    assert "@" not in file.read_text().replace(f"@{what}(", "")
    assert main(["check", str(file)]) == 0
    said = capsys.readouterr().out
    assert f"{what} 'fresh-{what}'" in said
    result = {
        "algorithm": "up: dy (delta), run (statistics)",
        "model": "outputs (5,)",
        "dataset": "800 training and 200 test samples, classes 4",
    }
    assert result[what] in said
    assert "BatchNorm statistics" not in said
    assert ("NOTE: paper has no link" in said) is (what == "algorithm")


METHOD = """
import fednet
from fednet.algorithms.fedavg import FedAvg

@fednet.algorithm("{name}")
class Mine(FedAvg):
    {body}
"""


def test_method_that_keeps_state_on_self_is_refused(checked):
    body = (
        "def __init__(self, config=None, clients=1):\n"
        "        super().__init__(config, clients)\n"
        "        self.memory = {}"
    )
    with pytest.raises(
        ConfigError,
        match="keeps memory on self; what lives between rounds belongs in Server or Client",
    ):
        checked(METHOD.format(name="chk-self", body=body), "chk_self.py")


def test_method_that_is_not_repeatable_is_refused(checked):
    body = (
        "def server_update(self, accumulator, server, cohort, host):\n        import os\n"
        "        after = super().server_update(accumulator, server, cohort, host)\n"
        "        return after.replace(x=after.x * (1 + os.urandom(1)[0] / 1000 + 1e-3 * "
        "len(os.urandom(1))))"
    )
    body = body.replace("os.urandom(1)[0] / 1000", "next(COUNT) / 1000")
    text = METHOD.format(name="chk-bits", body=body).replace(
        "import fednet\n", "import itertools\nimport fednet\nCOUNT = itertools.count()\n", 1
    )
    with pytest.raises(ConfigError, match="the same configuration gave other bits the second time"):
        checked(text, "chk_bits.py")


def test_partitioner_that_gives_a_sample_twice_is_refused(checked):
    text = (
        'import fednet\n@fednet.partitioner("chk-twice")\ndef twice(y, clients, *, share: float = '
        "0.5):\n"
        "    return [list(range(10)) for _ in range(clients)]\n"
    )
    with pytest.raises(ConfigError, match="chk-twice: a sample was given twice"):
        checked(text, "chk_twice.py")


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
        checked(text, "mislabelled.py")
    assert main(["run", "--set", "data.partition=mislabelled"]) == 2
    said = capsys.readouterr().err
    assert f"data.partition.labels is missing; expected a value. {gives}." in said


def test_partitioner_that_deals_passes(checked):
    text = (
        'import fednet\n@fednet.partitioner("chk-deal")\ndef deal(y, clients, rng):\n'
        "    return [list(range(len(y)))[c::clients] for c in range(clients)]\n"
    )
    assert "  ok  3 disjoint parts of 67, 67, 66 samples" in checked(text, "chk_deal.py")


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


DRAWN = """
import fednet, numpy
@fednet.dataset("{}")
def drawn(root):
    x = {}
    return fednet.Data((x, numpy.arange(4) % 2), (x, numpy.arange(4) % 2), classes=2)
"""


def test_a_dataset_is_refused_whose_readings_have_the_same_labels_and_other_samples(checked):
    with pytest.raises(
        ConfigError, match="chk-own-rng: two readings gave other samples; draw from"
    ):
        checked(
            DRAWN.format("chk-own-rng", "numpy.random.default_rng().random((4, 3))"), "own_rng.py"
        )
    said = checked(DRAWN.format("chk-drawn", "numpy.random.random((4, 3))"), "drawn.py")
    assert "  ok  loading the data twice gives the same data" in said
    flat = checked(DRAWN.format("chk-flat", "numpy.zeros((4, 3), numpy.uint8)"), "flat.py")
    assert any("NOTE: x: uint8 values are divided by 255" in line for line in flat)


def test_a_task_about_values_is_tried_on_values(checked):
    text = (
        "import fednet\nfrom fednet.training.tasks.regression import Regression\n"
        '@fednet.task("chk-degrees")\nclass Degrees(Regression):\n    tolerance = 0.1\n'
    )
    easy = "  ok  loss 0.0000, accuracy 1.0000 on four easy samples"
    assert easy in checked(text, "chk_degrees.py")


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
    assert any("accuracy() is not called" in line for line in checked(text, "chk_acc.py"))


def test_a_plain_module_passes_with_what_it_cannot_be_used_for(checked):
    text = (
        'import fednet, math\nfrom torch import nn\n@fednet.model("chk-headless")\ndef '
        "headless(*, input_shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), classes))\n"
    )
    said = "\n".join(checked(text, "chk_headless.py"))
    assert "\n  NOTE: without .head and features(x)" in said
    assert "  ok  initialised by the seed" in said


@pytest.mark.parametrize(("has", "lacks"), [("features", ".head"), ("head", "features(x)")])
def test_a_plain_module_may_use_either_name_for_a_part_of_its_own(checked, has, lacks):
    """As torchvision's VGG names its convolutions `features`."""
    last = "head" if has == "head" else "classifier"
    text = (
        f'import fednet, math\nfrom torch import nn\n@fednet.model("chk-has-{has}")\n'
        "class Has(nn.Module):\n"
        "    def __init__(self, *, input_shape, classes):\n"
        "        super().__init__()\n"
        f"        self.{'body' if has == 'head' else has} = nn.Flatten()\n"
        f"        self.{last} = nn.Linear(math.prod(input_shape), classes)\n"
        "    def forward(self, x):\n"
        f"        return self.{last}(x.flatten(1))\n"
    )
    said = "\n".join(checked(text, f"chk_has_{has}.py"))
    assert f"NOTE: without {lacks}: methods that look at features" in said
    assert "  ok  initialised by the seed" in said


def test_a_model_that_takes_no_sizes_is_tried_as_it_is(checked):
    text = (
        'import fednet\nfrom torch import nn\n@fednet.model("chk-fixed")\n'
        "def fixed():\n    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))\n"
    )
    assert "  ok  inputs (1, 28, 28) give outputs (10,)" in checked(text, "chk_fixed.py")


TOKENS = """import fednet
from torch import nn
@fednet.model("chk-tokens")
class Tokens(nn.Module):
    def __init__(self, *, classes):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, classes)
    def features(self, x):
        return self.embed(x){pooled}
    def forward(self, x):
        return {outputs}
"""


@pytest.mark.parametrize(
    ("pooled", "outputs", "shape"),
    [
        (".mean(1)", "self.head(self.features(x))", "(5,)"),
        ("", "self.head(self.features(x))", "(16, 5)"),
        ("", "self.head(self.features(x)).transpose(1, 2)", "(5, 16)"),
    ],
)
def test_a_model_of_tokens_is_tried_on_tokens(checked, pooled, outputs, shape):
    said = checked(TOKENS.format(pooled=pooled, outputs=outputs), "chk_tokens.py")
    assert f"  ok  inputs (16,) of whole numbers (tokens) give outputs {shape}" in said
    assert "  ok  body and head: head.weight, head.bias" in said


def test_a_model_that_gives_no_tensor_is_refused(checked):
    text = TOKENS.format(pooled="", outputs="{'logits': self.head(self.features(x)).tolist()}")
    with pytest.raises(ConfigError, match="it returns a dict; expected the outputs"):
        checked(text.replace("chk-tokens", "chk-dict"), "chk_dict.py")


def test_what_is_wrong_with_inputs_of_any_shape_is_said_once(checked):
    text = (
        'import fednet\nfrom torch import nn\n@fednet.model("chk-lazy")\n'
        "def lazy(*, input_shape, classes):\n    return nn.LazyLinear(classes)\n"
    )
    with pytest.raises(ConfigError) as said:
        checked(text, "chk_lazy.py")
    assert str(said.value).count("weight is of a lazy layer") == 1


def test_a_model_whose_head_is_no_linear_is_refused(checked):
    text = (
        'import fednet, math\nfrom torch import nn\n@fednet.model("chk-wrong-head")\n'
        "class Wrong(nn.Sequential):\n"
        "    def __init__(self, *, input_shape, classes):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(math.prod(input_shape), classes))\n"
        "        self.head = nn.Identity()\n"
    )
    with pytest.raises(ConfigError, match=r"expected \.head, the last nn\.Linear"):
        checked(text, "chk_wrong_head.py")


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


def test_file_that_registers_nothing_is_refused(checked):
    with pytest.raises(ConfigError, match="registers nothing; expected a decorator"):
        checked("x = 1\n", "chk_nothing.py")


def test_method_whose_memory_a_kill_loses_is_refused(checked):
    body = (
        "v = None\n\n"
        "    def server_update(self, accumulator, server, cohort, host):\n"
        "        after = super().server_update(accumulator, server, cohort, host)\n"
        "        step = (after.x - server.x).params\n"
        "        self.v = step if self.v is None else 0.9 * self.v + step\n"
        "        return after.replace(x=(server.x.params + self.v).with_buffers(after.x))"
    )
    with pytest.raises(
        ConfigError, match=r"killed in round 3 .* other bits from round 3; what live"
    ):
        checked(METHOD.format(name="chk-memory", body=body), "chk_memory.py", kill=True)


def test_method_whose_memory_in_its_module_a_kill_loses_is_refused(checked):
    """It is emptied when a run begins, so that two runs in one process agree."""
    body = (
        "def init_server(self, x):\n"
        "        KEPT.clear()\n"
        "        return super().init_server(x)\n\n"
        "    def server_update(self, accumulator, server, cohort, host):\n"
        "        after = super().server_update(accumulator, server, cohort, host)\n"
        "        step = (after.x - server.x).params\n"
        "        KEPT['v'] = 0.9 * KEPT['v'] + step if KEPT else step\n"
        "        return after.replace(x=(server.x.params + KEPT['v']).with_buffers(after.x))"
    )
    text = METHOD.format(name="chk-module", body=body).replace("@fednet", "KEPT = {}\n\n@fednet")
    with pytest.raises(ConfigError, match=r"killed in round 3 .* other bits from round 3; what"):
        checked(text, "chk_module.py", kill=True)


def test_method_that_is_fedavg_after_all_is_said_to_be(checked):
    said = checked(METHOD.format(name="chk-plain", body="pass"), "chk_plain.py")
    assert "  ok  killed in round 3 and resumed, it gives the same bits" in said
    assert any("the same bits as fedavg in every round" in line for line in said)
    # FedAvg's `asynchronous = True` is its heir's too.
    at = next(i for i, line in enumerate(said) if "5 updates without rounds" in line)
    assert said[at + 2] == "  ok  killed in update 3 and resumed, it gives the same bits"


def test_method_that_never_takes_the_clients_buffers_is_said_to(checked):
    body = (
        "def server_update(self, accumulator, server, cohort, host):\n"
        "        step = accumulator.x.mean() - server.x\n"
        "        return server.replace(x=server.x + step)  # with the buffers of server.x"
    )
    said = checked(METHOD.format(name="chk-buffers", body=body), "chk_buffers.py")
    assert sum("NOTE: the global model's BatchNorm statistics never change" in s for s in said) == 1


@pytest.mark.long
def test_method_that_errs_on_stale_replies_alone_is_refused_where_it_is_asynchronous(checked):
    body = (
        "asynchronous = {asynchronous}\n\n"
        "    def accumulate(self, accumulator, server, client_id, up, host):\n"
        "        x = up.x * (1 + next(COUNT) / 1000) if host.staleness else up.x\n"
        "        up = dataclasses.replace(up, x=x)\n"
        "        return super().accumulate(accumulator, server, client_id, up, host)"
    )
    text = METHOD.replace(
        "import fednet\n",
        "import dataclasses, itertools\nimport fednet\nCOUNT = itertools.count()\n",
        1,
    )
    said = checked(
        text.format(name="chk-sync", body=body.format(asynchronous=False)), "chk_sync.py"
    )
    assert not any("without rounds" in line for line in said)
    with pytest.raises(ConfigError, match="without rounds, the same configuration gave other bits"):
        checked(text.format(name="chk-stale", body=body.format(asynchronous=True)), "chk_stale.py")


def test_array_without_sizes_is_refused_before_a_reply_is(checked):
    body = (
        "class Up(fednet.Payload):\n"
        "        x: fednet.Weights\n"
        '        sketch: fednet.kind("sketch", "array")\n'
        "        run: fednet.Statistics\n\n"
        "    def client_update(self, phase, client, down, host):\n"
        "        import torch\n"
        "        y = host.train(down.x)\n"
        "        return client, self.Up(x=y.x, sketch=torch.ones(3), run=y.run)"
    )
    with pytest.raises(ConfigError, match=r"Up\.sketch is of the form array, .* define sizes"):
        checked(METHOD.format(name="chk-array", body=body), "chk_array.py")
    sized = body + (
        "\n\n    def sizes(self, payload, client):\n"
        '        return {"sketch": 12} if payload is self.Up else {}'
    )
    assert any("killed" in s for s in checked(METHOD.format(name="chk-b", body=sized), "chk_b.py"))


@pytest.mark.parametrize("whose", ["4", "4 if host.client_id == 1 else 3"], ids=["all", "one"])
def test_a_reply_that_is_refused_is_named_rather_than_the_loss_that_it_leaves(checked, whose):
    body = (
        "class Up(fednet.Payload):\n"
        "        x: fednet.Weights\n"
        '        sketch: fednet.kind("sketch", "array")\n'
        "        run: fednet.Statistics\n\n"
        "    def client_update(self, phase, client, down, host):\n"
        "        import torch\n"
        "        y = host.train(down.x)\n"
        f"        sketch = torch.ones({whose})\n"
        "        return client, self.Up(x=y.x, sketch=sketch, run=y.run)\n\n"
        "    def sizes(self, payload, client):\n"
        '        return {"sketch": 12} if payload is self.Up else {}'
    )
    name = f"chk-long-{len(whose)}"
    refused = "refused: field sketch: 16 bytes, expected 0 to 12"
    with pytest.raises((ConfigError, CannotGoOn), match=refused):
        checked(METHOD.format(name=name, body=body), f"{name}.py")


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
