"""What a server lets in: addresses and keys that may be used, messages and payloads that can be
what they say.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fednet.config import Config, TrainSection, to_yaml
from fednet.errors import ConfigError
from fednet.protocol.tasks import Rules
from fednet.transport.zeromq.sockets import check_address
from fednet.wire.messages import MAX_HEADER, MIN_BEAT_S, Field, Key

if TYPE_CHECKING:
    import torch

    from fednet.experiment.build import Experiment
    from fednet.server.spool.reply import Spooled
    from fednet.tensors import Tensors
    from fednet.training.setting import Pair
    from fednet.transport.keys import Keyring
    from fednet.wire.payload import Payload, Run, Samples
    from fednet.wire.sending import Past

STEPS = 100
BEATS = 1000  # a second, of all clients, were each a process of its own
MAX_CONFIG = MAX_HEADER - (1 << 12)  # bytes: what else its message says stands beside it
HUGE = 1.8e19  # the square of a larger norm is no float32
LOOPBACK = ("127.", "localhost", "[::1]")


class Sent(dict[int, "Tensors"]):
    """The weights that each client was sent with its last task. remembered: what the phase that was
    opened last began with of what compressors remember. The phases write both, the checks of
    replies read them.
    """

    remembered: Mapping[str, torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.remembered = {}

    def past(self, key: Key) -> Past:
        """To check a reply with: what follows from it is not remembered."""
        from fednet.wire.sending import Past

        return Past(self.remembered, {}, f"client {key.client}/up/{key.phase}/", key.round)


def as_sent(config: Config) -> str:
    """The configuration as clients are sent it when they join. Raises ConfigError where it is
    longer than what any would take.
    """
    text = to_yaml(config)
    size = len(text.encode())
    if size > MAX_CONFIG:
        raise ConfigError(
            f"the configuration has {size} bytes as a client is sent it, every default filled in; "
            f"{MAX_CONFIG} cross at most. link.per_client takes ranges of ids, and a division of "
            f"the data, a trace or a part of your own a file."
        )
    return text


def beat_seconds(config: Config) -> float:
    """How often a worker is to be heard of. Where there may be thousands, less often, as far as
    `round.lost.silent` lets it: their beats would take the time of what they reply.
    """
    lost = config.round.lost
    if lost.beat is not None:
        return lost.beat
    most = 60.0 if lost.silent is None else lost.silent / 4
    often = min(2.0, most, math.inf if lost.closed is None else lost.closed / 2)
    return max(MIN_BEAT_S, often, min(config.clients / BEATS, most))


def patience(config: Config) -> Rules:
    """How long is waited for whom, from the first connection on."""
    section = config.round
    return Rules(
        closed=section.lost.closed,
        silent=section.lost.silent,
        join=section.join_s(),
        stalled=section.lost.stalled,
    )


def declared(exp: Experiment) -> Callable[[Key, Sequence[Field]], None]:
    """Refuses a reply whose form and sizes are not what the method declares, before its body is
    asked for.
    """
    from fednet.experiment.judging import Judgement

    def check(key: Key, form: Sequence[Field]) -> None:
        kind = Judgement if key.purpose == "evaluate" else exp.algorithm.exchanges[key.phase].up
        exp.up.check(kind, form, exp.bounds(kind, key.client, key.round), key.round)

    return check


def checker(
    exp: Experiment,
    sent: Sent,
    samples: Callable[[int], int | None],
    tested: Callable[[int], tuple[int, int]],
) -> Callable[[Spooled, memoryview], Payload | None]:
    """What a reply must be, beyond its form: finite values, samples as this federation has them, no
    more of them than there can be, and an update within `security.max_norm`. What passes, the
    methods can fold; it is returned where they would be given the very same. samples(client): how
    many it may have trained on, by the partition or as its site declared; None: not known.
    tested(client): labels or values that it may have tested a model on, in its own test set and in
    the balanced one.
    """
    from fednet.errors import RemoteProtocolError
    from fednet.experiment.judging import Judgement
    from fednet.experiment.privacy import updates
    from fednet.tensors import Tensors
    from fednet.wire.payload import Samples, run_of
    from fednet.wire.sending import ANEW

    reference = exp.setting.initial.select(exp.shared)
    as_it_is = {exchange.up for exchange in exp.algorithm.exchanges if exp.up.alone(exchange.up)}

    def check(reply: Spooled, body: memoryview) -> Payload | None:
        key = reply.key
        past = sent.past(key) if exp.up.chains else ANEW
        kind = Judgement if key.purpose == "evaluate" else exp.algorithm.exchanges[key.phase].up
        payload = exp.up.decode(kind, reply.form, body, reference, reference, True, past)
        if isinstance(payload, Judgement):
            payload.check(exp.setting.counts_width, *tested(key.client))
            return None
        made = payload if kind in as_it_is else None
        for name in payload.fields:
            value = getattr(payload, name)
            if isinstance(value, Tensors):
                exp.up.finite(value, name)
                # the mean, or the next training, would leave the finite numbers: one peer could end
                # everybody's run
                if not math.isfinite(value.square):
                    raise RemoteProtocolError(
                        f"field {name}: a norm above {HUGE:.2g}, where float32 ends"
                    )
            if isinstance(value, Samples):
                _check_samples(value, name, exp)
        run = run_of(payload)
        most_samples = samples(key.client)
        if run is not None and most_samples is not None:
            _check_run(run, most_samples, exp.config.train)
        most = exp.config.security.max_norm
        if isinstance(most, float) and key.purpose == "train":
            x = sent.get(key.client)
            if x is not None:  # a compressed state is a difference to x
                payload = exp.up.decode(kind, reply.form, body, x, reference, False, past)
            for name, _, norm in updates(payload, x):
                if norm > most:
                    raise RemoteProtocolError(
                        f"{name} is an update of norm {norm:.4g}; security.max_norm allows {most:g}"
                    )
        return made

    return check


def _check_samples(value: Samples, name: str, exp: Experiment) -> None:
    """Samples are as those of this federation: of its shape, in a mapping only where its own are,
    with one label each below `classes`.
    """
    from fednet.errors import RemoteProtocolError

    classes, labels, x = exp.setting.classes, value.y, value.x
    mapped = exp.data is not None and isinstance(exp.data.train[0], dict)
    if isinstance(x, dict) != mapped:
        raise RemoteProtocolError(
            f"field {name}: samples {'in' if isinstance(x, dict) else 'without'} a mapping, unlike "
            f"this federation's"
        )
    if not isinstance(x, dict) and tuple(x.shape[1:]) != tuple(exp.input_shape):
        raise RemoteProtocolError(
            f"field {name}: samples of shape {tuple(x.shape[1:])}, expected "
            f"{tuple(exp.input_shape)}"
        )
    if not classes:
        return
    if labels.dim() != 1 or labels.is_floating_point():
        raise RemoteProtocolError(
            f"field {name}: labels of shape {tuple(labels.shape)} and type {labels.dtype}, "
            f"expected one whole number a sample"
        )
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise RemoteProtocolError(
            f"field {name}: labels from {int(labels.min())} to {int(labels.max())}, expected 0 to "
            f"{classes - 1}"
        )


def _check_run(run: Run, samples: int, train: TrainSection) -> None:
    """No more samples than the client has, and no more steps than `STEPS` passes in batches of one
    would take for each pass that the configuration asks for: methods may train more than once.
    """
    from fednet.errors import RemoteProtocolError

    if run.n > samples:
        raise RemoteProtocolError(f"it says it has {run.n} samples; there are {samples} for it")
    most = STEPS * max(train.steps or 0, max(1, train.epochs) * max(1, samples))
    if run.steps > most:
        raise RemoteProtocolError(
            f"it says it took {run.steps} steps; {most} would be {STEPS} times those "
            f"of its configuration"
        )


def judges(exp: Experiment, device: str) -> tuple[Pair | None, Pair | None]:
    """The server's test set and validation set as model inputs, where it has them and judges by
    them.
    """
    if exp.federation is None or not exp.config.evaluate.every:
        return None, None
    data = exp.federation.data
    test = (data.inputs(data.test[0], device), data.test[1].to(device)) if data.n_test else None
    held = exp.federation.validation_data()
    return test, (
        held.inputs(held.train[0], device),
        held.train[1].to(device),
    ) if held is not None else None


def check_bind(
    bind: str, curve: bool, insecure: bool, keyed: str = "security.curve: true and --keys DIR"
) -> None:
    """Before anything is made: what an address may be. keyed: what asks for keys. Raises
    ConfigError.
    """
    check_address(bind)
    scheme, _, rest = bind.partition("://")
    if scheme != "tcp" or curve or insecure or rest.startswith(LOOPBACK):
        return
    raise ConfigError(
        f"--bind {bind}: beyond loopback anyone could take part; use CURVE keys ({keyed}), or "
        f"--insecure."
    )


def keyring_of(config: Config, keys: Path | None) -> Keyring | None:
    if not config.security.curve:
        if keys is not None:  # whoever gives keys believes that they are used
            raise ConfigError(
                f"--keys {keys}: is given while security.curve is false; add --set "
                f"security.curve=true."
            )
        return None
    from fednet.transport.keys import Keyring

    where = keys or (Path(config.security.keys) if config.security.keys else None)
    if where is None:
        raise ConfigError(
            "security.curve: true needs the server's keys: --keys DIR or security.keys (make them "
            "by: fednet keys server DIR)."
        )
    return Keyring(where)


def run_keys(config: Config, directory: Path) -> Path | None:
    """The CURVE keys of a run whose server and workers are in one hand: those that the
    configuration names, as `fednet keys lab` lays them, or new ones in the run's directory.
    """
    if not config.security.curve:
        return None
    from fednet.transport import keys

    if config.security.keys:
        given = Path(config.security.keys)
        keys.load(given / "clients" / "all.key")  # an error now rather than in each worker
        return given
    folder = directory / "keys"
    if not (folder / "clients" / "all.key").exists():
        shutil.rmtree(folder, ignore_errors=True)  # half made by one that was interrupted
        server = keys.make_server_keys(folder)
        keys.allow(
            folder,
            range(config.clients),
            keys.make_client_keys(folder / "clients" / "all.key", server),
        )
    return folder
