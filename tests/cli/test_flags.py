from __future__ import annotations

import argparse
import errno
import json
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

from fednet.cli import client, main, server, values
from fednet.client import join
from fednet.client.policy import Policy
from fednet.config import Config
from fednet.errors import CannotGoOn, Stopped
from fednet.launch import start

CONFIG = Config()


def call(line: str) -> int:
    """The exit status of a command line of one of the three programs."""
    program, *words = shlex.split(line)
    return {"fednet": main, "fednet-server": server, "fednet-client": client}[program].main(words)


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """The engine's functions, written down instead of run; `answer` is what they return or
    raise.
    """
    seen = types.SimpleNamespace(calls=[], answer=0)

    def called(name):
        def record(*args, **kwargs):
            seen.calls.append((name, args, kwargs))
            if isinstance(seen.answer, BaseException):
                raise seen.answer
            return seen.answer

        return record

    monkeypatch.setattr(start, "run_command", called("run"))
    monkeypatch.setattr(start, "serve", called("serve"))
    monkeypatch.setattr(join, "main", called("client"))
    monkeypatch.setattr("fednet.cli.run.config_of", lambda args, typed: CONFIG)
    monkeypatch.setattr("fednet.cli.server.config_of", lambda args, typed: CONFIG)
    monkeypatch.chdir(tmp_path)
    for name in ("FEDNET_SERVER", "FEDNET_DATA", "FEDNET_OUT", "FEDNET_KEYS", "FEDNET_LOG"):
        monkeypatch.delenv(name, raising=False)
    return seen


def test_run_hands_the_flags_to_the_engine(engine, monkeypatch):
    monkeypatch.setattr("fednet.cli.run.time", types.SimpleNamespace(monotonic=lambda: 100.0))
    line = "fednet run c.yaml --workers 3 --device cpu --until 3h50m --resume --out x --quiet"
    assert call(line) == 0
    ((name, (config, out, how, _), given),) = engine.calls
    assert (name, config, out, how.display.quiet) == ("run", CONFIG, Path("x"), True)
    assert given == {"resume": True, "workers": 3, "in_process": False, "on": None}
    assert (how.command, how.device) == (line.split(), "cpu")
    assert how.until == 13800.0 + 100.0


def test_defaults_are_runs_and_loopback(engine):
    assert (call("fednet run"), call("fednet-server c.yaml")) == (0, 0)
    (_, (_, out, *_), _), (_, (_, _, how, _), given) = engine.calls
    assert (out, how.until, how.data) == (Path("runs"), None, None)
    bound = {"bind": "tcp://127.0.0.1:5555", "insecure": False, "keys": None}
    assert given == {"resume": False, **bound}


def test_environment_stands_in_for_flags_and_flags_hold_over_it(engine, monkeypatch):
    for name, value in (("SERVER", "tcp://h:1"), ("DATA", "d"), ("KEYS", "k"), ("OUT", "o")):
        monkeypatch.setenv(f"FEDNET_{name}", value)
    for line in ("client --id 0", "client --id 0 --server tcp://g:2 --data e", "server"):
        call(f"fednet-{line}")
    (_, (_, policy), first), (_, (_, other), second), (_, (_, out, how, _), third) = engine.calls
    assert (first["server"], first["keys"]) == ("tcp://h:1", Path("k"))
    assert (policy.data, policy.places) == (Path("d"), (Path("d"),))
    assert (second["server"], other.data) == ("tcp://g:2", Path("e"))
    assert (third["bind"], out) == ("tcp://h:1", Path("o"))
    assert how.data is None  # the configuration's data.root goes before the variable


def test_client_hands_its_ids_and_permissions_to_the_engine(engine, tmp_path):
    (tmp_path / "a.py").write_text("")
    call(
        "fednet-client --id 0-24,40 --run runs/x --allow state,delta --faults --give-up 2m "
        "--explain --load a.py"
    )
    ((_, args, options),) = engine.calls
    assert args == ("0-24,40", Policy(allow=("state", "delta"), faults=True))
    assert {key: value for key, value in options.items() if value is not None} == {
        "run": Path("runs/x"),
        "device": "auto",
        "explain": True,
        "status": False,
        "load": [Path("a.py")],
        "quiet": False,
        "give_up_s": 120.0,
    }


def test_a_client_that_stays_takes_part_until_it_is_to_end(engine, monkeypatch):
    ends = iter([0, 0, -1])  # two runs are over, then it is asked to end
    monkeypatch.setattr(join, "main", lambda *args, **given: next(ends))
    assert call("fednet-client --id 3 --stay") == 0
    assert next(ends, None) is None


def test_a_policy_may_say_which_clients_a_site_runs(engine, tmp_path):
    (tmp_path / "site.yaml").write_text("ids: 0-2\nallow: [state]\n")
    assert call("fednet-client --policy site.yaml") == 0
    ((_, (ids, policy), _),) = engine.calls
    assert (ids, policy.allow) == ("0-2", ("state",))


OWN_PART = """
import fednet
Sketch = fednet.kind("sketch", "float")
class Up(fednet.Payload):
    size: Sketch
@fednet.dataset("policy-table")
def table(root, *, label: str = "age"): ...
class Sketches(fednet.Algorithm):
    exchanges = (fednet.Exchange(fednet.Payload, Up),)
fednet.algorithm("policy-sketches")(Sketches)
"""


@pytest.mark.parametrize(
    ("flags", "policy", "says"),
    [
        ([], "{ids: 0, allow: [states]}", "allow: unknown kind of payload 'states'. Did you mean"),
        (["--allow", "sketches"], "ids: 0", "--allow: unknown kind of payload 'sketches'. Did you"),
        (["--id", "1"], "{ids: 0-3, allow: [state, sketch], text: [data.label]}", ""),
        (["--id", "1/2"], "ids: 0-3", ""),  # how many clients there are, the server says
    ],
)
def test_a_policy_is_checked_before_a_client_connects(
    engine, tmp_path, capsys, flags, policy, says
):
    (tmp_path / "own.py").write_text(OWN_PART)
    (tmp_path / "site.yaml").write_text(policy)
    status = client.main([*flags, "--policy", "site.yaml", "--load", "own.py"])
    assert (status, len(engine.calls)) == ((2, 0) if says else (0, 1))
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("fednet run --worker=3", "Did you mean --workers?"),
        ("fednet run --workers 0", "--workers"),
        ("fednet run --until soon", "expected a length of time"),
        ("fednet run c.yaml", "fednet run: c.yaml:2: unknown key comm_round. Did you mean rounds?"),
        ("fednet run --set comm_round=3", "fednet run: --set comm_round=3: unknown key comm_round"),
        ("fednet run . --resume", "is a folder without a config.yaml"),
        ("fednet reprot", "Did you mean 'report'?"),
        ("fednet world phones", "the command world is gone: its table is fednet list world TRACE"),
        ("fednet keys", "server | client"),
        ("fednet new thing x.py", "invalid choice: 'thing'"),
        ("fednet new model own.py", "own.py: there is such a file already; nothing is overwritten"),
        ("fednet partition --out x.docx", "expected a file of the kind .png or .svg or .pdf"),
        ("fednet partition --out absent/x.png", "there is no folder 'absent'"),
        ("fednet partition --export x.txt", "expected a file of the kind .json"),
        ("fednet figure r --out x.docx", "expected a file of the kind .pdf or .svg"),
        ("fednet report r --out absent/x.html", "there is no folder 'absent'"),
        ("fednet reproduce", "fednet reproduce: expected PAPER/TABLE"),
        ("fednet reproduce feddpc/tabel2", "Did you mean 'feddpc/table2'? Known: "),
        ("fednet reproduce mcmahan/table1 --seeds 0-1000", "at most 1000 seeds, got 1001"),
        ("fednet sweep", "fednet sweep: expected a sweep file"),
        ("fednet sweep ok.yaml --seeds 0,1-99999999", "expected"),
        ("fednet sweep ok.yaml --plan --grid trian.lr=0.1", "unknown key trian"),
        ("fednet sweep grid.yaml --seeds 1", "grid.yaml is a sweep file, which says itself what"),
        ("fednet keys allow keys 0 K --until 2020-01-01", "this date is in the past"),
        ("fednet keys lab keys --clients 100001", "gets a key file; expected at most 100000"),
        ("fednet keys lab /proc/x --clients 2", "/proc/x: No such file or directory; expected a f"),
        ("fednet keys server file", "file/allowed: Not a directory; expected a folder that keys"),
        ("fednet keys client file/site.key", "expected a file that keys can be written to"),
        ("fednet status file", "expected a run directory"),
        ("fednet report torn", "config.yaml: is no text (invalid"),
        ("fednet-client", "--id is missing"),
        ("fednet-client --id 3-1", "--id 3-1: the range 3-1 goes from 3 to 1"),
        ("fednet-client --id 3 --run runs/x --stay", "give --server, not --run"),
        ("fednet-client --id 0 --state file", "--state file: is a file; expected a folder"),
        ("fednet-client --id 0 --proxy=socks5://h:1", "--proxy is gone: lead the connection thr"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(line, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("seed: 0\ncomm_round: 3\n")
    Path("ok.yaml").write_text("rounds: 2\n")
    Path("grid.yaml").write_text("base: ok.yaml\n")
    Path("file").touch()
    Path("own.py").touch()
    Path("torn").mkdir()
    Path("torn/config.yaml").write_bytes(b"\xc8\x00")
    before = sorted(Path().iterdir())
    assert call(line) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert (said.err.count("\n"), said.out) == (1, "")
    assert sorted(Path().iterdir()) == before  # nothing is written


def test_a_variable_that_named_a_proxy_is_refused_so_that_nobody_connects_past_it(
    monkeypatch, capsys
):
    monkeypatch.setenv("FEDNET_PROXY", "socks5://proxy.example:1080")
    assert call("fednet-client --id 0") == 2
    assert "FEDNET_PROXY is gone: lead the connection through a tunnel" in capsys.readouterr().err


# -- what is quoted --------------------------------------------------------------------------------
@pytest.mark.parametrize("words", [["run", "--set", "train.lr={}"], ["status", "{}"], ["{}"]])
def test_a_long_error_is_cut(words, capsys):
    assert main.main([word.format("z" * 20_000) for word in words]) in (2, 3)
    said = capsys.readouterr().err
    assert " characters)" in said
    assert len(said) < 5000


# -- what comes out --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (CannotGoOn("no client is left."), 3),
        (Stopped("asked to."), 4),
        (Stopped("asked to.", by_keyboard=True), 130),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_status_says_how_it_ended(engine, capsys, raised, status):
    engine.answer = raised
    assert main.main(["run"]) == status
    said = capsys.readouterr().err
    assert "Traceback" not in said
    if str(raised):
        assert said == f"fednet run: {raised}\n"
    assert not Path("runs").exists()  # its sentence is all there is to say


def test_unexpected_exception_is_short_on_stderr_and_whole_in_the_log(engine, capsys, tmp_path):
    engine.answer = RuntimeError("the moon")
    assert main.main(["run", "--out", "o"]) == 3
    said = capsys.readouterr().err
    assert (
        said
        == "fednet run: RuntimeError: the moon (this is a fault of fednet; the whole traceback is "
        "in o/fednet.log).\n"
    )
    assert "Traceback (most recent call last)" in (tmp_path / "o/fednet.log").read_text()


@pytest.mark.parametrize(
    ("raised", "quoted"),
    [
        (MemoryError(), ""),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), " ([Errno 12] Cannot allocate memory)"),
        (
            ImportError("libtorch.so: failed to map segment from shared object"),
            " (libtorch.so: failed to map segment from shared object)",
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory\nat a frame"),
            " (DefaultCPUAllocator: can't allocate memory)",
        ),
    ],
)
def test_memory_that_is_not_there_is_no_fault_of_fednet(engine, capsys, raised, quoted):
    engine.answer = raised
    assert main.main(["run", "--out", "o"]) == 3
    assert capsys.readouterr().err == (
        "fednet run: no memory is left here, or by a limit of this process (ulimit -v, a "
        f"container's){quoted}.\n"
    )
    assert not Path("o").exists()


def test_a_sentence_of_ours_about_a_users_own_file_has_its_line_and_no_traceback(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("floats.py").write_text(
        "import fednet, torch\n"
        "@fednet.dataset('floats')\n"
        "def floats(root):\n"
        "    pair = torch.zeros(8, 2), torch.zeros(8)\n"
        "    return fednet.Data(train=pair, test=pair, classes=3)\n"
    )
    chosen = ["--set", "data.dataset=floats", "--load", "floats.py"]
    assert main.main(["run", "--check", *chosen]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    *_, place, words = said.splitlines()
    assert place.endswith('floats.py", line 5')
    assert words.startswith("fednet run: train: y holds floats but")


def test_exception_in_a_users_file_shows_that_files_frames_only(capsys, tmp_path):
    own = tmp_path / "own_broken.py"
    own.write_text("def f():\n    return 1 / 0\n\nf()\n")
    assert main.main(["list", "models", "--load", str(own)]) == 2
    said = capsys.readouterr().err
    assert f'File "{own}", line 4, in <module>' in said
    assert f'File "{own}", line 2, in f' in said
    assert "fednet/loading.py" not in said
    assert said.endswith(f"fednet list: {own}: raised ZeroDivisionError: division by zero\n")


# -- values ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3h50m", 13800), ("90", 90), ("45m", 2700), ("1d2h", 93600), ("1.5s", 1.5), ("2m30s", 150)],
)
def test_length_of_time_is_read(text, seconds):
    assert values.seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "3x", "-5", "0", "50m3h", "3 h", "9" * 400])
def test_what_is_no_length_of_time_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        values.seconds(text)


TINY = (
    "name: tiny\nrounds: 2\nclients: 2\nreport: false\nmodel: {name: mlp, hidden: [4]}\n"
    "data: {dataset: synthetic, samples: 40, shape: [4], classes: 2}\n"
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "environment"),
    [
        ("{} >&- 2>&-", {}),
        ("{} | head -1", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    ],
    ids=["no output", "ASCII and a reader that goes"],
)
def test_a_run_ends_well_wherever_its_output_goes(tmp_path, how, environment):
    folder = tmp_path / "日 ö"
    folder.mkdir()
    (folder / "tiny.yaml").write_text(TINY)
    line = f"'{sys.executable}' -m fednet run '{folder}/tiny.yaml' --in-process --out '{folder}'"
    words = ["bash", "-o", "pipefail", "-c", how.format(line)]
    done = subprocess.run(words, env={**os.environ, **environment}, capture_output=True)
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "tiny" / "summary.json").read_text(encoding="utf-8"))
    assert f"{folder}/tiny.yaml" in str(summary["provenance"])


def test_a_key_that_took_the_place_of_the_configuration_is_pointed_to(capsys):
    assert call("fednet run --in-process --set rounds=3 clients=5") == 2
    assert "clients=5: there is no such file" in (said := capsys.readouterr().err)
    assert "A key is set by a --set of its own: --set clients=5." in said


def test_a_run_from_a_clone_needs_no_git(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "bin").mkdir()
    words = ["-m", "fednet", "run", "tiny.yaml", "--in-process", "--out", ".", "--quiet"]
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PATH": str(tmp_path / "bin"), "PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "tiny" / "summary.json").read_text(encoding="utf-8"))
    assert summary["provenance"]["git"] is None


@pytest.mark.parametrize("program", ["fednet", "fednet-server", "fednet-client"])
def test_ctrl_c_while_a_command_is_imported_is_said_in_a_sentence(program):
    root = Path(__file__).resolve().parents[2]
    scripts = (root / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf'^{program} = "(.+):(.+)"$', scripts, re.MULTILINE)
    assert found is not None
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored after `&`
        "class Pressed:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'argparse':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Pressed())\n"
        f"from {found[1]} import {found[2]} as begin\n"
        "sys.exit(begin())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert (ended.returncode, ended.stderr) == (130, f"{program}: stopped by Ctrl-C.\n")
