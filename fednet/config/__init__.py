"""The typed configuration of a run: strict YAML in, one frozen record out, every error with its
place.

A part's own mapping (algorithm, model, dataset, partition) is checked against the type that the
registry returns for its name. Importing this module imports no part and no torch.
Read in this order: tree, schema, fit, parts, rules, reading, keys.
"""

from __future__ import annotations

from fednet.config.reading import differing as differing
from fednet.config.reading import flat as flat
from fednet.config.reading import from_mapping as from_mapping
from fednet.config.reading import from_text as from_text
from fednet.config.reading import load as load
from fednet.config.reading import to_mapping as to_mapping
from fednet.config.reading import to_yaml as to_yaml
from fednet.config.schema import WHERE as WHERE
from fednet.config.schema import AlgorithmSection as AlgorithmSection
from fednet.config.schema import AvailabilitySection as AvailabilitySection
from fednet.config.schema import ClientLinkSection as ClientLinkSection
from fednet.config.schema import Config as Config
from fednet.config.schema import DevicesSection as DevicesSection
from fednet.config.schema import EvaluateSection as EvaluateSection
from fednet.config.schema import FaultKind as FaultKind
from fednet.config.schema import LinkSection as LinkSection
from fednet.config.schema import ModelSection as ModelSection
from fednet.config.schema import PrivacySection as PrivacySection
from fednet.config.schema import RoundSection as RoundSection
from fednet.config.schema import ServerPoint as ServerPoint
from fednet.config.schema import TrainSection as TrainSection
from fednet.config.schema import parse_distribution as parse_distribution
from fednet.config.tree import compose as compose
