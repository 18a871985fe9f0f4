"""MOON."""

from __future__ import annotations

from tests.algorithms.harness import begun, same


def test_a_client_first_seen_late_has_no_contrast_either():
    a = begun("moon", mu=5).rounds(2, (0, 1))
    start = a.server.x
    a.rounds(1, (2,))
    assert same(a.ups[2].x, a.host(2).train(start).x)


def test_a_client_keeps_the_model_it_trained_last():
    f = begun("moon").rounds(1, (0, 1))
    v = f.clients[0].v
    assert same(v, f.ups[0].x)
    f.rounds(1, (1,))
    assert f.clients[0].v is v
    assert not same(f.clients[1].v, v)


def test_each_batch_counts_once_in_the_statistics_of_batch_norm():
    f = begun("moon", model={"name": "mlp", "norm": "batch"})
    f.rounds(1, (0,))
    before = int(f.downs[0].x.counters[0])
    f.rounds(1, (0,))  # the second participation has a contrast
    assert int(f.ups[0].x.counters[0]) - int(f.downs[0].x.counters[0]) == f.ups[0].run.steps
    assert before == 0
