"""The bytes of `tests.bench secagg` are those of the messages; no time is tested."""

from __future__ import annotations

from tests.bench import secagg


def test_bytes_are_those_that_the_papers_count():
    n, d = 10, 1000
    plain, pairs, graph, coded = (secagg.machines(p, n, 0.0, d) for p in secagg.PROTOCOLS)
    assert (plain["up_bytes"], plain["down_bytes"]) == (4 * d, 4 * d)
    # keys 3 * 32; a digest and n - 1 times id, two shares of 36, tag; d entries of 4 bytes; a
    # signature; n times id and share
    shares, unmask = 32 + 9 * (4 + 72 + 16), 10 * (4 + 36)
    assert pairs["up"] == {
        "keys": 96,
        "shares": shares,
        "masked": 4 * d,
        "consistency": 64,
        "unmask": unmask,
    }
    assert graph["up_bytes"] == pairs["up_bytes"]  # twenty neighbours are all of ten
    piece = 4 * 500  # U - T = 7 - 5
    sealed = 9 * (4 + piece + 16)
    assert coded["up"] == {"keys": 32, "shares": sealed, "masked": 4 * d, "unmask": piece}
