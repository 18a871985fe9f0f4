"""The messages of the protocol.

A message is one small header frame (see `frames`) and at most one raw body frame. The header has
the fields of the typed records below, checked before anything is believed. Bodies are payloads
(see `codec`), or parts of them. A payload of up to `BESIDE` bytes crosses beside its message; a
longer one is announced without a body, and pulled in parts of `PART` bytes.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fednet.files import CHECK_BYTES

PROTOCOL = 1  # its version, which both sides say at the join
PART = 4 << 20  # bytes of one body frame at most
BESIDE = 1 << 20  # bytes of a payload that nobody has to ask for: many clients may send it at once
WINDOW = 2  # parts that a receiver grants to one sender ahead of those that have come
WHOLE = 1 << 62  # in place of PART: every payload crosses in one piece, within a process
MAX_HEADER = 1 << 18  # bytes of one header frame at most
MAX_IDS = 1 << 20  # clients of one process at most
MIN_BEAT_S = 0.1  # a server that asked for more beats than that would take a client's processor
MAX_SAMPLES = 1 << 31  # of one client at most: what a site says of its data is bounded
MAX_REASON = 300  # characters of a refusal's reason: parts of it are the sender's

Index = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
SampleCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_SAMPLES)]
# Of a payload's bytes, by `files.digest`.
Check = Annotated[bytes, msgspec.Meta(max_length=CHECK_BYTES)]
# What a peer writes is shown on terminals and in logs: nothing of it may move a cursor, begin a
# line, or turn the direction of what stands beside it. `clean` replaces such characters.
_UNSEEN = (
    r"\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\ud800-\udfff"
)
REPORTS = 16  # numbers that a method may say of a client in a round
Text = Annotated[str, msgspec.Meta(max_length=4096, pattern=rf"^[^{_UNSEEN}]*\Z")]
Name = Annotated[str, msgspec.Meta(max_length=128, pattern=rf"^[^{_UNSEEN}]*\Z")]
# What may become a path: one name within a folder, and never the folder itself or the one above.
_PATH_NAME = r"^(?!\.{1,2}\Z)[A-Za-z0-9._-]"
Id = Annotated[str, msgspec.Meta(max_length=128, pattern=rf"{_PATH_NAME}*\Z")]
RunId = Annotated[str, msgspec.Meta(max_length=128, pattern=rf"{_PATH_NAME}+\Z")]
Version = Annotated[str, msgspec.Meta(max_length=64, pattern=r"^([0-9]+-[0-9]+-[0-9]+)?\Z")]
Digest = Annotated[str, msgspec.Meta(pattern=r"^(?:[0-9a-f]{64})?\Z")]  # SHA-256, or none
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # neither negative nor NaN
Purpose = Literal["train", "evaluate"]
Direction = Literal["up", "down"]
OTHER: dict[Direction, Direction] = {"down": "up", "up": "down"}


class Key(msgspec.Struct, frozen=True, array_like=True, order=True):
    """What a task and all that belongs to it are known by. Keys are sorted, and written, by their
    fields in this order.
    """

    round: Index
    phase: Index
    attempt: Index
    client: Index
    purpose: Purpose = "train"

    @property
    def version(self) -> str:
        """The client state that this task makes: `round-phase-attempt`."""
        return f"{self.round}-{self.phase}-{self.attempt}"


class Field(msgspec.Struct, frozen=True, array_like=True):
    """One payload field as encoded."""

    name: Name
    kind: Name
    size: Index
    """Bytes on the wire."""
    raw: Index
    """Bytes before compression."""
    parts: Annotated[
        list[tuple[Name, Name, Annotated[list[Index], msgspec.Meta(max_length=8)]]],
        msgspec.Meta(max_length=64),
    ] = []
    """(name, dtype, shape) of the arrays inside, where the declaration leaves them open."""


Form = Annotated[list[Field], msgspec.Meta(max_length=64)]


class Fault(msgspec.Struct, frozen=True, array_like=True):
    """A planned fault that the client is to act out in a task, or the pace of its device. amount:
    seconds of delay, factor of slowness, share of an upload that gets through, rounds that a
    crashed client stays away; of a pace the seconds that the task takes at least.
    """

    kind: Name
    amount: Seconds = 0.0

    def cut(self, size: int) -> int:
        """Bytes of an upload of `size` that get through before it is cut: of all of them, all but
        one, since nothing is lost of an upload that is whole.
        """
        return max(0, min(int(self.amount * size), size - 1))


class Message(msgspec.Struct, frozen=True, tag_field="t", kw_only=True):
    """Base of all messages. `run` and `inc` (incarnation of the server) mark what belongs to this
    run.
    """

    run: Id = ""
    inc: Index = 0


class SiteFacts(msgspec.Struct, frozen=True, array_like=True):
    """What a site tells of its data."""

    client: Index
    train: SampleCount
    """Training samples."""
    test: SampleCount
    """Labels or values of its test samples, one each, or one for each position of a sequence."""
    classes: list[SampleCount] = []
    """Training samples by class."""
    names: Digest = ""
    """Digest of the names of the classes in order, "" where they have none."""


# -- from the client -------------------------------------------------------------------------------
class Join(Message, tag="join", frozen=True):
    """The first message of a connection. `worker`: this process's random name; `session`: the token
    that the server gave this process earlier, if any; `ids` or `share` (k of n) say whom it hosts;
    `holding`: tasks it still has; `speaks`: its version of the protocol; `explain`: it only wants
    to read the configuration, and hosts nobody; `status`: it only asks what the server knows of
    these clients.
    """

    worker: Id
    session: Id = ""
    ids: list[Index] = []
    share: tuple[Index, Index] | None = None
    host: Name = ""
    pid: Index = 0
    device: Name = ""
    slots: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    versions: Annotated[dict[Name, Name], msgspec.Meta(max_length=32)] = {}
    files: Annotated[dict[Text, Name], msgspec.Meta(max_length=256)] = {}
    holding: Annotated[list[Key], msgspec.Meta(max_length=4096)] = []
    speaks: Index = PROTOCOL
    explain: bool = False
    status: bool = False


class Ready(Message, tag="ready", frozen=True):
    """Data and model are in place. `layout`: digest of the shared layout; `sites`: facts, where
    data are the sites'.
    """

    layout: Name
    sites: list[SiteFacts] = []


UPLOADING = "uploading"  # a client's stage once its training is over


class Progress(Message, tag="progress", frozen=True):
    """What this process does for a client. stage: of its task, such as training; step: of `steps`
    in this stage.
    """

    client: Index
    stage: Name = ""
    step: Index = 0
    steps: Index = 0


class Slots(Message, tag="slots", frozen=True):
    """From now on this process can do so many tasks at once."""

    slots: Annotated[int, msgspec.Meta(ge=1, le=1024)]


class Reply(Message, tag="reply", frozen=True):
    """What came of a task: announced with its form, the body beside it if it fits into one part,
    else to be pulled. The fields of the evaluation within a task, if one was asked for, are behind
    the method's own.
    """

    key: Key
    form: Form
    size: Index
    check: Check = b""
    """Digest of the payload's bytes."""
    state: Digest = ""
    """SHA-256 of the client's new state ("" if the method keeps none)."""
    kept: bool = False
    """Whether a version of it was written, which the next task must name."""
    seconds: Seconds = 0.0
    """Seconds that the task took."""
    split: Annotated[list[Seconds], msgspec.Meta(max_length=3)] = []
    """Seconds of these in training, evaluating and encoding."""
    reported: Annotated[dict[Name, float], msgspec.Meta(max_length=REPORTS)] = {}
    """What the method says of the client in this round (`host.report`), where the site lets
    statistics out.
    """


class Failed(Message, tag="failed", frozen=True):
    """The task could not be done. `again`: whether giving it to this client once more could
    help. `lacks`: the state that it starts from is not here; another process may have it. `base`:
    nor is the model that training starts from, which the server sends.
    """

    key: Key
    reason: Text
    again: bool = False
    lacks: bool = False
    base: bool = False


class Leave(Message, tag="leave", frozen=True, omit_defaults=True):
    """This process ends on purpose. reason: of a site that refuses the run; else empty."""

    reason: Text = ""


# -- from the server -------------------------------------------------------------------------------
class Welcome(Message, tag="welcome", frozen=True):
    """Accepted. `run` names the client's folder for this run; the configuration travels as YAML;
    `ids`: whom this process hosts; `beat_s`: seconds between beats; `speaks`: the server's
    version of the protocol.
    """

    run: RunId
    session: Id
    name: Text
    config: Annotated[str, msgspec.Meta(max_length=MAX_HEADER)]
    ids: list[Index]
    beat_s: Annotated[float, msgspec.Meta(ge=MIN_BEAT_S, le=3600)] = 2.0
    speaks: Index = PROTOCOL


class Refuse(Message, tag="refuse", frozen=True):
    """Not accepted. `final`: trying again cannot help. `unread`: the message was damaged, and what
    it said is lost.
    """

    reason: Text
    final: bool = False
    unread: bool = False


class Standing(Message, tag="standing", frozen=True):
    """The answer to a join that asks for the status of its clients, in words."""

    text: Text


class Task(Message, tag="task", frozen=True):
    """Work for a client."""

    key: Key
    form: Form
    size: Index
    check: Check = b""
    start: Version = ""
    """The state version it starts from ("" = its initial state)."""
    state: Digest = ""
    """That state's SHA-256, "" where the server has none on record."""
    keep: Version = ""
    """The version that the server's last checkpoint names."""
    enrol: Index = 0
    """How many of the form's fields are the enrolment that comes before `Down`."""
    evaluates: bool = msgspec.field(default=False, name="judge")
    """Whether the client evaluates within this task."""
    deadline_s: Seconds | None = None
    faults: Annotated[list[Fault], msgspec.Meta(max_length=1024)] = []


class Cancel(Message, tag="cancel", frozen=True):
    """This task is not wanted any more."""

    key: Key


class End(Message, tag="end", frozen=True):
    """The run is over, or stops with rounds left to do (`over` false: a later server goes on)."""

    over: bool = True
    reason: Text = ""


# -- both ways -------------------------------------------------------------------------------------
class Alive(Message, tag="alive", frozen=True):
    """Nothing to say but that this side is there."""


class Pull(Message, tag="pull", frozen=True):
    """The receiver of a payload grants `count` parts from `first` on."""

    key: Key
    first: Index
    count: Annotated[int, msgspec.Meta(ge=1, le=1024)]


class Part(Message, tag="part", frozen=True):
    """Part `index` of the payload of `key`; the body beside it."""

    key: Key
    index: Index


FROM_CLIENT = (Join, Ready, Alive, Progress, Slots, Reply, Failed, Leave, Pull, Part)
FROM_SERVER = (Welcome, Refuse, Standing, Task, Cancel, End, Alive, Pull, Part)
# Heartbeats. The server answers each with Alive, records them as one sum, and disconnects a client
# that sends too many. A message that is sent once, or that writes an event, is no heartbeat.
BEATS = (Alive, Progress, Slots)
WITH_BODY = (Reply, Task, Part)


def beside(part: int) -> int:
    """Returns up to how many bytes a payload crosses beside its message, where the parts of longer
    ones have `part` bytes.
    """
    return part if part == WHOLE else min(part, BESIDE)


def clean(text: object, most: int = MAX_REASON) -> str:
    """What a peer, or an exception that quotes one, wrote: as one line that a terminal, a log and a
    receiver take as it stands.
    """
    return "".join(c if c.isprintable() else " " for c in str(text)[:most])
