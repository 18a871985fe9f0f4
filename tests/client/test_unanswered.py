"""What a client says while no server answers it."""

from __future__ import annotations

import pytest

from fednet.client import loop as loops
from fednet.client.loop import ClientLoop
from fednet.errors import CannotGoOn
from fednet.protocol.client import ClientProtocol
from fednet.transport.inproc import Inproc


@pytest.fixture
def said(monkeypatch):
    """What is said, and raised, by a client in no time without a server; the transport's trouble is
    what is given.
    """

    def run(trouble: str) -> list[str]:
        monkeypatch.setattr(loops, "UNANSWERED_S", 0.0)
        transport = Inproc().client()
        transport.trouble = trouble
        client = ClientLoop(ClientProtocol("c", ids=[0]), transport, prepare=None, curve=False)
        lines: list[str] = []
        with pytest.raises(CannotGoOn) as ended:
            client.run(lines.append, give_up_s=1e-3)
        client.close()
        return [*lines, str(ended.value)]

    return run


def test_why_no_connection_stands_is_in_both_sentences(said):
    assert said("nothing listens there") == [
        "not connected to inproc yet (nothing listens there); trying on (Ctrl-C ends this)",
        "no server has taken this client in for 0.001 s (--give-up; inproc: nothing listens there);"
        " started again with the same --state, it goes on.",
    ]


def test_where_no_reason_is_known_none_is_given(said):
    assert said("") == [
        "not connected to inproc yet; trying on (Ctrl-C ends this)",
        "no server has taken this client in for 0.001 s (--give-up); started again with the same "
        "--state, it goes on.",
    ]
