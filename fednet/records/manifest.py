"""checkpoint/manifest.json of a run: its progress, and the files from which a resume starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from fednet.errors import StateError
from fednet.files import read_record
from fednet.plain import JsonDict

# No path: a manifest names no file elsewhere.
StateName = Annotated[str, msgspec.Meta(pattern=r"^state-[0-9a-f]+\.safetensors\Z")]
FORMAT = 1  # of a run's directory, as this release writes it
RESTORE = "restore the files from a backup, or start the run again under another name"


class UnderWay(msgspec.Struct, kw_only=True):
    """A task of an asynchronous run that waits for its reply."""

    round: int
    """The round in which it was sent."""
    at: float
    """The second of the run's clock at which it was sent."""
    start: str
    """The version of its client's state."""
    sent: str
    """The digest of the payload."""
    bytes: int = 0
    """Bytes of the message, on the virtual clock."""
    enrolled: bool = False


class Candidate(msgspec.Struct, kw_only=True, frozen=True):
    """A client that may be selected, and what the server knows of it from its last reply that
    counted. Before its first one, all but `id` and `n` have their defaults.
    """

    id: int
    n: int | None = None
    """Its training samples; None where its site has the data and it has not replied yet."""
    round: int = 0
    """The round of that reply; 0: none."""
    times: int = 0
    """Rounds in which a reply of it counted."""
    loss: float | None = None
    """Its mean training loss then; None: none, or not finite."""
    reported: dict[str, float] = {}
    """What it reported then by `host.report`."""
    seconds: float | None = None
    """How long its task took then; None with `link.clock: real`, where no two runs agree."""


class RunProgress(msgspec.Struct, kw_only=True):
    """The progress of a run, beside the method's own state."""

    run: str
    clients: int = 0
    """How many clients it has; 0: unknown."""
    round: int = 0
    versions: dict[int, str] = {}
    """The version of each client's state that was last used."""
    states: dict[int, str] = {}
    """The hash of each client's state."""
    candidates: dict[int, Candidate] = {}
    """What each client replied last, where the clients are selected by it."""
    lengths: dict[str, int] = {}
    """Bytes of the files of lines, but for `wire.jsonl`."""
    records: dict[str, list[JsonDict]] = {}
    """Lines of the checkpoint that may not be in their files yet."""
    void: int = 0
    best: float | None = None
    best_round: int = 0
    best_of: str = ""
    """Which model has the accuracy `best`: global, personal or local."""
    client_metrics: dict[str, dict[str, float]] = {}
    """Of the evaluation at the end, see `Summary`."""
    confusion: JsonDict = {}
    """Of the evaluation at the end, see `Summary`."""
    seconds: float = 0.0
    virtual: float = 0.0
    totals: dict[str, int] = {}
    """Bytes spent, by direction."""
    useful: dict[str, dict[str, int]] = {}
    """Payload bytes of the method's own messages by direction and kind, as measured."""
    predicted: dict[str, dict[str, int]] = {}
    """The same, as declared."""
    stopped: str = ""
    """Why the run ended before its last round."""
    finished: bool = False
    under_way: dict[int, UnderWay] = {}
    """In an asynchronous run, the tasks that wait for their replies, by client."""
    at: float = 0.0
    """The second of the run's clock."""
    journal: tuple[int, int] = (0, 0)
    """Generation and bytes of the server's journal, see `journal.file`."""

    def tasks(self) -> set[tuple[int, int]]:
        """Returns (round, client) of the tasks under way."""
        return {(task.round, client) for client, task in self.under_way.items()}


def read_manifest(checkpoint: Path) -> tuple[RunProgress, dict[str, str]]:
    """Returns a checkpoint's progress, and its files by name, among them `server`. Raises
    StateError if it is damaged or of another format.
    """
    path = checkpoint / "manifest.json"
    try:
        manifest = read_record(path, RESTORE)
        if manifest["format"] != FORMAT:
            raise StateError(
                f"{path.parents[1]}: another release of fednet wrote this run's directory (format "
                f"{manifest['format']!r}; this release reads {FORMAT}): resume it with the version "
                f"that {path.parents[1] / 'events.jsonl'} names, or start the run again under "
                f"another name."
            )
        files = msgspec.convert(manifest["files"], dict[str, StateName])
        return msgspec.convert(manifest["progress"], RunProgress, strict=False), {
            "server": files.pop("server"),
            **files,
        }
    except (OSError, KeyError, TypeError, ValueError) as broken:  # msgspec's are ValueErrors
        raise StateError(f"{path}: not a whole checkpoint ({broken}); {RESTORE}.") from broken
