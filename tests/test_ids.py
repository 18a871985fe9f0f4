from __future__ import annotations

import pytest

from fednet import ids
from fednet.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "found"), [("3", (3,)), ("0-3,7", (0, 1, 2, 3, 7)), ("7, 0-1,1", (0, 1, 7))]
)
def test_ids_are_listed_in_order_and_once(text, found):
    assert ids.parse(text).resolve(10) == found


def test_shares_cut_all_ids_without_overlap_and_differ_by_at_most_one():
    shares = [ids.parse(f"{k}/4").resolve(10) for k in (1, 2, 3, 4)]
    assert shares == [(0, 1), (2, 3, 4), (5, 6), (7, 8, 9)]


@pytest.mark.parametrize(
    "text", ["", "a", "3-1", "0/4", "5/4", "1,,2", "-1", "0-99999999999", "1/0"]
)
def test_what_is_no_id_is_refused(text):
    with pytest.raises(ConfigError, match="--id"):
        ids.parse(text)


def test_id_beyond_the_federation_is_refused():
    with pytest.raises(ConfigError, match="there is no client 10; ids go from 0 to 9"):
        ids.parse("8-10").resolve(10)


def test_empty_share_is_refused():
    with pytest.raises(ConfigError, match="is empty; use at most 2 shares"):
        ids.parse("1/3").resolve(2)
