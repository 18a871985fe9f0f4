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


@pytest.mark.parametrize(
    ("trouble", "there", "beside"),
    [
        ("nothing listens there", " (nothing listens there)", "; inproc: nothing listens there"),
        ("", "", ""),
    ],
)
def test_both_sentences_say_why_there_is_no_connection_if_that_is_known(
    said, trouble, there, beside
):
    assert said(trouble) == [
        f"not connected to inproc yet{there}; still trying (Ctrl-C ends this)",
        f"no server has accepted this client for 0.001 s (--give-up{beside}). To go on, start it "
        f"again with the same --state.",
    ]
