"""The numbers of a round: the name of each, its field of a `Round`, and where it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fednet.plain import JsonMapping
from fednet.records.rows import Row

OWN = "personal"  # the clients' own models, where a record does not say


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def mb(count: float) -> str:
    """Returns bytes as MB, 10^6."""
    return f"{count / 1e6:.2f} MB" if count < 1e8 else f"{count / 1e6:.0f} MB"


@dataclass(frozen=True)
class Metric:
    """A number of each round.

    name: as `--y` has it; label: on an axis and in a table, see `titled`; field: its place in
    a `Round`, with a dot before the key of a mapping (`client_accuracy.personal`,
    `algorithm.epsilon`). places: where it is shown, words of: line (of a round, as it ends), page,
    compare (its last value) and track (TensorBoard). word and form: how the line says it. share: it
    is 0..1. unless: in the line only where none of these other metrics has a value.

    An accuracy names the model that was evaluated: `global`, or `{own}`, which `titled` and
    `line_parts` replace by what the clients' own models are: `personal` or `local`
    (`Round.own_model`).
    """

    name: str
    label: str
    field: str
    places: str
    word: str = ""
    form: Callable[[float], str] = "{:.4f}".format
    share: bool = False
    unless: tuple[str, ...] = ()

    def titled(self, own: str = OWN) -> str:
        """Returns its label, with what the clients' own models are."""
        return self.label.replace("{own}", own)

    def of(self, row: JsonMapping | Row) -> float | None:
        """Returns its value in a round's row, of several numbers their mean; None if it was not
        measured, or is no number.
        """
        head, *keys = self.field.split(".")
        value = getattr(row, head) if isinstance(row, Row) else row.get(head)
        for key in keys:
            value = (value or {}).get(key)
        if isinstance(value, list) and value:
            value = sum(value) / len(value)
        return value if isinstance(value, int | float) else None


# In the order in which they are shown.
METRICS: tuple[Metric, ...] = (
    Metric(
        name="accuracy",
        label="global test accuracy",
        field="test_accuracy",
        places="line page track",
        word="global accuracy",
        form=percent,
        share=True,
    ),
    Metric(
        name="client_accuracy",
        label="global accuracy on clients' tests",
        field="client_accuracy.global",
        places="line page",
        word="global accuracy on clients' tests",
        form=percent,
        share=True,
        unless=("accuracy",),
    ),
    Metric(
        name="received_accuracy",
        label="global accuracy before the round, on clients' tests",
        field="client_accuracy.received",
        places="line page",
        word="global accuracy before the round, on clients' tests",
        form=percent,
        share=True,
        unless=("accuracy", "client_accuracy"),
    ),
    Metric(
        name="personal_accuracy",
        label="{own} accuracy on clients' tests",
        field="client_accuracy.personal",
        places="line page",
        word="{own} accuracy on clients' tests",
        form=percent,
        share=True,
        unless=("accuracy",),
    ),
    Metric(
        name="validation_accuracy",
        label="global validation accuracy",
        field="validation_accuracy",
        places="page compare track",
        share=True,
    ),
    Metric(name="test_loss", label="test loss", field="test_loss", places="page track"),
    Metric(name="staleness", label="mean staleness", field="staleness", places="page track"),
    Metric(
        name="held_out_accuracy",
        label="global accuracy on held-out clients' tests",
        field="held_out.global",
        places="line page",
        word="on held-out clients",
        form=percent,
        share=True,
    ),
    Metric(
        name="held_out_personal_accuracy",
        label="{own} accuracy on held-out clients' tests",
        field="held_out.personal",
        places="line page",
        word="{own} on held-out clients",
        form=percent,
        share=True,
    ),
    Metric(
        name="train_loss",
        label="training loss",
        field="train_loss",
        places="line page track",
        word="train loss",
    ),
)
# What a round costs: in its line after the numbers above and after who took part.
COSTS: tuple[Metric, ...] = (
    Metric("bytes_down", "bytes down", "bytes_down", "line track", "down", mb),
    Metric("bytes_up", "bytes up", "bytes_up", "line track", "up", mb),
    Metric("seconds", "seconds", "seconds", "line track", "", "{:.1f} s".format),
    Metric(
        "virtual", "virtual seconds", "seconds_virtual", "line track", "", "{:.1f} s virtual".format
    ),
)


# Of the metrics of `evaluate.metrics`, by their field of a round: what is before the metric's name,
# in a label, and in a round's line; and what is after the name in a label.
FURTHER = {
    "metrics": ("", "global ", "", ""),
    "client_metrics.global": ("client_", "global ", "global ", " on clients' tests"),
    "client_metrics.received": (
        "received_",
        "global ",
        "received ",
        " before the round, on clients' tests",
    ),
    "client_metrics.personal": ("personal_", "{own} ", "{own} ", " on clients' tests"),
}


def further(row: JsonMapping | Row) -> list[Metric]:
    """Returns the metrics of `evaluate.metrics` that a round's row has."""
    found: list[Metric] = []
    for field, (prefix, model, word, tested) in FURTHER.items():
        head, _, key = field.partition(".")
        values = row.get(head) or {}
        if key:
            values = values.get(key) or {}
        for name in values:
            found.append(
                Metric(
                    name=prefix + name,
                    label=f"{model}{name}{tested}",
                    field=f"{field}.{name}",
                    places="line page track compare" if not prefix else "line page track",
                    word=word + name,
                    unless=_unless(name, prefix),
                )
            )
    return found


def _unless(name: str, prefix: str) -> tuple[str, ...]:
    """Returns the metrics beside which this one is not in a round's line, as for the accuracies."""
    if not prefix:
        return ()
    return (name, f"client_{name}") if prefix == "received_" else (name,)


def metric(name: str, rows: Iterable[JsonMapping | Row] = ()) -> Metric:
    """Raises KeyError for a name that neither the table nor one of these rows has."""
    for m in METRICS:
        if m.name == name:
            return m
    return {m.name: m for m in known(rows)}[name]


def known(rows: Iterable[JsonMapping | Row] = ()) -> list[Metric]:
    """Returns the metrics of the table, and those that only these rows have."""
    found = {m.name: m for row in rows for m in further(row)}
    return [*METRICS, *found.values()]


def names(rows: Iterable[JsonMapping | Row] = ()) -> list[str]:
    return [m.name for m in known(rows)]


def shown(place: str, rows: Iterable[JsonMapping | Row] = ()) -> list[Metric]:
    """Returns the metrics that are shown there."""
    return [m for m in known(rows) if place in m.places.split()]


def line_parts(row: JsonMapping | Row, costs: bool = False) -> list[str]:
    """Returns the pieces of a round's line that its metrics have, or its costs."""
    metrics = COSTS if costs else known([row])
    own = row.get("own_model") or OWN
    found = {
        m.name: v for m in metrics if "line" in m.places.split() and (v := m.of(row)) is not None
    }
    return [
        f"{m.word.replace('{own}', own)} {m.form(found[m.name])}".strip()
        for m in metrics
        if m.name in found and not any(other in found for other in m.unless)
    ]
