"""The whole configuration: one record of sections, with every key, its default and what it does.

Each key's text ends with its unit (- where it has none) and the module that reads it.
"""

from __future__ import annotations

import functools
import math
from typing import Annotated, Literal

import msgspec

from fednet.config.conditions import (
    AggregationSection,
    AvailabilitySection,
    DevicesSection,
    FaultsSection,
    LinkSection,
)
from fednet.config.learning import (
    AlgorithmSection,
    DataSection,
    EvaluateSection,
    ModelSection,
    TrainSection,
)
from fednet.config.running import (
    CheckpointSection,
    PrivacySection,
    RecordSection,
    RoundSection,
    ScheduleSection,
    SecuritySection,
    StopSection,
    WireSection,
)
from fednet.config.types import AtLeast1, RunName, Section, Taken
from fednet.ids import LARGEST


class Config(Section, frozen=True, kw_only=True):
    """A whole run. `fednet.config.load` and `from_mapping` make it, checked; `to_mapping` writes it
    back.
    """

    name: RunName = "quickstart"
    """The run directory's name under --out. [-; launch/start]"""
    load: tuple[str, ...] = ()
    """A user's own files, relative to the file that names them, as --load. [-; config/reading]"""
    seed: int = 0
    """Of every draw. [-; experiment/build]"""
    rounds: AtLeast1 = 20
    """How many. [rounds; server/rounds]"""
    clients: Annotated[int, msgspec.Meta(ge=1, le=LARGEST)] = 10
    """Logical clients in the federation. [clients; server/rounds]"""
    participation: Taken | None = 0.5
    """Of the clients, asked in a round (uniform, without replacement), at least one.
    [share; config/sections]"""
    clients_per_round: AtLeast1 | None = None
    """Instead of `participation`. [clients; config/sections]"""
    algorithm: AlgorithmSection = AlgorithmSection()
    model: ModelSection = ModelSection()
    task: str = "classification"
    """A registered task, which gives loss and exact counts; see `fednet list tasks`.
    [-; experiment/settled]"""
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    evaluate: EvaluateSection = EvaluateSection()
    round: RoundSection = RoundSection()
    schedule: ScheduleSection = ScheduleSection()
    stop: StopSection = StopSection()
    checkpoint: CheckpointSection = CheckpointSection()
    record: RecordSection = RecordSection()
    wire: WireSection = WireSection()
    link: LinkSection = LinkSection()
    availability: AvailabilitySection = AvailabilitySection()
    devices: DevicesSection = DevicesSection()
    faults: FaultsSection = FaultsSection()
    aggregation: AggregationSection = AggregationSection()
    security: SecuritySection = SecuritySection()
    privacy: PrivacySection = PrivacySection()
    track: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = ()
    """Who else gets each round's numbers, in a store of files in the run's directory.
    [-; server/tracking]"""
    report: bool = True
    """Figures and page at the end. [-; cli/sweep]"""

    @property
    def cohort_size(self) -> int:
        """m = max(1, floor(C * N + 0.5)): clients asked in a round, without `select_extra`."""
        if self.clients_per_round is not None:
            return self.clients_per_round
        assert self.participation is not None
        return max(1, math.floor(self.participation * self.clients + 0.5))

    @property
    def buffer(self) -> int | None:
        """Replies that make an update; None where their number does not."""
        if self.schedule.mode != "async":
            return None
        return self.schedule.buffer or max(1, self.cohort_size // 2)

    @property
    def asked(self) -> int:
        """Clients asked in a round, where so many are there."""
        if self.round.ask is not None:
            wanted = math.ceil(min(self.round.ask * self.cohort_size - 1e-9, self.clients))
        else:
            wanted = self.cohort_size + self.round.select_extra
        return min(self.clients, wanted)

    @property
    def first(self) -> int | None:
        """Replies that close a round; None: those of all that are asked."""
        return self.cohort_size if self.round.ask is not None else self.round.first

    def replace(self, **changes: object) -> Config:
        """This configuration with some sections changed, unchecked."""
        return msgspec.structs.replace(self, **changes)


@functools.cache
def homes() -> dict[str, list[str]]:
    """Where each key of ours stands: {'lr': ['train.lr'], ...}."""
    found: dict[str, list[str]] = {}

    def visit(kind: type[msgspec.Struct], path: str) -> None:
        for field in msgspec.structs.fields(kind):
            here = f"{path}.{field.encode_name}" if path else field.encode_name
            if field.name != "options":
                found.setdefault(field.encode_name, []).append(here)
            if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
                visit(field.type, here)

    visit(Config, "")
    return found
