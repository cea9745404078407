"""A run that goes on beside whatever a test does to the hub: its process, and peers that exchange groups all the time.

The hub is the process of a run, with ledger, event log, plan and ring. Producers answer leases with groups, a consumer
compares each of them, wholly, with what must arrive, and commits every step. They are threads of the test, with the
channels of a run; nothing is generated and nothing is trained.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tests.support.wire_messages import SENDER
from zbgrpo.bench.traffic import Settings, Shape, TrafficConsumer, TrafficProducer
from zbgrpo.bench.traffic_run import HUB, hub_spec
from zbgrpo.engine.hub_process import ChildProcess, address_of
from zbgrpo.errors import PeerLostError, ProtocolError
from zbgrpo.ledger.records import PlanKind
from zbgrpo.observe.events import read_events
from zbgrpo.transport import messages as m
from zbgrpo.transport.channel import Channel, Timing
from zbgrpo.transport.plan_stream import PlannedEntry, PlanReader
from zbgrpo.transport.ring import RingReader
from zbgrpo.transport.sockets import Address
from zbgrpo.transport.wire import Sender

GIVE_UP_SECONDS = 60.0
MAX_MESSAGE_BYTES = 1 << 20
RUN_ID = SENDER.run_id
TIMING = Timing(heartbeat_seconds=0.2, peer_timeout_seconds=GIVE_UP_SECONDS, resend_seconds=0.3)
_SHAPE = Shape(groups=8, responses=4, prompt_tokens=16, response_tokens=20)
_NUM_PRODUCERS = 2
_GROUPS_PER_STEP = 32
_NUM_ROWS = 400_000
"""More than any test can use up."""


class _Consumer(TrafficConsumer):
    """Compares every group with what its row has, and counts entries of the plan; ends with STOP."""

    def __init__(self, settings: Settings, channel: Channel, reader: PlanReader) -> None:
        super().__init__(settings, channel, reader)
        self._sequence = -1

    def run(self) -> dict[str, Any]:
        self._channel.send(m.WeightsStart(1, 0))
        while True:
            planned = self._reader.next_entry(GIVE_UP_SECONDS)
            while self._channel.receive() is not None:
                pass
            if planned is None:
                raise PeerLostError("no plan entry has come for a long time")
            if planned.entry.kind is PlanKind.STOP:
                break
            self._take(planned)
        self._channel.send(m.BroadcastsDone())
        return {"groups": len(self._arrived)}

    def _take(self, planned: PlannedEntry) -> None:
        if planned.entry.sequence <= self._sequence:
            raise ProtocolError(f"plan entry {planned.entry.sequence} came after {self._sequence}")
        self._sequence = planned.entry.sequence
        for group in planned.groups:
            self._content.check(group)
        super()._take(planned)

    @property
    def num_arrived(self) -> int:
        return len(self._arrived)


class RunBeside:
    """Use `run_beside`."""

    def __init__(self, folder: Path, host: str | None, curve: bool) -> None:
        self.events_path = folder / "events" / "hub.jsonl"
        spec = hub_spec(_SHAPE, _NUM_ROWS, _NUM_PRODUCERS, 32, _GROUPS_PER_STEP, self.events_path)
        self.spec = msgspec.structs.replace(
            spec, run_id=RUN_ID, host=host, curve=curve, timing=TIMING, max_message_bytes=MAX_MESSAGE_BYTES
        )
        self.hub = ChildProcess(HUB, self.spec, GIVE_UP_SECONDS)
        self.address: Address = address_of(self.hub.started.address)
        self.problems: list[str] = []
        self._settings = Settings(RUN_ID, self.hub.started.address, _SHAPE)
        self.channels = {name: self._channel(name) for name in self._names()}
        self._threads: list[threading.Thread] = []
        self.producers: dict[str, TrafficProducer] = {}
        self.finished = False
        started = self.hub.started
        self._ring = RingReader.attach(started.ring_path, started.ring_bytes)
        self._reader = PlanReader(self.channels["reader:0"], self._ring)
        self._consumer = _Consumer(self._settings, self.channels["consumer:0"], self._reader)

    def _names(self) -> list[str]:
        return [*(f"producer:{index}" for index in range(_NUM_PRODUCERS)), "consumer:0", "reader:0"]

    def _channel(self, name: str) -> Channel:
        return Channel(self.address, Sender(RUN_ID, name), TIMING, MAX_MESSAGE_BYTES)

    def start(self) -> None:
        """Start all peers."""
        self._reader.start()
        for name, channel in self.channels.items():
            if name != "reader:0":
                channel.start()
        for name in ("consumer:0", "reader:0"):
            self.channels[name].send(m.Hello(0))
        for name, channel in self.channels.items():
            if name.startswith("producer:"):
                producer = TrafficProducer(msgspec.structs.replace(self._settings, index=int(name[9:])), channel)
                self.producers[name] = producer
                self._go(name, producer.run)
        self._go("consumer:0", self._consumer.run)

    def _go(self, name: str, work: Callable[[], Any]) -> None:
        def guarded() -> None:
            try:
                work()
            except Exception as error:
                self.problems.append(f"{name}: {type(error).__name__}: {error}")

        self._threads.append(threading.Thread(target=guarded, name=f"beside-{name}", daemon=True))
        self._threads[-1].start()

    @property
    def num_groups(self) -> int:
        """Groups that have been trained so far."""
        return self._consumer.num_arrived

    def goes_on(self, num_groups: int = 200) -> None:
        """Wait until so many groups more have made their whole way, some of them from each producer."""
        target = self.num_groups + num_groups
        sent = {name: producer.num_sent for name, producer in self.producers.items()}
        self.wait_until(
            lambda: self.num_groups >= target and all(p.num_sent > sent[name] for name, p in self.producers.items()),
            "the run has stopped going on",
        )

    def wait_until(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Wait for it; the run must not have failed."""
        deadline = time.monotonic() + GIVE_UP_SECONDS
        while not condition():
            assert not self.problems and self.hub.poll() is None, (self.problems, self.hub.poll(), self.refused())
            assert time.monotonic() < deadline, otherwise
            time.sleep(0.01)

    def finish(self) -> None:
        """End it as a signal does, and make sure that nothing went wrong anywhere."""
        self.channels["consumer:0"].send(m.StopRequest("the test has ended"))
        for thread in self._threads:
            thread.join(GIVE_UP_SECONDS)
        assert not any(thread.is_alive() for thread in self._threads), "it does not end"
        assert self.problems == []
        self._reader.close()
        for name, channel in self.channels.items():
            assert name == "reader:0" or channel.close(GIVE_UP_SECONDS), f"{name} could not drain"
        self.finished = True
        self.hub.close(GIVE_UP_SECONDS)
        assert self.hub.poll() == 0, "the hub has failed"
        events = self.events()
        kinds = {event["kind"] for event in events}
        assert not kinds & {"failed", "dropped", "returned"}, kinds
        assert {event["peer"] for event in events if event["kind"] == "hello"} == set(self._names())
        assert 0 < self.num_groups <= sum(producer.num_sent for producer in self.producers.values())

    def close(self) -> None:
        """However the test has ended: leave nothing running."""
        self.hub.close(0.0)
        if not self.finished:
            for channel in self.channels.values():
                channel.close(0.0)
        self._ring.close()

    def events(self) -> list[dict[str, Any]]:
        """The hub's log."""
        return read_events(self.events_path)

    def refused(self) -> tuple[int, str]:
        """Messages that the hub has refused, and why the last one; known when it has ended."""
        for event in self.events():
            if event["kind"] == "refused":
                return event["count"], event["last"]
        return 0, ""

    @property
    def hub_pid(self) -> int:
        return self.hub._process.pid

    def num_files(self) -> int:
        """Open descriptors of the hub."""
        return len(os.listdir(f"/proc/{self.hub_pid}/fd"))

    def resident_bytes(self) -> int:
        """Memory of the hub."""
        return resident_bytes(self.hub_pid)


def resident_bytes(pid: int | str = "self") -> int:
    """Memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@contextmanager
def run_beside(folder: Path, host: str | None = None, curve: bool = False) -> Iterator[RunBeside]:
    """A run that has begun, and that must end without a fault after the block."""
    run = RunBeside(folder, host, curve)
    try:
        run.start()
        run.goes_on()
        yield run
        if not run.finished:
            run.goes_on()
            run.finish()
    finally:
        run.close()
