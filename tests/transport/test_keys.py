from __future__ import annotations

import functools
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import pytest

from fednet.cli.main import main
from fednet.errors import ConfigError
from fednet.transport import keys
from fednet.transport.base import Closed, Opened
from fednet.transport.keys import (
    KEY_LENGTH,
    Keyring,
    allow,
    check_key,
    lab,
    load,
    make_client_keys,
    make_server_keys,
    revoke,
)
from fednet.transport.zeromq import sockets
from fednet.transport.zeromq.client import TELL_ENDED, ZmqClient
from tests.transport.pairs import joined, of, opened, pump, said


def test_a_servers_pair_is_secret_on_disk_and_never_overwritten(tmp_path):
    public = make_server_keys(tmp_path)
    file = tmp_path / "server.key"
    assert file.stat().st_mode & 0o777 == 0o600
    pair = load(file)
    assert pair.public == public
    assert pair.secret not in repr(pair)
    with pytest.raises(ConfigError, match=r"server.key: there is a key already"):
        make_server_keys(tmp_path)


def test_a_secret_key_that_others_can_read_is_an_error_with_file_and_mode(tmp_path):
    make_client_keys(tmp_path / "c.key")
    (tmp_path / "c.key").chmod(0o640)
    with pytest.raises(ConfigError, match=r"c\.key: .* its mode is 0640, expected 0600"):
        load(tmp_path / "c.key")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"public": "x"}',
        '{"public": "short", "secret": "short"}',
        '{"public": 1, "secret": 2}',
        '{"public": "", "secret": "", "more": ""}',
        '{"public": "\xff"}',  # in Latin-1
    ],
)
def test_a_file_that_is_no_key_file_is_an_error_that_names_it(tmp_path, text):
    with pytest.raises(ConfigError, match=r"c\.key: no such key file"):
        load(tmp_path / "c.key")
    file = tmp_path / "c.key"
    file.write_text(text, encoding="latin-1")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=r"c\.key: "):
        load(file)


def test_an_error_about_a_key_does_not_show_it():
    with pytest.raises(ConfigError) as raised:
        check_key("my-secret-that-is-too-short", "here")
    assert "my-secret" not in str(raised.value)
    assert "found 27 characters" in str(raised.value)


def test_ids_may_share_a_key_and_an_id_may_have_several(tmp_path):
    make_server_keys(tmp_path)
    one = make_client_keys(tmp_path / "1.key")
    two = make_client_keys(tmp_path / "2.key")
    allow(tmp_path, [0, 1], one)
    allow(tmp_path, [1], two)
    allow(tmp_path, [1], two)
    ring = Keyring(tmp_path)
    assert [[not ring.refusal(user, k) for k in range(3)] for user in (one, two)] == [
        [True, True, False],
        [False, True, False],
    ]
    assert ring.refusal(None, 0)
    assert (tmp_path / "allowed" / "1").read_text().split() == [one, two]


def test_a_change_on_disk_takes_effect_on_a_keyring_in_use(tmp_path):
    make_server_keys(tmp_path)
    ring = Keyring(tmp_path)
    one = make_client_keys(tmp_path / "1.key")
    assert not ring.allows(one)
    for _ in range(20):  # faster than the clock behind a directory's time ticks
        allow(tmp_path, [3], one)
        assert not ring.refusal(one, 3)
        revoke(tmp_path, [3])
        assert ring.refusal(one, 3)
        assert not ring.allows(one)
    # and when the directory has been quiet for long
    allow(tmp_path, [3], one)
    os.utime(tmp_path / "allowed", ns=(0, 0))
    assert not ring.refusal(one, 3)
    revoke(tmp_path, [3])
    assert ring.refusal(one, 3)


def test_a_spoilt_file_stops_a_server_from_starting_but_not_one_that_runs(tmp_path, caplog):
    make_server_keys(tmp_path)
    one = make_client_keys(tmp_path / "1.key")
    allow(tmp_path, [0], one)
    ring = Keyring(tmp_path)
    (tmp_path / "allowed" / "1").write_text("nonsense")
    assert not ring.refusal(one, 0)
    assert "Nobody may speak for client 1" in caplog.text
    with pytest.raises(ConfigError, match="allowed/1"):
        Keyring(tmp_path)


def test_lab_makes_a_key_for_each_client_and_one_for_all(tmp_path):
    *files, everybody = lab(tmp_path, 3)
    ring = Keyring(tmp_path)
    assert [file.name for file in files] == ["0.key", "1.key", "2.key"]
    pairs = [load(file) for file in files]
    assert {pair.server for pair in pairs} == {ring.pair.public}
    assert [[not ring.refusal(pair.public, k) for k in range(3)] for pair in pairs] == [
        [True, False, False],
        [False, True, False],
        [False, False, True],
    ]
    assert all(not ring.refusal(load(everybody).public, k) for k in range(3))


def test_the_list_names_who_may_run_which_clients(tmp_path, capsys):
    server = tmp_path / "keys"
    site = tmp_path / "site.key"
    public = make_server_keys(server)
    one = make_client_keys(site, public)
    two = make_client_keys(tmp_path / "two.key")
    allow(server, [0, 1, 2], one, name="uke")
    allow(server, [4], two, keys.time_of("2020-01-31", ""))
    assert main(["keys", "revoke", str(server), "1-2", "--key", one]) == 0
    assert main(["keys", "list", str(server)]) == 0
    _, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    mark = keys.fingerprint
    assert rows == [
        ["0", "uke", mark(one), "-", "allowed", one],
        ["4", "-", mark(two), "2020-01-31T00:00:00", "expired", two],
    ]
    assert main(["keys", "show", str(site)]) == 0
    said = capsys.readouterr().out
    assert f"this key    {mark(one)}" in said
    assert f"its server  {mark(public)}" in said
    assert load(site).secret not in said
    assert main(["keys", "show", str(server), "--public"]) == 0
    assert capsys.readouterr().out == f"{public}\n"
    assert main(["keys", "list", str(tmp_path / "typo")]) == 2
    assert "no such directory of keys" in capsys.readouterr().err


# Over the wire


def test_a_message_carries_the_key_that_its_sender_proved(tmp_path, new_pair):
    files = lab(tmp_path, 2)
    pair = new_pair(keyring=Keyring(tmp_path))
    for file in files[:2]:
        keys = load(file)
        client = opened(pair, keys=keys)
        assert said(pair, client, b"header", bytes(2**20)).user == keys.public


def test_an_unknown_key_never_connects_and_both_sides_are_told(tmp_path, new_pair):
    (file, _) = lab(tmp_path, 1)
    stranger = make_client_keys(tmp_path / "stranger.key", load(file).server)
    at_server = []
    at_client = []
    pair = new_pair(
        keyring=Keyring(tmp_path),
        on_refused=lambda why, where: at_server.append((why, where)),
    )
    client = pair.client(
        keys=load(tmp_path / "stranger.key"),
        on_refused=lambda why, where: at_client.append(why),
    )
    seen = pump(pair.server, client, until=lambda seen: at_server and at_client)
    assert seen == []
    assert client.send([b"x"]) is False
    assert at_server == [(f"key not allowed: {stranger}", "127.0.0.1")]
    assert at_client == ["the server does not allow this key"]


def test_a_key_allowed_after_it_was_refused_connects_by_itself(tmp_path, new_pair):
    (file, _) = lab(tmp_path, 1)
    late = make_client_keys(tmp_path / "late.key", load(file).server)
    pair = new_pair(keyring=Keyring(tmp_path))
    client = pair.client(keys=load(tmp_path / "late.key"))
    pump(pair.server, client, until=lambda seen: pair.refused and client._retry_at)
    allow(tmp_path, [0], late)
    client._retry_at = 0.0  # now, rather than in two seconds
    pump(pair.server, client, until=lambda seen: of(seen, Opened, client))


def test_a_client_that_alone_has_no_curve_is_told_at_once(tmp_path, new_pair):
    lab(tmp_path, 1)
    told = []
    pair = new_pair(keyring=Keyring(tmp_path))
    client = pair.client(on_refused=lambda why, where: told.append(why))
    pump(pair.server, client, until=lambda seen: told)
    assert "only one of the two uses keys" in told[0]


def test_a_server_that_merely_ends_is_not_taken_for_one_with_another_key(tmp_path):
    told = []
    ended = 0
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        client = ZmqClient(
            f"tcp://127.0.0.1:{listener.getsockname()[1]}",
            on_refused=lambda why, where: told.append(why),
        )
        stack.callback(client.close, 0)
        listener.settimeout(0.01)
        limit = time.monotonic() + 20
        while ended < TELL_ENDED:  # a connection that is taken, and whose server then dies
            assert time.monotonic() < limit
            assert not told or ended == TELL_ENDED - 1
            with suppress(TimeoutError):
                taken, _ = listener.accept()
                taken.close()
            before = client._ended_early
            client.poll(0.01)
            ended += client._ended_early - before
        assert len(told) == 1
        assert told[0].startswith("the server ends each connection in its handshake")


def test_strangers_with_giant_handshakes_are_hung_up_on_and_whoever_has_a_key_gets_in(
    tmp_path, new_pair
):
    (file, _) = lab(tmp_path, 1)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    giant = b"\x06" + (2**20).to_bytes(8, "big")  # the header of a command frame
    pair = new_pair(keyring=Keyring(tmp_path))
    strangers = [pair.stranger() for _ in range(20)]
    for one in strangers:
        one.sendall(greeting + giant)
        one.setblocking(False)
    gone = set()

    def push(seen) -> bool:
        for one in strangers:
            try:
                one.send(bytes(2**14))
            except BlockingIOError:
                pass
            except OSError:
                gone.add(one)
        return len(gone) == len(strangers)

    pump(pair.server, until=push)
    assert pair.refusals("bytes before it joined")
    joined(pair, keys=load(file))


def test_a_client_that_was_given_another_servers_key_never_connects(tmp_path, new_pair):
    (file, _) = lab(tmp_path / "one", 1)
    lab(tmp_path / "two", 1)
    pair = new_pair(keyring=Keyring(tmp_path / "two"))
    told = []
    client = pair.client(keys=load(file), on_refused=lambda why, where: told.append(why))
    seen = pump(pair.server, client, until=lambda seen: told)
    assert seen == []
    assert "trusts another server's key" in told[0]
    assert pair.refusals("handshake")


def test_a_revoked_key_is_hung_up_on_and_does_not_come_back(tmp_path, new_pair):
    files = lab(tmp_path, 2)
    pair = new_pair(keyring=Keyring(tmp_path))
    stays, kept = joined(pair, keys=load(files[0]))
    client, conn = joined(pair, keys=load(files[1]))
    (
        tmp_path / "allowed" / "1"
    ).unlink()  # with it the key for all; `kept` speaks for client 0 still
    seen = pump(pair.server, client, stays, until=lambda seen: pair.refusals("key revoked") >= 2)
    (closed,) = of(seen, Closed, pair.server)
    assert (closed, closed.why) == (Closed(conn), "key revoked")
    assert of(seen, Opened, client) == []
    assert pair.server.send(kept, [b"still here"])


def test_no_key_is_made_that_a_command_line_takes_for_a_flag(tmp_path, monkeypatch):
    dash = "-" + "a" * (KEY_LENGTH - 1)
    pairs = iter([(dash, "s" * KEY_LENGTH), ("b" * KEY_LENGTH, "s" * KEY_LENGTH)])
    monkeypatch.setattr(sockets, "new_curve_pair", lambda: next(pairs))
    assert make_client_keys(tmp_path / "c.key") == "b" * KEY_LENGTH


def test_a_key_whose_time_is_over_speaks_for_nobody_and_the_ring_notices(tmp_path, monkeypatch):
    make_server_keys(tmp_path)
    old = make_client_keys(tmp_path / "a.key")
    new = make_client_keys(tmp_path / "b.key")
    now = 1_800_000_000.0
    monkeypatch.setattr(keys.time, "time", lambda: now)
    allow(tmp_path, [3], old, until=now + 60)
    allow(tmp_path, [3], new)
    ring = Keyring(tmp_path)
    assert [not ring.refusal(key, 3) for key in (old, new)] == [True, True]  # in overlap
    before = ring.version
    os.utime(tmp_path / "allowed", (1, 1))  # long ago: it is not read again for that
    monkeypatch.setattr(keys.time, "time", lambda: now + 61)
    assert [not ring.refusal(key, 3) for key in (old, new)] == [False, True]
    assert not ring.allows(old)
    assert ring.version > before
    assert (tmp_path / "allowed" / "3").read_text() == f"{old} 2027-01-15T08:01:00\n{new}\n"
    (tmp_path / "allowed" / "3").write_text(f"{old} tomorrow\n")
    with pytest.raises(ConfigError, match="expected a time"):
        Keyring(tmp_path)


def test_the_ring_knows_the_sites_by_name_and_when_their_last_keys_end(tmp_path):
    make_server_keys(tmp_path)
    one, two, three = (make_client_keys(tmp_path / f"{n}.key") for n in range(3))
    soon = float(int(time.time()) + 3600)
    allow(tmp_path, [0, 1], one, until=soon, name="uke")
    allow(tmp_path, [2], two, name="charite")
    allow(tmp_path, [3], three, until=soon + 60)
    ring = Keyring(tmp_path)
    assert [ring.name(k) for k in range(5)] == ["uke", "uke", "charite", "", ""]
    assert ring.ends == [((0, 1), "uke", soon), ((3,), "", soon + 60)]
    allow(tmp_path, [0, 1], three)  # the site's next key, which does not name it again
    allow(tmp_path, [3], three, until=soon + 120)
    ring.refresh()
    assert [ring.name(k) for k in (0, 3)] == ["uke", ""]
    assert ring.ends == [((3,), "", soon + 120)]
    allow(tmp_path, [0, 1], one, until=soon + 7200)  # later, and without its name
    assert {allowed.name for ids, _, allowed in keys.all_keys(tmp_path) if 0 in ids} == {"uke", ""}


@pytest.mark.parametrize("name", ["two words", "-x", "a\nb", "\x1b[2J", "x" * 65])
def test_a_name_that_could_break_a_line_or_a_terminal_is_refused(tmp_path, capsys, name):
    make_server_keys(tmp_path / "keys")
    public = make_client_keys(tmp_path / "site.key")
    words = ["keys", "allow", str(tmp_path / "keys"), "3", f"--name={name}", "--", public]
    assert main(words) == 2
    assert "--name: expected a site's name" in capsys.readouterr().err


def test_the_ring_says_why_no_key_may_speak_for_a_client(tmp_path):
    make_server_keys(tmp_path)
    old = make_client_keys(tmp_path / "old.key")
    new = make_client_keys(tmp_path / "new.key")
    allow(tmp_path, [3, 4], old, until=time.time() - 60)  # before this server began
    allow(tmp_path, [4], new)
    ring = Keyring(tmp_path)
    assert [ring.lacking(k) for k in (3, 4, 5)] == ["key expired", "", "no key is allowed"]
    allow(tmp_path, [3], new)
    ring.refresh()
    assert ring.lacking(3) == ""


def test_keys_that_a_wrong_clock_expired_are_valid_again_when_it_is_right(tmp_path, monkeypatch):
    make_server_keys(tmp_path)
    soon, later = (make_client_keys(tmp_path / f"{n}.key") for n in "ab")
    now = time.time()
    allow(tmp_path, [3], soon, until=now + 3600)
    allow(tmp_path, [4], later, until=now + 7200)
    os.utime(tmp_path / "allowed", (1, 1))  # long ago: it is not read again for that
    ring = Keyring(tmp_path)
    clock = list[float]()
    monkeypatch.setattr(keys.time, "time", lambda: clock[-1])
    valid = list[list[bool]]()
    for at in (now, now + 5000, now, now + 9000, now + 5000, now):
        clock.append(at)
        valid.append([not ring.refusal(soon, 3), not ring.refusal(later, 4)])
    both = [True, True]
    second = [False, True]
    none = [False, False]
    assert valid == [both, second, both, none, second, both]


@pytest.mark.parametrize(
    ("text", "utc"),
    [
        ("2099-01-31T18:00:00+05:00", "2099-01-31T13:00:00"),
        ("2099-01-31T18:00:00-05:00", "2099-01-31T23:00:00"),
        ("2099-01-31T18:00:00Z", "2099-01-31T18:00:00"),
        ("2099-01-31T18:00", "2099-01-31T18:00:00"),
        ("2099-01-31", "2099-01-31T00:00:00"),
    ],
)
def test_a_key_expires_at_the_time_in_its_zone_and_in_utc_without_one(tmp_path, text, utc):
    make_server_keys(tmp_path / "keys")
    public = make_client_keys(tmp_path / "a.key")
    words = ["keys", "allow", str(tmp_path / "keys"), "3", "--until", text, "--", public]
    assert main(words) == 0
    assert (tmp_path / "keys" / "allowed" / "3").read_text() == f"{public} {utc}\n"


@pytest.mark.parametrize(
    "text", ["", " ", "9999-12-31T23:59:59-05:00", "2099-01-31T18:00:00+25:00"]
)
def test_a_key_is_not_allowed_until_what_is_no_time(tmp_path, capsys, text):
    make_server_keys(tmp_path / "keys")
    public = make_client_keys(tmp_path / "a.key")
    words = ["keys", "allow", str(tmp_path / "keys"), "3", f"--until={text}", "--", public]
    assert main(words) == 2
    assert "--until: expected a time such as 2027-01-31" in capsys.readouterr().err
    assert not (tmp_path / "keys" / "allowed" / "3").exists()


def in_processes(*works: Callable[[], None]) -> None:
    """Does all of that at once, each in a process of its own."""
    fork = multiprocessing.get_context("fork")
    start = fork.Barrier(len(works))

    def begin(work: Callable[[], None]) -> None:
        start.wait()
        work()

    processes = [fork.Process(target=begin, args=(work,)) for work in works]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(works)


def test_keys_that_several_processes_allow_at_once_are_all_allowed(tmp_path):
    make_server_keys(tmp_path)
    all_keys = [f"{n:040}" for n in range(200)]

    def allow_some(first: int) -> None:
        for key in all_keys[first::4]:
            allow(tmp_path, [3], key)

    in_processes(*[functools.partial(allow_some, first) for first in range(4)])
    assert sorted(key for _, key, _ in keys.all_keys(tmp_path)) == all_keys


def test_a_key_that_is_revoked_while_others_are_allowed_stays_revoked(tmp_path):
    make_server_keys(tmp_path)
    revoked = [f"{n:040}" for n in range(100)]
    allowed = [f"{n:040}" for n in range(100, 200)]
    for key in revoked:
        allow(tmp_path, [3], key)

    def allow_all() -> None:
        for key in allowed:
            allow(tmp_path, [3], key)

    def revoke_all() -> None:
        for key in revoked:
            revoke(tmp_path, [3], key)

    in_processes(allow_all, revoke_all)
    assert sorted(key for _, key, _ in keys.all_keys(tmp_path)) == allowed


def test_a_key_is_not_allowed_until_a_time_that_is_over(tmp_path, capsys):
    make_server_keys(tmp_path / "keys")
    public = make_client_keys(tmp_path / "a.key")
    words = ["keys", "allow", str(tmp_path / "keys"), "3", "--until", "2020-01-01", "--", public]
    assert main(words) == 2
    assert "--until 2020-01-01: this date is in the past" in capsys.readouterr().err
    assert not (tmp_path / "keys" / "allowed" / "3").exists()


def test_one_of_two_keys_is_revoked_and_none_that_was_never_allowed(tmp_path):
    make_server_keys(tmp_path)
    old, new = (make_client_keys(tmp_path / f"{n}.key") for n in "ab")
    for key in (old, new):
        allow(tmp_path, [3], key)
    revoke(tmp_path, [3], old)
    ring = Keyring(tmp_path)
    assert [not ring.refusal(key, 3) for key in (old, new)] == [False, True]
    with pytest.raises(ConfigError, match="client 3 has no such key"):
        revoke(tmp_path, [3], old)
    with pytest.raises(ConfigError, match="client 7 has no key to revoke"):
        revoke(tmp_path, [7])
    revoke(tmp_path, [3])
    assert ring.refusal(new, 3)
