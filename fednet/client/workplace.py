"""What a worker does with a task: load the client's state, run the client half of the method,
judge, write the new state.

Nothing here knows of sockets or time: a task and its payload go in, encoded replies come out.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from fednet import seeds
from fednet.algorithms.returned import finite
from fednet.algorithms.secure import Secure
from fednet.algorithms.state import State
from fednet.client.base_model import split_base_model, with_base_model
from fednet.client.book import Answers
from fednet.client.device import Device
from fednet.client.judging import ClientJudge, came_to, filled
from fednet.client.policy import Policy
from fednet.client.secrets import Secrets
from fednet.client.work import TaskCancelled
from fednet.data.federation import Site
from fednet.errors import ConfigError, RemoteProtocolError, StateAbsent, StateError
from fednet.experiment import privacy
from fednet.experiment.build import Experiment
from fednet.experiment.judging import Stopwatch, keeps_local
from fednet.experiment.store import ClientStore, Record
from fednet.files import digest
from fednet.robust import attacks
from fednet.tensors import Inputs, Tensors
from fednet.training.evaluation import Counts
from fednet.training.hosts import SiteHost
from fednet.training.lanes import Pack
from fednet.training.setting import Pair
from fednet.wire import messages as m
from fednet.wire.codec import Body, Encoded
from fednet.wire.messages import Key
from fednet.wire.payload import Payload, weights_of
from fednet.wire.sending import Past


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """One reply to send: an evaluation goes before the training it belongs to."""

    reply: m.Reply
    body: Body

    def with_(self, **changes: object) -> Answer:
        """The same answer with some fields of its reply changed."""
        return Answer(msgspec.structs.replace(self.reply, **changes), self.body)


class Workplace:
    """The clients that one process hosts, with one scratch model a slot.

    data: a function from client id to that client's `Site`. state_lost: begin anew where a client's
    state is missing. pack: where clients come together to be trained as one. policy: what may
    leave; without one, everything. answers: the account of what leaves with noise on it. secrets:
    what the clients keep to themselves in secure aggregation, together with other workplaces of
    this process.
    """

    def __init__(
        self,
        experiment: Experiment,
        store: ClientStore,
        site: Callable[[int], Site],
        device: str = "cpu",
        *,
        state_lost: bool = False,
        balanced: Callable[[], Pair] | None = None,
        pack: Pack | None = None,
        policy: Policy | None = None,
        answers: Answers | None = None,
        secrets: Secrets | None = None,
    ) -> None:
        """Nine arguments: what is computed, on whose data and where, and what may leave."""
        self.experiment, self.store, self.pack = experiment, store, pack
        self.policy, self._state_lost = policy or Policy(), state_lost
        self._secrets, self._account = secrets, answers.account if answers else None
        self.device = Device(device, site, lambda *at: self.experiment.scratch(*at))
        self._grounding = threading.Lock()
        # Digest, kind and form of the last payload whose values were found finite: others that are
        # sent the same need not be looked through again.
        self._sound: tuple[bytes, type[Payload], Sequence[m.Field]] | None = None
        drawn = answers is not None and answers.of(store.root.name)
        secret, personalised = store.root / "noise.key", experiment.algorithm.personalised
        self._noise = privacy.noise_of(experiment.config, "client", secret, drawn)
        self.keeps_local = keeps_local(experiment.config, personalised)
        own = (store, self.keeps_local, balanced, self.device.settle, state_lost)
        self._judging = lambda: ClientJudge(self.experiment, *own)
        self._judge = self._judging()

    @property
    def needs_state(self) -> bool:
        """Whether training starts from what the client kept: the method's state, its own buffers,
        or what its compressed uploads left out.
        """
        exp = self.experiment
        residuals = exp.down.shared or any(c.remembers for c in exp.up.chains.values())
        own = bool(dataclasses.fields(exp.algorithm.Client))  # type: ignore[arg-type]
        return own or residuals or exp.config.model.buffers == "local"

    def forget(self) -> None:
        self.device.forget()

    def warm(self) -> None:
        if not self.experiment.base_comes:
            self.device.warm(self.experiment.setting)

    # -- a task ------------------------------------------------------------------------------------
    def do(
        self,
        task: m.Task,
        body: memoryview,
        progress: Callable[[str, int, int], None],
        cancelled: Callable[[], bool],
    ) -> list[Answer]:
        """Raises TaskCancelled, StateError where the client's state is not here,
        RemoteProtocolError for a broken payload.
        """
        watch = Stopwatch(progress)
        if digest([body]) != task.check:
            raise RemoteProtocolError("the payload was damaged on its way")
        task, body = self._grounded(task, body)
        key, (record, start) = task.key, self._recorded(task)

        def step(done: int, of: int) -> None:
            progress("training", done, of)
            if cancelled():
                raise TaskCancelled(f"task of client {key.client} in round {key.round}")

        with self.device.stream():
            host = self._host(key, record, step)
            progress("loading", 0, 0)
            if key.purpose == "train":
                answers = self._train(task, body, record, start, host, watch.turn)
            else:
                judged = self._judge.all(task, body, record, start, host, watch.turn)
                answers = [self._judgement(key, judged)]
            self.device.settle()
            watch.turn("over", 0, 0)
        for answer in answers:
            self.policy.check_leaves(f.kind for f in answer.reply.form)
        seconds, split, reported = watch.seconds, watch.split, self._reported(host)
        return [
            answer.with_(
                seconds=seconds,
                split=split,
                reported=reported if answer.reply.key.purpose == "train" else {},
            )
            for answer in answers
        ]

    def _grounded(self, task: m.Task, body: memoryview) -> tuple[m.Task, memoryview]:
        """The task without the model that training starts from, which is taken in."""
        rest, body, sent = split_base_model(self.experiment, task, body)
        with self._grounding:
            if self.experiment.hollow:
                self.experiment = with_base_model(self.experiment, self.store.root, sent)
                self._judge = self._judging()
        return rest, body

    def _recorded(self, task: m.Task) -> tuple[Record, str]:
        """(what the client kept, the version that this is of); of a client that is to begin anew
        nothing, and "".
        """
        try:
            found = self.store.load(task.key.client, task.start, task.state)
            return found or Record(), task.start
        except StateError as missing:
            # What only the last judging needs is no reason not to train.
            needed = self.needs_state or task.key.purpose != "train"
            if not self._state_lost and (needed or not isinstance(missing, StateAbsent)):
                raise
            return Record(), ""

    def _host(self, key: Key, record: Record, step: Callable[[int, int], None]) -> SiteHost:
        setting = self.experiment.setting_of(key.client)
        site = self.device.site(key.client)
        return SiteHost(
            setting,
            self.device.scratch(setting),
            key.client,
            key.round,
            key.phase,
            train=self._samples(site, key.client),
            test=site.test,
            rest=record.own(setting.initial),
            progress=step,
            pack=self.pack,
        )

    def _lies(self, client: int) -> bool:
        """Whether a planned fault makes this client malicious, where this process serves faults."""
        config = self.experiment.config
        return self.policy.faults and client in attacks.malicious(config)

    def _as_sent(self, up: Payload, x: Tensors | None, key: Key) -> Payload:
        """The reply, or what a malicious client sends in its place. x: the weights it got."""
        if not self._lies(key.client):
            return up
        exp = self.experiment
        x = x if x is not None else exp.agreed
        return attacks.spoiled(up, x, exp.config, key.round, key.client)

    def _samples(self, site: Site, client: int) -> tuple[Inputs, torch.Tensor]:
        """The training split, with the labels that the client trains on."""
        x, y = site.train
        config = self.experiment.config
        if config.faults.malicious.attack == "label_flip" and self._lies(client):
            y = attacks.labels(y, self.experiment.setting.classes)
        return x, y

    def _reported(self, host: SiteHost) -> dict[str, float]:
        """What the method reported of the client. Raises ConfigError where that is too much."""
        if len(host.reported) > m.REPORTS:
            raise ConfigError(
                f"{self.experiment.config.algorithm.name} reports {len(host.reported)} numbers of "
                f"a client in a round; expected at most {m.REPORTS}."
            )
        allowed = self.policy.allow
        return host.reported if allowed is None or "statistics" in allowed else {}

    def _train(
        self,
        task: m.Task,
        body: memoryview,
        record: Record,
        start: str,
        host: SiteHost,
        progress: Callable[[str, int, int], None],
    ) -> list[Answer]:
        exp, method, key = self.experiment, self.experiment.algorithm, task.key
        past = record.past(f"down/{key.phase}/", key.round)
        state, down = self._received(task, body, record, host, past)
        x, host.secrets = weights_of(down), self._secrets
        progress("training", 0, 0)
        state, up = method.local(key.phase, state, down, host)
        main = key.phase == method.main_exchange
        came_to(method, up, host, wanted=main and self.keeps_local)
        up = self._as_sent(up, x, key)
        finite(up, exp.up.exempt)
        if exp.config.privacy.clip is not None:
            asked = privacy.Question.of(exp.config, self.store.root.name, task, record, body)
            own = privacy.at_client(exp.config)
            up = privacy.protect(up, x, own, self._noise, asked, self._account)
        if isinstance(method, Secure):
            up = method.masked(key.phase, up, down, x, host)
        progress("encoding", 0, 0)
        encoded = self._encoded(key, up, x, past)
        if method.in_memory and not main:
            return [_answer(key, encoded)]
        answers = []
        if task.judge and main:
            progress("evaluating", 0, 0)
            answers.append(self._judgement(key, self._judge.within(state, x, record, host)))
        progress("saving", 0, 0)
        kept = Record(algorithm=state, residuals=past.next or None)
        saved = self._save(task, start, kept, host.trained, main)
        return [*answers, _answer(key, encoded, *saved)]

    def _received(
        self, task: m.Task, body: memoryview, record: Record, host: SiteHost, past: Past
    ) -> tuple[State, Payload]:
        """(the client's state, enrolled where the task says so; what came down)."""
        exp, method = self.experiment, self.experiment.algorithm
        state = method.init_client(host.initial) if record.algorithm is None else record.algorithm
        cut, fill = sum(f.size for f in task.form[: task.enrol]), filled(exp, record)
        if task.enrol:
            assert method.Enrolment is not None
            form = task.form[: task.enrol]
            enrolment = exp.down.decode(method.Enrolment, form, body[:cut], fill=fill)
            state = method.enrolled(state, enrolment, host)
        kind, form = method.exchanges[task.key.phase].down, task.form[task.enrol :]
        here = (task.check, kind, form)
        sound = self._sound == here
        down = exp.down.decode(kind, form, body[cut:], exp.agreed, fill, sound, past)
        if exp.down.alone(kind) and not cut:
            self._sound = here
        return state, down

    def _encoded(self, key: Key, up: Payload, x: Tensors | None, past: Past) -> Encoded:
        """The reply, compressed; what follows from it is written down in `past`."""
        exp = self.experiment
        return exp.up.encode(
            up,
            lambda name: seeds.rng(
                exp.config.seed, f"compress/up/{key.phase}/{name}", key.round, key.client
            ),
            past.next,
            x if x is not None else exp.agreed,
            past=dataclasses.replace(past, where=f"{key.phase}/"),
        )

    def _save(
        self, task: m.Task, start: str, kept: Record, local: Tensors | None, main: bool
    ) -> tuple[str, bool]:
        """Writes what the client keeps of this task. local: its model as trained. (SHA-256 of what
        is kept, whether there is anything).
        """
        key, keeps_local = task.key, self.keeps_local and main and local is not None
        if self.experiment.config.model.buffers == "local" and local is not None:
            kept = kept.replace(buffers=local.buffers, counters=local.counters)
        # A version says, too, that the client has had what is sent once.
        keep = keeps_local or not kept.empty or self.experiment.base_comes
        if keep:
            model = None
            if keeps_local and local is not None:
                model = local.to("cpu")
            elif self.keeps_local:
                model = self.store.local(key.client, start, self._state_lost)
            self.store.save(key.client, key.version, kept, model)
            self.store.prune(key.client, key.version, (start, task.keep))
        return kept.sha256(), keep

    def _judgement(self, key: Key, judged: Mapping[str, Counts | None]) -> Answer:
        encoded = self.experiment.up.encode(self._judge.payload(judged))
        return _answer(msgspec.structs.replace(key, purpose="evaluate"), encoded)


def _answer(key: Key, encoded: Encoded, state: str = "", kept: bool = False) -> Answer:
    body = encoded.body
    return Answer(
        m.Reply(
            key=key,
            form=list(encoded.form),
            size=body.size,
            check=body.check(),
            state=state,
            kept=kept,
        ),
        body,
    )
