"""What a reply must be before it may be aggregated: of the form that its method declares, which is
checked before a byte of its payload is asked for; then of values that the method can use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from fednet.errors import FednetError, RemoteProtocolError, no_memory
from fednet.experiment.build import Experiment
from fednet.experiment.evaluations import EvaluationReply
from fednet.experiment.privacy import updates
from fednet.loading import WrongPart, error_text
from fednet.server.inbox import ReceivedReply
from fednet.tensors import Tensors
from fednet.wire import messages as m
from fednet.wire.body import Body
from fednet.wire.codec import cut
from fednet.wire.compressors.base import Memory
from fednet.wire.messages import Field, Key
from fednet.wire.payload import LocalRun, Payload, Samples

STEPS = 100  # passes in batches of one, for each that is configured: more steps are refused
HUGE = 1.8e19  # the square of a larger norm is no float32


class SentModels(dict[int, Tensors]):
    """What replies are decoded with: the weights that each client was sent with its last task.
    remembered: what compressors remembered as the exchange was opened. fill: the model that buffers
    are taken from where the clients' do not cross; None: not known before a reply is counted. The
    rounds write it before tasks go out, the inbox reads it.
    """

    remembered: Mapping[str, torch.Tensor]
    fill: Tensors | None

    def __init__(self) -> None:
        super().__init__()
        self.remembered = {}
        self.fill = None


def form_check(exp: Experiment) -> Callable[[Key, Sequence[Field], bool], None]:
    """Refuses a reply whose form and sizes are not what the method declares, before its body is
    asked for; with an evaluation behind it where the task asks for one.
    """

    # By phase, purpose and whether an evaluation is within: a form that is as declared, where this
    # depends on nothing else.
    known: dict[tuple[int, str, bool], Sequence[Field]] = {}

    def check(key: Key, form: Sequence[Field], evaluates: bool) -> None:
        case = key.phase, key.purpose, evaluates
        if form != known.get(case):
            compare(key, form, evaluates)
            if not exp.sized_by_client:
                known[case] = form

    def compare(key: Key, form: Sequence[Field], evaluates: bool) -> None:
        kind: type[Payload]
        if key.purpose == "train":
            kind = exp.algorithm.exchanges[key.phase].up
            own = form[: len(kind.fields)] if evaluates else form
            exp.up.check(kind, own, exp.bounds(kind, key.client, key.round))
            form = form[len(kind.fields) :]
        if evaluates or key.purpose == "evaluate":
            kind = exp.evaluation_reply
            exp.up.check(kind, form, exp.bounds(kind, key.client, key.round))

    return check


def evaluation_in(
    exp: Experiment, form: Sequence[Field], body: Body, tested: tuple[int, int]
) -> EvaluationReply:
    """A client's evaluation, whose form was checked when it was announced. Raises
    RemoteProtocolError for one that cannot be of this client.
    """
    counts = exp.up.decode(exp.evaluation_reply, form, body, sound=True)
    counts.check(exp.setting.counts_width, *tested, exp.setting.more)
    return counts


class ReplyDecoder:
    """Decodes replies, and checks what they must be beyond their form: finite values, samples as
    this federation has them, no more of them than there can be, and an update within
    `security.max_norm`. What passes can be used by the methods.

    samples(client): how many it may have trained on, by the partition or as its site declared;
    None: not known. tested(client): labels or values that it may have tested a model on, in its own
    test set and in the balanced one.
    """

    def __init__(
        self,
        exp: Experiment,
        sent: SentModels,
        samples: Callable[[int], int | None],
        tested: Callable[[int], tuple[int, int]],
    ) -> None:
        self._exp = exp
        self._sent = sent
        self._samples = samples
        self._tested = tested
        self._initial = exp.setting.initial.select(exp.shared)
        ups = [exchange.up for exchange in exp.algorithm.exchanges]
        self._self_contained = {up for up in ups if exp.up.self_contained(up)}

    def decode(
        self, replies: Sequence[ReceivedReply], bodies: Sequence[Body]
    ) -> Sequence[Payload | None]:
        """Returns the payloads of replies to one exchange, of one form; None of those that depend
        on a model which is not known yet. Raises RemoteProtocolError or WrongPart where the methods
        could not use one of them.
        """
        exp = self._exp
        sent = self._sent
        key = replies[0].key
        form: Sequence[Field] = replies[0].message.form
        if key.purpose == "evaluate":
            clients = [reply.key.client for reply in replies]
            return [
                evaluation_in(exp, form, body, self._tested(client))
                for client, body in zip(clients, bodies)
            ]
        kind = exp.algorithm.exchanges[key.phase].up
        evaluation_form: Sequence[Field] = ()
        evaluations: list[Body] = []
        if len(form) > len(kind.fields):
            cuts = [cut(form, body, len(kind.fields)) for body in bodies]
            (form, _), (evaluation_form, _) = cuts[0]
            bodies = [own for (_, own), _ in cuts]
            evaluations = [rest for _, (_, rest) in cuts]
        fill = self._initial if sent.fill is None else sent.fill
        try:
            if exp.up.compresses(kind):
                payloads = [
                    self._decompressed(reply, kind, form, body, fill)
                    for reply, body in zip(replies, bodies)
                ]
            else:
                payloads = exp.up.decode_all(kind, form, bodies, fill=fill, sound=True)
        except Exception as broken:
            if isinstance(broken, FednetError) or no_memory(broken):
                raise
            # A compressor of the user's own failed at bytes that a client may choose: the run goes
            # on without them.
            raise WrongPart(m.clean(error_text(broken, anywhere=True))) from broken
        self._check(kind, replies, payloads)
        for reply, body in zip(replies, evaluations):
            tested = self._tested(reply.key.client)
            try:
                reply.evaluation = evaluation_in(exp, evaluation_form, body, tested)
            except RemoteProtocolError as broken:  # it decides nothing of the training
                reply.evaluation_refused = str(broken)
        if kind not in self._self_contained and sent.fill is None:
            for reply in replies:
                reply.remembered.clear()
            return [None] * len(payloads)
        return payloads

    def _decompressed(
        self,
        reply: ReceivedReply,
        kind: type[Payload],
        form: Sequence[Field],
        body: Body,
        fill: Tensors,
    ) -> Payload:
        key = reply.key
        # A compressed state is a difference to what the client was sent.
        x = self._sent.get(key.client, self._initial)
        prefix = f"client {key.client}/up/{key.phase}/"
        past = Memory(self._sent.remembered, reply.remembered, prefix)
        return self._exp.up.decode(kind, form, body, x, fill, True, past)

    def _check(
        self, kind: type[Payload], replies: Sequence[ReceivedReply], payloads: Sequence[Payload]
    ) -> None:
        """Raises RemoteProtocolError for values that cannot be. Notes the norms in the replies."""
        exp = self._exp
        for name, field in kind.fields.items():
            values = [getattr(payload, name) for payload in payloads]
            if isinstance(values[0], Tensors):
                noted = field.kind not in exp.up.chains
                for reply, value in zip(replies, values):
                    exp.up.finite(value, name)
                    # the mean, or the next training, would leave the finite numbers: one peer could
                    # end everybody's run
                    norm = value.rough_norm
                    if not math.isfinite(norm):
                        raise RemoteProtocolError(
                            f"field {name}: a norm above {HUGE:.2g}, where float32 ends"
                        )
                    if noted:
                        reply.norms[name] = norm
            elif isinstance(values[0], Samples):
                for value in values:
                    _check_samples(value, name, exp)
        if kind.run_field is not None:
            for reply, payload in zip(replies, payloads):
                self._check_run(reply.key.client, getattr(payload, kind.run_field))
        most_norm = exp.config.security.max_norm
        if isinstance(most_norm, float):
            for reply, payload in zip(replies, payloads):
                for name, _, update in updates(payload, self._sent.get(reply.key.client)):
                    norm = update.norm()
                    if norm > most_norm:
                        raise RemoteProtocolError(
                            f"{name} is an update of norm {norm:.4g}; security.max_norm allows "
                            f"{most_norm:g}"
                        )

    def _check_run(self, client: int, run: LocalRun) -> None:
        most_samples = self._samples(client)
        if most_samples is None:
            return
        if run.n > most_samples:
            raise RemoteProtocolError(f"it reports {run.n} samples, but has {most_samples}")
        # Methods may train more often than the configuration asks for.
        train = self._exp.config.train_of(client)
        most_steps = STEPS * max(train.steps or 0, max(1, train.epochs) * max(1, most_samples))
        if run.steps > most_steps:
            raise RemoteProtocolError(
                f"it says it took {run.steps} steps; {most_steps} would be {STEPS} times those "
                f"of its configuration"
            )


def _check_samples(value: Samples, name: str, exp: Experiment) -> None:
    """Samples are as those of this federation: of its shape, in a mapping only where its own are,
    with one label each below `classes`.
    """
    classes = exp.setting.classes
    labels = value.y
    x = value.x
    mapped = exp.data is not None and isinstance(exp.data.train[0], dict)
    alike = isinstance(x, dict) == mapped
    if alike and not isinstance(x, dict):
        alike = tuple(x.shape[1:]) == tuple(exp.input_shape)
    if classes and (labels.dim() != 1 or labels.is_floating_point()):
        alike = False
    elif classes and len(labels):
        alike = alike and 0 <= int(labels.min()) <= int(labels.max()) < classes
    if not alike:
        raise RemoteProtocolError(
            f"field {name}: samples of another form than this federation's, of shape "
            f"{tuple(exp.input_shape)} with a label below {classes}"
        )
