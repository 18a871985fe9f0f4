"""A site's policy: what a server may ask of the site. The client's command line and its policy file
set it, and a server cannot change it.

`Policy()` is the strict one of a client that is started by itself. `Policy.of_run` is for the
clients of `fednet run`, whose configuration the same user wrote.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args, get_origin

import msgspec

from fednet import config as configuration
from fednet import ids as numbers
from fednet import places as paths
from fednet import registry
from fednet.config import Config, parts
from fednet.config.fit import fit
from fednet.config.parts import declared_options
from fednet.config.schema import AtLeast1, Positive
from fednet.config.tree import compose
from fednet.errors import ConfigError, unknown
from fednet.plain import JsonDict, JsonMapping
from fednet.wire.messages import Field
from fednet.wire.payload import KINDS
from fednet.world.shipped import LINKS

if TYPE_CHECKING:
    from fednet.experiment.build import Experiment

MB = 1_000_000


class BudgetSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The differential privacy that a site requires. clip: the largest norm of an update. noise:
    the smallest noise multiplier, added here. epsilon at delta: what all answers of one client
    together may spend, over all runs of its state directory.
    """

    clip: Positive
    noise: Positive
    epsilon: Positive | None = None
    delta: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 1e-5


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a policy file and a policy have in common."""

    allow: tuple[str, ...] | None = None
    """Kinds of payload that may leave; None: every kind."""
    hide: tuple[Literal["host", "pid", "device", "versions"], ...] = ()
    """What a join does not say of this process and its machine."""
    text: tuple[str, ...] = ()
    """Options of the site's own parts, whose text the server may choose (see `check_text`)."""
    download: bool = False
    faults: bool = False
    privacy: BudgetSection | None = None
    max_model_mb: Positive | None = None
    max_samples: AtLeast1 | None = None


class PolicyFile(Limits, frozen=True):
    """The keys of a policy file. ids: clients that may be served. data: folders or files that may
    be read. A key that is left out sets no limit, but `text`, `download` and `faults` allow nothing
    unless they are given.
    """

    ids: int | str | None = None
    data: str | tuple[str, ...] = ()


class Policy(Limits, frozen=True):
    """Says what a client process may do."""

    ids: numbers.Ids | None = None
    data: Path | None = None
    """This site's data."""
    places: tuple[Path, ...] = ()
    """Folders below which a path that the server names may be read."""
    local: bool = False
    """The user of this process wrote the server's configuration too."""

    @classmethod
    def of_run(cls, data: Path | None) -> Policy:
        """Returns the policy of a client of `fednet run`, which does what the server asks."""
        return cls(data=data, download=True, faults=True, local=True)

    # -- before a run ------------------------------------------------------------------------------
    def read_config(self, text: str) -> Config:
        """Returns the configuration that a server sent. Raises ConfigError if it gives text to
        parts of this site's own that may name a file here, before any of them sees it.
        """
        where = "the server's configuration"
        if self.local:
            return configuration.from_text(text, where)
        check = functools.partial(check_text, allowed=self.text)
        return configuration.from_text(text, where, before=check)

    def applied_to(self, config: Config) -> Config:
        """Returns the server's configuration for this site, with the site's own files in place of
        those that it names. Raises ConfigError for what the site refuses, before a file is opened.
        """
        from fednet.experiment.privacy import at_client

        if self.local:
            return config
        if self.privacy is not None:
            section = at_client(config)
            if section.where != "client" or section.noise < self.privacy.noise:
                raise ConfigError(
                    f"privacy: the policy wants noise of at least {self.privacy.noise:g} times the "
                    f"bound added at this site; the server's configuration has noise "
                    f"{section.noise:g} at the {section.where}."
                )
            if section.clip is None or section.clip > self.privacy.clip:
                raise ConfigError(
                    f"privacy.clip: the policy's is {self.privacy.clip:g}; the server's "
                    f"configuration has {section.clip}."
                )
        data = config.data
        link = config.link
        model = config.model
        partition = msgspec.structs.replace(
            data.partition, options=self._options(data.partition.options, "data.partition")
        )
        if data.dataset == "site" and "path" in data.options:
            raise ConfigError(
                "data.path: the server names a path, and with data.dataset: site each site names "
                "its own; refused."
            )
        if isinstance(samples := data.options.get("samples"), int):
            self.check_samples(samples)
        data = msgspec.structs.replace(
            data,
            root=None,
            download=data.download and self.download,
            partition=partition,
            options=self._options(data.options, "data"),
        )
        if link.clock == "real" and link.trace is not None:
            named = (link.trace,) if isinstance(link.trace, str) else link.trace
            found = [n if n in LINKS else str(self._path(n, "link.trace")) for n in named]
            trace = found[0] if len(found) == 1 else (found[0], found[1])
            link = msgspec.structs.replace(link, trace=trace)
        if model.weights is not None:
            path = str(self._path(model.weights, "model.weights"))
            model = msgspec.structs.replace(model, weights=path)
        if model.adapters is not None and model.adapters.weights is not None:
            path = str(self._path(model.adapters.weights, "model.adapters.weights"))
            adapters = msgspec.structs.replace(model.adapters, weights=path)
            model = msgspec.structs.replace(model, adapters=adapters)
        return config.replace(data=data, link=link, model=model)

    def check_samples(self, samples: int) -> None:
        """Raises ConfigError if these are more than the site allows."""
        if self.max_samples is not None and samples > self.max_samples:
            raise ConfigError(
                f"the data of this run have {samples} samples; the policy's max_samples is "
                f"{self.max_samples}."
            )

    def check_built(self, experiment: Experiment) -> None:
        """Raises ConfigError if the largest model, the samples or what leaves is not allowed."""
        from fednet.models import bytes_of

        if experiment.data is not None:
            self.check_samples(experiment.data.n_train + experiment.data.n_test)
        if self.max_model_mb is not None:
            size = max(bytes_of(setting.blank) for setting in experiment.settings)
            if size > self.max_model_mb * MB:
                raise ConfigError(
                    f"the model of this run has {size / MB:,.1f} MB; the policy's max_model_mb is "
                    f"{self.max_model_mb:g}."
                )
        for name, kind in leaving(experiment):
            if self.allow is not None and kind not in self.allow:
                raise ConfigError(
                    f"the method {experiment.config.algorithm.name} sends up {name} of kind "
                    f"{kind!r}; this site allows only {', '.join(self.allow) or 'nothing'} "
                    "(--allow, or allow in its policy)."
                )

    # -- in a run ----------------------------------------------------------------------------------
    def check_leaves(self, form: Iterable[Field]) -> None:
        """Raises ConfigError for a kind of payload that must not leave this site."""
        for field in form:
            if self.allow is not None and field.kind not in self.allow:
                raise ConfigError(
                    f"this site sends nothing of kind {field.kind!r} (--allow, or allow in its "
                    f"policy)."
                )

    # -- inside ------------------------------------------------------------------------------------
    def _options(self, given: JsonMapping, where: str) -> JsonDict:
        made = dict(given)
        if isinstance(made.get("path"), str) and made["path"] != ".":
            made["path"] = str(self._path(made["path"], f"{where}.path"))
        return made

    def _path(self, named: str, key: str) -> Path:
        """Returns the file or folder that the server names. Raises ConfigError if it is in none of
        the places that this site lets a run read.
        """
        for place in self.places:
            if _below(place / named, place):
                return (place / named).resolve()
        what = f"{key}: the server names {named!r}, to be read here; refused:"
        if not self.places:
            raise ConfigError(f"{what} this client was started without --data.")
        raise ConfigError(f"{what} it is not below {_all(self.places)} (--data).")


def leaving(experiment: Experiment) -> list[tuple[str, str]]:
    """Returns (what, its kind) of everything that a client of this run sends up."""
    from fednet.experiment.evaluations import EvaluationReply

    config = experiment.config
    found: list[tuple[str, str]] = []
    for exchange in experiment.algorithm.exchanges:
        found += [(repr(name), field.kind) for name, field in exchange.up.fields.items()]
    if config.evaluate.every and config.evaluate.clients != "none":
        found += [("its evaluations", kind) for kind in sorted(EvaluationReply.kinds())]
    if config.data.dataset == "site":
        found.append(("counts of samples by class", "statistics"))
    return found


# -- text for parts of the site's own --------------------------------------------------------------
def check_text(config: Config, allowed: Collection[str]) -> None:
    """Raises ConfigError for text that the server may not choose. allowed: keys for which it may.

    fednet's own parts read a file only by an option named `path`, which the policy checks. A
    dataset, model or method that the site has loaded may read a file that any of its options names.
    So only the site chooses its text: in the part's file (as the option's default, or in a
    `Literal`), or by letting the server choose (`text: [data.label]`).
    """
    data = config.data
    partition = config.data.partition
    sections: list[tuple[str, str, str, JsonDict]] = [  # key, kind of part, its name, its options
        ("data", "dataset", data.dataset, dict(data.options)),
        ("data.partition", "partitioner", partition.scheme, dict(partition.options)),
        ("algorithm", "algorithm", config.algorithm.name, config.algorithm.options),
    ]
    for *_, own in sections[:2]:
        own.pop("path", None)  # the policy looks at it
    for one in parts.each_model(config):
        sections.append(("model", "model", one.model.name, one.model.options))
    inner = data.options.get("format") if data.dataset == "site" else None
    if inner in registry.dataset.names():  # what reads the site's data there
        from fednet.data.datasets.site import DECLARED

        own = {k: v for k, v in data.options.items() if k not in DECLARED}
        sections.append(("data", "dataset", inner, own))
    for key, kind, name, options in sections:
        part = getattr(registry, kind).get(name)
        if part.__module__.partition(".")[0] == "fednet":
            continue
        declared = declared_options(part, kind)
        fields = () if declared is None else msgspec.structs.fields(declared)
        known: dict[str, set[str]] = {}  # by option, the texts that the part's own file gives it
        for field in fields:
            default = field.default
            if field.default_factory is not msgspec.NODEFAULT:
                default = field.default_factory()
            given = _texts(msgspec.to_builtins(default, enc_hook=str))
            known[field.encode_name] = {*_literals(field.type), *given}
        for option, value in options.items():
            text = next((t for t in _texts(value) if t not in known.get(option, ())), None)
            if text is not None and f"{key}.{option}" not in allowed:
                raise ConfigError(
                    f"{key}.{option}: the server gives {text!r} to the {kind} {name!r}, a part of "
                    f"this site's own; refused, since it may name a file here. A policy with "
                    f"text: [{key}.{option}] lets the server choose it."
                )


def _literals(hint: object) -> Iterator[str]:
    if get_origin(hint) is Literal:
        yield from (v for v in get_args(hint) if isinstance(v, str))
    else:
        for inner in get_args(hint):
            yield from _literals(inner)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from (*_texts(key), *_texts(inner))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)


# -- the file and the command line -----------------------------------------------------------------
def read_file(path: Path) -> PolicyFile:
    """Reads a policy file. Raises ConfigError, for an unknown key with the nearest known one."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as wrong:
        reason = getattr(wrong, "strerror", None) or wrong
        raise ConfigError(f"--policy {path}: cannot be read ({reason}).") from None
    tree = compose(text, str(path))
    if tree.value is None:
        return PolicyFile()
    made = fit(tree, PolicyFile, "")
    if made.ids is not None:
        numbers.parse(str(made.ids), f"{path}: ids")
    return made


def make_policy(
    file: Path | None,
    data: Path | None,
    allow: Sequence[str] | None,
    *,
    download: bool = False,
    faults: bool = False,
) -> Policy:
    """Returns the policy of the file, or of the command line. Names in either are looked up among
    what this process has loaded. Raises ConfigError where both say what is allowed.
    """
    check_kinds(allow or (), "--allow")
    if file is None:
        alone: tuple[Path, ...] = () if data is None else (data,)
        kinds = None if allow is None else tuple(allow)
        return Policy(data=data, places=alone, allow=kinds, download=download, faults=faults)
    given = read_file(file)
    check_kinds(given.allow or (), f"{file}: allow")
    said = {"allow": allow is not None, "download": download, "faults": faults}
    for name, is_given in said.items():
        if is_given:
            raise ConfigError(f"--{name}: the policy {file} decides that; write {name} there.")
    named = (given.data,) if isinstance(given.data, str) else given.data
    places = tuple(file.parent / paths.expand_home(p, f"{file}: data") for p in named)
    if data is None and len(places) == 1:
        data = places[0]
    elif data is not None and places and not any(_below(data, place) for place in places):
        raise ConfigError(f"--data {data}: the policy {file} names {_all(places)}.")
    elif data is not None and not places:
        places = (data,)
    ids = None if given.ids is None else numbers.parse(str(given.ids), f"{file}: ids")
    same = {name: getattr(given, name) for name in Limits.__struct_fields__}
    return Policy(ids=ids, data=data, places=places, **same)


def check_kinds(given: Iterable[str], where: str) -> None:
    """Raises ConfigError for a kind of payload that no method sends up. where: for the error."""
    known = set(KINDS)
    for method in registry.algorithm.own().values():
        known |= {f.kind for exchange in method.exchanges for f in exchange.up.fields.values()}
    for kind in given:
        if kind not in known:
            raise ConfigError(f"{where}: {unknown('kind of payload', kind, known)}")


def _below(path: Path, place: Path) -> bool:
    return path.resolve().is_relative_to(place.resolve())


def _all(places: Iterable[Path]) -> str:
    return " or ".join(str(place) for place in places)
