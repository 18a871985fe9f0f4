"""The numbers of a round: the name of each, its field of a `Round`, and where it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fednet.records.rows import Row

OWN = "personal"  # the clients' own models, where a record does not say


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def mb(count: float) -> str:
    """Returns bytes as MB, 10^6."""
    return f"{count / 1e6:.2f} MB" if count < 1e8 else f"{count / 1e6:.0f} MB"


def _number(value: float) -> str:
    return f"{value:.4f}"


@dataclass(frozen=True)
class Metric:
    """A number of each round.

    An accuracy names the model that was evaluated: `global`, or `{own}`, which `full_label` and
    `line_parts` replace by what the clients' own models are: `personal` or `local`
    (`Round.own_model`).
    """

    name: str
    """As `--y` has it."""
    label: str
    """On an axis and in a table, see `full_label`."""
    field: str
    """Its place in a `Round`, with a dot before the key of a mapping (`client_accuracy.personal`,
    `algorithm.epsilon`).
    """
    places: str
    """Where it is shown, words of: line (of a round, as it ends), page, compare (its last value)
    and track (TensorBoard).
    """
    form: Callable[[float], str] = _number
    """How the line writes the value."""
    word: str | None = None
    """What the line calls it; None: its label."""
    unless: tuple[str, ...] = ()
    """It is in the line only where none of these other metrics has a value."""

    @property
    def share(self) -> bool:
        """Whether it is 0..1."""
        return self.form is percent

    def full_label(self, own: str = OWN) -> str:
        """Returns its label, with what the clients' own models are."""
        return self.label.replace("{own}", own)

    def of(self, row: Row) -> float | None:
        """Returns its value in a round's row, of several numbers their mean; None if it was not
        measured, or is no number.
        """
        head, *keys = self.field.split(".")
        value = row.get(head)
        for key in keys:
            value = (value or {}).get(key)
        if isinstance(value, list) and value:
            value = sum(value) / len(value)
        return value if isinstance(value, int | float) else None


# In the order in which they are shown.
METRICS: tuple[Metric, ...] = (
    Metric(
        "accuracy",
        "global test accuracy",
        "test_accuracy",
        "line page track",
        percent,
        "global accuracy",
    ),
    Metric(
        "client_accuracy",
        "global accuracy on clients' tests",
        "client_accuracy.global",
        "line page",
        percent,
        unless=("accuracy",),
    ),
    Metric(
        "received_accuracy",
        "global accuracy before the round, on clients' tests",
        "client_accuracy.received",
        "line page",
        percent,
        unless=("accuracy", "client_accuracy"),
    ),
    Metric(
        "personal_accuracy",
        "{own} accuracy on clients' tests",
        "client_accuracy.personal",
        "line page",
        percent,
        unless=("accuracy",),
    ),
    Metric(
        "validation_accuracy",
        "global validation accuracy",
        "validation_accuracy",
        "page compare track",
        percent,
    ),
    Metric(
        "test_loss",
        "test loss",
        "test_loss",
        "line page track",
        word="test loss",
        unless=("accuracy", "client_accuracy", "received_accuracy", "personal_accuracy"),
    ),
    Metric("staleness", "mean staleness", "staleness", "page track"),
    Metric(
        "held_out_accuracy",
        "global accuracy on held-out clients' tests",
        "held_out.global",
        "line page",
        percent,
        "on held-out clients",
    ),
    Metric(
        "held_out_personal_accuracy",
        "{own} accuracy on held-out clients' tests",
        "held_out.personal",
        "line page",
        percent,
        "{own} on held-out clients",
    ),
    Metric("train_loss", "training loss", "train_loss", "line page track", word="train loss"),
)
_BY_NAME = {m.name: m for m in METRICS}
# What a round costs: in its line after the numbers above and after who took part.
COSTS: tuple[Metric, ...] = (
    Metric("bytes_down", "bytes down", "bytes_down", "line track", mb, "down"),
    Metric("bytes_up", "bytes up", "bytes_up", "line track", mb, "up"),
    Metric("seconds", "seconds", "seconds", "line track", "{:.1f} s".format, ""),
    Metric(
        "virtual", "virtual seconds", "seconds_virtual", "line track", "{:.1f} s virtual".format, ""
    ),
)


# The evaluations for which a round has the metrics of `evaluate.metrics`: what is before the
# metric's name in `--y`, the field, and, with {m} for the name, the label and the line's words.
FURTHER = (
    ("", "metrics", "global {m}", "global {m}"),
    ("client_", "client_metrics.global", "global {m} on clients' tests", "global {m}"),
    (
        "received_",
        "client_metrics.received",
        "global {m} before the round, on clients' tests",
        "received {m}",
    ),
    ("personal_", "client_metrics.personal", "{own} {m} on clients' tests", "{own} {m}"),
)


def all_metrics(rows: Iterable[Row] = ()) -> list[Metric]:
    """Returns the metrics of the table, and those of `evaluate.metrics` in these rows."""
    found: dict[str, Metric] = {}
    for row in rows:
        for prefix, field, label, word in FURTHER:
            head, _, key = field.partition(".")
            values = row.get(head) or {}
            if key:
                values = values.get(key) or {}
            for name in values:
                # The metrics beside which this one is not in a round's line, as for the accuracies.
                unless = (name, f"client_{name}") if prefix == "received_" else (name,)
                found[prefix + name] = Metric(
                    prefix + name,
                    label.replace("{m}", name),
                    f"{field}.{name}",
                    "line page track" if prefix else "line page track compare",
                    word=word.replace("{m}", name),
                    unless=unless if prefix else (),
                )
    return [*METRICS, *found.values()]


def metric(name: str, rows: Iterable[Row] = ()) -> Metric:
    """Raises KeyError for a name that neither the table nor one of these rows has."""
    return _BY_NAME.get(name) or {m.name: m for m in all_metrics(rows)}[name]


def metrics_shown(place: str, rows: Iterable[Row] = ()) -> list[Metric]:
    """Returns the metrics that are shown there."""
    return [m for m in all_metrics(rows) if place in m.places.split()]


def line_parts(row: Row, costs: bool = False) -> list[str]:
    """Returns the pieces of a round's line that its metrics have, or its costs."""
    metrics = [m for m in (COSTS if costs else all_metrics([row])) if "line" in m.places.split()]
    own = row.get("own_model") or OWN
    every = {m.name: m.of(row) for m in metrics}
    found = {name: value for name, value in every.items() if value is not None}
    pieces = []
    for m in metrics:
        if m.name in found and not any(other in found for other in m.unless):
            word = m.label if m.word is None else m.word
            pieces.append(f"{word.replace('{own}', own)} {m.form(found[m.name])}".strip())
    return pieces
