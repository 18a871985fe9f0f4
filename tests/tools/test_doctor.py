from __future__ import annotations

import socket
import threading
from contextlib import ExitStack

import pytest
import torch

from fednet.cli.main import main
from fednet.errors import ConfigError
from fednet.tools import doctor
from fednet.tools.doctor import fingerprint
from fednet.transport.keys import Keyring, lab, load, make_client_keys, make_server_keys
from fednet.transport.zeromq.server import ZmqServer


def test_fingerprint_is_the_same_twice_and_leaves_torch_as_it_was():
    threads = torch.get_num_threads()
    state = torch.get_rng_state()
    first = fingerprint()
    assert first == fingerprint()
    assert len(first) == 64
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_what_makes_a_run_impossible_is_printed_and_ends_with_status_2(tmp_path, capsys):
    (tmp_path / "file").touch()
    make_server_keys(tmp_path / "keys")
    (tmp_path / "keys" / "server.key").chmod(0o644)
    wrong = ["--device", "gpu", "--out", tmp_path / "file", "--keys", tmp_path / "keys"]
    given = [*map(str, wrong), "--set", "data.dataset=nowhere"]
    assert main(["doctor", *given, "--quiet"]) == 2
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in printed] == [
        ["bad", what] for what in ("device", "data", "disk", "keys")
    ]
    assert "chmod 600" in printed[-1]
    assert main(["doctor", "--device", "cpu", "--out", str(tmp_path / "a" / "b")]) == 0
    assert "bad" not in capsys.readouterr().out


def test_whether_a_server_would_let_this_client_in(tmp_path):
    file, _ = lab(tmp_path / "server", 1)
    make_client_keys(tmp_path / "stranger.key", load(file).server)
    with ExitStack() as stack:
        for keyring, path, accepted, said in (
            (None, None, True, "any client"),
            (Keyring(tmp_path / "server"), file, True, "accepts this key"),
            (Keyring(tmp_path / "server"), tmp_path / "stranger.key", False, "does not allow this"),
            (Keyring(tmp_path / "server"), None, False, "give --keys FILE"),
            (None, file, False, "only one of the two uses keys"),
        ):
            server = ZmqServer("tcp://127.0.0.1:0", keyring=keyring)
            over = threading.Event()
            thread = threading.Thread(
                target=lambda server=server, over=over: [
                    server.poll(0.02) for _ in iter(over.is_set, True)
                ]
            )
            stack.callback(server.close, 0)
            thread.start()
            stack.callback(lambda over=over, thread=thread: (over.set(), thread.join()))
            if accepted:
                assert said in doctor.server(server.address, path)
            else:
                with pytest.raises(ConfigError, match=said):
                    doctor.server(server.address, path)


def test_an_address_at_which_no_server_answers_is_bad(monkeypatch):
    monkeypatch.setattr(doctor, "HANDSHAKE_S", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        with pytest.raises(ConfigError, match="does not let a client in from here: no answer"):
            doctor.server(f"tcp://127.0.0.1:{silent.getsockname()[1]}", None)
