"""Everything that crosses between a rank and the hub, as typed structures: direction, meaning, version.

Messages are msgpack maps tagged with their name; unknown keys are ignored, so a field may be added within a protocol
version. Tensors never travel in here: they are raw frames behind the header, described by `GroupHeader.sizes`.
"""

from __future__ import annotations

from typing import Any, Union

from msgspec import Struct, field

from zbgrpo.ledger.evaluation import EvaluationLease, EvaluationResult
from zbgrpo.ledger.records import Lease, PlanEntry
from zbgrpo.transport.ring import Descriptor

PROTOCOL = 5
"""Raised with every change that an older peer would misread."""


class GroupHeader(Struct, frozen=True, array_like=True):
    """What is known of a group without its tensors. Its frame has `sizes[i]` rows of tensor i, one tensor after the
    other."""

    lease_id: int
    episode: int
    row: int
    attempt: int
    num_tokens: int
    oldest_version: int
    newest_version: int
    crc: int
    """crc32 of the frame, which has the tensors in the order of `PAYLOAD_DTYPES`; the three logs are joined by it."""
    sizes: list[int]


# ------------------------------------------------------------------------------------------------ rank -> hub


class Hello(Struct, frozen=True, tag=True):
    """First message of every peer. Consumers and readers name their place in the mesh, relays their node."""

    rank: int
    node: int = 0
    dp_index: int = 0


class Lane(Struct, frozen=True, tag=True):
    """Producer -> hub, before its first frames: memory through which frames may come; see `zbgrpo.transport.lane`."""

    path: str
    capacity_bytes: int


class Want(Struct, frozen=True, tag=True):
    """Producer -> hub: room for this many more leases; replaces the earlier number."""

    num_leases: int
    received: int = 0
    """Leases that had reached the producer when it asked, so that leases on their way are not granted twice."""


class Applied(Struct, frozen=True, tag=True):
    """Producer -> hub: tokens are sampled with this version from now on."""

    version: int
    digest: str


class Groups(Struct, frozen=True, tag=True):
    """Producer -> hub: finished groups, with one frame each."""

    groups: list[GroupHeader]


class Filtered(Struct, frozen=True, tag=True):
    """Producer -> hub: the group was not effective; statistics instead of tensors."""

    lease_id: int
    mean_accuracy: float
    mean_format: float
    mean_reward: float
    num_responses: int
    num_tokens: int
    zero_variance: bool


class Dropped(Struct, frozen=True, tag=True):
    """Producer -> hub: the group is lost for good. `reason` is a `DropReason`."""

    lease_id: int
    reason: str
    detail: str


class Returned(Struct, frozen=True, tag=True):
    """Producer -> hub: the group was not generated, for no fault of its own; lease it again."""

    lease_id: int
    detail: str


class Evaluated(Struct, frozen=True, tag=True):
    """Producer -> hub: an evaluation row was answered."""

    lease_id: int
    result: EvaluationResult


class Trained(Struct, frozen=True, tag=True):
    """Consumer -> hub: forward and backward passes of this TRAIN entry are done."""

    sequence: int


class Committed(Struct, frozen=True, tag=True):
    """Consumer -> hub: an optimizer step made this version; `skipped` if its gradient was not finite."""

    version: int
    skipped: bool = False


class SnapshotRequest(Struct, frozen=True, tag=True):
    """Consumer 0 -> hub: send the ledger as of now; nothing has been committed since this version."""

    version: int


class WeightsStart(Struct, frozen=True, tag=True):
    """Source of a stage -> hub -> producers: broadcast number `broadcast` of that stage begins now and carries this
    version."""

    broadcast: int
    version: int
    hold: bool = False
    """Set by the hub for evaluators of a version that is due: apply it, and stay with it until `ReleaseVersion`."""
    stage: int = 0


class BroadcastsDone(Struct, frozen=True, tag=True):
    """First source -> hub, behind the last plan entry: no broadcast is running or will start; producers may leave."""


class Release(Struct, frozen=True, tag=True):
    """Reader -> hub or relay: this ring record has been copied."""

    sequence: int


class TimeReport(Struct, frozen=True, tag=True):
    """Rank -> hub: seconds by phase so far."""

    seconds: dict[str, float]


class Progress(Struct, frozen=True, tag=True):
    """Rank -> hub, with every heartbeat and without a sequence number: how its main loop is."""

    quiet_seconds: float
    """Since the last turn of the loop."""
    doing: str
    waiting: bool
    """Whether it waits for other ranks, so that they may be why it does not go on."""


class StopRequest(Struct, frozen=True, tag=True):
    """Any rank -> hub: plan STOP next (a signal arrived)."""

    reason: str


class Failed(Struct, frozen=True, tag=True):
    """Any rank -> hub: this rank ends with an error; everybody else must end too.

    `lost`: all it knows is that another rank is gone. It waits for the hub to say which.
    """

    error: str
    lost: bool = False


class Goodbye(Struct, frozen=True, tag=True):
    """Any rank -> hub: nothing more will come; silence is no fault from now on."""


# ------------------------------------------------------------------------------------------------ hub -> rank


class LaneOpen(Struct, frozen=True, tag=True):
    """Hub -> producer: frames may come through the memory that was offered."""


class Leases(Struct, frozen=True, tag=True):
    """Hub -> producer."""

    leases: list[Lease]


class EvaluationLeases(Struct, frozen=True, tag=True):
    """Hub -> producer: all for the version that it holds."""

    leases: list[EvaluationLease]


class ReleaseVersion(Struct, frozen=True, tag=True):
    """Hub -> producer: the evaluation is over; newer versions may be applied."""

    version: int


class PlanFor(Struct, frozen=True, tag=True):
    """Hub or relay -> reader: an entry, with the ring record of this rank's groups; more of them follow until
    `complete`."""

    entry: PlanEntry
    groups: list[GroupHeader] = []
    record: Descriptor | None = None
    """Holds the frames of these groups, one behind the other; None if there are none."""
    complete: bool = True


class PlanRelay(Struct, frozen=True, tag=True):
    """Hub -> relay: an entry, with the groups of that node's ranks, one frame each."""

    entry: PlanEntry
    groups: list[GroupHeader] = []


class LedgerState(Struct, frozen=True, tag=True):
    """Hub -> consumer 0: the ledger as of a commit that is saved."""

    version: int
    state: dict[str, Any]


class StepReport(Struct, frozen=True, tag=True):
    """Hub -> consumer 0, after each commit: what the step's metrics need from the other side.

    `filtered`: sums over the groups filtered since the last report, over responses (reward, format_acc, ans_acc,
    responses, tokens) and groups (groups, zero_variance).
    """

    version: int
    counts: dict[str, int]
    applied_min: int
    filtered: dict[str, float]
    times: dict[str, TimeReport]
    """By peer name."""


class EvaluationRows(Struct, frozen=True, tag=True):
    """Hub -> consumer 0: rows of an evaluation that has ended, by task and row; `EvaluationDone` follows the last."""

    version: int
    results: list[EvaluationResult]


class EvaluationDone(Struct, frozen=True, tag=True):
    """Hub -> consumers: an evaluation has ended."""

    version: int


class FinalReport(Struct, frozen=True, tag=True):
    """Hub -> consumer 0: everybody else has left; totals for the summary."""

    counts: dict[str, int]
    dropped_by_reason: dict[str, int]
    last_drop: str
    """Detail of the last group that was dropped with one."""
    times: dict[str, TimeReport]


class Finished(Struct, frozen=True, tag=True):
    """Hub -> everybody: the plan has ended (`end` or `stop`); drain and leave."""

    reason: str


class Abort(Struct, frozen=True, tag=True):
    """Hub -> everybody: the run has failed; leave at once. `reported`: whoever failed has said so on the screen."""

    error: str
    reported: bool = False


Message = Union[
    Hello, Lane, Want, Applied, Groups, Filtered, Dropped, Returned, Evaluated, Trained, Committed, SnapshotRequest,
    WeightsStart, BroadcastsDone, Release, TimeReport, Progress, StopRequest, Failed, Goodbye, LaneOpen, Leases,
    EvaluationLeases, ReleaseVersion, PlanFor, PlanRelay, LedgerState, StepReport, EvaluationRows, EvaluationDone,
    FinalReport, Finished, Abort,
]  # fmt: skip


class Header(Struct, frozen=True, array_like=True):
    """First part of every multipart message; its crc32 is behind it. Sequence 0 carries no messages but
    `Progress`, only the acknowledgement."""

    magic: str
    protocol: int
    run_id: str
    sender: str
    incarnation: int
    """Number of the start of the peer (in both directions: of the peer, never of the hub)."""
    sequence: int
    acknowledged: int
    """Highest sequence number received in order from the other side."""
    messages: list[Message]
    crcs: list[int] = field(default_factory=list)
    """crc32 of each raw frame behind the header."""
    times: list[float] = field(default_factory=list)
    """With sequence 0 only, in seconds of the monotonic clock of whoever wrote it. Rank -> hub: [sent]. Hub -> rank:
    [sent, received, answered] of the rank's message that this answers; see `zbgrpo.observe.clockoffset`."""
    lengths: list[int] = field(default_factory=list)
    """Bytes of each frame, when all of them lie one after the other in the part behind the header, or in `record`;
    empty when each is a part of its own."""
    shares: list[tuple[int, int]] = field(default_factory=list)
    """[messages, frames] of each call of `send` whose messages travel together here; empty when it was one."""
    record: Descriptor | None = None
    """Where the frames are in the peer's lane, if they are not behind the header."""


MAGIC = "zbgrpo"
