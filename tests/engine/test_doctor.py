from __future__ import annotations

import socket
import threading
from pathlib import Path

import torch

from fednet.engine import doctor


def test_fingerprint_is_the_same_twice_and_leaves_torch_as_it_was():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    first = doctor.fingerprint()
    assert first == doctor.fingerprint()
    assert len(first) == 64
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_keys_that_others_can_read_are_bad(tmp_path):
    key = tmp_path / "server.key"
    key.write_text("x")
    key.chmod(0o644)
    found, = doctor.keys(tmp_path)
    assert found.verdict == "bad"
    assert f"chmod 600 {key}" in found.text
    key.chmod(0o600)
    assert [f.verdict for f in doctor.keys(tmp_path)] == ["ok"]


def test_missing_keys_are_bad(tmp_path):
    assert [f.verdict for f in doctor.keys(tmp_path / "none")] == ["bad"]


def test_taken_port_is_told_from_a_free_one():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        assert [f.verdict for f in doctor.port(number)] == ["warn"]


def test_server_is_known_by_its_greeting():
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
            assert [f.verdict for f in doctor.reachable(f"tcp://127.0.0.1:{number}")] == [verdict]
            thread.join()
    assert [f.verdict for f in doctor.reachable(f"tcp://127.0.0.1:{number}")] == ["bad"]
    assert [f.verdict for f in doctor.reachable("nonsense")] == ["bad"]


def test_folder_that_is_not_there_yet_is_judged_by_its_parent(tmp_path):
    found, = doctor.disk(tmp_path / "a" / "b")
    assert found.verdict in ("ok", "warn")
    assert str(Path(tmp_path)) in found.text
