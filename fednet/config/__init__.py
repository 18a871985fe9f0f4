"""The typed configuration of a run: strict YAML in, one frozen record out, every error with its
place.

A part's own mapping (algorithm, model, dataset, partition) is checked against the type that the
registry returns for its name. Importing this module imports no part and no torch.
"""

from __future__ import annotations

from fednet.config.reading import (
    differing,
    flat,
    from_mapping,
    from_text,
    load,
    to_mapping,
    to_yaml,
)
from fednet.config.schema import (
    WHERE,
    AlgorithmSection,
    AvailabilitySection,
    ClientLinkSection,
    Config,
    DevicesSection,
    EvaluateSection,
    FaultKind,
    LinkSection,
    ModelSection,
    PrivacySection,
    RoundSection,
    ServerPoint,
    TrainSection,
    drawn,
)
from fednet.config.tree import compose
from fednet.options import call

__all__ = [
    "WHERE",
    "AlgorithmSection",
    "AvailabilitySection",
    "ClientLinkSection",
    "Config",
    "DevicesSection",
    "EvaluateSection",
    "FaultKind",
    "LinkSection",
    "ModelSection",
    "PrivacySection",
    "RoundSection",
    "ServerPoint",
    "TrainSection",
    "call",
    "compose",
    "differing",
    "drawn",
    "flat",
    "from_mapping",
    "from_text",
    "load",
    "to_mapping",
    "to_yaml",
]
