"""The producer's loop: one rank that generates.

consumes      leases (hub), new weights (subscriber), verdicts (reward pool)
waits for     the first version; then only for leases, and only when no slot is in use
unblocked by  a lease, an evaluation lease, a new version, the end of the run
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from zbgrpo import failpoints
from zbgrpo.algorithms.filters import is_effective
from zbgrpo.algorithms.temperature import TemperatureSchedule
from zbgrpo.config.schema import RunConfig
from zbgrpo.data.rows import Row
from zbgrpo.engine.work import PromptSource, Work, make_payload
from zbgrpo.inference.base import GenerationRequest, InferenceBackend, Response
from zbgrpo.inference.sampling import stream
from zbgrpo.ledger.evaluation import EvaluationLease, EvaluationResult
from zbgrpo.ledger.records import Lease
from zbgrpo.observe import timeledger as phases
from zbgrpo.observe.decoding import DecodeStatistics
from zbgrpo.observe.events import EventLog
from zbgrpo.observe.profiling import Profiler
from zbgrpo.observe.timeledger import TimeLedger
from zbgrpo.observe.trace import Trace
from zbgrpo.rewards.messages import ScoreOutcome, ScoreRequest
from zbgrpo.rewards.pool import RewardPool
from zbgrpo.transport import messages as m
from zbgrpo.transport.channel import Channel
from zbgrpo.transport.wire import group_header, payload_crc, payload_frame
from zbgrpo.types import DropReason, FinishReason, GroupPayload, Uid
from zbgrpo.weights.staged import StagedSubscriber

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 0.02
_REPORT_SECONDS = 0.5


class Producer:
    """Runs one producer until the hub says that the plan has ended."""

    def __init__(
        self,
        config: RunConfig,
        *,
        backend: InferenceBackend,
        pool: RewardPool,
        prompts: PromptSource,
        channel: Channel,
        subscriber: StagedSubscriber,
        ledger: TimeLedger,
        profiler: Profiler,
        events: EventLog,
        stop_requested: Callable[[], str | None],
        trace: Trace | None = None,
    ) -> None:
        self.config = config
        self.backend, self.pool, self.prompts = backend, pool, prompts
        self.channel, self.subscriber = channel, subscriber
        self.time, self.events, self.stop_requested = ledger, events, stop_requested
        self.trace = trace or Trace(enabled=False)
        self.profiler, self.decoding = profiler, DecodeStatistics()
        self.temperatures = TemperatureSchedule(config.inference, len(prompts.usable), config.seed)
        self.work: dict[int, Work] = {}  # by key
        self.hold: int | None = None  # the version to stay with while it is evaluated
        self.finished: str | None = None
        self._next_key = 0
        self._received = 0
        self._asked = (-1, -1)
        self._reported_at = 0.0
        self._stop_sent = False
        self._verdicts: list[m.Message] = []
        self._unparsable_rows: set[int] = set()

    def run(self) -> str:
        """The loop. Returns why the run ended (`end`, `stop`)."""
        while self.finished is None:
            with self.time.phase(phases.BUSY):  # what follows books its waiting, and the empty slots, itself
                self._take_messages()
                self._apply_new_weights()
                self._ask_for_leases()
                responses = self._decode()
                self._hand_back_lost()
                self._submit_for_scoring(responses)
                self._send_scored()
                self._report()
        self._send_times()
        return self.finished

    # ------------------------------------------------------------------------------------------ messages in

    def _take_messages(self) -> None:
        idle = not self.backend.num_active and not self.backend.num_unstarted and not self.work
        if not idle:
            self._handle_all(0.0)
            return
        self.decoding.pause()
        if self.subscriber.applied_version < 0:
            with self.time.phase(phases.STARTUP):
                self._handle_all(_IDLE_SECONDS)
        else:
            with self.time.phase(phases.EVAL if self.hold is not None else phases.STARVED):
                self._handle_all(_IDLE_SECONDS)

    def _handle_all(self, timeout_seconds: float) -> None:
        self.channel.alive()
        received = self.channel.receive(timeout_seconds)
        while received is not None:
            self._handle(received.message)
            received = self.channel.receive()
        if (reason := self.stop_requested()) and not self._stop_sent:
            self._stop_sent = True
            self.channel.send(m.StopRequest(reason))

    def _handle(self, message: Any) -> None:
        match message:
            case m.Leases(leases):
                for lease in leases:
                    self._received += 1
                    self._start_training_lease(lease)
            case m.EvaluationLeases():
                for evaluation_lease in message.leases:
                    self._start_evaluation_lease(evaluation_lease)
            case m.ReleaseVersion(version):
                if self.hold == version:
                    self.hold = None
                    self.trace.end("evaluation", version)
            case m.Finished(reason):
                self.finished = reason
            case _:
                raise AssertionError(f"the hub sent {type(message).__name__} to a producer")

    def _start_training_lease(self, lease: Lease) -> None:
        failpoints.fire("lease.start")
        inference = self.config.inference
        row = self.prompts.rows[self.prompts.usable[lease.row]]
        streams = [
            stream(self.config.seed, "train", lease.uid, lease.attempt, n) for n in range(inference.num_generations)
        ]
        self.trace.begin("lease", lease.lease_id, uid=lease.uid, attempt=lease.attempt)
        self._submit(lease, row, streams, self.temperatures.at(lease.uid))

    def _start_evaluation_lease(self, lease: EvaluationLease) -> None:
        failpoints.fire("evaluation.row")
        evaluation = self.config.evaluation
        row = self.prompts.evaluation[lease.task][lease.row]
        # Without the version: the same random numbers at every step, so that accuracies differ by the weights only.
        streams = [
            stream(self.config.seed, f"evaluation/{lease.task}", Uid(0, lease.row), 0, n)
            for n in range(evaluation.num_generations)
        ]
        self.trace.begin("evaluation row", lease.lease_id, task=lease.task, row=lease.row)
        self._submit(lease, row, streams, evaluation.temperature)

    def _submit(self, lease: Any, row: Row, streams: list[int], temperature: float) -> None:
        key, self._next_key = self._next_key, self._next_key + 1
        prompt_ids = self.prompts.render(row.messages)
        self.work[key] = Work(lease, row, prompt_ids, len(streams))
        own = row.max_new_tokens
        limits = None if own is None else [own[n % len(own)] for n in range(len(streams))]
        self.backend.submit(GenerationRequest(key, prompt_ids, streams, temperature, limits))

    # ------------------------------------------------------------------------------------------ weights, leases

    def _apply_new_weights(self) -> None:
        if self.subscriber.ready() is None or self.hold is not None:
            return
        phase = phases.BLOCKED_ON_WEIGHTS if self.subscriber.applied_version >= 0 else phases.STARTUP
        with self.time.phase(phase), self.trace.span("apply") as noted:
            failpoints.fire("weights.apply")
            applied = self.subscriber.apply()
            if applied is not None:
                noted["version"] = applied.version
                digests = self.backend.weights_changed(applied.version)
                if digests:
                    self.events.append("worker_digests", version=applied.version, digests=digests)
        self.decoding.pause()
        if applied is not None:
            self.hold = applied.version if applied.keep else None
            if applied.keep:
                self.trace.begin("evaluation", applied.version, version=applied.version)
            logger.info("version %d applied", applied.version)
            self.events.append("applied", version=applied.version, digest=applied.digest)
            self.events.flush()  # first, as with groups
            self.channel.send(m.Applied(applied.version, applied.digest))

    def _ask_for_leases(self) -> None:
        if self.subscriber.applied_version < 0:
            return
        # One group more than there is room for, so that a slot that becomes free does not wait for the hub's answer.
        group = self.config.inference.num_generations
        missing = self.backend.num_slots + group - self.backend.num_active - self.backend.num_unstarted
        wanted = max(0, math.ceil(missing / group))
        if (wanted, self._received) != self._asked:
            self._asked = (wanted, self._received)
            self.channel.send(m.Want(wanted, self._received))

    # ------------------------------------------------------------------------------------------ generation

    def _decode(self) -> list[Response]:
        num_slots = self.backend.num_slots
        occupied = min(num_slots, self.backend.num_active + self.backend.num_unstarted)
        self.trace.counter("slots in use", occupied)
        if not occupied:
            return []
        failpoints.fire("generate.step")
        self.profiler.advance(self.subscriber.applied_version)
        rest = phases.EVAL if self.hold is not None else phases.STARVED
        unstarted, begun = self.backend.num_unstarted, time.monotonic()
        with self.time.phase_weighted(phases.BUSY, occupied / num_slots, rest):
            responses = self.backend.step()
        self.decoding.add(
            occupied=occupied,
            started=unstarted - self.backend.num_unstarted,
            finished=len(responses),
            begun=begun,
            ended=time.monotonic(),
        )
        return responses

    def _hand_back_lost(self) -> None:
        """What an engine that died had in work: training leases go back, evaluation is simply asked for again."""
        for key in self.backend.take_lost():
            work = self.work.pop(key)
            if isinstance(work.lease, EvaluationLease):
                self._start_evaluation_lease(work.lease)
            else:
                self._return(work.lease, f"row {work.row.line}: the generation engine died")
        self._send_verdicts()

    def _submit_for_scoring(self, responses: list[Response]) -> None:
        for response in responses:
            work = self.work.get(response.key)
            if work is None:  # finished in time, but the rest of its group was lost
                continue
            work.responses[response.response_index] = response
            if len(work.responses) == work.num_responses:
                failpoints.fire("reward.submit")
                work.complete_at = time.monotonic()
                self.trace.begin("reward", response.key, responses=work.num_responses)
                self.pool.submit(response.key, [self._score_request(work, n) for n in range(work.num_responses)])

    def _score_request(self, work: Work, number: int) -> ScoreRequest:
        decode, row = self.prompts.decode, work.row
        text = decode(work.responses[number].token_ids.tolist())
        return ScoreRequest(text, row.gt_answer, row.test_cases, decode(work.prompt_ids[-64:]), row.extra)

    # ------------------------------------------------------------------------------------------ results out

    def _send_scored(self) -> None:
        only_waiting = not self.backend.num_active and not self.backend.num_unstarted and bool(self.work)
        if only_waiting:
            self.decoding.pause()
            with self.time.phase(phases.EVAL if self.hold is not None else phases.STARVED):
                scored = self.pool.poll(_IDLE_SECONDS)
        else:
            scored = self.pool.poll()
        headers: list[m.GroupHeader] = []
        frames: list[bytes] = []
        for key, outcomes in scored:
            self.trace.end("reward", key)
            work = self.work.pop(key)
            self.decoding.scored(len(outcomes))
            if isinstance(work.lease, EvaluationLease):
                self._send_evaluation(work, outcomes)
            elif (ready := self._judge(work, work.lease, outcomes)) is not None:
                headers.append(ready[0])
                frames.append(ready[1])
        if not scored:
            return
        self.events.flush()  # first, so that nothing is known of a group that this log does not have
        if headers:
            failpoints.fire("send.groups")
            self.channel.send(m.Groups(headers), frames=frames)
        self._send_verdicts()

    def _send_verdicts(self) -> None:
        if self._verdicts:
            self.events.flush()
            self.channel.send(*self._verdicts)
            self._verdicts.clear()

    def _judge(self, work: Work, lease: Lease, outcomes: list[ScoreOutcome]) -> tuple[m.GroupHeader, bytes] | None:
        """Make a group of responses and verdicts, or report why there is none."""
        failed = next((o for o in outcomes if o.error is not None), None)
        if failed is not None:
            detail = f"row {work.row.line}: {failed.error}"
            logger.warning("group %s has no reward: %s", lease.uid, detail)
            if failed.infrastructure:
                self._return(lease, detail)
            else:
                self._drop(lease, DropReason.REWARD_ERROR, detail)
            return None
        self._note_unparsable_gold(work, outcomes)
        payload = make_payload(self.config, work, outcomes)
        numbers = (payload.rewards, payload.format_acc, payload.ans_acc, payload.logprobs)
        if not all(np.isfinite(values).all() for values in numbers):
            detail = f"row {work.row.line}: a reward or log-prob is not finite"
            logger.warning("group %s is dropped: %s", lease.uid, detail)
            self._drop(lease, DropReason.NON_FINITE, detail)
            return None
        algorithm = self.config.algorithm
        if algorithm.dynamic_batching and not is_effective(payload.ans_acc.tolist(), algorithm.filter_range):
            self._filter(work, lease, payload)
            return None
        frame = payload_frame(payload)
        crc = payload_crc(frame)
        header = group_header(lease.uid, lease.lease_id, lease.attempt, payload, crc)
        versions = {"oldest": header.oldest_version, "newest": header.newest_version}
        self._log("sent", lease, crc=crc, **versions, **work.costs())
        return header, frame

    def _note_unparsable_gold(self, work: Work, outcomes: list[ScoreOutcome]) -> None:
        if any(o.gold_unparsable for o in outcomes) and work.row.line not in self._unparsable_rows:
            self._unparsable_rows.add(work.row.line)
            logger.warning(
                "row %d: its gold answer cannot be parsed and pays by equality of text only; %d such rows so far",
                work.row.line,
                len(self._unparsable_rows),
            )

    def _filter(self, work: Work, lease: Lease, payload: GroupPayload) -> None:
        self._verdicts.append(
            m.Filtered(
                lease.lease_id,
                float(payload.ans_acc.mean()),
                float(payload.format_acc.mean()),
                float(payload.rewards.mean()),
                payload.num_responses,
                len(payload.response_ids),
                bool((payload.rewards == payload.rewards[0]).all()),
            )
        )
        self._log("filtered", lease, accuracy=float(payload.ans_acc.mean()), **work.costs())

    def _return(self, lease: Lease, detail: str) -> None:
        self._verdicts.append(m.Returned(lease.lease_id, detail))
        self._log("returned", lease, detail=detail)

    def _drop(self, lease: Lease, reason: DropReason, detail: str) -> None:
        self._verdicts.append(m.Dropped(lease.lease_id, reason.value, detail))
        self._log("dropped", lease, reason=reason.value, detail=detail)

    def _send_evaluation(self, work: Work, outcomes: list[ScoreOutcome]) -> None:
        lease = work.lease
        assert isinstance(lease, EvaluationLease)
        responses = [work.responses[n] for n in range(work.num_responses)]
        error = next((o.error for o in outcomes if o.error is not None), None)
        result = EvaluationResult(
            lease.task,
            lease.row,
            lease.version,
            [o.reward for o in outcomes],
            [o.ans_acc for o in outcomes],
            [o.format_acc for o in outcomes],
            [len(r.token_ids) for r in responses],
            [r.finish is FinishReason.LENGTH for r in responses],
            [self.prompts.decode(r.token_ids.tolist()) for r in responses],
            error,
        )
        versions = {version for r in responses for _, version in r.spans}
        assert versions == {lease.version}, f"evaluation of version {lease.version} used {versions}"
        failpoints.fire("evaluation.result")
        self.channel.send(m.Evaluated(lease.lease_id, result))
        self.trace.end("evaluation row", lease.lease_id)

    def _log(self, kind: str, lease: Lease, **fields: Any) -> None:
        self.events.append(kind, lease=lease.lease_id, uid=list(lease.uid), attempt=lease.attempt, **fields)
        self.trace.end("lease", lease.lease_id, outcome=kind)

    # ------------------------------------------------------------------------------------------ time

    def _report(self) -> None:
        if time.monotonic() - self._reported_at >= _REPORT_SECONDS:
            self._send_times()

    def _send_times(self) -> None:
        self._reported_at, seconds = time.monotonic(), self.time.snapshot()
        self.channel.send(m.TimeReport(seconds))
        times = {name: round(value, 6) for name, value in seconds.items()}
        version, slots = self.subscriber.applied_version, self.backend.num_slots
        rows, turns = self.decoding.take()
        self.events.append("decode", version=version, slots=slots, times=times, rows=rows, turns=turns)
