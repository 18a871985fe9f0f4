from __future__ import annotations

import math
import stat
from types import SimpleNamespace

import pytest
import torch

from fednet import config
from fednet.algorithms.base import Delta, Payload, Statistics, Weights
from fednet.algorithms.fedavg import FedAvg
from fednet.config import PrivacySection
from fednet.errors import ConfigError
from fednet.experiment import privacy, selection
from fednet.experiment.privacy import Noise
from fednet.tensors import Layout, Slot, Tensors
from fednet.wire.payload import LocalRun
from tests.rooms import hashes, lines, run, summary

LAYOUT = Layout((Slot("w", (2,), "parameter"),))


class Up(Payload):
    x: Weights
    run: Statistics


class Change(Payload):
    d: Delta
    run: Statistics


def vector(*values: float) -> Tensors:
    return Tensors.pack(LAYOUT, {"w": torch.tensor(values)})


def private(out, name, **sets):
    """A run of three rounds, whose four clients count the same."""
    uniform = {"name": "fedavg", "weighting": "uniform"}
    return run(out, name=name, clients=4, rounds=3, algorithm=uniform, **sets)


def test_an_update_is_scaled_to_the_bound_whether_it_is_sent_as_weights_or_as_a_change():
    x = vector(1, 1)
    run = LocalRun(5, 1, 0.0)
    short = privacy.clip_updates(Up(x=vector(4, 5), run=run), x, 1.0)  # (3, 4) has norm 5
    assert torch.allclose(short.x.vector, torch.tensor([1.6, 1.8]))
    assert torch.allclose(
        privacy.clip_updates(Change(d=vector(3, 4), run=run), x, 1.0).d.vector,
        torch.tensor([0.6, 0.8]),
    )
    within = Up(x=vector(4, 5), run=run)
    assert privacy.clip_updates(within, x, 5.0) is within


def test_the_server_counts_every_update_alike_and_clips_what_a_client_did_not():
    section = PrivacySection(clip=1.0)
    up = privacy.clip_received(Up(x=vector(4, 5), run=LocalRun(500, 1, 0.0)), vector(1, 1), section)
    assert up.run.n == 1
    assert torch.allclose(up.x.vector, torch.tensor([1.6, 1.8]))


def test_noise_is_of_its_scale_repeats_for_a_question_and_comes_from_a_secret(tmp_path):
    file = tmp_path / "noise.key"
    zero = torch.zeros(10_000)

    def drawn(file, question=b"1", value=zero):
        return Noise(file).add(value, 3.0, question)[0] - value

    first = drawn(file)
    assert abs(float(first.std()) - 3.0) < 5 * 3.0 / math.sqrt(2 * 10_000)
    assert abs(float(first.mean())) < 5 * 3.0 / math.sqrt(10_000)
    assert torch.equal(first, drawn(file))
    assert not torch.equal(first, drawn(file, b"2"))
    assert not torch.allclose(first, drawn(file, value=zero + 1e-6), atol=1.0)
    assert not torch.equal(first, drawn(tmp_path / "other.key"))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


QUESTION = privacy.Question("r", 1, 0, b"asked")


def test_a_client_adds_noise_to_what_it_sends_only_where_the_configuration_says_so(tmp_path):
    up = Up(x=vector(4, 5), run=LocalRun(1, 1, 0.0))
    noise = Noise(tmp_path / "k")
    x = vector(1, 1)
    clipped = torch.tensor([1.6, 1.8])
    at_server = privacy.protect(up, x, PrivacySection(clip=1.0, noise=2.0), noise, QUESTION)
    section = PrivacySection(clip=1.0, noise=2.0, where="client")
    at_client = privacy.protect(up, x, section, noise, QUESTION)
    assert torch.allclose(at_server.x.vector, clipped)
    expected, _ = noise.add(at_server.x.vector, 2.0, b"askedx")
    assert torch.allclose(at_client.x.vector.double(), expected)


def test_whoever_asks_twice_with_other_weights_learns_nothing_from_the_difference(tmp_path):
    """One round, one client, two questions: with the same noise on both answers the difference
    would be that of the updates alone, here 0.
    """
    noise = Noise(tmp_path / "k")
    section = PrivacySection(clip=1.0, noise=100.0, where="client")

    def answer(x, digest):
        up = Up(x=x + vector(0.5, 0.5), run=LocalRun(1, 1, 0.0))
        found = privacy.protect(up, x, section, noise, privacy.Question("r", 1, 0, digest))
        return found.x.vector - x.vector

    first = answer(vector(0, 0), b"a")
    other = answer(vector(8, 8), b"b")
    assert float((first - other).norm()) > 1.0
    assert torch.equal(first, answer(vector(0, 0), b"a"))
    # The same question of a site whose data have changed: another answer, so other noise.
    up = Up(x=vector(0.5, 0.25), run=LocalRun(1, 1, 0.0))
    changed = privacy.protect(up, vector(0, 0), section, noise, privacy.Question("r", 1, 0, b"a"))
    assert float((first - changed.x.vector).norm()) > 1.0


def test_two_fields_of_one_answer_do_not_have_the_same_noise(tmp_path):
    class Two(Payload):
        d: Delta
        e: Delta

    section = PrivacySection(clip=1.0, noise=100.0, where="client")
    up = Two(d=vector(0.1, 0.2), e=vector(0.1, 0.2))
    found = privacy.protect(up, None, section, Noise(tmp_path / "k"), QUESTION)
    assert float((found.d.vector - found.e.vector).norm()) > 1.0


@pytest.mark.long
def test_a_bound_that_no_update_reaches_and_no_noise_change_nothing(tmp_path):
    plain = private(tmp_path, "plain")
    bounded = private(tmp_path, "p", privacy={"clip": 1e6})
    assert hashes(plain) == hashes(bounded)
    assert summary(bounded)["privacy"]["epsilon"] is None


@pytest.mark.long
@pytest.mark.parametrize("where", ["server", "client"])
def test_a_private_run_says_what_it_spent(tmp_path, where):
    pytest.importorskip("dp_accounting")
    section = {"clip": 0.1, "noise": 4.0, "where": where, "delta": 1e-3}
    first = private(tmp_path, "first", privacy=section)
    spent = [r["algorithm"]["epsilon"] for r in lines(first / "rounds.jsonl")]
    # All clients take part in all rounds: T Gaussians of multiplier z/2, so eps(a) = 2 a T / z^2,
    # and the classical conversion adds log(1/delta) / (a - 1). dp-accounting's is a little tighter,
    # never looser.
    for t, found in enumerate(spent, 1):
        classical = min(
            2 * a * t / 16 + math.log(1000) / (a - 1) for a in (1 + n / 10 for n in range(1, 1000))
        )
        assert 0.7 * classical < found <= classical * 1.001
    assert summary(first)["privacy"]["epsilon"] == spent[-1]
    assert hashes(first) != hashes(private(tmp_path, "again", privacy=section))


def test_drawing_half_of_the_clients_spends_less_if_nobody_knows_whom():
    pytest.importorskip("dp_accounting")
    made = config.from_mapping(
        {"clients": 100, "participation": 0.1, "privacy": {"clip": 1.0, "noise": 8.0}}, where="here"
    )
    accountant = privacy.Accountant(made)
    spent = [accountant.spent(round) for round in range(1, 4)]
    assert all(s["epsilon_sampled"] < s["epsilon"] for s in spent)
    assert [s["epsilon_sampled"] for s in spent] == sorted(s["epsilon_sampled"] for s in spent)


@pytest.mark.parametrize("there", [{}, {"trace": "devices.csv"}])
def test_the_rounds_of_the_client_that_was_drawn_most_often_count_or_all_if_time_decides(there):
    pytest.importorskip("dp_accounting")
    section = {"clip": 1.0, "noise": 8.0}
    shape = {"clients": 100, "participation": 0.1, "privacy": section, "availability": there}
    made = config.from_mapping(shape, where="here")
    drawn = [client for round in range(1, 7) for client in selection.cohort(made, round)]
    most = max(map(drawn.count, drawn))
    assert 1 < most < 6
    accountant = privacy.Accountant(made)
    for last in (1, 6):  # after a resume not each round is asked for
        spent = accountant.spent(last)
        times = last if there or last == 1 else most
        assert spent["epsilon"] == privacy.epsilon({8.0: times}, made.privacy.delta)
        assert ("epsilon_sampled" in spent) is (not there)


def test_secret_cohorts_never_spend_more_than_known_ones():
    """Where most clients take part, the bound for sampled cohorts alone is above the other."""
    dp_accounting = pytest.importorskip("dp_accounting")
    from dp_accounting import rdp

    section = {"clip": 1.0, "noise": 4.0, "delta": 1e-5}
    made = config.from_mapping(
        {"clients": 10, "participation": 0.8, "privacy": section}, where="here"
    )
    spent = privacy.Accountant(made).spent(20)
    sampled = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    event = dp_accounting.SampledWithoutReplacementDpEvent(
        10, 8, dp_accounting.GaussianDpEvent(4.0 / 2)
    )
    sampled.compose(event, 20)
    assert sampled.get_epsilon(1e-5) > spent["epsilon"]
    assert spent["epsilon_sampled"] == spent["epsilon"]


def test_a_model_that_cannot_be_private_is_refused():
    with_buffers = Layout((Slot("w", (2,), "parameter"), Slot("bn.running_mean", (2,), "buffer")))
    experiment = SimpleNamespace(
        config=SimpleNamespace(privacy=PrivacySection(clip=1.0)),
        algorithm=FedAvg(),
        shared=with_buffers,
        up=SimpleNamespace(buffers=True),
    )
    with pytest.raises(ConfigError, match=r"set model\.buffers: local"):
        privacy.check(experiment)


# The bound on an update's norm


@pytest.mark.parametrize(
    ("change", "security", "why"),
    [
        (lambda x: x * 1e6, {"max_norm": 10.0}, "security.max_norm allows 10"),
        # near the end of the numbers: without a bound too
        (lambda x: x.with_vector(torch.full_like(x.vector, 3e38)), {}, "a norm above 1.8e+19"),
    ],
    ids=["huge", "3e38"],
)
def test_a_huge_update_is_refused_and_the_round_goes_on(
    tmp_path, monkeypatch, change, security, why
):
    honest = FedAvg.client_update

    def client_update(self, phase, client, down, host):
        state, up = honest(self, phase, client, down, host)
        return state, self.Up(x=change(up.x), run=up.run) if host.client_id == 1 else up

    monkeypatch.setattr(FedAvg, "client_update", client_update)
    rounds = lines(private(tmp_path, "huge", security=security) / "rounds.jsonl")
    assert [r["completed"] for r in rounds] == [[0, 2, 3]] * 3
    assert all(why in r["dropped"]["1"] for r in rounds)
