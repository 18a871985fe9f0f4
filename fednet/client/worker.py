"""A worker does the tasks of a process's clients on one device: it takes a task and its payload,
and returns the encoded reply. It knows of no socket.

`Worker.work` is a whole task, from top to bottom.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import torch

from fednet import seeds
from fednet.algorithms.making import is_secure
from fednet.algorithms.returned import finite
from fednet.algorithms.state import State
from fednet.client import evaluation
from fednet.client.books import Answers, MaskedAccount
from fednet.client.policy import Policy
from fednet.client.stages import Stages
from fednet.client.untouched import Untouched
from fednet.data.federation import Site
from fednet.errors import BaseAbsent, ConfigError, RemoteProtocolError, StateAbsent
from fednet.experiment import privacy
from fednet.experiment.build import Experiment
from fednet.experiment.evaluations import SPLIT
from fednet.experiment.store import ClientStore, Record
from fednet.files import write_aside
from fednet.models.start import BASE, unpack_state_dict
from fednet.registry import shipped
from fednet.robust import attacks
from fednet.tensors import Tensors
from fednet.training.hosts import ClientHost
from fednet.training.loop import Descent
from fednet.training.scratch import Scratch
from fednet.training.setting import Pair, Setting, Splits
from fednet.wire import messages as m
from fednet.wire.body import Body
from fednet.wire.codec import PLAIN, Compression, cut
from fednet.wire.compressors.base import Memory
from fednet.wire.payload import LocalRun, Payload, tensors_of, weights_of

NO_STREAM = contextlib.nullcontext()
CACHED_SHARE = 0.1  # of a GPU's memory for clients' data: what `slots.SPARE` leaves


class Device:
    """Holds a device's data, and a scratch model of each setting for each thread. Any thread may
    call it. load(client) returns a client's data. packed: one thread alone works on it.
    """

    def __init__(self, name: str, load: Callable[[int], Site], packed: bool = False) -> None:
        self.device = torch.device(name)
        self.packed = packed
        self._load = load
        self._sites: OrderedDict[int, Site] = OrderedDict()
        self._held = 0  # bytes
        self._lock = threading.Lock()
        self._own = threading.local()
        self._most = 0
        if self.device.type == "cuda":
            self._most = int(torch.cuda.mem_get_info(self.device)[1] * CACHED_SHARE)

    def site(self, client: int) -> Site:
        """Returns the client's data on the device. On a GPU they stay there; those that were not
        used for longest are dropped when there are too many. On the CPU it costs less to gather
        them for each task (1 ms for 500 images of 3 kB) than to have them in memory twice.
        """
        if self.device.type == "cpu":
            return self._load(client)
        with self._lock:
            if client in self._sites:
                self._sites.move_to_end(client)
                return self._sites[client]
            found = self._load(client)
            held = found.nbytes
            self.synchronize()
            self._sites[client] = found
            self._held += held
            while self._held > self._most and len(self._sites) > 1:
                _, old = self._sites.popitem(last=False)
                self._held -= old.nbytes
            return found

    def forget(self) -> None:
        """Drops the data that are kept for later tasks."""
        with self._lock:
            self._sites.clear()
            self._held = 0

    def forget_scratch(self) -> None:
        """Drops the scratch models of the calling thread, which does no tasks any more."""
        self._own.scratch = {}

    def synchronize(self) -> None:
        """Waits for what this thread's stream computes, so that other streams may use it."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def scratch(self, experiment: Experiment, setting: Setting) -> Scratch:
        """Returns this thread's scratch model for a setting of the experiment."""
        if not hasattr(self._own, "scratch"):
            self._own.scratch = {}
        found: dict[Setting, Scratch] = self._own.scratch
        if setting not in found:
            found[setting] = experiment.scratch(self.device, setting)
        return found[setting]

    def stream(self) -> AbstractContextManager[object]:
        """Returns this thread's CUDA stream as a context. On the CPU, and where clients are packed,
        a context that does nothing. A client has no stream of its own: what is freed in a stream is
        kept for that stream alone.
        """
        if self.device.type != "cuda" or self.packed:
            return NO_STREAM
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self.device)
        return torch.cuda.stream(self._own.stream)


class Worker:
    """Does tasks on one device, with one scratch model a thread. Any thread may call it.

    site(client) returns a client's data. balanced() returns a test set with as many samples of each
    class; None where there is none. pack(descent) trains clients together. policy: what may leave.
    answers is the account of what leaves with noise. secrets are the clients' keys in secure
    aggregation, which all workers of a process share.
    """

    def __init__(
        self,
        experiment: Experiment,
        store: ClientStore,
        site: Callable[[int], Site],
        device: str,
        *,
        balanced: Callable[[], Pair] | None,
        pack: Callable[[Descent], LocalRun] | None,
        policy: Policy,
        answers: Answers | None,
        secrets: MaskedAccount | None,
    ) -> None:
        config = experiment.config
        method = experiment.algorithm
        self.experiment = experiment
        self.store = store
        self.pack = pack
        self.policy = policy
        self.device = Device(device, site, packed=pack is not None)
        self.keeps_local = evaluation.keeps_local(config, method.personalised)
        self._secrets = secrets
        self._account = answers.account if answers else None
        self._noise = privacy.noise_of(
            config,
            "client",
            store.root / "noise.key",
            drawn=answers is not None and answers.answered_in(store.root.name),
        )
        self._balanced = balanced
        self._balanced_set: Pair | None = None
        self._lock = threading.Lock()
        self._untouched = Untouched(config.algorithm.name)
        # A user's own method may change what it was given, or what it has returned. fednet's own
        # do not, which tests/contract holds each of them to: large models save the time.
        self._checked = not shipped(type(method).__module__)
        self._malicious = attacks.malicious(config)
        self._masks = is_secure(method)
        self._main = method.main_exchange
        has_state = bool(dataclasses.fields(method.Client))  # type: ignore[arg-type]
        # What a client has that kept nothing yet. Where the method has no state, one for all.
        self._new = Record(algorithm=None if has_state else method.Client())
        # Whether a training needs what the client's last one left here: the method's state, the
        # client's own buffers, its optimizer's state, and what its compressed uploads left out.
        self._needs_past = (
            has_state
            or experiment.down.shared
            or any(chain.remembers for chain in experiment.up.chains.values())
            or config.model.buffers == "local"
            or config.train.keep_optimizer
        )
        # Whether a training leaves anything here. With a base model a version also says that the
        # client has had what is sent once.
        self._keeps = self._needs_past or self.keeps_local or experiment.base_comes
        # By field of the last broadcast: its tensors, and their copy on this device.
        self._copies: dict[str, tuple[Tensors, Tensors]] = {}
        self._broadcast: _Broadcast | None = None  # the last one that others may get too

    def warm(self) -> None:
        """Builds the scratch model, and imports what the first step would. On a GPU the first task
        does, since that may wait for memory.
        """
        exp = self.experiment
        if not exp.base_comes and self.device.device.type == "cpu":
            self.device.scratch(exp, exp.setting)

    # -- a task ------------------------------------------------------------------------------------
    def work(
        self, task: m.Task, body: Body, stages: Stages, check: bytes | None = None
    ) -> tuple[m.Reply, Body]:
        """Does a task; returns the reply and its payload, in which an evaluation within the task
        comes after the method's fields.

        check: the digest of the body, if it is known already. What `stages` raises ends the task.
        Raises RemoteProtocolError for a damaged payload, StateError where the client's state is
        not here, ConfigError for what this site does not let out.
        """
        # A task that came by reference is from a server in this process. A reply that goes back by
        # reference has no digest: to compute one, its tensors would have to be made into bytes.
        here = body.by_reference
        if not here and (check or body.digest()) != task.check:
            raise RemoteProtocolError("the payload was damaged on its way")
        base: memoryview | None = None
        if self.experiment.base_comes and task.enrol and task.form[0].kind == BASE:
            # The base model is in front of what is sent once, in the client's first task.
            size = task.form[0].size
            first, body = body.split(task.form, 1)
            base = first.to_bytes()
            task = msgspec.structs.replace(
                task, form=list(task.form[1:]), enrol=task.enrol - 1, size=task.size - size
            )
        with self._lock:
            if self.experiment.hollow:
                self.experiment = with_base_model(self.experiment, self.store.root, base)
            exp = self.experiment
        config = exp.config
        method = exp.algorithm
        key = task.key
        record, start = self._load(task) if task.start else (self._new, "")
        # A planned fault, where this site allows such faults.
        malicious = self.policy.faults and key.client in self._malicious
        state_sha256 = ""
        kept = False

        # A model that comes without buffers gets the client's own, or the initial ones.
        setting = exp.setting_of(key.client)
        own = record.own(setting.initial)
        fill = exp.initial_shared if own is None else own.select(exp.shared)

        with self.device.stream():
            site = self.device.site(key.client)
            splits: Splits | Site = site
            if malicious and config.faults.malicious.attack == "label_flip":
                inputs, labels = site.train
                flipped = attacks.flipped_labels(labels, exp.setting.classes)
                splits = Splits((inputs, flipped), site.test)
            host = ClientHost(
                setting,
                self.device.scratch(exp, setting),
                key.client,
                key.round,
                key.phase,
                splits=splits,
                rest=own,
                progress=stages.trained,
                pack=self.pack,
            )
            try:
                if key.purpose != "train":
                    newest = exp.exact.decode(exp.evaluation, task.form, body, fill=fill)
                    stages.enter("evaluating")
                    local = self.store.local(key.client, start)
                    balanced = None if self._balanced is None else self._load_balanced
                    found = evaluation.evaluate_in_own_task(
                        exp, task, newest, local, record, host, balanced
                    )
                    encoded = exp.up.encode(evaluation.reply(exp, found))
                    form = encoded.form
                    sent = encoded.body
                else:
                    main = key.phase == self._main
                    past = record.past(f"down/{key.phase}/")
                    state, down = self._decode(exp, task, body, record, fill, host, past)
                    x = weights_of(down)
                    reference = exp.initial_shared if x is None else x

                    host.secrets = self._secrets
                    if config.train.keep_optimizer:
                        host.memory = past.next
                    stages.enter("training")
                    given = [setting.initial, *tensors_of(down).values()] if self._checked else []
                    if given:
                        self._untouched.lend(given)
                    try:
                        state, up = method.client_update(key.phase, state, down, host)
                    finally:
                        if given:
                            self._untouched.take_back(given)
                    if host.trained is None:
                        evaluation.set_trained(method, up, host, wanted=main and self.keeps_local)

                    if malicious:
                        up = attacks.attacked_reply(up, reference, config, key.round, key.client)
                    finite(up, exp.up.exempt)
                    if config.privacy.clip is not None:
                        question = privacy.Question.of(
                            config, self.store.root.name, task, record, body.to_bytes()
                        )
                        section = privacy.at_client(config)
                        up = privacy.protect(up, x, section, self._noise, question, self._account)
                    if self._masks:
                        assert is_secure(method)
                        up = method.mask_reply(key.phase, up, down, x, host)

                    stages.enter("encoding")
                    how = PLAIN
                    if exp.up.chains:
                        how = Compression(
                            lambda name: seeds.rng(
                                config.seed,
                                f"compress/up/{key.phase}/{name}",
                                key.round,
                                key.client,
                            ),
                            Memory(past.next, past.next, f"{key.phase}/"),
                            Memory(past.known, past.next, f"{key.phase}/"),
                            reference,
                        )
                    encoded = exp.up.encode(up, how, stay=here)
                    form = encoded.form
                    sent = encoded.body
                    if self._checked:
                        sent = sent.copy()
                    if task.evaluates and main:
                        stages.enter("evaluating")
                        found = evaluation.evaluate_in_training_task(exp, state, x, record, host)
                        evaluated = exp.up.encode(evaluation.reply(exp, found))
                        form += evaluated.form
                        sent = Body([*sent.values, *evaluated.body.values])
                    keeps = self._keeps or task.start  # which a run resumed otherwise may have
                    if keeps and method.exchanges[key.phase].summation.trains:
                        next_record = Record(algorithm=state, residuals=past.next or None)
                        state_sha256, kept = self._save(
                            task, start, next_record, host.trained, main, stages
                        )
            finally:
                host.close()
            self.device.synchronize()
            stages.enter("over")

        if len(host.reported) > m.REPORTS:
            raise ConfigError(
                f"{config.algorithm.name} reports {len(host.reported)} numbers of a client in a "
                f"round; expected at most {m.REPORTS}."
            )
        reported = host.reported
        if self.policy.allow is not None:
            self.policy.check_leaves(form)
            if "statistics" not in self.policy.allow:
                reported = {}
        reply = m.Reply(
            run=task.run,
            inc=task.inc,
            key=key,
            form=list(form),
            size=sent.size,
            check=b"" if here and sent.by_reference else sent.digest(),
            state=state_sha256,
            kept=kept,
            seconds=sum(stages.seconds.values()),
            split=[stages.seconds[name] for name in SPLIT],
            reported=reported,
        )
        return reply, sent

    def _load(self, task: m.Task) -> tuple[Record, str]:
        """Returns what the client kept, and its version: "" where it is lost, and not needed."""
        key = task.key
        trains_anew = key.purpose == "train" and not self._needs_past
        if trains_anew and key.phase == self._main:
            return self._new, task.start  # a version that only an evaluation would read
        try:
            return self.store.load(key.client, task.start, task.state), task.start
        except StateAbsent:
            # The client trains all the same if only the last evaluation needs what is lost.
            if not trains_anew:
                raise
            return self._new, ""

    def _decode(
        self,
        exp: Experiment,
        task: m.Task,
        body: Body,
        record: Record,
        fill: Tensors,
        host: ClientHost,
        past: Memory,
    ) -> tuple[State, Payload]:
        """Returns the client's state, which an enrolment in the task changes, and the broadcast."""
        method = exp.algorithm
        state = method.init_client(host.initial) if record.algorithm is None else record.algorithm
        form = task.form
        if task.enrol:
            if method.Enrolment is None:
                raise RemoteProtocolError("the task enrols a client, which this method does not")
            given, (form, body) = cut(form, body, task.enrol)
            enrolment = exp.down.decode(method.Enrolment, *given, fill=fill)
            state = method.receive_enrolment(state, enrolment, host)
        kind = method.exchanges[task.key.phase].down
        # Most clients get the same broadcast: it is decoded once, where nothing of their own is in
        # it and no method writes to it. A large one is not kept, unless clients are packed, of
        # which each would have a copy.
        last = self._broadcast
        if last is not None and not task.enrol and last.is_in(task, kind, body):
            down = last.payload
        else:
            down = exp.down.decode(kind, form, body, exp.initial_shared, fill, past=past)
            alike = not (task.enrol or self._checked) and exp.down.self_contained(kind)
            if alike and (self.device.packed or body.size <= m.BESIDE):
                self._broadcast = _Broadcast(kind, list(form), task.check, body, down)
        if body.by_reference and self.device.device.type != "cpu" and method.only_sums:
            # One copy of the tensors on this device, for all clients that get this broadcast.
            moved: dict[str, Tensors] = {}
            with self._lock:
                known = self._copies
                self._copies = {}
                for name, value in tensors_of(down).items():
                    source, copy = known.get(name, (None, value))
                    if source is not value:
                        copy = value.to(self.device.device)
                    self._copies[name] = value, copy
                    # This client's own; those of a pack all begin with the same tensors.
                    moved[name] = copy if self.device.packed else copy.clone()
                self.device.synchronize()
            down = dataclasses.replace(down, **moved)
        return state, down

    def _save(
        self,
        task: m.Task,
        start: str,
        record: Record,
        trained: Tensors | None,
        main: bool,
        stages: Stages,
    ) -> tuple[str, bool]:
        """Writes the client's next version, before its reply leaves. trained: its whole local
        model. Returns the SHA-256 of the record, and whether anything is kept.
        """
        key = task.key
        if self.experiment.config.model.buffers == "local" and trained is not None:
            record = record.replace(buffers=trained.buffers, counters=trained.counters)
        new = trained if self.keeps_local and main else None
        empty = record.empty
        keep = new is not None or not empty or self.experiment.base_comes
        if keep:
            stages.enter("saving")
            if new is not None:
                new = new.to("cpu")
            elif self.keeps_local:
                new = self.store.local(key.client, start)
            self.store.save(key.client, key.version, record, new)
            self.store.prune(key.client, key.version, (start, task.keep))
        return "" if empty else record.sha256, keep

    def _load_balanced(self) -> Pair:
        assert self._balanced is not None
        with self._lock:
            if self._balanced_set is None:
                self._balanced_set = self._balanced()
                self.device.synchronize()
            return self._balanced_set


@dataclasses.dataclass(frozen=True, slots=True)
class _Broadcast:
    """A payload that came, and what it was decoded to."""

    kind: type[Payload]
    form: list[m.Field]
    check: bytes
    body: Body
    payload: Payload

    def is_in(self, task: m.Task, kind: type[Payload], body: Body) -> bool:
        """Whether a task has the same payload, of which the digest was compared."""
        if kind is not self.kind:
            return False
        if body.by_reference:
            return body is self.body
        return bool(task.check) and task.check == self.check and task.form == self.form


def with_base_model(experiment: Experiment, root: Path, sent: memoryview | None) -> Experiment:
    """Returns the experiment with the base model that was sent, or else with the one in `root`,
    where it is kept under its digest for all clients of the process and for the next process.

    Raises BaseAbsent if it is in neither place, ConfigError if it is another model.
    """
    path = root / f"base-{experiment.config.model.sha256}.safetensors"
    kept = path.exists()
    if sent is None and not kept:
        raise BaseAbsent(f"the base model is not in {root}; the server is asked to send it again.")
    data = path.read_bytes() if kept else bytes(sent or b"")
    complete = experiment.starting_from(unpack_state_dict(data))
    if not kept:
        write_aside(path, data)
    return complete
