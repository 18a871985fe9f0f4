"""FedPDC."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fednet.tensors import mean
from tests.algorithms.harness import begun, close, same


def forced(f, p):
    """The federation with the accuracies the server remembers set to p for everyone."""
    f.servers[-1] = f.server.replace(p=dict.fromkeys(range(4), p))
    return f


def test_a_model_weighs_what_it_gets_right_of_the_public_set():
    f = begun("fedpdc", train={"epochs": 10, "lr": 0.3}).rounds(1)
    p = {i: f.io.evaluate(f.ups[i].x).accuracy for i in range(4)}
    assert f.server.p == p
    assert all(0 <= one <= 1 for one in p.values())
    assert len(set(p.values())) > 1
    expected = mean((f.ups[i].x, p[i]) for i in range(4))
    assert close(f.server.x, expected)
    assert f.io.reported["accuracy_public"] == {str(i): v for i, v in p.items()}
    assert f.io.reported["accuracy_public_sum"] == pytest.approx(p[0] + p[1] + p[2] + p[3])


@pytest.mark.parametrize(
    ("p", "weights"),
    [
        ((0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0)),
        ((0.0, 0.0, 0.5, 0.0), (0.0, 0.0, 0.5, 0.0)),
        ((0.5, 0.0, 0.25, 0.0), (0.5, 0.0, 0.25, 0.0)),
    ],
)
def test_all_count_alike_with_a_warning_only_where_no_model_gets_anything_right(p, weights):
    f = begun("fedpdc")
    left = iter(p)
    f.io.evaluate = lambda x: SimpleNamespace(accuracy=next(left))  # in the order of replies
    f.rounds(1)
    assert len({f.ups[i].run.n for i in range(4)}) > 1
    assert close(f.server.x, mean((f.ups[i].x, w) for i, w in enumerate(weights) if w))
    assert ["all count alike" in text for text in f.io.warnings] == [True] * (not any(p))


def test_a_client_is_told_its_accuracy_of_the_round_before_or_1():
    f = begun("fedpdc").rounds(1, (0, 1))
    assert [d.p for d in f.downs.values()] == [1, 1]
    p1 = f.server.p[1]
    f.rounds(1, (1, 2))
    assert [d.p for d in f.downs.values()] == [p1, 1]
    assert set(f.server.p) == {1, 2}  # client 0's has been dropped
    f.rounds(1, (0,))
    assert f.downs[0].p == 1


def test_the_literal_penalty_moves_nothing_and_is_not_in_the_reported_loss():
    runs = [begun("fedpdc", **{"lambda": v}) for v in (0.0, 1.0, 10.0, "adaptive")]
    for f in runs:
        f.rounds(3)
        assert same(f.server.x, runs[0].server.x)
        assert min(f.downs[i].p for i in range(4)) < 1
        assert all(f.ups[i].run.loss == runs[0].ups[i].run.loss for i in range(4))


@pytest.mark.parametrize("penalty", ["prox", "scale"])
def test_with_p_1_for_all_every_penalty_is_the_literal_one_to_the_bit(penalty):
    a = begun("fedpdc", penalty=penalty)
    b = begun("fedpdc")
    for _ in range(3):
        forced(a, 1.0).rounds(1)
        forced(b, 1.0).rounds(1)
    assert same(a.server.x, b.server.x)
    assert not same(forced(a, 0.5).rounds(1).server.x, forced(b, 0.5).rounds(1).server.x)


@pytest.mark.parametrize(("strength", "pull"), [(2.0, 0.5), ("adaptive", 0.25)])
def test_prox_trains_as_fedprox_with_mu_lambda_times_1_less_p(strength, pull):
    """In round 2, in which an adaptive lambda is 0.5 * 2."""
    f = begun("fedpdc", penalty="prox", **{"lambda": strength}, train={"momentum": 0.9}).rounds(1)
    forced(f, 0.75).rounds(1)
    for i in range(4):
        assert close(f.ups[i].x, f.host(i).train(f.downs[i].x, proximal=pull).x)


def test_scale_trains_as_plain_sgd_with_the_learning_rate_scaled():
    f = forced(begun("fedpdc", penalty="scale", **{"lambda": 2.0}, train={"lr": 0.1}), 0.75).rounds(
        1
    )
    plain = begun("fedavg", train={"lr": 0.15}).rounds(1)
    for i in range(4):
        assert close(f.ups[i].x, plain.ups[i].x, 1e-5)
