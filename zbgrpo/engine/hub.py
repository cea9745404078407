"""The hub: owns order, leases, plans and accounting. A child process of consumer 0 that dies with it; no torch.

    consumes      requests, groups and evaluation rows of producers; commits of consumers
    waits for     messages, in one place (`Server.poll`)
    unblocked by  any message, at the latest by its timer

Every turn of the loop: take what has arrived, let the ledger grant and plan, send, log, keep peers alive.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from zbgrpo import failpoints
from zbgrpo.data.order import episode_order
from zbgrpo.engine.hub_process import child_main
from zbgrpo.engine.hub_spec import HubSpec
from zbgrpo.errors import ProtocolError
from zbgrpo.ledger.evaluation import EvaluationBook
from zbgrpo.ledger.ledger import Ledger
from zbgrpo.ledger.records import Lease, PlanEntry, PlanKind
from zbgrpo.observe.events import EventLog
from zbgrpo.observe.trace import HubTrace
from zbgrpo.transport import messages as m
from zbgrpo.transport.plan_stream import PlanPublisher, StoredGroup
from zbgrpo.transport.ring import RingWriter
from zbgrpo.transport.server import Server
from zbgrpo.transport.wire import check_frames
from zbgrpo.types import DropReason

_TURN_SECONDS = 0.1
_LEAVE_SECONDS = 30.0
_ROWS_PER_MESSAGE = 64  # evaluation rows carry the texts of their responses


class Hub:
    """See the module's text. `run` returns the exit status."""

    def __init__(self, spec: HubSpec, server: Server, ring: RingWriter) -> None:
        @lru_cache(maxsize=4)
        def order(episode: int) -> np.ndarray:
            return episode_order(spec.num_rows, episode, spec.seed)

        self.spec, self.server, self.ring = spec, server, ring
        self.ledger = Ledger(spec.ledger_options(order))
        if spec.restored is not None:
            self.ledger.restore(spec.restored, spec.model_saved)
        self.evaluation = EvaluationBook(spec.eval_rows, spec.num_producers, spec.leases_per_producer)
        self.events = EventLog(spec.events_path)
        self.trace = HubTrace(spec.events_path, spec.run_id, spec.trace_limit)
        self.events.append("started", run=spec.run_id, ring=ring.path, version=self.ledger.version)
        self.groups: dict[int, StoredGroup] = {}
        local = {reader.name: reader.dp_index for reader in spec.readers if reader.node == spec.node}
        self.publisher = PlanPublisher(ring, local, server.send)
        self.times: dict[str, m.TimeReport] = {}
        self.filtered: dict[str, float] = {}
        self.last_drop = ""
        self.extremes = {"all_right": 0, "all_wrong": 0}
        self._attached: set[str] = set()
        self._expected = spec.peers()
        self._held_weights: list[m.WeightsStart] = []
        self._granted = [0] * spec.num_producers
        self._due_evaluation: int | None = self.ledger.version if spec.eval_rows and spec.evaluate_first else None
        if self._due_evaluation is not None:
            self.ledger.evaluating, self.ledger.evaluated_version = True, self._due_evaluation
        self._snapshots_due: set[int] = set()
        self._failure: str | None = None
        self._finished: str | None = None
        self._ended_at = 0.0
        self._final_sent = False
        self._handlers: dict[type, Any] = {
            m.Hello: self._hello,
            m.Want: self._want,
            m.Applied: self._applied,
            m.Groups: self._groups,
            m.Filtered: self._filtered,
            m.Dropped: self._dropped,
            m.Returned: self._returned,
            m.Evaluated: self._evaluated,
            m.Trained: self._trained,
            m.Committed: self._committed,
            m.SnapshotRequest: self._snapshot_request,
            m.WeightsStart: self._weights_start,
            m.BroadcastsDone: self._broadcasts_done,
            m.Release: self._release,
            m.TimeReport: self._time_report,
            m.StopRequest: self._stop,
            m.Failed: self._failed,
            m.Goodbye: self._goodbye,
        }

    # ---------------------------------------------------------------- the loop

    def run(self) -> int:
        """Serve until the plan has ended and everybody has left, or the run has failed."""
        while True:
            for name, message, frames in self.server.poll(_TURN_SECONDS):
                self._handle(name, message, frames)
            if self._failure is None and self._everybody_here():
                self._advance()
            for name, loss in self.server.tick().items():
                self._fail(f"{self.spec.title(name)} {loss}")
            self._write_events()
            if self._failure is not None:
                return self._leave(1)
            if self._finished is not None and self._everybody_left():
                return self._leave(0)

    def _handle(self, name: str, message: m.Message, frames: Sequence[memoryview]) -> None:
        handler = self._handlers.get(type(message))
        try:
            if handler is None:
                raise ProtocolError(f"{name} sent {type(message).__name__}, which only the hub sends")
            handler(name, message, frames)
        except ProtocolError as error:
            self._fail(f"protocol broken by {name}: {error}")

    def _everybody_here(self) -> bool:
        """Whether all peers have said hello; nothing is leased, planned or announced before."""
        return not self._expected

    def _advance(self) -> None:
        self._advance_evaluation()  # first: an evaluator that has just got its version must not get other work too
        granted: dict[int, list[Lease]] = {}
        for producer, lease in self.ledger.grant():
            granted.setdefault(producer, []).append(lease)
        for producer, leases in granted.items():
            failpoints.fire("hub.grant")
            # All in one message: a producer must not begin a synchronous round with a part of it.
            self._granted[producer] += len(leases)
            self.server.send(_producer(producer), m.Leases(leases))
        for entry in self.ledger.plan():
            failpoints.fire("hub.plan")
            self._publish(entry)
        if self._ended_at and not self._final_sent:
            self._send_final()

    def _publish(self, entry: PlanEntry) -> None:
        if entry.kind is PlanKind.SAVE:
            if self.ledger.version == entry.version:
                self._send_snapshot(entry.version)
            else:
                self._snapshots_due.add(entry.version)
        elif entry.kind is PlanKind.EVAL:
            self._due_evaluation = entry.version
        ids = [lease_id for rank in entry.ranks for lease_id in rank]
        stored = {lease_id: self.groups.pop(lease_id) for lease_id in ids}
        by_node: dict[int, set[int]] = {}
        for reader in self.spec.readers:
            mine = entry.ranks[reader.dp_index] if entry.ranks else []
            by_node.setdefault(reader.node, set()).update(mine)
        for node, mine_ids in by_node.items():
            groups = {i: stored[i] for i in ids if i in mine_ids}
            if node == self.spec.node:
                self.publisher.publish(entry, groups)
            else:
                self._send_to_relay(node, entry, list(groups.values()))
        if entry.kind in (PlanKind.STOP, PlanKind.END):
            self._finish(entry.kind.value)

    def _send_to_relay(self, node: int, entry: PlanEntry, groups: list[StoredGroup]) -> None:
        frames = [group.frame for group in groups]
        self.server.send(f"relay:{node}", m.PlanRelay(entry, [g.header for g in groups]), frames=frames)

    def _finish(self, reason: str) -> None:
        self._finished = reason
        self.groups.clear()

    def _broadcasts_done(self, name: str, message: m.BroadcastsDone, frames: Any) -> None:
        if self._finished is None:
            raise ProtocolError("the broadcasts have ended before the plan has")
        self._ended_at = time.monotonic()
        failpoints.fire("shutdown.hub")
        for producer in self._names("producer:"):
            self.server.send(producer, m.Finished(self._finished))

    # ---------------------------------------------------------------- evaluation

    def _advance_evaluation(self) -> None:
        book, ledger = self.evaluation, self.ledger
        if self._due_evaluation is not None and ledger.version >= self._due_evaluation and book.version is None:
            book.start(self._due_evaluation)
            self.trace.evaluation(self._due_evaluation)
            ledger.reserved = set(book.evaluators)
            self._due_evaluation = None
        if book.version is None:
            return
        for producer in book.evaluators:
            if ledger.applied[producer] == book.version and (leases := book.grant(producer)):
                self.server.send(_producer(producer), m.EvaluationLeases(leases))
        version = book.version
        if (results := book.finish()) is not None:
            ledger.reserved, ledger.evaluating = set(), False
            self.ledger.events.append({"kind": "evaluated", "version": version, "rows": len(results)})
            for producer in book.evaluators:
                self.server.send(_producer(producer), m.ReleaseVersion(version))
            for start in range(0, len(results), _ROWS_PER_MESSAGE):
                self.server.send("consumer:0", m.EvaluationRows(version, results[start : start + _ROWS_PER_MESSAGE]))
            for name in self._names("consumer:"):
                self.server.send(name, m.EvaluationDone(version))

    # ---------------------------------------------------------------- messages of producers

    def _want(self, name: str, message: m.Want, frames: Any) -> None:
        producer = _index(name)
        on_their_way = self._granted[producer] - message.received
        self.ledger.request(producer, max(0, message.num_leases - on_their_way))

    def _applied(self, name: str, message: m.Applied, frames: Any) -> None:
        self.ledger.apply(_index(name), message.version)
        self.ledger.events.append({"kind": "applied", "producer": _index(name), "version": message.version,
                                   "digest": message.digest})  # fmt: skip

    def _groups(self, name: str, message: m.Groups, frames: Sequence[memoryview]) -> None:
        check_frames(message.groups, frames)
        for header, frame in zip(message.groups, frames, strict=True):
            failpoints.fire("hub.deliver")
            if self.ledger.deliver(header.lease_id, header.num_tokens, header.oldest_version, header.crc):
                self.groups[header.lease_id] = StoredGroup(header, frame)

    def _filtered(self, name: str, message: m.Filtered, frames: Any) -> None:
        if not self.ledger.filter(message.lease_id, message.mean_accuracy):
            return
        self.extremes["all_right"] += message.mean_accuracy >= 1.0
        self.extremes["all_wrong"] += message.mean_accuracy <= 0.0
        count = message.num_responses
        for key, value in (
            ("groups", 1.0),
            ("zero_variance", float(message.zero_variance)),
            ("responses", float(count)),
            ("tokens", float(message.num_tokens)),
            ("reward", message.mean_reward * count),
            ("format_acc", message.mean_format * count),
            ("ans_acc", message.mean_accuracy * count),
        ):
            self.filtered[key] = self.filtered.get(key, 0.0) + value

    def _dropped(self, name: str, message: m.Dropped, frames: Any) -> None:
        self.last_drop = message.detail or self.last_drop
        self.ledger.drop(message.lease_id, DropReason(message.reason), message.detail)

    def _returned(self, name: str, message: m.Returned, frames: Any) -> None:
        self.ledger.give_back(message.lease_id, message.detail)

    def _evaluated(self, name: str, message: m.Evaluated, frames: Any) -> None:
        self.evaluation.deliver(message.lease_id, message.result)

    # ---------------------------------------------------------------- messages of consumers

    def _trained(self, name: str, message: m.Trained, frames: Any) -> None:
        if name == "consumer:0":
            self.ledger.trained(message.sequence)

    def _committed(self, name: str, message: m.Committed, frames: Any) -> None:
        if name != "consumer:0":
            return
        failpoints.fire("hub.commit")
        self.ledger.commit(message.version, message.skipped)
        if message.version in self._snapshots_due:
            self._snapshots_due.discard(message.version)
            self._send_snapshot(message.version)
        report = m.StepReport(
            message.version, self.ledger.counts(), min(self.ledger.applied), self.filtered, dict(self.times)
        )
        self.filtered = {}
        self.server.send("consumer:0", report)

    def _snapshot_request(self, name: str, message: m.SnapshotRequest, frames: Any) -> None:
        self._send_snapshot(message.version)

    def _send_snapshot(self, version: int) -> None:
        failpoints.fire("hub.snapshot")
        self.ledger.events.append({"kind": "snapshot", "version": version})
        self._write_events()  # what the snapshot covers is in the log before anybody can restore it
        self.server.send("consumer:0", m.LedgerState(version, self.ledger.snapshot()))

    def _weights_start(self, name: str, message: m.WeightsStart, frames: Any) -> None:
        if self._expected:
            self._held_weights.append(message)
        else:
            self._announce(message)

    def _announce(self, message: m.WeightsStart) -> None:
        evaluators = self.evaluation.evaluators if self.spec.eval_rows else ()
        for producer in range(self.spec.num_producers):
            hold = producer in evaluators and self._is_due(message.version)
            self.server.send(
                _producer(producer), m.WeightsStart(message.broadcast, message.version, hold, message.stage)
            )

    def _is_due(self, version: int) -> bool:
        """Whether this version is or will be evaluated, so that its evaluators must stay with it."""
        if version in (self._due_evaluation, self.evaluation.version):
            return True
        interval = self.spec.eval_interval
        return interval is not None and version > 0 and version % interval == 0

    def _release(self, name: str, message: m.Release, frames: Any) -> None:
        self.publisher.released(name, message.sequence)

    # ---------------------------------------------------------------- everybody

    def _hello(self, name: str, message: m.Hello, frames: Any) -> None:
        self.ledger.events.append({"kind": "hello", "peer": name, "rank": message.rank, "node": message.node})
        self._expected.discard(name)
        if not self._expected:
            for held in self._held_weights:
                self._announce(held)
            self._held_weights.clear()
        if name.startswith("reader:"):
            self._attached.add(name)
            if all(r.name in self._attached for r in self.spec.readers if r.node == self.spec.node):
                self.ring.unlink()

    def _time_report(self, name: str, message: m.TimeReport, frames: Any) -> None:
        self.times[name] = message

    def _stop(self, name: str, message: m.StopRequest, frames: Any) -> None:
        self.ledger.events.append({"kind": "stop_request", "peer": name, "reason": message.reason})
        self.ledger.request_stop()

    def _failed(self, name: str, message: m.Failed, frames: Any) -> None:
        if message.lost:
            self.server.suspicious = True  # who it is shows at once
        else:
            self._fail(message.error, reported=True)

    def _goodbye(self, name: str, message: m.Goodbye, frames: Any) -> None:
        if self._finished is None:
            self._fail(f"{self.spec.title(name)} left before the end of the run")

    # ---------------------------------------------------------------- the end

    def _names(self, prefix: str) -> list[str]:
        return [name for name, peer in self.server.peers.items() if name.startswith(prefix) and not peer.left]

    def _send_final(self) -> None:
        others = [n for p in ("producer:", "consumer:", "relay:") for n in self._names(p) if n != "consumer:0"]
        if "consumer:0" in self.server.peers and (not others or time.monotonic() - self._ended_at > _LEAVE_SECONDS):
            self._final_sent = True
            self.server.send(
                "consumer:0",
                m.FinalReport(
                    self.ledger.counts() | self.extremes,
                    self.ledger.dropped_by_reason,
                    self.last_drop,
                    dict(self.times),
                ),
            )

    def _everybody_left(self) -> bool:
        return bool(self.server.peers) and all(peer.left for peer in self.server.peers.values())

    def _fail(self, error: str, reported: bool = False) -> None:
        if self._failure is None:
            self._failure = error
            self.ledger.events.append({"kind": "failed", "error": error})
            for name in self._names(""):
                self.server.send(name, m.Abort(error, reported))

    def _leave(self, status: int) -> int:
        deadline = time.monotonic() + (_LEAVE_SECONDS if status == 0 else 2.0)
        while time.monotonic() < deadline and not self.server.drained():
            self.server.poll(0.02)
            self.server.tick()
        if self.server.refused:
            self.events.append("refused", count=self.server.refused, last=self.server.last_refusal)
        self.events.close()
        self.trace.close()
        return status

    def _write_events(self) -> None:
        if self.ledger.events:
            self.trace.turn(self.ledger)
            self.events.extend(self.ledger.events)
            self.ledger.events.clear()
            self.events.flush()


def _producer(index: int) -> str:
    return f"producer:{index}"


def _index(name: str) -> int:
    return int(name.partition(":")[2])


def main() -> int:
    """Entry of the child process."""
    return child_main(lambda spec, server, ring: Hub(spec, server, ring).run())


if __name__ == "__main__":
    sys.exit(main())
