"""What a client process makes ready for the run that a server tells it of, and what it says of it
beforehand.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fednet import places
from fednet.client.loop import ClientLoop
from fednet.client.policy import Policy, leaving
from fednet.client.tasks import Prepared
from fednet.config import Config
from fednet.errors import ConfigError, DataError, FednetError, StateError
from fednet.experiment import determinism
from fednet.experiment.lock import StatesHold
from fednet.ids import Ids
from fednet.wire import messages as m

if TYPE_CHECKING:
    from fednet.client.slots import Packing
    from fednet.client.worker import Worker
    from fednet.data.base import Data
    from fednet.data.federation import Federation, Site
    from fednet.experiment.build import Experiment
    from fednet.training.setting import Pair


NAMES = 1 << 16  # bytes beside the tensors of a payload, such as the head of a .safetensors file


class Preparer:
    """Makes a client process ready for the run that a server tells it of. asked: whom it serves,
    whatever the server says. state: the folder of its clients' states; reset: begin anew where one
    is missing. hold: this process's hold on them; None: whoever started it sees to that.
    """

    def __init__(
        self,
        policy: Policy,
        asked: Ids,
        devices: Sequence[str],
        state: Path | None,
        *,
        reset: bool = False,
        say: Callable[[str], None] = lambda line: None,
        hold: StatesHold | None = None,
    ) -> None:
        self.policy, self.asked, self.devices, self.state = policy, asked, devices, state
        self.reset, self.say, self.hold = reset, say, hold

    def __call__(self, loop: ClientLoop, welcome: m.Welcome) -> Prepared:
        with clean_words():
            return self._prepared(loop, welcome)

    def _prepared(self, loop: ClientLoop, welcome: m.Welcome) -> Prepared:
        from fednet.experiment import links

        config, ids = settled(welcome, self.policy, self.asked), welcome.ids
        determinism.settle(config.train)
        root = state_directory(self.state, welcome.run)
        own_folder(root)
        _take(self.hold, root, ids)
        data = self._data(config, ids)
        packing = _packing(config, data.experiment, loop)
        workers = self._workers(config, root, data, packing)
        everyone = len(ids) == config.clients
        book = root / (f"wire-{loop.protocol.worker}.jsonl" if everyone else "wire.jsonl")
        loop.book.open(book, config.record.wire == "sums")
        for worker in workers:
            worker.warm()
        facts = data.facts()
        self.say(
            f"joined {welcome.name} as client{'s' if len(ids) > 1 else ''} "
            f"{_listed(ids)} on {', '.join(self.devices)}"
        )
        return Prepared(
            workers,
            data.experiment.digest,
            facts,
            links.shaper(config),
            packing,
            together=max(1, min(config.train.pack, len(ids))),
            beside=config.schedule.mode != "sync",
            largest=payload_bound(data.experiment),
        )

    def _data(self, config: Config, ids: Sequence[int]) -> SiteData:
        from fednet.experiment import build

        own: dict[int, Federation] = {}
        if config.data.dataset == "site":
            from fednet.data.site import alone

            own = {client: alone(self._of_site(config, client)) for client in ids}
        first = next(iter(own.values())).data if own else None
        experiment = build.build(config, self.policy.data, first, tried=True)
        self.policy.check_built(experiment)
        forms = set() if first is None else {first.form}
        for client, federation in own.items():
            if federation.data.form not in forms:
                forms.add(federation.data.form)
                try:
                    build.try_on(experiment, federation.data)
                except ConfigError as wrong:
                    raise ConfigError(f"client {client}: {wrong}") from None
        return SiteData(experiment, own, self.devices[0])

    def _of_site(self, config: Config, client: int) -> Data:
        """What lies in this client's own folder, each client's looked through."""
        from fednet.data.site import load_site
        from fednet.experiment import trial

        folder = _own_folder(self.policy.data, client)
        try:
            data = load_site(config.data, folder, config.seed)
            trial.finite(data)
        except DataError as wrong:
            where = "" if str(folder) in str(wrong) else f", in {folder}"
            raise DataError(f"client {client}{where}: {wrong}") from None
        for note in data.notes:
            self.say(f"client {client}: {note}")
        if data.names is not None:
            self.say(f"client {client}: classes in order: {', '.join(data.names[:20])}")
        self.policy.check_samples(data.n_train + data.n_test)
        return data

    def _workers(
        self, config: Config, root: Path, data: SiteData, packing: Packing | None
    ) -> list[Worker]:
        from fednet.client.books import MASKED, Masked, account_of, configuration_of
        from fednet.client.secrets import Secrets
        from fednet.client.worker import Worker
        from fednet.experiment.store import ClientStore

        store = ClientStore(root, data.experiment.algorithm.Client)
        answers = account_of(config.privacy, self.policy.privacy, root)
        secrets = None
        if config.privacy.secagg.protocol != "none":
            secrets = Secrets(Masked(root.parent / MASKED), configuration_of(config))
        return [
            Worker(
                data.experiment,
                store,
                functools.partial(data.site, device=device),
                device,
                state_lost=self.reset,
                balanced=functools.partial(data.balanced, device) if data.has_balanced else None,
                pack=packing.on(number) if packing is not None else None,
                policy=self.policy,
                answers=answers,
                secrets=secrets,
            )
            for number, device in enumerate(self.devices)
        ]


def payload_bound(experiment: Experiment) -> Callable[[m.Key], int]:
    """How many bytes a task's payload may have, by its key and what the run declares: with what a
    client is sent once, and the model that training starts from, which come with its first task.
    """
    from fednet.models import bytes_of

    method = experiment.algorithm
    setting = experiment.setting
    base = NAMES + 2 * bytes_of(setting.blank) if experiment.base_comes else NAMES

    def largest(key: m.Key) -> int:
        kinds = []
        if key.purpose == "evaluate":
            kinds.append(experiment.evaluation)
        elif key.phase < len(method.exchanges):
            kinds.append(method.exchanges[key.phase].down)
        if method.Enrolment is not None:
            kinds.append(method.Enrolment)
        total = base
        for kind in kinds:
            bounds = experiment.bounds(kind, key.client, key.round)
            for name, field in kind.fields.items():
                # An evaluation's is not compressed.
                sizes = [
                    codec.size_of(field.kind, field.form, bounds.get(name), key.round)[1]
                    for codec in (experiment.down, experiment.exact)
                ]
                total += max(sizes)
        return total

    return largest


class SiteData:
    """The data of the clients that a process hosts. own: of a run on sites' own data, each one's;
    else they are the run's, divided. device: where facts are counted.
    """

    def __init__(self, experiment: Experiment, own: dict[int, Federation], device: str) -> None:
        self.experiment, self._own, self._device = experiment, own, device

    @property
    def has_balanced(self) -> bool:
        """Whether there is a test set of all classes alike."""
        return not self._own and bool(self.experiment.setting.classes)

    def site(self, client: int, device: str) -> Site:
        if self._own:
            return self._own[client].site(0, device)
        return self.experiment.divided.site(client, device)

    def balanced(self, device: str) -> Pair:
        """(x, y) on `device`: test samples, of each class as many."""
        import numpy as np
        import torch

        from fednet.data import balanced_test
        from fednet.data.federation import Site

        data = self.experiment.divided.data
        chosen = balanced_test(data, self.experiment.config.seed)
        return Site(data, np.zeros(0, dtype=np.int64), chosen, torch.device(device)).test

    def facts(self) -> list[m.SiteFacts]:
        """What the server has to know of sites' own data."""
        return [_facts(client, self.site(client, self._device)) for client in self._own]


def _packing(config: Config, experiment: Experiment, loop: ClientLoop) -> Packing | None:
    """Where clients come together to be trained as one; None where each is trained by itself."""
    from fednet.client.slots import Packing

    if config.train.pack <= 1:
        return None
    return Packing(
        config.train.pack, experiment.setting.task, loop.slots.limit, config.train.threads
    )


def _take(hold: StatesHold | None, root: Path, ids: Sequence[int]) -> None:
    """These clients' states are this process's own, and nothing half written among them."""
    from fednet.experiment.store import clear_clients

    clear = functools.partial(clear_clients, root)
    if hold is None:
        clear(ids)
    else:
        hold.take(root, ids, clear)


def _facts(client: int, site: Site) -> m.SiteFacts:
    counts = [int(k) for k in site.class_counts]
    return m.SiteFacts(client, site.n, site.n_targets, counts, site.data.names_sha256)


def settled(welcome: m.Welcome, policy: Policy, asked: Ids) -> Config:
    """The configuration of a run as it holds at this site. Raises ConfigError where the site does
    not take part in such a run.
    """
    from fednet.models.start import received

    config = received(policy.read(welcome.config))
    policy.check_ids(welcome.ids, asked, config)
    return policy.applied_to(config)


@contextlib.contextmanager
def clean_words() -> Iterator[None]:
    """What is raised here quotes the server: as one line, whatever it wrote."""
    try:
        yield
    except FednetError as wrong:
        more = ""
        if isinstance(wrong, DataError) and "data.download" in str(wrong):
            more = " Only --download, or the site's policy, lets a server have data fetched."
        wrong.args = (m.clean(f"{wrong}{more}", 4000),)
        raise


# Whatever a client process writes into the folder of a run.
_OWN = re.compile(
    r"client-[0-9]+|wire(-[A-Za-z0-9._-]+)?\.jsonl|\.?(noise\.key|lock|base-)[A-Za-z0-9._-]*"
)


def own_folder(root: Path) -> None:
    """Raises StateError where the folder of a run holds what no client process has written, or has
    the name of one of the site's accounts: a server names it, and files in it are cut and deleted.
    """
    from fednet.client.books import ANSWERS, MASKED

    if root.name.casefold() in (ANSWERS, MASKED):
        raise StateError(
            f"{root}: the server's run is named {root.name!r}, which is the name of an account of "
            f"this site's; refused."
        )
    with contextlib.suppress(FileNotFoundError):
        foreign = sorted(p.name for p in root.iterdir() if not _OWN.fullmatch(p.name))
        if foreign:
            raise StateError(
                f"{root}: the server's run has the name of this folder, which holds "
                f"{foreign[0]!r} and is no client's; give another --state."
            )


def state_directory(state: Path | None, run: str) -> Path:
    """Where a client process keeps what belongs to one run."""
    return (state or places.runs() / "client-state") / run


def _own_folder(data: Path | None, client: int) -> Path | None:
    """A site that hosts several clients keeps each one's data in DIR/client-K; one client's data
    may be DIR itself.
    """
    if data is not None and (data / f"client-{client}").exists():
        return data / f"client-{client}"
    return data


def _listed(numbers: Sequence[int]) -> str:
    ranges, start = [], None
    for i, n in enumerate(numbers):
        start = n if start is None else start
        if i + 1 == len(numbers) or numbers[i + 1] != n + 1:
            ranges.append(f"{start}-{n}" if n > start else str(n))
            start = None
    return ",".join(ranges)


def explanation(experiment: Experiment, clients: Sequence[int]) -> list[str]:
    """What would leave this site each round, from the declarations."""
    method, lines = experiment.algorithm, []
    for client in clients:
        if experiment.config.model.base == "server":
            lines.append(f"client {client}, once, with its first task: down the whole model (base)")
        if method.Enrolment is not None:
            given = experiment.predicted(method.Enrolment, "down", client)
            parts = ", ".join(f"{kind} {n:,} bytes" for kind, n in given.items())
            lines.append(f"client {client}, once, with its first task: down {parts}")
        for number, exchange in enumerate(method.exchanges, 1):
            kinds = experiment.predicted(exchange.up, "up", client)
            parts = ", ".join(f"{kind} {n:,} bytes" for kind, n in kinds.items())
            down = sum(experiment.predicted(exchange.down, "down", client).values())
            lines.append(f"client {client}, exchange {number}: up {parts}; down {down:,} bytes")
    keeps = method.keeps[1]
    lines.append(f"kept at this site between rounds: {keeps if keeps != '-' else 'nothing'}")
    lines.append("numbers that the method reports of a client go with its reply (statistics)")
    leaves = {what: kind for what, kind in leaving(experiment) if not what.startswith("'")}
    if "its evaluations" in leaves:
        lines.append("evaluations send up counts of correct answers by class (accuracy)")
    if experiment.config.data.dataset == "site":
        lines.append(
            "at each start: counts of samples, by class, and a digest of the classes' names "
            "(statistics)"
        )
    return lines


class Explained(FednetError):
    """`--explain` has said what it had to say."""


@dataclass(frozen=True, slots=True)
class Explainer:
    """Stands in the place of a `Preparer`: prints what the run would do with this site, and raises
    `Explained`.
    """

    policy: Policy
    asked: Ids
    state: Path | None

    def __call__(self, loop: ClientLoop, welcome: m.Welcome) -> Prepared:
        from fednet.experiment import build

        with clean_words():
            config = settled(welcome, self.policy, self.asked)
            exp = build.build(config, self.policy.data)
        print(
            f"{welcome.name}: {config.algorithm.name}, {config.rounds} rounds, "
            f"{config.cohort_size} of {config.clients} clients a round"
        )
        for line in explanation(exp, welcome.ids):
            print(line)
        where = f" in {self.policy.data}" if self.policy.data else ""
        print(f"read here: the data of {config.data.dataset}{where}")
        print(
            f"stored here: {state_directory(self.state, welcome.run)} (the clients' states, and "
            f"wire.jsonl, this site's own book of all messages)",
            flush=True,
        )
        raise Explained("")
