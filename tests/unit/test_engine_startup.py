"""What rank 0 claims, finds and starts before a run; the processes it starts; the mark of a finished run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch.distributed import HashStore

from zbgrpo import launch
from zbgrpo.checkpoint.folder import MANIFEST_NAME, RunLock, find_latest, write_folder
from zbgrpo.config import fields
from zbgrpo.config.schema import RunConfig
from zbgrpo.engine import saving, startup
from zbgrpo.engine.finished import MARK_NAME, finished_at, mark_finished, save_folder
from zbgrpo.engine.hub_process import ChildProcess, address_of, encode_spec
from zbgrpo.engine.hub_spec import HubSpec, ReaderSpec
from zbgrpo.errors import EXIT_USER_ERROR, ConfigError, PeerLostError, ResourceError, RunFolderError
from zbgrpo.topology.env import TorchrunEnv
from zbgrpo.transport import messages as m
from zbgrpo.transport.channel import Channel, Timing
from zbgrpo.transport.server import Server
from zbgrpo.transport.sockets import Address, Keys
from zbgrpo.transport.wire import Sender

ROOT = Path(__file__).resolve().parents[2]
RUN = "0123456789abcdef"
TIMING = Timing(0.2, 20.0, 1.0)
MAX_BYTES = 1 << 20
LIMIT_SECONDS = 30.0


def config_of(folder: Path, **more: Any) -> RunConfig:
    paths = {
        "checkpoint.save_dir": "model", "evaluation.save_dir": "eval",
        "observe.log_dir": "logs", "observe.rollout_save_dir": "rollouts",
    }  # fmt: skip
    values = {key: str(folder / name) for key, name in paths.items()} | {"project": "p"}
    return fields.build(values | {key.replace("__", "."): value for key, value in more.items()})


def env_of(master_addr: str, rank: int = 0) -> TorchrunEnv:
    return TorchrunEnv(rank, 2, 0, 1, rank, master_addr, 29500, "none", 0)


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


# --------------------------------------------------------------------------------------------------------- folders


def test_a_lock_alone_is_not_an_earlier_run(tmp_path: Path) -> None:
    config = config_of(tmp_path, checkpoint__resume="never")
    for _ in range(2):
        startup.claim_folders(config).release()
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["p"]


def test_never_moves_every_folder_of_an_earlier_run_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["eval", "logs", "model", "rollouts"]
    for name in names:
        (tmp_path / name / "p").mkdir(parents=True)
        (tmp_path / name / "p" / "file").write_text(name)
    lock = startup.claim_folders(config_of(tmp_path, checkpoint__resume="never"))
    moved = sorted(path.parent.parent.name for path in tmp_path.glob("*/p.old-1/file"))
    assert moved == names
    said = capsys.readouterr().out
    assert all(f"{tmp_path / name / 'p'} was moved to" in said for name in names)
    with pytest.raises(RunFolderError, match="in use"):
        RunLock(tmp_path / "model" / "p").acquire()
    lock.release()


def test_auto_moves_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs" / "p").mkdir(parents=True)
    (tmp_path / "logs" / "p" / "file").touch()
    startup.claim_folders(config_of(tmp_path)).release()
    assert (tmp_path / "logs" / "p" / "file").exists()


def test_only_a_complete_model_folder_written_after_the_state_counts(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    parent = save_folder(config)
    write_folder(parent / "state-3", lambda folder: None)
    saved = saving.SavedRun(parent / "state-3", 3, {})
    assert not startup._has_model(config, saved)
    write_folder(parent / "step-3", lambda folder: (folder / "weights").write_bytes(b"1234") and None)
    assert startup._has_model(config, saved)
    assert not startup._has_model(config, saved._replace(folder=tmp_path / "elsewhere" / "state-3"))
    (parent / "step-3" / "weights").write_bytes(b"12")
    assert not startup._has_model(config, saved)
    (parent / "step-3" / "weights").write_bytes(b"1234")
    os.utime(parent / "step-3" / MANIFEST_NAME, (0, 0))
    assert not startup._has_model(config, saved), "a model of an earlier history was taken"


# ------------------------------------------------------------------------------------------------------ a saved state


class Trainer:
    """Writes its part of a state."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def save_state(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / f"__{self.rank}_0.distcp").write_bytes(b"part")


@pytest.mark.parametrize("rank", [0, 1])
def test_other_ranks_do_not_wait_for_the_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Two barriers, the second when each rank has its part on the disk; `latest` is set behind both, by rank 0."""
    config = config_of(tmp_path)
    parent = save_folder(config)
    seen: list[tuple[bool, bool]] = []

    def barrier(group: Any) -> None:
        if rank == 1 and not seen:
            (parent / "state-1.tmp-token").mkdir(parents=True)  # what rank 0 does before
        part = parent / "state-1.tmp-token" / "trainer" / f"__{rank}_0.distcp"
        seen.append((part.exists(), find_latest(parent) is not None))

    monkeypatch.setattr(saving, "_barrier", barrier)
    trainer: Any = Trainer(rank)
    saving.save_state(config, trainer, None, rank, 1, "token", lambda: {"num_rows": 1})
    assert seen == [(False, False), (True, False)]
    found = find_latest(parent)
    assert found == (parent / "state-1" if rank == 0 else None)
    if rank == 0:
        saved = saving.find_saved(config)
        assert saved is not None and (saved.version, saved.ledger) == (1, {"num_rows": 1})


# ------------------------------------------------------------------------------------------------------ finished runs


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    config = config_of(tmp_path, ledger__max_steps=4)
    assert finished_at(config) is None
    save_folder(config).mkdir(parents=True)
    for version in (2, 4):
        mark_finished(config, version, data_used_up=False)
    assert [path.name for path in save_folder(config).iterdir()] == [MARK_NAME]
    assert finished_at(config) == 4
    assert finished_at(config_of(tmp_path, ledger__max_steps=5)) is None
    assert finished_at(config_of(tmp_path, ledger__max_steps=4, checkpoint__resume="never")) is None
    mark_finished(config, 4, data_used_up=True)
    assert finished_at(config_of(tmp_path, ledger__max_steps=5)) == 4


def test_a_finished_run_of_another_configuration_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, ledger__max_steps=4, trainer__learning_rate=1e-3)
    save_folder(config).mkdir(parents=True)
    mark_finished(config, 4, data_used_up=False)
    assert finished_at(config) == 4
    other = config_of(tmp_path, ledger__max_steps=4, trainer__learning_rate=0.5)
    with pytest.raises(RunFolderError, match=rf"{MARK_NAME}: .*-lr.*0\.001.*0\.5"):
        finished_at(other)


@pytest.mark.parametrize(
    "content", [b"", b'{"version": 4, "data_us', b"[1]", b'{"version": 4}', b"\xff\xfe", b"[" * 9999]
)
def test_a_damaged_mark_is_named(tmp_path: Path, content: bytes) -> None:
    config = config_of(tmp_path)
    save_folder(config).mkdir(parents=True)
    (save_folder(config) / MARK_NAME).write_bytes(content)
    with pytest.raises(RunFolderError, match=f"{save_folder(config) / MARK_NAME}: not the mark"):
        finished_at(config)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_launcher_says_so_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], rank: int) -> None:
    config = config_of(tmp_path)
    save_folder(config).mkdir(parents=True)
    (save_folder(config) / MARK_NAME).write_bytes(b"torn")
    assert launch._start(config, env_of("localhost", rank)) == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert said.startswith(f"zbgrpo: {save_folder(config) / MARK_NAME}") if rank == 0 else said == ""


# ---------------------------------------------------------------------------------------------- where the hub listens


def store_of(*addresses: str) -> Any:
    store = HashStore()
    for rank, address in enumerate(addresses):
        store.set(f"address/{rank}", address)
    return store


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """This machine's address on the way to others, and what names mean; filled by the test. 127.0.0.9 stands for an
    address that others reach: a machine without a network has none."""
    known: dict[str, str] = {}
    monkeypatch.setattr(startup, "route_to", lambda host, port: known.get(host))
    monkeypatch.setattr(startup.socket, "gethostbyname", lambda name: known.get(name, name))
    return known


def test_one_node_needs_no_address() -> None:
    assert startup._hub_host(env_of("no.such.name.invalid"), [0, 0], None) is None


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_nodes_on_one_machine_meet_on_loopback(routes: dict[str, str], name: str) -> None:
    routes.update({name: "127.0.0.1"})
    assert startup._hub_host(env_of(name), [0, 1], store_of("127.0.0.1", "10.1.1.1")) == "127.0.0.1"


def test_a_name_that_is_loopback_here_alone_is_not_listened_on(routes: dict[str, str]) -> None:
    """The address that is tried is the one on the route to another node: here nobody can listen on it."""
    routes.update({"head": "127.0.1.1", "10.1.1.2": "203.0.113.7"})
    with pytest.raises(ConfigError, match=r"MASTER_ADDR: 'head' means 203\.0\.113\.7 here"):
        startup._hub_host(env_of("head"), [0, 1, 1], store_of("127.0.1.1", "", "10.1.1.2"))


def test_a_loopback_name_of_launchers_on_one_machine_is_right(routes: dict[str, str]) -> None:
    routes.update({"head": "127.0.1.1", "127.0.0.1": "127.0.0.1"})
    assert startup._hub_host(env_of("head"), [0, 1], store_of("127.0.0.1", "127.0.0.1")) == "127.0.0.1"


def test_an_unusable_address_is_refused_by_name(routes: dict[str, str]) -> None:
    routes.update({"head": "203.0.113.7"})
    with pytest.raises(ConfigError, match=r"MASTER_ADDR: 'head' means 203\.0\.113\.7"):
        startup._hub_host(env_of("head"), [0, 1], store_of("", ""))


def test_an_unknown_name_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"MASTER_ADDR: 'no\.such\.name\.invalid'"):
        startup._hub_host(env_of("no.such.name.invalid"), [0, 1], store_of("", ""))


# -------------------------------------------------------------------------------------------- the processes of a rank


@pytest.fixture
def hub() -> Iterator[Server]:
    """A hub of the test's own."""
    server = Server(RUN, None, TIMING, MAX_BYTES)
    yield server
    server.close()


def relay_spec(hub: Server, ring_bytes: int = 4096) -> HubSpec:
    return HubSpec(
        run_id=RUN, node=1, host=None, curve=False, timing=TIMING, ring_bytes=ring_bytes, max_message_bytes=MAX_BYTES,
        readers=[ReaderSpec(1, 1, 0)], events_path="", hub_address=asdict(hub.address),
    )  # fmt: skip


def start(spec: HubSpec) -> ChildProcess:
    return ChildProcess("zbgrpo.engine.relay", spec, LIMIT_SECONDS)


def files_of(child: ChildProcess) -> list[Path]:
    return [Path(child.started.address["endpoint"].removeprefix("ipc://")).parent, Path(child.started.ring_path)]


def messages_until(hub: Server, last: type) -> list[Any]:
    got: list[Any] = []
    deadline = time.monotonic() + LIMIT_SECONDS
    while not any(isinstance(message, last) for message in got):
        assert time.monotonic() < deadline, got
        got += [message for _, message, _ in hub.poll(0.05)]
        hub.tick()
    return got


def test_a_relay_that_fails_says_why_to_the_hub_and_to_its_readers(
    hub: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    relay = start(relay_spec(hub))
    assert relay.title == "relay of node 1"
    reader = Channel(address_of(relay.started.address), Sender(RUN, "reader:1"), TIMING, MAX_BYTES).start()
    reader.send(m.Hello(1), m.Release(7))  # a record that was never written
    said = messages_until(hub, m.Goodbye)
    assert [type(message) for message in said] == [m.Hello, m.Failed, m.Goodbye]
    assert said[1].error.startswith("the relay of node 1 failed: ProtocolError: ")
    with pytest.raises(PeerLostError, match="the relay of node 1 failed: ProtocolError") as caught:
        wait_until(reader.check)
    assert caught.value.reported
    relay.close(LIMIT_SECONDS)
    reader.close(0.0)
    assert relay.poll() == 1
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("zbgrpo: the relay of node 1 failed: ProtocolError: "), lines
    assert not any(path.exists() for path in files_of(relay))


def test_a_killed_child_leaves_no_files(hub: Server) -> None:
    relay = start(relay_spec(hub))
    assert all(path.exists() for path in files_of(relay))
    os.kill(relay._process.pid, signal.SIGKILL)
    relay.close(LIMIT_SECONDS)
    assert relay.poll() == -signal.SIGKILL
    assert not any(path.exists() for path in files_of(relay))


def test_a_child_whose_parent_is_killed_tells_the_hub_and_leaves_no_files(hub: Server) -> None:
    program = (
        "import sys, time; from zbgrpo.engine.hub_process import *; "
        "child = ChildProcess('zbgrpo.engine.relay', decode_spec(sys.stdin.readline()), 30.0); "
        "print(msgspec.json.encode(child.started).decode(), flush=True); "
        "time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert parent.stdin is not None and parent.stdout is not None
    parent.stdin.write(encode_spec(relay_spec(hub)) + "\n")
    parent.stdin.flush()
    started = msgspec.json.decode(parent.stdout.readline())
    files = [Path(started["address"]["endpoint"].removeprefix("ipc://")).parent, Path(started["ring_path"])]
    assert all(path.exists() for path in files)
    messages_until(hub, m.Hello)
    parent.kill()
    parent.communicate()
    said = messages_until(hub, m.Goodbye)
    assert "the rank that started it is gone" in said[0].error
    wait_until(lambda: not any(path.exists() for path in files))


def test_a_child_that_cannot_start_says_what_is_missing(hub: Server) -> None:
    with pytest.raises(ResourceError, match=r"the relay of node 1 cannot start: .*ring_bytes"):
        start(relay_spec(hub, ring_bytes=1 << 50))
    with pytest.raises(ResourceError, match=r"the relay of node 1 cannot start: ValueError: .*ring\.py:\d+"):
        start(relay_spec(hub, ring_bytes=0))


def test_keys_travel_in_a_file_of_the_users_own_and_never_through_the_store(tmp_path: Path) -> None:
    keys = asdict(Keys.generate())
    hub = {"endpoint": "tcp://10.0.0.1:5", **{name: keys[name] for name in asdict(Address("")) if name in keys}}
    document = startup.Document(
        run_id="r", usable=[0], version=0, resume_folder=None, hub=hub, ring_path="", ring_bytes=0,
        log_dir=str(tmp_path), evaluate_first=False, nodes=[0, 1], num_schedule_rows=1,
    )  # fmt: skip
    store = HashStore()
    startup.keys_path(tmp_path).write_text("of an earlier run, which anybody may read")
    startup.publish(store, document)
    assert startup.keys_path(tmp_path).stat().st_mode & 0o777 == 0o600
    told = store.get("document")
    assert not any(key.encode() in told for key in keys.values())
    assert startup.receive(store) == document


def test_a_new_socket_removes_the_folders_of_killed_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    live = Server(RUN, None, TIMING, MAX_BYTES)
    kept, gone, young, other = (tmp_path / f"zbgrpo-{name}" for name in ("live", "gone", "young", "other"))
    Path(live.address.endpoint.removeprefix("ipc://")).parent.rename(kept)
    for folder in (gone, young):
        folder.mkdir()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(folder / "socket"))
    other.mkdir()
    (other / "notes.txt").touch()
    for folder in (kept, gone, other):
        os.utime(folder, (0, 0))
    second = Server(RUN, None, TIMING, MAX_BYTES)
    second.close()
    assert (kept.exists(), gone.exists(), young.exists(), other.exists()) == (True, False, True, True)
    kept.rename(Path(live.address.endpoint.removeprefix("ipc://")).parent)
    live.close()
