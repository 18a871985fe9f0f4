from __future__ import annotations

import re
import socket
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from fednet.cli.main import main
from fednet.errors import ConfigError
from fednet.tools import doctor
from fednet.tools.fingerprint import fingerprint
from fednet.transport.keys import Keyring, lab, load, make_client_keys, make_server_keys
from fednet.transport.zeromq.server import ZmqServer


def test_fingerprint_is_the_same_twice_and_leaves_torch_as_it_was():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    first = fingerprint()
    assert first == fingerprint()
    assert len(first) == 64
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_every_package_that_fednet_needs_is_looked_for():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    needed = text.partition("\ndependencies = [")[2].partition("]")[0]
    assert re.findall(r'"([a-z0-9-]+)>=', needed) == list(doctor.NEEDED)


def test_a_device_and_a_place_for_runs_that_there_cannot_be_are_bad(tmp_path):
    found = doctor.found("device", doctor.device, "gpu")
    assert (found.verdict, found.what) == ("bad", "device")
    assert "expected auto, cpu, cuda" in found.text
    assert doctor.found("device", doctor.device, "cpu").verdict == "ok"
    file = tmp_path / "file"
    file.touch()
    assert doctor.found("disk", doctor.disk, file).verdict == "bad"
    below = doctor.found("disk", doctor.disk, tmp_path / "a" / "b")  # its parent is looked at
    assert below.verdict in ("ok", "warn")
    assert str(tmp_path) in below.text


def test_keys_that_others_can_read_are_bad(tmp_path):
    key = tmp_path / "server.key"
    make_server_keys(tmp_path)
    key.chmod(0o644)
    with pytest.raises(ConfigError, match=f"chmod 600 {key}"):
        doctor.keys(tmp_path)
    key.chmod(0o600)
    assert "1 secret key(s)" in doctor.keys(tmp_path)
    key.write_text("x")
    with pytest.raises(ConfigError):
        doctor.keys(tmp_path)
    with pytest.raises(ConfigError, match="no keys there"):
        doctor.keys(tmp_path / "none")


def test_whether_a_server_would_let_this_client_in(tmp_path):
    file, _ = lab(tmp_path / "server", 1)
    make_client_keys(tmp_path / "stranger.key", load(file).server)
    with ExitStack() as stack:
        for keyring, path, verdict, said in (
            (None, None, "ok", "any client"),
            (Keyring(tmp_path / "server"), file, "ok", "accepts this key"),
            (
                Keyring(tmp_path / "server"),
                tmp_path / "stranger.key",
                "bad",
                "does not allow this key",
            ),
            (Keyring(tmp_path / "server"), None, "bad", "give --keys FILE"),
            (None, file, "bad", "only one of the two uses keys"),
        ):
            server, over = ZmqServer("tcp://127.0.0.1:0", keyring=keyring), threading.Event()
            thread = threading.Thread(
                target=lambda server=server, over=over: [
                    server.poll(0.02) for _ in iter(over.is_set, True)
                ]
            )
            stack.callback(server.close, 0)
            thread.start()
            stack.callback(lambda over=over, thread=thread: (over.set(), thread.join()))
            found = doctor.found("admission", doctor.admitted, server.address, path)
            assert (found.verdict, said in found.text) == (verdict, True), found


def test_taken_port_is_told_from_a_free_one():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        assert doctor.found("port", doctor.port, number).verdict == "warn"


def test_server_is_known_by_its_greeting(monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        number = listener.getsockname()[1]

        def greet(first: bytes) -> threading.Thread:
            def once():
                link, _ = listener.accept()
                with link:
                    link.sendall(first)

            thread = threading.Thread(target=once)
            thread.start()
            return thread

        for first, verdict in ((b"\xff", "ok"), (b"HTTP", "bad")):
            thread = greet(first)
            found = doctor.found("server", doctor.reachable, f"tcp://127.0.0.1:{number}")
            assert found.verdict == verdict
            thread.join()
        monkeypatch.setattr(doctor, "ANSWER_S", 0.2)
        with pytest.raises(ConfigError, match="did not answer: its server is starting or busy"):
            doctor.reachable(f"tcp://127.0.0.1:{number}")
    with pytest.raises(ConfigError, match=r"^nothing listens at tcp://127\.0\.0\.1:"):
        doctor.reachable(f"tcp://127.0.0.1:{number}")
    with pytest.raises(ConfigError, match="expected an address"):
        doctor.reachable("nonsense")


def test_a_server_that_awaits_the_first_word_answers():
    server = ZmqServer("tcp://127.0.0.1:0")
    try:
        for _ in range(2):
            server.poll(0.0)
            found = doctor.found("server", doctor.reachable, server.address)
            assert (found.verdict, "answers in" in found.text) == ("ok", True), found
    finally:
        server.close(0)


def test_a_folder_of_data_that_is_not_there_is_bad(tmp_path, capsys):
    assert main(["doctor", "--data", str(tmp_path / "absent"), "--quiet"]) == 2
    assert f"--data {tmp_path / 'absent'}: there is no such folder" in capsys.readouterr().out


def test_where_a_proxy_is_the_only_way_out_the_handshake_goes_through_it(monkeypatch):
    monkeypatch.setenv("FEDNET_PROXY", "socks5://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"the proxy at 127\.0\.0\.1:1 cannot be reached"):
        doctor.admitted("tcp://server.example:5555", None)
