from __future__ import annotations

import tracemalloc
import zlib
from typing import Annotated, Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednet.config.schema import Carried
from fednet.errors import LocalProtocolError, RemoteProtocolError
from fednet.wire import messages as m
from fednet.wire.frames import (
    FORMS,
    MAX_LIST,
    MessageDecoder,
    decode_from_client,
    decode_from_server,
    encode,
)
from tests.chaos.mallory import raw

KEY = m.Key(3, 1, 2, 7)
FIELD = m.Field("x", "state", 12, 12, [("x", "float32", [1, 3])])
FROM_CLIENT = [
    m.Join(
        worker="w",
        ids=[0, 5],
        share=(1, 4),
        holding=[KEY],
        versions={"torch": "2.6"},
        files={"a.py": "00"},
    ),
    m.Ready(run="r", inc=2, layout="d", sites=[m.SiteFacts(0, 10, 5, [4, 6])]),
    m.Alive(run="r", inc=2),
    m.Progress(run="r", inc=2, client=7, stage="training", step=3, steps=9),
    m.Slots(run="r", inc=2, slots=3),
    m.Reply(
        run="r",
        inc=2,
        key=KEY,
        form=[FIELD],
        size=12,
        check=b"5",
        state="ab" * 32,
        kept=True,
        seconds=0.5,
    ),
    m.Failed(run="r", inc=2, key=KEY, reason="broken", again=True),
    m.Leave(run="r", inc=2),
    m.Pull(run="r", inc=2, key=KEY, first=4, count=4),
    m.Part(run="r", inc=2, key=KEY, index=4),
]
FROM_SERVER = [
    m.Welcome(run="r", inc=2, session="s", name="n", config="seed: 0", ids=[0, 5]),
    m.Refuse(run="r", inc=2, reason="no", final=True),
    m.Standing(run="r", inc=2, text="round 1 (training)"),
    m.Task(
        run="r",
        inc=2,
        key=KEY,
        form=[FIELD],
        size=12,
        check=b"5",
        start="1-0-0",
        enrol=1,
        evaluates=True,
        deadline_s=3.0,
    ),
    m.Cancel(run="r", inc=2, key=KEY),
    m.End(run="r", inc=2, over=False, reason="stopped"),
    m.Alive(run="r", inc=2),
    m.Pull(run="r", inc=2, key=KEY, first=4, count=4),
    m.Part(run="r", inc=2, key=KEY, index=4),
]


def refused(frames, match="", decode=decode_from_client) -> str:
    with pytest.raises(RemoteProtocolError, match=match or None) as caught:
        decode(frames)
    assert len(str(caught.value)) <= m.MAX_REASON + 100
    return str(caught.value)


DECODE = [
    *((message, decode_from_client) for message in FROM_CLIENT),
    *((message, decode_from_server) for message in FROM_SERVER),
]


def test_the_lists_have_every_kind_of_message():
    assert [type(message) for message in FROM_CLIENT] == [*m.FROM_CLIENT]
    assert [type(message) for message in FROM_SERVER] == [*m.FROM_SERVER]


def damaged(header: bytes) -> bytes:
    """A header with the sum that its bytes have."""
    return header[:-4] + zlib.crc32(header[:-4]).to_bytes(4, "big")


@pytest.mark.parametrize(("message", "decode"), DECODE, ids=lambda x: type(x).__name__)
def test_a_message_survives_its_frames_and_no_damage_to_its_header_is_taken(message, decode):
    whole = encode(message)
    assert decode([whole]) == (message, None)
    fields = msgpack.unpackb(whole)
    assert list(fields) == ["v", *msgspec.to_builtins(message, builtin_types=(bytes,)), "c"]
    assert whole == msgpack.packb(fields)
    for at in range(len(whole)):
        for by in (0x01, 0x80, 0xFF):
            refused([whole[:at] + bytes([whole[at] ^ by]) + whole[at + 1 :]], "damaged", decode)


def test_what_a_later_release_adds_is_passed_over_and_what_is_missing_has_its_default():
    later = {"t": "reply", "run": "r", "size": 0, "form": [], "key": [3, 1, 2, 7, "train", 5]}
    message, _ = decode_from_client([raw(**later, colour=[1, {"a": 2}])])
    assert message == m.Reply(run="r", key=KEY, form=[], size=0)


def test_forms_are_read_as_they_came_however_many_there_were_before():
    last = m.Field("x", "state", 4, 4)
    for n in range(3 * FORMS):
        form = [m.Field(f"x{n % (2 * FORMS)}", "state", n % 7, 4, [("", "int8", [n])]), last]
        if n % 2:
            form = form[1:]
        for message, decode in (
            (m.Reply(run="r", key=KEY, form=form, size=4), decode_from_client),
            (m.Task(run="r", key=KEY, form=form, size=4), decode_from_server),
        ):
            assert decode([encode(message)]) == (message, None)
    long = [m.Field("x" * 100, "state", n, 4) for n in range(64)]
    message = m.Reply(run="r", key=KEY, form=long, size=4)
    assert decode_from_client([encode(message)]) == (message, None)


@pytest.mark.parametrize(("fields", "letters", "times"), [(1, 100, 8 * FORMS), (64, 100, FORMS)])
def test_however_many_forms_came_they_take_little_memory(fields, letters, times):
    decode = MessageDecoder((m.Reply,))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for n in range(times):
            name = f"{n:0{letters}d}"
            form = [m.Field(name, "state", k, 4) for k in range(fields)]
            decode([encode(m.Reply(run="r", key=KEY, form=form, size=4))])
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1 << 19


def test_a_form_that_is_none_is_refused_each_time():
    whole = {"t": "reply", "run": "r", "size": 0, "key": [3, 1, 2, 7, "train"]}
    for _ in range(3):
        refused([raw(**whole, form=[["x\n", "state", 0, 0]])], "reply: .*form")
        refused([raw(**whole, form=[["x", "state", -1, 0]])], "reply: .*form")
        refused([raw(**whole, form=65 * [["x", "state", 1, 1]])], "reply: .*form")
        refused([raw(**whole, form={"x": 1})], "reply: .*form")


def test_a_hundred_thousand_ids_fit_into_a_header():
    for ids in (list(range(100_000)), [*range(50_000), 70_000]):
        header = encode(m.Join(worker="w", ids=ids))
        assert len(header) < 400
        assert decode_from_client([header])[0].ids == ids


def test_each_side_takes_only_what_the_other_may_say():
    refused([encode(FROM_SERVER[0])], "unknown message type 'welcome'")
    refused([encode(FROM_CLIENT[0])], "unknown message type 'join'", decode_from_server)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "1 or 2 frames"),
        ([b"a", b"b", b"c"], "1 or 2 frames"),
        ([b""], "damaged"),
        ([b"\xc1"], "damaged"),
        ([msgpack.packb({"v": 1, "t": "leave"})], "damaged"),
        ([damaged(b"\xc1" * 9)], "no msgpack"),
        ([damaged(b"\x93\x01\x02\xce" + bytes(4))], "no map"),
        ([raw(t=5)], "unknown message type 5"),
        ([raw(t=["leave"])], "unknown message type list"),
        (
            [raw(t="join", worker="w", ids=[[3, 2]])],
            r"expected whole numbers and \[first, last\]",
        ),
        ([raw(t="join", worker="w", ids=[[0, 1 << 40]])], "more than 1048576"),
        ([raw(t="join", worker="w", ids=[[0, 1, 2]])], "expected whole numbers"),
        ([raw(t="join", worker="w", ids=[True])], "expected whole numbers"),
        ([raw(t="leave", run=5)], "Expected `str`"),
        ([raw(t="join", worker="w", deep={1: 2})], "no msgpack"),
        ([raw(t="leave", run=msgpack.ExtType(4, b"x"))], "no msgpack"),
        ([raw(t="leave"), b"body"], "a body of 4 bytes is not allowed"),
        (
            [raw(t="part", key=[1, 0, 0, 0], index=0), bytes(m.PART + 1)],
            f"a body of {m.PART + 1} bytes",
        ),
        ([bytes(m.MAX_HEADER + 1)], "header of 262145 bytes"),
    ],
    ids=str,
)
def test_frames_that_are_no_message_are_refused_with_a_reason(frames, reason):
    refused(frames, reason)


# Fields of messages that are taken as they are.
KEYED = {"key": [0, 0, 0, 0]}
BASES: dict[str, tuple[dict[str, Any], Any]] = {
    "join": ({"worker": "w"}, decode_from_client),
    "ready": ({"layout": ""}, decode_from_client),
    "progress": ({"client": 0, "stage": "x"}, decode_from_client),
    "reply": ({**KEYED, "form": [], "size": 0}, decode_from_client),
    "failed": ({**KEYED, "reason": "x"}, decode_from_client),
    "pull": ({**KEYED, "first": 0, "count": 1}, decode_from_client),
    "part": ({**KEYED, "index": 0}, decode_from_client),
    "leave": ({}, decode_from_client),
    "alive": ({}, decode_from_client),
    "refuse": ({"reason": "x"}, decode_from_server),
    "task": ({**KEYED, "form": [], "size": 0}, decode_from_server),
    "welcome": (
        {"run": "r", "session": "s", "name": "n", "config": "c", "ids": [0]},
        decode_from_server,
    ),
}


def refused_with(message: str, field: str, value: object, match: str = "") -> None:
    """The message is taken, and not with this value of a field."""
    fields, decode = BASES[message]
    decode([raw(t=message, **fields)])
    refused([raw(t=message, **{**fields, field: value})], match, decode)


@pytest.mark.parametrize("number", [-1, (1 << 40) + 1, (1 << 64) - 1, 1.5, "1", None, True])
@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        ("reply", "key", lambda n: [n, 0, 0, 0]),
        ("reply", "key", lambda n: [0, 0, 0, n]),
        ("reply", "size", lambda n: n),
        ("reply", "form", lambda n: [["x", "state", n, 0]]),
        ("reply", "form", lambda n: [["x", "state", 0, n]]),
        ("reply", "form", lambda n: [["x", "state", 0, 0, [["y", "float32", [n]]]]]),
        ("pull", "first", lambda n: n),
        ("pull", "count", lambda n: n),
        ("part", "index", lambda n: n),
        ("join", "ids", lambda n: [n]),
        ("join", "share", lambda n: [n, 1]),
        ("join", "slots", lambda n: n),
        ("ready", "sites", lambda n: [[0, n, 0]]),
        ("progress", "step", lambda n: n),
        ("leave", "inc", lambda n: n),
    ],
)
def test_numbers_out_of_range_are_refused_in_every_whole_number_field(
    message, field, value, number
):
    refused_with(message, field, value(number))


NAMES = ["../x", "/x", "a/b", "..", ".", "a\n", "\u202ea", "a\x00"]  # a way out of a folder
VERSIONS = ["../1-0-0", "1-0", "1-0-0\n", "1-0-0/x", "x", "1-0-0.local"]
# What would begin a line, or turn the direction of another's text.
MARKS = ["\n", "\r", "\u202e", "\u2066", "\u200f", "\u2028", "\x85", "\ufeff"]
MARKED = [text for mark in MARKS for text in (f"{mark}a", f"a{mark}b", f"a{mark}")]


@pytest.mark.parametrize(
    ("message", "field", "values", "match"),
    [
        ("reply", "seconds", [float("nan"), float("inf"), -1.0], ""),
        ("reply", "state", ["xyz", "ab", "f" * 63, "F" * 64, "f" * 64 + "\n"], "state"),
        ("reply", "key", [[0, 0, 0, 0, "/../../x"]], "Invalid enum value"),
        ("reply", "form", [[["x", "state", 0, 0]] * 65], ""),
        ("reply", "form", [[["x", "state", 0, 0, [["y", "float32", [1] * 9]]]]], ""),
        ("join", "holding", [[[0, 0, 0, 0]] * 4097], ""),
        ("join", "versions", [{str(i): "" for i in range(33)}], ""),
        ("join", "files", [{str(i): "" for i in range(257)}], ""),
        ("join", "worker", ["w" * 129], ""),
        # More samples than a site may have.
        ("ready", "sites", [[[0, m.MAX_SAMPLES + 1, 0]], [[0, 5, m.MAX_SAMPLES + 1]]], "sites"),
        ("join", "host", ["a\rb", *MARKED], "regex"),
        ("join", "device", ["\x9b2J"], ""),  # it would move a terminal's cursor
        ("progress", "stage", ["\x1b[2J"], ""),
        ("failed", "reason", ["\x1b]0;title\x07", *MARKED], "regex"),
        ("failed", "reason", ["x" * 4097], ""),
        ("refuse", "reason", MARKED, "regex"),
        ("welcome", "run", ["", *NAMES], "run"),
        ("alive", "run", NAMES, "run"),
        # So many beats that they would take the processor.
        ("welcome", "beat_s", [0.0, 1e-9, 0.05, float("nan"), float("inf")], "beat_s"),
        ("task", "start", VERSIONS, "start"),
        ("task", "keep", VERSIONS, "keep"),
    ],
)
def test_texts_lists_and_seconds_have_a_form_and_a_limit(message, field, values, match):
    for value in values:
        refused_with(message, field, value, match)


@pytest.mark.parametrize("mark", MARKS)
def test_an_unknown_type_is_shown_without_what_turns_a_line(mark):
    assert refused([raw(t=f"x{mark}y")], "unknown message type").isprintable()


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=400))
def test_a_text_made_clean_is_taken(text):
    reason = m.clean(text)
    assert decode_from_server([encode(m.Refuse(reason=reason))])[0].reason == reason
    assert len(reason) <= m.MAX_REASON


@pytest.mark.parametrize("depth", [100, 900, 1020, 5000])
def test_deep_nesting_is_refused_wherever_it_stands(depth):
    nested = b"\x91" * depth + b"\xc0"
    for header in (
        nested,
        b"\x82\xa1v" + nested + b"\xa1t\xa5leave",
        b"\x82\xa1v\x01\xa1t" + nested,
    ):
        refused([damaged(header + bytes(4))])


@pytest.mark.parametrize(
    ("announced", "nbytes"),
    [(2**32 - 1, 5000), (5000, 4000), (MAX_LIST, MAX_LIST - 1), (MAX_LIST + 1, m.MAX_HEADER)],
)
def test_list_announced_long_takes_no_memory_before_its_items_are_there(announced, nbytes):
    lists = (b"\xdd" + announced.to_bytes(4, "big")) * 800
    header = damaged(lists[: nbytes - 4].ljust(nbytes, b"\0"))
    tracemalloc.start()
    try:
        refused([header], "no msgpack")
        assert tracemalloc.get_traced_memory()[1] < 4 * nbytes + (1 << 20)
    finally:
        tracemalloc.stop()


def test_a_header_of_the_limit_is_sent_and_taken_and_one_byte_more_is_neither():
    def welcome(nbytes):
        return m.Welcome(run="r", session="", name="", config="x" * nbytes, ids=[])

    most = m.MAX_HEADER - len(encode(welcome(1 << 16))) + (1 << 16)
    header = encode(welcome(most))
    assert len(header) == m.MAX_HEADER
    assert decode_from_server([header])[0] == welcome(most)
    with pytest.raises(LocalProtocolError, match=f"welcome .*of {m.MAX_HEADER + 1} bytes"):
        encode(welcome(most + 1))
    refused([damaged(header + b"x")], f"of {m.MAX_HEADER + 1} bytes", decode_from_server)


@pytest.mark.parametrize("number", [9, 10, 11, 12, 13, 14, 300])
def test_a_header_is_the_map_that_msgpack_packs_however_many_fields_it_has(number):
    names = [(f"field{i}", int, i) for i in range(number)]
    header = encode(msgspec.defstruct("Many", names, bases=(m.Message,), tag="many")())
    fields = msgpack.unpackb(header)
    assert fields["field8"] == 8
    assert len(fields) == 5 + number  # version, type, run, incarnation, check
    assert header == msgpack.packb(fields)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(FROM_CLIENT), st.data())
def test_spoilt_header_is_another_message_or_refused(message, data):
    spoilt = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        spoilt[data.draw(st.integers(0, len(spoilt) - 1))] = data.draw(st.integers(0, 255))
    try:
        found, _ = decode_from_client([damaged(bytes(spoilt))])  # as if its sender had meant it
    except RemoteProtocolError:
        return
    assert decode_from_client([encode(found)])[0] == found


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=3))
def test_noise_is_refused(frames):
    for decode in (decode_from_client, decode_from_server):
        refused(frames, decode=decode)


def test_what_a_configuration_may_say_of_seconds_fits_into_a_message():
    said, carried = map(msgspec.inspect.type_info, (Annotated[float, Carried], m.Seconds))
    assert said.le == carried.le
