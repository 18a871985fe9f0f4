"""A folder that is served: its queue, its page, clients that stay, and a server that is killed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from fednet.cli.main import main
from fednet.config import from_mapping
from fednet.errors import ConfigError, StateError
from fednet.experiment import lock
from fednet.files import read_record, write_record
from fednet.report import open_run
from fednet.serve import page
from fednet.serve.queue import Queue
from fednet.serve.runner import Runner
from tests.processes import Processes, lines, port, until
from tests.report.fake_run import write
from tests.report.test_status import put


def config(name="one", **more):
    return from_mapping({"name": name, **more})


@pytest.fixture
def queue(tmp_path):
    return Queue(tmp_path)


def test_runs_stand_in_the_order_in_which_they_were_submitted_with_a_name_of_their_own(queue):
    for name in ("one", "two", "one"):
        queue.submit(config(name))
    assert [(e.number, e.name, e.state) for e in queue.entries()] == [
        (1, "one-1", "waiting"),
        (2, "two-2", "waiting"),
        (3, "one-3", "waiting"),
    ]
    assert "name: one-3" in queue.entry(3).config
    queue.cancel(2)
    assert [e.state for e in Queue(queue.folder).entries()] == ["waiting", "cancelled", "waiting"]
    with pytest.raises(ConfigError, match="run 2 is cancelled already"):
        queue.cancel(2)
    with pytest.raises(ConfigError, match="there is no run 9"):
        queue.cancel(9)


def test_a_new_run_does_not_take_over_what_a_deleted_one_left(queue):
    """Neither that it was cancelled, nor its directory, whose run it would continue."""
    for _ in range(2):
        queue.submit(config())
    queue.cancel(1)
    (queue.runs / "one-2").mkdir(parents=True)
    for file in ("000001.json", "000002.json"):
        (queue.folder / "queue" / file).unlink()
    new = queue.submit(config())
    assert (new.number, queue.entry(new.number).state) == (3, "waiting")


@pytest.mark.parametrize("words", [["list"], ["cancel", "1"], ["submit", "--resume", "1"]])
def test_a_folder_to_which_nothing_was_submitted_is_no_empty_queue(words, tmp_path, capsys):
    """What was mistyped is said, and is not made."""
    for folder in (tmp_path / "typo", tmp_path):
        assert main(["queue", *words, "--at", str(folder)]) == 2
        assert f"--at {folder}: nothing was submitted there" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_is_served_has_an_empty_queue_before_anything_is_submitted(tmp_path, capsys):
    with lock.holding(tmp_path):
        assert main(["queue", "list", "--at", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split() == ["run", "name", "state", "reason"]


def test_a_copy_of_a_run_in_the_queue_is_no_run(tmp_path, queue):
    queue.submit(config())
    for name in ("000001 (copy)", "1", "1b"):
        shutil.copy(tmp_path / "queue" / "000001.json", tmp_path / "queue" / f"{name}.json")
    assert queue.submit(config()).number == 2
    assert [e.number for e in queue.entries()] == [1, 2]


def test_a_run_whose_file_is_damaged_has_failed_and_keeps_no_other_from_its_turn(tmp_path):
    queue = Queue(tmp_path)
    at = tmp_path / "queue"
    for _ in range(5):
        queue.submit(config())
    (at / "000001.json").write_bytes((at / "000001.json").read_bytes()[:99])
    shutil.copy(at / "000005.json", at / "000002.json")
    whole = read_record(at / "000003.json", "")
    write_record(at / "000003.json", {**whole, "name": "../../elsewhere"})
    write_record(at / "000004.json", {**whole, "number": 4, "state": "odd"})
    found = queue.entries()
    assert [(e.number, e.state) for e in found] == [
        *((number, "failed") for number in (1, 2, 3, 4)),
        (5, "waiting"),
    ]
    for entry in found[:4]:
        assert entry.reason.endswith("; delete it, or put back what was there.")
        with pytest.raises(StateError, match=rf"{entry.number:06d}\.json: no"):
            queue.resume(entry.number)


def test_those_that_submit_at_the_same_time_each_get_a_number(tmp_path):
    with ThreadPoolExecutor(8) as all:
        made = list(all.map(lambda k: Queue(tmp_path).submit(config(f"c{k}")).number, range(24)))
    assert sorted(made) == list(range(1, 25))


def test_the_commands_submit_list_and_cancel(tmp_path, capsys):
    at = ["--at", str(tmp_path)]
    assert main(["queue", "submit", *at, "--set", "name=mine", "--set", "rounds=3", "--quiet"]) == 0
    assert capsys.readouterr().out == "1\n"
    assert main(["queue", "list", *at]) == 0
    assert f"No server is running for {tmp_path}: `fednet serve" in capsys.readouterr().out
    with lock.holding(tmp_path):
        assert main(["queue", "list", *at]) == 0
        assert "No server is running" not in capsys.readouterr().out
    assert main(["queue", "cancel", "1", *at]) == 0
    assert main(["queue", "list", *at]) == 0
    said = capsys.readouterr().out
    assert "mine-1  cancelled" in said
    assert "No server is running" not in said
    assert main(["queue", "submit", *at, "--set", "ronds=3"]) == 2
    assert len(Queue(tmp_path).entries()) == 1


class Site:
    def __init__(self, queue):
        self.server = page.serve(("127.0.0.1", 0), queue)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.end()

    def get(self, path="/"):
        with urlopen(self.url + path, timeout=30) as answer:
            return answer.read().decode()


def test_the_page_shows_the_queue_and_a_runs_curves_and_takes_nothing(queue):
    entry = queue.submit(config("shown"))
    write(queue.run_folder(entry))
    with Site(queue) as site:
        text = site.get()
        assert 'href="/runs/1"' in text
        assert "shown-1" in text
        assert "<form" not in text
        assert "<svg" in site.get("/runs/1")
        with pytest.raises(HTTPError, match="501"):
            urlopen(site.url + "/submit", b"config=", timeout=30)
        for absent in ("/runs/7", "/runs/../x", "/etc/passwd", "/runs/1/../../queue"):
            with pytest.raises(HTTPError, match="404"):
                site.get(absent)
    assert [e.state for e in queue.entries()] == ["waiting"]


def test_the_page_shows_each_runs_place_its_newest_numbers_and_its_processes(queue):
    runs = [queue.submit(config(f"r{k}")) for k in range(4)]
    for entry, state in zip(runs, ("done", "running", "waiting", "waiting")):
        entry.state = state
        queue.write(entry)
    directory = write(queue.run_folder(runs[0]), rounds=3)
    write(queue.run_folder(runs[1]), rounds=2)
    (queue.run_folder(runs[1]) / "summary.json").unlink()
    sites = [{"clients": [[0, 4]], "connected": True, "host": "a", "did": "evaluated client 3"}]
    put(queue.run_folder(runs[1]), sites=sites)
    with Site(queue) as site:
        text = site.get()
        assert "4 runs submitted: 1 done, 1 running, 2 waiting." in text
        assert [*re.findall(r'<span class="soft">(.*?)</span>', text)] == [
            "waiting, 2 before it",
            "waiting, 1 before it",
            "running",
            "done",
        ]
        queue.cancel(2)
        assert "running, it is being stopped" in site.get()
        rows = open_run(directory).rounds
        last = next(row.test_accuracy for row in reversed(rows) if row.test_accuracy is not None)
        seconds = sum(row.seconds or 0.0 for row in rows)
        assert f"3 rounds in {seconds:.0f} s, global accuracy {100 * last:.2f} %" in text
        assert re.search(r"0-4 +- +a .*evaluated client 3", text)
        (queue.run_folder(runs[1]) / "rounds.jsonl").write_bytes(b"nonsense\n")  # one damaged run
        text = site.get()
        assert "rounds.jsonl" in text
        assert f"3 rounds in {seconds:.0f} s" in text


def test_a_page_is_read_again_while_there_is_news(queue):
    entry = queue.submit(config("shown"))
    write(queue.run_folder(entry))
    summary = queue.run_folder(entry) / "summary.json"
    held = summary.read_bytes()
    summary.unlink()
    with Site(queue) as site:
        assert "location.reload()" in site.get()
        assert "This page reloads every" in site.get("/runs/1")
        summary.write_bytes(held)  # without another round
        assert "Not finished" not in site.get("/runs/1")
        assert "location.reload" not in site.get("/runs/1")


def test_what_a_run_says_is_text_and_a_page_elsewhere_does_not_reach_this_one(queue):
    entry = queue.submit(config("shown"))
    entry.state = "failed"
    entry.reason = "<script>alert(1)</script>"
    queue.write(entry)
    with Site(queue) as site:
        assert "<script>alert" not in site.get()
        assert "&lt;script&gt;alert" in site.get()
        with pytest.raises(HTTPError, match="403"):
            urlopen(Request(site.url, headers={"Host": "elsewhere.example"}), timeout=30)
        assert "shown-1" in site.get()


@pytest.mark.parametrize("what", ["torn", "a list", "a time that is none"])
def test_a_run_whose_status_is_damaged_hides_no_other_run(queue, what):
    other = queue.submit(config("other"))
    entry = queue.submit(config("shown"))
    entry.state = "running"
    queue.write(entry)
    run = queue.run_folder(entry)
    run.mkdir(parents=True)
    site = {"clients": [[0, 2]], "host": "a", "connected": True, "seen": 0.0, "why": ""}
    put(run, **({"sites": [{**site, "since": -1e308}]} if what == "a time that is none" else {}))
    if what != "a time that is none":
        (run / "status.json").write_bytes(b"\xff{" if what == "torn" else b"[]")
    with Site(queue) as page:
        shown = page.get()
    assert "status.json" in shown
    assert other.name in shown


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (b"GET / HTTP/1.0\r\nHost: [\r\n\r\n", 400),
        (b"GET http://[ HTTP/1.0\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /runs/" + b"9" * 5000 + b" HTTP/1.0\r\nHost: localhost\r\n\r\n", 404),
    ],
)
def test_what_no_browser_asks_is_answered_with_a_sentence(queue, capfd, asked, code):
    with Site(queue) as site:
        host, port = site.url.rsplit("/", 1)[-1].split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(asked)
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.0 %d " % code)
    assert "Traceback" not in capfd.readouterr().err


SMALL = (
    "clients=2",
    "participation=1.0",
    "report=false",
    "model={name: mlp, hidden: [8]}",
    "data={dataset: synthetic, samples: 200, shape: [1, 4, 4], classes: 4}",
    "evaluate={every: 50, clients: none}",
)


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--bind", "tcp://127.0.0.1:99999", "there is no port 99999"),
        ("--bind", "tcp://127.0.0.1:0", "expected a fixed port"),
        ("--bind", "5555", "'5555' is no address: expected tcp://HOST:PORT"),
        ("--bind", "tcp://127.0.0.1:-1", "has no port '-1'"),
        ("--bind", "tcp://127.0.0.1", "'tcp://127.0.0.1' has no port: expected"),
        ("--bind", "tcp://*:5755", "use CURVE keys (--keys DIR), or --insecure"),
        ("--keys", "nowhere", "nowhere: no such directory of keys"),
        ("--device", "gpu", "--device 'gpu': expected auto, cpu"),
        ("--page", "x", "--page x: expected PORT or HOST:PORT"),
    ],
)
def test_what_no_run_can_begin_with_is_refused_at_the_start(flag, value, says, tmp_path, capsys):
    assert main(["serve", str(tmp_path / "lab"), flag, value]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "lab").exists()


@pytest.mark.parametrize(
    ("flag", "form", "says"),
    [
        ("--bind", "tcp://127.0.0.1:{}", "cannot bind '{}': the port is in use"),
        ("--page", "127.0.0.1:{}", "--page {}: nothing can be served there"),
    ],
)
def test_an_address_that_is_taken_is_refused_and_fails_no_run_of_the_queue(
    tmp_path, capsys, flag, form, says
):
    queue = Queue(tmp_path / "lab")
    queue.submit(config())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = form.format(taken.getsockname()[1])
        places = {"--bind": f"tcp://127.0.0.1:{port()}", "--page": str(port()), flag: address}
        words = [word for pair in places.items() for word in pair]
        assert main(["serve", str(queue.folder), *words, "--device", "cpu"]) == 2
    assert says.format(address) in capsys.readouterr().err
    assert [e.state for e in queue.entries()] == ["waiting"]


@pytest.mark.long
def test_clients_stay_from_run_to_run_and_a_killed_server_goes_on_with_what_there_was(tmp_path):
    number = port()
    address = f"tcp://127.0.0.1:{number}"
    queue = Queue(tmp_path / "serve")
    with Processes(tmp_path) as all:

        def serve():
            words = ("serve", queue.folder, "--bind", address, "--page", port(), "--device", "cpu")
            return all.start("main", *words)

        def submit(name, rounds):
            sets = [w for s in (*SMALL, f"name={name}", f"rounds={rounds}") for w in ("--set", s)]
            assert main(["queue", "submit", "--at", str(queue.folder), *sets, "--quiet"]) == 0

        def rounds(name):
            return len(lines(queue.runs / name / "rounds.jsonl"))

        def refused():
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", number))

        submit("first", 2)
        submit("second", 100)
        submit("third", 2)
        submit("never", 2)
        server = serve()
        words = ("--server", address, "--stay", "--device", "cpu", "--state")
        clients = [all.start("client", "--id", k, *words, tmp_path / f"state-{k}") for k in (0, 1)]
        until(lambda: rounds("second-2") > 2, "the second run goes on", server, *clients)
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        until(refused, "the run's own server has ended too")
        queue.cancel(4)
        before = [e.state for e in queue.entries()]
        server = serve()
        over = lambda: {e.state for e in queue.entries()} <= {"done", "cancelled"}  # noqa: E731
        until(over, "the queue is empty", server, *clients)
        assert before == ["done", "running", "waiting", "cancelled"]
        assert [e.state for e in queue.entries()] == ["done", "done", "done", "cancelled"]
        assert [rounds(n) for n in ("first-1", "second-2", "third-3")] == [2, 100, 2]
        assert not (queue.runs / "never-4").exists()
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 4, server.said()
        for client in clients:
            client.send_signal(signal.SIGTERM)
            assert client.wait(60) == 0, client.said()
    starts = [e for e in lines(queue.runs / "second-2" / "events.jsonl") if e["type"] == "started"]
    assert [e["resumed"] for e in starts] == [False, True]


@pytest.mark.parametrize(
    ("status", "asked", "state"),
    [(-15, True, "running"), (4, True, "running"), (-11, False, "failed"), (2, True, "failed")],
)
def test_a_run_that_is_ended_with_its_server_goes_on_even_if_it_had_not_begun(
    queue, monkeypatch, status, asked, state
):
    queue.submit(config())
    runner = Runner(queue, [], lambda line: None)

    def server(entry):
        runner._stop.set() if asked else None
        return status, ""

    monkeypatch.setattr(runner, "_run_server", server)
    runner._run_one(queue.entry(1))
    assert queue.entry(1).state == state


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (40, "signal 40")])
def test_of_a_run_that_is_killed_the_queue_says_by_what(queue, monkeypatch, number, name):
    """It leaves no line of its own."""

    def killed(process, stop):
        process._process.send_signal(number)
        return process._process.wait()

    queue.submit(config())
    runner = Runner(queue, [], lambda line: None)
    monkeypatch.setattr("fednet.launch.parent.RunProcess.status", killed)
    runner._run_one(queue.entry(1))
    assert queue.entry(1).state == "failed"
    assert queue.entry(1).reason.startswith(f"ended by {name}. To continue it: fednet queue submit")


def test_a_run_that_was_stopped_from_outside_goes_on_by_the_command_that_the_queue_names(
    tmp_path, monkeypatch, capsys
):
    queue = Queue(tmp_path / "my lab")
    for name in ("one", "two"):
        queue.submit(config(name))
    runner = Runner(queue, [], lambda line: None)
    ends = [(4, "stopped: SIGTERM; continue with --resume."), (2, "no such data.")]
    monkeypatch.setattr(runner, "_run_server", lambda entry: ends.pop(0))
    runner._run_one(queue.entry(1))
    command = queue.entry(1).reason.split("To continue it: fednet ")[1]
    runner._run_one(queue.entry(2))
    assert queue.entry(2).reason == "no such data."
    assert main([*shlex.split(command), "--set", "rounds=3"]) == 2
    assert "leave out CONFIG, --set and --load" in capsys.readouterr().err
    assert main(shlex.split(command)) == 0
    assert (queue.entry(1).state, queue.entry(1).reason) == ("waiting", "")
    assert queue.open(queue.entries())[0].number == 1
    assert main(shlex.split(command)) == 2
    assert "run 1 is waiting; only one that failed is resumed" in capsys.readouterr().err


def test_two_do_not_serve_one_folder(tmp_path):
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    runner = Runner(Queue(tmp_path), [], print)
    runner._stop.set()
    try:
        with lock.holding(tmp_path), pytest.raises(ConfigError, match="process"):
            runner.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
