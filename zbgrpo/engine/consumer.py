"""The consumer's loop: one rank that trains.

consumes      the plan stream: TRAIN entries with this rank's groups, SAVE, EVAL, STOP, END
waits for     the next entry (starved); in `commit`, the slowest consumer (imbalance)
unblocked by  the hub, as soon as a minibatch of effective groups has arrived
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from zbgrpo import failpoints
from zbgrpo.algorithms.temperature import TemperatureSchedule
from zbgrpo.config.schema import RunConfig
from zbgrpo.engine import saving
from zbgrpo.engine.recorder import Recorder
from zbgrpo.engine.steplog import StepLog
from zbgrpo.errors import PeerLostError
from zbgrpo.groups.process_groups import collective
from zbgrpo.ledger.evaluation import EvaluationResult
from zbgrpo.ledger.records import PlanEntry, PlanKind
from zbgrpo.observe import timeledger as phases
from zbgrpo.observe.events import EventLog
from zbgrpo.observe.profiling import Profiler
from zbgrpo.observe.timeledger import TimeLedger
from zbgrpo.observe.trace import Trace
from zbgrpo.trainer.base import TrainerBackend
from zbgrpo.transport import messages as m
from zbgrpo.transport.channel import Channel
from zbgrpo.transport.plan_stream import PlannedEntry, PlanReader, TrainGroup
from zbgrpo.types import Uid
from zbgrpo.weights.publisher import WeightPublisher

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_LEAVE_SECONDS = 30.0  # so long the hub waits for the others to leave; one that is lost meanwhile it names


class Consumer:
    """Runs one consumer rank to the end of the plan."""

    def __init__(
        self,
        config: RunConfig,
        *,
        rank: int,
        run_id: str,
        trainer: TrainerBackend,
        tokenizer: Any,
        group: dist.ProcessGroup | None,
        reader: PlanReader,
        channel: Channel,
        publisher: WeightPublisher | None,
        recorder: Recorder | None,
        ledger: TimeLedger,
        events: EventLog,
        steps: StepLog | None,
        temperatures: TemperatureSchedule,
        profiler: Profiler,
        trace: Trace,
        version: int,
        evaluating: bool,
        check_alive: Callable[[], None],
        stop_requested: Callable[[], str | None],
    ) -> None:
        """`publisher` on source ranks, `recorder` on rank 0 only; `check_alive` raises when the hub is gone."""
        self.config, self.rank, self.run_id = config, rank, run_id
        self.trainer, self.tokenizer, self.group = trainer, tokenizer, group
        self.reader, self.channel, self.publisher, self.recorder = reader, channel, publisher, recorder
        self.time, self.events, self.steps, self.temperatures = ledger, events, steps, temperatures
        self.profiler, self.trace, self.version, self.evaluating = profiler, trace, version, evaluating
        self.check_alive, self.stop_requested = check_alive, stop_requested
        self.saved_version = version
        self._states: dict[int, dict[str, Any]] = {}
        self._evaluation: list[EvaluationResult] = []
        self._final: m.FinalReport | None = None
        self._stop_sent = self._trained_any = False
        self._left_out = self._abandoned = False  # work of the open step; the open step and all that follows
        self._stall_seconds = 0.0
        self._sampled: list[TrainGroup] = []

    def run(self) -> str:
        """The loop. Returns why the run ended (`end`, `stop`)."""
        self._publish(pinned=True)
        while True:
            entry, groups = self._next_entry()
            match entry.kind:
                case PlanKind.TRAIN:
                    with self.time.phase(phases.BUSY):  # what follows books its waiting itself
                        self._train(entry, groups)
                case PlanKind.SAVE:
                    self._save(entry.version)
                case PlanKind.EVAL:
                    self.evaluating = True
                case PlanKind.STOP:
                    self.trainer.discard()
                    if self.rank == 0 and not self._is_saved(self.version):
                        self.channel.send(m.SnapshotRequest(self.version))
                    self._save_state(self.version)
                    return entry.kind.value
                case PlanKind.END:
                    return entry.kind.value

    # ------------------------------------------------------------------------------------------ waiting

    def _next_entry(self) -> PlannedEntry:
        while True:
            planned = self.reader.next_entry(0.0)
            if planned is None:
                with self.time.phase(self._waiting_phase()):
                    planned = self.reader.next_entry(_POLL_SECONDS)
            self._take_messages()
            if planned is not None:
                return planned

    def _waiting_phase(self) -> str:
        if not self._trained_any:
            return phases.STARTUP
        # With a single producer nothing is generated for training while it evaluates.
        alone = self.config.cluster.num_inferencer == 1
        return phases.EVAL if self.evaluating and alone else phases.STARVED

    def _take_messages(self) -> None:
        with self.time.phase(phases.BUSY if self._trained_any else phases.STARTUP):
            self._take_messages_now()

    def _take_messages_now(self) -> None:
        self.channel.alive()
        self.channel.check()  # first: a hub that has ended the run ends too
        self.check_alive()
        if self.publisher is not None:
            self.publisher.check()
        while (received := self.channel.receive()) is not None:
            self._handle(received.message)
        if (reason := self.stop_requested()) and not self._stop_sent:
            self._stop_sent = True
            self.channel.send(m.StopRequest(reason))

    def _handle(self, message: Any) -> None:
        match message:
            case m.StepReport():
                assert self.recorder is not None
                self.recorder.report(message)
            case m.LedgerState(version, state):
                self._states[version] = state
            case m.EvaluationRows(_, results):
                self._evaluation += results
            case m.EvaluationDone(version):
                self.evaluating = False
                if self.recorder is not None:
                    self.recorder.evaluation(version, self._evaluation)
                self._evaluation = []
            case m.FinalReport():
                self._final = message
            case _:
                raise AssertionError(f"the hub sent {type(message).__name__} to a consumer")

    def _wait_for(self, ready: Callable[[], Any], what: str, patience_seconds: float = 0.0) -> Any:
        """Handle messages until `ready()` gives something; bounded by the peer timeout, and what comes on top of it."""
        timeout_seconds = self.config.transport.peer_timeout_seconds + patience_seconds
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            if (value := ready()) is not None:
                return value
            received = self.channel.receive(_POLL_SECONDS)
            if received is not None:
                self._handle(received.message)
            self.check_alive()
            self.channel.alive()
        raise PeerLostError(f"the hub did not send {what} within {timeout_seconds:.0f} s")

    # ------------------------------------------------------------------------------------------ training

    def _train(self, entry: PlanEntry, groups: list[TrainGroup]) -> None:
        self._trained_any = True
        if self.reader.stop_ahead and not self.trainer.lockstep:
            # Work that STOP would throw away is left out; at the step's end the ranks agree that it has not happened.
            self._left_out = True
        else:
            self._train_minibatch(entry, groups)
        if entry.closes_step and not self._abandoned:
            self._commit(entry)

    def _train_minibatch(self, entry: PlanEntry, groups: list[TrainGroup]) -> None:
        begun = time.monotonic()
        span = self.trace.span("forward/backward", step=entry.version, minibatch=entry.minibatch, groups=len(groups))
        with self.time.phase(phases.BUSY), span:
            failpoints.fire("step.minibatch")
            self.profiler.advance(entry.version)
            temperatures = [self.temperatures.at(Uid(group.header.episode, group.header.row)) for group in groups]
            if self.steps is not None:
                self.steps.minibatch(entry.version, groups, temperatures)
            self.trainer.train_minibatch([group.payload for group in groups], entry.version, temperatures)
            self.channel.send(m.Trained(entry.sequence))
            self._log_trained(entry, groups, begun)
            if self.recorder is not None and entry.version % self.config.observe.rollout_interval == 0:
                self._sampled += groups

    def _log_trained(self, entry: PlanEntry, groups: list[TrainGroup], begun: float) -> None:
        for header, _ in groups:
            self.events.append(
                "trained",
                lease=header.lease_id,
                uid=[header.episode, header.row],
                crc=header.crc,
                step=entry.version,
                oldest=header.oldest_version,
                newest=header.newest_version,
            )
        self.events.append(
            "minibatch",
            step=entry.version,
            responses=sum(group.payload.num_responses for group in groups),
            tokens=sum(group.payload.num_tokens for group in groups),
            seconds=round(time.monotonic() - begun, 6),
        )

    def _commit(self, entry: PlanEntry) -> None:
        with self.time.phase(phases.BUSY), self.trace.span("optimizer step", step=entry.version):
            failpoints.fire("step.commit")
            result = self.trainer.commit(abandon=self._left_out)
        if result is None:
            self._abandoned = True
            return
        failpoints.fire("step.committed")
        self.version = entry.version + 1
        if self.steps is not None:
            self.steps.commit(self.version, result.skipped)
        seconds = self.time.snapshot()
        self.channel.send(m.TimeReport(seconds), m.Committed(self.version, result.skipped))
        broadcast = None
        with self.time.phase(phases.BLOCKED_ON_WEIGHTS), self.trace.span("snapshot", version=self.version):
            self._publish(pinned=entry.pin_version)
        if self.publisher is not None and self.publisher.last is not None:
            broadcast = self.publisher.last.seconds
        times = {name: round(value, 6) for name, value in seconds.items()}
        self.events.append("commit", version=self.version, skipped=result.skipped, times=times)
        logger.info("step %d: loss %.6g, gradient norm %.6g", self.version, result.loss, result.grad_norm)
        self.events.flush()
        if self.recorder is not None:
            with self.time.phase(phases.BUSY):
                stall = self.publisher.stall_seconds if self.publisher is not None else 0.0
                self.recorder.step(self.version, result, broadcast, stall - self._stall_seconds)
                self._stall_seconds = stall
                if self._sampled:
                    self.recorder.rollouts(entry.version, self._sampled, self.tokenizer.decode)
                    self._sampled.clear()

    def _publish(self, pinned: bool) -> None:
        if self.trainer.mesh.pp > 1 and not self._is_chosen(pinned):
            return
        weights = self.trainer.weights()
        if self.publisher is not None:
            self.publisher.publish(self.version, weights, pinned or self.trainer.mesh.pp > 1)
        elif self.trainer.lockstep:
            for _ in weights:  # this rank's share of what the source gathers
                pass

    def _is_chosen(self, pinned: bool) -> bool:
        """Whether this version travels: the first source decides, for all stages, so that they send the same ones.
        It does if nothing is on its way from there, and in any case if it is `pinned`."""
        idle = self.publisher is not None and self.publisher.is_idle
        choice = torch.tensor(int(pinned or idle))
        with collective("agreeing on the version to send"):
            dist.broadcast(choice, src=0, group=self.group)
        return bool(choice)

    # ------------------------------------------------------------------------------------------ saving

    def _save(self, version: int) -> None:
        if self._abandoned:
            return
        self._save_state(version)
        with self.time.phase(phases.CHECKPOINT), self.trace.span("save model", version=version):
            failpoints.fire("checkpoint.model")
            saving.save_model(self.config, self.trainer, self.tokenizer, version)

    def _is_saved(self, version: int) -> bool:
        return version == self.saved_version and version > 0

    def _save_state(self, version: int) -> None:
        if self._is_saved(version):
            return
        with self.time.phase(phases.CHECKPOINT), self.trace.span("save state", version=version):
            if (recorder := self.recorder) is not None:
                # A state vouches for the lines of all its steps.
                self._wait_for(lambda: recorder.num_waiting == 0 or None, "the last step's report")
            failpoints.fire("checkpoint.state")
            token = f"{self.run_id[:8]}-{version}"
            saving.save_state(
                self.config, self.trainer, self.group, self.rank, version, token, lambda: self._ledger_state(version)
            )
        self.saved_version = version
        logger.info("saved state %d", version)
        self.events.append("saved", version=version)
        self.events.flush()

    def _ledger_state(self, version: int) -> dict[str, Any]:
        state: dict[str, Any] = self._wait_for(lambda: self._states.pop(version, None), f"the ledger of step {version}")
        return state

    # ------------------------------------------------------------------------------------------ the end

    def finish(self) -> m.FinalReport | None:
        """Send the last times; on rank 0 wait until everybody else has left and return the totals."""
        with self.time.phase(phases.SHUTDOWN):
            if self.publisher is not None:
                self.publisher.flush(self.config.weights.timeout_seconds)
                self.publisher.close()
            if self.rank == 0:
                self.channel.send(m.BroadcastsDone())
            if self.recorder is None:
                self.channel.send(m.TimeReport(self.time.snapshot()))
                return None
            recorder = self.recorder
            self._wait_for(lambda: recorder.num_waiting == 0 or None, "the last step's report")
            final: m.FinalReport = self._wait_for(lambda: self._final, "its totals", _LEAVE_SECONDS)
        final.times["consumer:0"] = m.TimeReport(self.time.snapshot())
        return final
