"""Prepares a client process for the run that a server describes, or explains to the site what the
run would do there (`--explain`).
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fednet import ids as numbers
from fednet import places
from fednet.client.loop import ClientLoop, Prepared
from fednet.client.policy import Policy, leaving
from fednet.client.states import StatesHold
from fednet.config import Config
from fednet.errors import ConfigError, DataError, FednetError, StateError
from fednet.experiment import determinism
from fednet.ids import Ids
from fednet.wire import messages as m

if TYPE_CHECKING:
    from fednet.client.packs import Packs
    from fednet.data.federation import Federation, Site
    from fednet.experiment.build import Experiment
    from fednet.training.setting import Pair

NAMES = 1 << 16  # bytes beside the tensors of a payload, such as the head of a .safetensors file


@contextlib.contextmanager
def on_one_line() -> Iterator[None]:
    """Puts errors that are raised inside, and may quote the server, on one printable line."""
    try:
        yield
    except FednetError as wrong:
        more = ""
        if isinstance(wrong, DataError) and "data.download" in str(wrong):
            more = " Only --download, or the site's policy, lets a server have data fetched."
        wrong.args = (m.clean(f"{wrong}{more}", 4000),)
        raise


@on_one_line()
def prepare(
    policy: Policy,
    asked: Ids,
    devices: Sequence[str],
    state: Path | None,
    loop: ClientLoop,
    welcome: m.Welcome,
    *,
    say: Callable[[str], None] = lambda line: None,
    hold: StatesHold | None = None,
    like: Callable[[], Experiment | None] = lambda: None,
) -> Prepared:
    """Prepares data, model and workers for the run that a server describes, and opens the process's
    book.

    asked: the clients that it serves, whatever the server says. state: the folder of their states.
    hold: this process's lock on the states; None: the process that started this one has it.
    like() gives the server's experiment, where that is in this process and has the data.
    say(sentence) tells the user.
    """
    import numpy as np
    import torch

    from fednet.client.books import MASKED, MaskedAccount, account_of
    from fednet.client.worker import Worker
    from fednet.data.federation import Site, balanced_test
    from fednet.experiment import build, links
    from fednet.experiment.store import ClientStore

    config = accept_config(welcome, policy, asked)
    clients = welcome.ids
    determinism.set_switches(config.train)
    root = state_directory(state, welcome.run)
    check_folder(root)
    if hold is not None:
        hold.take(root, clients)
    own: dict[int, Federation] = {}
    if config.data.dataset == "site":
        own = sites_data(config, clients, policy, say)
    first = next(iter(own.values())).data if own else None
    experiment = build.build(
        config, policy.data, first, tried=True, like=None if own else like(), for_client=True
    )
    policy.check_built(experiment)
    forms = set() if first is None else {first.form}
    for client, federation in own.items():
        if federation.data.form not in forms:
            forms.add(federation.data.form)
            try:
                build.try_on(experiment, federation.data)
            except ConfigError as wrong:
                raise ConfigError(f"client {client}: {wrong}") from None
    packs: list[Packs] = []
    if config.train.pack > 1:
        from fednet.client.packs import Packs

        packs = [Packs(config.train.pack, experiment.setting.task) for _ in devices]

    def sites(device: str) -> Callable[[int], Site]:
        """Returns a function from a client to its data on `device`."""
        if own:
            return lambda client: own[client].site(0, device)
        return functools.partial(experiment.known_federation.site, device=device)

    def balanced(device: str) -> Pair:
        """Returns (x, y) on `device`: as many test samples of each class."""
        data = experiment.known_federation.data
        chosen = balanced_test(data, config.seed)
        return Site(data, np.zeros(0, dtype=np.int64), chosen, torch.device(device)).test

    answers = account_of(config.privacy, policy.privacy, root)
    secrets = None
    if config.privacy.secagg.protocol != "none":
        secrets = MaskedAccount(root.parent / MASKED, config)
    store = ClientStore(root, experiment.algorithm.Client, config.checkpoint.fsync)
    has_balanced = not own and bool(experiment.setting.classes)
    workers = [
        Worker(
            experiment,
            store,
            sites(device),
            device,
            balanced=functools.partial(balanced, device) if has_balanced else None,
            pack=packs[number].descend if packs else None,
            policy=policy,
            answers=answers,
            secrets=secrets,
        )
        for number, device in enumerate(devices)
    ]
    loop.message_file.open(root, loop.protocol.join.worker)
    for worker in workers:
        worker.warm()
    facts = []  # what the server has to know of sites' own data
    for client in own:
        mine = own[client].site(0, devices[0])
        counts = [int(k) for k in mine.class_counts]
        tested = mine.n_test * mine.data.targets_each
        facts.append(m.SiteFacts(client, mine.n, tested, counts, mine.data.names_sha256))
    if own:
        samples = {client: federation.data.n_train for client, federation in own.items()}
    else:
        parts = experiment.known_federation.parts
        samples = {client: len(parts[client]) for client in clients}
    s = "s" if len(clients) > 1 else ""
    say(f"joined {welcome.name} as client{s} {numbers.as_text(clients)} on {', '.join(devices)}")
    return Prepared(
        workers,
        experiment.digest,
        samples,
        facts,
        links.shaper(config),
        packs,
        together=max(1, min(config.train.pack, len(clients))),
        rounds_overlap=config.schedule.mode != "sync",
        largest=payload_bound(experiment),
        main_exchange=experiment.algorithm.main_exchange,
    )


def sites_data(
    config: Config, clients: Sequence[int], policy: Policy, say: Callable[[str], None]
) -> dict[int, Federation]:
    """Returns by client the data that this site brings itself, after checks of all values."""
    from fednet.data.datasets.site import alone, load_site
    from fednet.experiment import trial

    own: dict[int, Federation] = {}
    for client in clients:
        folder = policy.data  # that of a site which hosts one client, or DIR/client-K
        if folder is not None and (folder / f"client-{client}").exists():
            folder = folder / f"client-{client}"
        try:
            data = load_site(config.data, folder, config.seed)
            trial.finite(data)
        except DataError as wrong:
            where = "" if str(folder) in str(wrong) else f", in {folder}"
            raise DataError(f"client {client}{where}: {wrong}") from None
        for note in data.notes:
            say(f"client {client}: {note}")
        if data.names is not None:
            say(f"client {client}: classes in order: {', '.join(data.names[:20])}")
        policy.check_samples(data.n_train + data.n_test)
        own[client] = alone(data)
    return own


def payload_bound(experiment: Experiment) -> Callable[[m.Key], int]:
    """Returns a function from a task's key to the most bytes that its payload may have, by what the
    run declares. What a client is sent once, and the base model, come with its first task.
    """
    from fednet.models import bytes_of

    method = experiment.algorithm
    setting = experiment.setting
    base = NAMES + 2 * bytes_of(setting.blank) if experiment.base_comes else NAMES

    known: dict[tuple[str, int], int] = {}  # where it depends on no client

    def largest(key: m.Key) -> int:
        which = key.purpose, key.phase
        if which in known:
            return known[which]
        kinds = [] if method.Enrolment is None else [method.Enrolment]
        if key.purpose == "evaluate":
            kinds.append(experiment.evaluation)
        elif key.phase < len(method.exchanges):
            kinds.append(method.exchanges[key.phase].down)
        total = base
        for kind in kinds:
            bounds = experiment.bounds(kind, key.client, key.round)
            for name, field in kind.fields.items():
                of = (field.kind, field.form, bounds.get(name))
                # An evaluation's is not compressed.
                total += max(experiment.down.size_of(*of)[1], experiment.exact.size_of(*of)[1])
        if not experiment.sized_by_client:
            known[which] = total
        return total

    return largest


def accept_config(welcome: m.Welcome, policy: Policy, asked: Ids) -> Config:
    """Returns the configuration of a run as it holds at this site. Raises ConfigError if the site
    does not take part in such a run, and if the server makes this process host other clients than
    it asked for, or some that the policy does not name.
    """
    from fednet.models.start import without_server_files

    config = without_server_files(policy.read_config(welcome.config))
    wanted = asked.resolve(config.clients)
    if tuple(sorted(welcome.ids)) != wanted:
        raise ConfigError(
            f"the server wants this process to host client(s) {numbers.as_text(welcome.ids)}; it "
            f"was started for client(s) {numbers.as_text(wanted)}, and serves no other."
        )
    if policy.ids is not None:
        served = policy.ids.resolve(config.clients) if policy.ids.share else policy.ids.listed
        beyond = sorted(set(wanted) - set(served))
        if beyond:
            raise ConfigError(
                f"--id {asked.text}: the policy names clients {policy.ids.text}, and {beyond[0]} "
                f"is none of them."
            )
    return policy.applied_to(config)


# The names of all files that a client process writes into the folder of a run.
_OWN = re.compile(
    r"client-[0-9]+|wire(-[A-Za-z0-9._-]+)?\.jsonl|\.?(noise\.key|lock|base-)[A-Za-z0-9._-]*"
)


def check_folder(root: Path) -> None:
    """Raises StateError if the folder of a run has files that no client process wrote, or the name
    of one of the site's accounts: the server chooses the run's name, and files in the folder are
    deleted.
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
    """Returns the folder in which a client process keeps what belongs to one run."""
    return (state or places.runs() / "client-state") / run


def explanation(experiment: Experiment, clients: Sequence[int]) -> list[str]:
    """Returns lines that say what would leave this site each round, from the declarations."""
    method = experiment.algorithm
    lines = []
    for client in clients:
        if experiment.config.model.base == "server":
            lines.append(f"client {client}, once, with its first task: down the whole model (base)")
        if method.Enrolment is not None:
            given = experiment.payload_bytes(method.Enrolment, "down", client)
            parts = ", ".join(f"{kind} {n:,} bytes" for kind, n in given.items())
            lines.append(f"client {client}, once, with its first task: down {parts}")
        for number, exchange in enumerate(method.exchanges, 1):
            kinds = experiment.payload_bytes(exchange.up, "up", client)
            parts = ", ".join(f"{kind} {n:,} bytes" for kind, n in kinds.items())
            down = sum(experiment.payload_bytes(exchange.down, "down", client).values())
            lines.append(f"client {client}, exchange {number}: up {parts}; down {down:,} bytes")
    keeps = method.keeps()[1]
    if experiment.config.train.keep_optimizer:
        keeps = "the optimizer's state" if keeps == "-" else f"{keeps}, the optimizer's state"
    lines.append(f"kept at this site between rounds: {keeps if keeps != '-' else 'nothing'}")
    lines.append("numbers that the method reports of a client go with its reply (statistics)")
    if any(what == "its evaluations" for what, _ in leaving(experiment)):
        lines.append("evaluations send up counts of correct answers by class (accuracy)")
    if experiment.config.data.dataset == "site":
        lines.append(
            "at each start: counts of samples, by class, and a digest of the classes' names "
            "(statistics)"
        )
    return lines


def told_at_join(join: m.Join) -> str:
    """Returns the line on what each connection begins with."""
    told = []
    if join.host:
        told.append(f"the host name {join.host}")
    if join.pid:
        told.append("the process id")
    if join.device:
        told.append(f"the device {join.device}")
    if join.versions:
        told.append(f"versions and processor ({', '.join(join.versions)})")
    if join.files:
        told.append(f"names and digests of {', '.join(join.files)} (--load)")
    return f"at each connection: {', '.join([*told, 'the client ids'])}"


class Explained(FednetError):
    """`--explain` has printed everything: the process ends."""


@on_one_line()
def explain(
    policy: Policy, asked: Ids, state: Path | None, loop: ClientLoop, welcome: m.Welcome
) -> Prepared:
    """In place of `prepare`: prints what the run would do at this site, and raises `Explained`."""
    from fednet.experiment import build

    config = accept_config(welcome, policy, asked)
    exp = build.build(config, policy.data, for_client=True)
    print(
        f"{welcome.name}: {config.algorithm.name}, {config.rounds} rounds, "
        f"{config.cohort_size} of {config.clients} clients a round"
    )
    for line in explanation(exp, welcome.ids):
        print(line)
    print(told_at_join(loop.protocol.join))
    where = f" in {policy.data}" if policy.data else ""
    print(f"read here: the data of {config.data.dataset}{where}")
    print(
        f"stored here: {state_directory(state, welcome.run)} (the clients' states, and "
        f"wire.jsonl, this site's own record of all messages)",
        flush=True,
    )
    raise Explained("")
