"""What a client takes server.json for, as the server wrote it and as a person may."""

from __future__ import annotations

import pytest

from fednet.client.join import read_server
from fednet.errors import StateError
from fednet.files import write_record

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
