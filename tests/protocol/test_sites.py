"""What sites say of their data: what was declared first holds for a run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fednet.errors import RemoteProtocolError
from fednet.protocol.workers import Sites
from fednet.wire.messages import SiteFacts

WORKER = SimpleNamespace(name="w", ids={0, 1, 2})


def said(sites: Sites, **train: int) -> list[tuple[str, dict]]:
    facts = [SiteFacts(int(name[1:]), n, 0) for name, n in train.items()]
    return sites.take(WORKER, facts)


def test_what_a_site_declares_first_holds_for_the_run_and_a_change_is_an_event() -> None:
    sites = Sites()
    assert said(sites, c0=5, c1=7) == [("declared", {"worker": "w", "samples": {"0": 5, "1": 7}})]
    assert said(sites, c0=5, c1=7) == []
    changed = {"worker": "w", "samples": {"1": 99}, "first": {"1": 7}}
    assert said(sites, c0=5, c1=99) == [("data_changed", changed)]
    assert said(sites, c1=99) == []
    assert sites.declared == {0: 5, 1: 7}
    assert sites.facts.get(1).train == 99  # what it may say that it trained on


def test_an_earlier_servers_are_put_back_and_hold() -> None:
    sites = Sites()
    sites.recall([{"samples": {"0": 5}}, {"samples": {"1": 7, "0": 50}}])
    assert sites.declared == {0: 5, 1: 7}
    assert [event for event, _ in said(sites, c0=6, c2=1)] == ["declared", "data_changed"]
    assert sites.declared == {0: 5, 1: 7, 2: 1}


def test_facts_of_clients_that_a_worker_does_not_host_are_refused_whole() -> None:
    sites = Sites()
    with pytest.raises(RemoteProtocolError, match="facts of client 3, which this worker"):
        said(sites, c0=5, c3=1)
    assert sites.declared == {}
    assert sites.facts.get(0) is None


CATS = "c" * 64
DOGS = "d" * 64


@pytest.mark.parametrize(
    ("configured", "earlier", "names", "refused"),
    [
        ("", [], {0: CATS, 1: CATS, 2: ""}, None),  # a site without names has none to compare
        ("", [], {0: CATS, 1: DOGS}, (1, "client 0")),
        ("", [], {0: "", 1: DOGS, 2: CATS}, (2, "client 1")),
        (CATS, [], {0: DOGS}, (0, "the server's configuration")),
        ("", [{"samples": {"0": 5}, "names": {"0": CATS}}], {1: DOGS}, (1, "client 0")),
    ],
)
@pytest.mark.parametrize("together", [True, False], ids=["one process", "each its own"])
def test_sites_whose_classes_have_other_names_are_refused_whoever_came_first(
    configured: str,
    earlier: list[dict],
    names: dict[int, str],
    refused: tuple[int, str] | None,
    together: bool,
) -> None:
    sites = Sites(configured)
    sites.recall(earlier)
    facts = [SiteFacts(client, 5, 0, [], digest) for client, digest in names.items()]
    reason = ""
    for joined in [facts] if together else [[one] for one in facts]:
        reason = sites.unlike(joined)
        if reason:
            break
        sites.take(WORKER, joined)
    if refused is None:
        assert not reason
    else:
        assert f"client {refused[0]} have other names than those of {refused[1]}, or" in reason


def test_the_names_are_on_record_for_a_server_that_goes_on() -> None:
    sites = Sites()
    ((_, fields),) = sites.take(WORKER, [SiteFacts(0, 5, 0, [], CATS), SiteFacts(1, 5, 0)])
    assert fields["names"] == {"0": CATS}
    after = Sites()
    after.recall([fields])
    assert after.unlike([SiteFacts(2, 5, 0, [], DOGS)])
