"""How a client finds its server: what it takes from server.json, and what it says while no server
answers.
"""

from __future__ import annotations

import pytest

from fednet.client import loop as loops
from fednet.client.join import read_server
from fednet.client.loop import ClientLoop
from fednet.errors import CannotGoOn, StateError
from fednet.files import write_record
from fednet.protocol.client import ClientProtocol
from fednet.transport.inproc import Inproc

ADDRESS = "tcp://10.0.0.7:5555"


def test_a_file_written_by_hand_needs_no_more_than_an_address(tmp_path):
    file = tmp_path / "server.json"
    file.write_text(f'{{"address": "{ADDRESS}"}}')
    assert read_server(tmp_path) == (ADDRESS, None)
    file.write_text(
        '{\n "address": "tcp://0.0.0.0:5555",\n "host": "lab",\n "public_key": "k"\n}\n'
    )
    assert read_server(tmp_path) == ("tcp://lab:5555", "k")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"adress": "tcp://10.0.0.7:5555"}', "unknown field `adress`"),
        ('{"host": "lab"}', "missing required field `address`"),
        ('{"address": 5555}', "Expected `str`, got `int`"),
        ("", "truncated"),
    ],
)
def test_a_file_that_is_neither_is_refused_with_what_it_must_hold(tmp_path, text, said):
    (tmp_path / "server.json").write_text(text)
    with pytest.raises(StateError, match=r"server\.json") as refused:
        read_server(tmp_path)
    assert said in str(refused.value)
    assert "written or changed by hand has an address" in str(refused.value)


def test_an_address_changed_by_hand_is_taken_once_the_check_is_deleted(tmp_path):
    file = tmp_path / "server.json"
    write_record(file, {"address": ADDRESS, "host": "h", "pid": 7, "public_key": None})
    written = file.read_text()
    file.write_text(written.replace("10.0.0.7", "10.0.0.8"))
    with pytest.raises(StateError, match="and no check"):
        read_server(tmp_path)
    file.write_text(file.read_text().partition(',"check"')[0] + "}\n")
    assert read_server(tmp_path) == ("tcp://10.0.0.8:5555", None)


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
        f"no server has accepted this client for 0.001 s (--give-up{beside}). To continue, start "
        f"it again with the same --state.",
    ]
