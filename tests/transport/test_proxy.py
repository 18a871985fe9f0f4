"""A client whose only way out is a proxy, with and without CURVE."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest

from fednet.errors import ConfigError
from fednet.transport.base import Opened, Received
from fednet.transport.keys import Keyring, lab, load
from fednet.transport.zeromq import proxy
from fednet.transport.zeromq.client import ZmqClient
from fednet.transport.zeromq.server import ZmqServer
from tests.transport.relays import Socks

HIDDEN = {"server.hidden": "127.0.0.1"}  # names that the proxy alone knows


def events(end, kind):
    for _ in range(200):
        found = [e for e in end.poll(0.1) if isinstance(e, kind)]
        if found:
            return found
    raise AssertionError(f"no {kind.__name__}")


@pytest.mark.parametrize("curve", [False, True], ids=["plain", "curve"])
def test_messages_go_both_ways_through_a_proxy(curve, tmp_path, monkeypatch):
    keys = keyring = None
    if curve:
        files = lab(tmp_path / "keys", 1)
        keyring, keys = Keyring(tmp_path / "keys"), load(files[0])
    with ExitStack() as stack:
        middle = Socks(HIDDEN)
        stack.callback(middle.close)
        monkeypatch.setenv(proxy.VARIABLE, f"socks5://site:se%20cret@127.0.0.1:{middle.port}")
        server = ZmqServer("tcp://127.0.0.1:0", keyring=keyring)
        stack.callback(server.close, 0.0)
        results = []
        thread = threading.Thread(target=lambda: results.extend(events(server, Received)))
        thread.start()
        where = server.address.replace("127.0.0.1", "server.hidden")
        client = ZmqClient(where, keys=keys)
        stack.callback(client.close, 0.0)
        events(client, Opened)
        assert client.send([b"hello", b"x" * 300_000])
        for _ in range(200):
            client.poll(0.05)
            if results:
                break
        thread.join(10)
        (got,) = results
        assert [len(f) for f in got.frames] == [5, 300_000]
        assert server.send(got.conn, [b"back"])
        server.poll(0.1)
        (answer,) = events(client, Received)
        assert bytes(answer.frames[0]) == b"back"
        port = int(server.address.rpartition(":")[2])
        assert middle.asked[0] == ("server.hidden", port)
        assert middle.passed > 300_000


@pytest.mark.parametrize(
    ("who", "says"),
    [
        ("", "requires a user and password, or is no SOCKS5 proxy"),
        ("site:wrong@", "refuses that user and password"),
        (None, "cannot be reached (Connection refused)"),
    ],
)
def test_why_a_proxy_does_not_connect_is_said_and_it_is_tried_again(who, says, monkeypatch):
    """who: what the client says of itself; None: the proxy is down, and comes back."""
    with ExitStack() as stack:
        middle = Socks(HIDDEN)
        stack.callback(middle.close)
        if who is None:
            middle.close()
        known = "site:se%20cret@" if who is None else who
        monkeypatch.setenv(proxy.VARIABLE, f"socks5://{known}127.0.0.1:{middle.port}")
        server = ZmqServer("tcp://127.0.0.1:0")
        stack.callback(server.close, 0.0)
        said = []
        client = ZmqClient(server.address, on_refused=lambda reason, where: said.append(reason))
        stack.callback(client.close, 0.0)
        for _ in range(200):
            client.poll(0.05)
            if said:
                break
        assert said[0].startswith(f"the proxy at 127.0.0.1:{middle.port} {says}")
        if who is None:
            again = Socks(HIDDEN, middle.port)
            stack.callback(again.close)
            events(client, Opened)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("ftp://u:secret@h:1", "h:1: expected socks5://HOST:PORT"),
        ("socks5://h", "expected socks5://HOST:PORT"),
        ("socks5://h:x", "expected socks5://HOST:PORT"),
        ("h:1", "expected socks5://HOST:PORT"),
        ("http://u:secret@h:3128", "h:3128: expected socks5://"),
    ],
)
def test_what_is_no_socks5_proxy_is_refused_in_a_sentence_without_its_password(wrong, says):
    with pytest.raises(ConfigError) as refused:
        proxy.read(wrong)
    assert says in str(refused.value)
    assert "secret" not in str(refused.value)
