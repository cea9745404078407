"""Folders that are there as a whole or not at all: written aside, checked by a manifest, published by one rename.

    state-200.tmp-<token>/   being written; ignored by everybody, swept by `remove_old`
    state-200/               complete: MANIFEST.json was written last, and the folder renamed after that
    state-200.old-<token>/   the former state-200 while a new one takes its place
    latest                   name of the newest folder, replaced after the rename

A crash at any moment, of the process or of the machine, leaves the old or the new state, never a mix of both.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import platform
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from isal.isal_zlib import crc32

from zbgrpo import failpoints
from zbgrpo.checkpoint.durable import disk_full_named, measure_file, sync_folder, write_durably
from zbgrpo.errors import RunFolderError

FORMAT_VERSION = 1
MANIFEST_NAME = "MANIFEST.json"
LATEST_NAME = "latest"
LOCK_NAME = ".lock"

_TEMPORARY = ".tmp-"
_ASIDE = ".old-"
_RESERVED_KEYS = ("format_version", "files", "manifest_crc32")
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

logger = logging.getLogger(__name__)


class _FileEntry(msgspec.Struct):
    bytes: int
    crc32: int


class _Manifest(msgspec.Struct):
    files: dict[str, _FileEntry]
    manifest_crc32: int


def new_token() -> str:
    """A random name for one transaction; rank 0 makes it and tells the other ranks."""
    return secrets.token_hex(4)


def write_folder(final: Path, fill: Callable[[Path], None], manifest: dict[str, Any] | None = None) -> None:
    """Make the folder `final` with what `fill` writes into the folder it is given, atomically and durably.

    When this returns, the folder is on the disk; when it raises, `final` is what it was before and nothing is left
    beside it (unless all that failed was to make the last rename durable). An existing `final` is replaced.
    `manifest` holds further fields of MANIFEST.json, as JSON values.
    Raises `ResourceError` when the disk is full, and whatever `fill` raises.
    """
    transaction = FolderTransaction(final, new_token())
    with contextlib.ExitStack() as stack:
        stack.callback(transaction.abort)
        stack.enter_context(disk_full_named(final))
        fill(transaction.begin())
        transaction.commit(manifest)


class FolderTransaction:
    """`write_folder` in pieces, for a folder that several ranks fill.

    1. All ranks make one with the same token (`new_token` on one rank, then broadcast).
    2. One rank calls `begin`; after a barrier all ranks write files into `path` and call
       `durable.sync_files` on their own.
    3. After a barrier one rank calls `commit`; or `abort`, if any rank failed.
    """

    def __init__(self, final: Path, token: str) -> None:
        if not token or "/" in token:
            raise ValueError(f"{token!r} cannot be part of a file name")
        self.final = final
        self.path = final.with_name(f"{final.name}{_TEMPORARY}{token}")
        """The folder to write into."""
        self._aside = final.with_name(f"{final.name}{_ASIDE}{token}")

    def begin(self) -> Path:
        """Create the empty folder to write into, and the folders above it; returns `path`."""
        self.final.parent.mkdir(parents=True, exist_ok=True)
        os.mkdir(self.path)
        return self.path

    def commit(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """Put everything in `path` on the disk, the manifest last, and rename it to `final`; returns the manifest.

        If it raises, `final` is what it was before, unless only making the rename durable failed. `path` is then
        left to `abort`.
        """
        with disk_full_named(self.final):
            folders, files = _contents(self.path)
            entries = {file.relative_to(self.path).as_posix(): _sync_and_measure(file) for file in files}
            manifest = _sealed(extra or {}, entries)
            for folder in reversed(folders):
                sync_folder(folder)
            write_durably(self.path / MANIFEST_NAME, json.dumps(manifest, indent=1).encode())
            sync_folder(self.path)
            self._publish()
        return manifest

    def abort(self) -> None:
        """Remove what was written. Nothing happens after a `commit` or a second time."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _publish(self) -> None:
        replaces = self.final.exists()
        with contextlib.ExitStack() as undo:
            if replaces:
                # A folder that is not empty cannot be renamed over. `recover_folders` repairs a crash between the two.
                os.rename(self.final, self._aside)
                undo.callback(os.rename, self._aside, self.final)
            os.rename(self.path, self.final)
            undo.pop_all()
        failpoints.fire("checkpoint.rename")
        sync_folder(self.final.parent)
        if replaces:
            shutil.rmtree(self._aside, ignore_errors=True)


def verify_folder(path: Path, checksums: bool = True) -> dict[str, Any]:
    """The manifest of a complete folder. With `checksums` every byte is read, else only the sizes are compared.

    Files that the manifest does not name are not looked at. Raises `RunFolderError` when the folder is not complete,
    a file is missing or has changed, or the format is of another version.
    """
    manifest = _read_manifest(path)
    for name, entry in msgspec.convert(manifest, _Manifest).files.items():
        try:
            size_bytes = (path / name).stat().st_size
            if size_bytes == entry.bytes and checksums:
                size_bytes, crc = measure_file(path / name)
            else:
                crc = entry.crc32
        except OSError as error:
            raise RunFolderError(f"{path / name} cannot be read: {error.strerror}") from error
        if size_bytes != entry.bytes:
            raise RunFolderError(f"{path / name} has {size_bytes} bytes, not {entry.bytes}")
        if crc != entry.crc32:
            raise RunFolderError(f"{path / name} is damaged: its checksum is {crc:#010x}, not {entry.crc32:#010x}")
    return manifest


def set_latest(parent: Path, name: str) -> None:
    """Make `parent/latest` name the complete folder `parent/name`, atomically and durably."""
    if Path(name).name != name or not (parent / name / MANIFEST_NAME).is_file():
        raise RunFolderError(f"{parent / name} is not a complete folder of {parent}")
    temporary = parent / f"{LATEST_NAME}{_TEMPORARY}{new_token()}"
    try:
        with disk_full_named(parent / LATEST_NAME):
            write_durably(temporary, f"{name}\n".encode())
            os.replace(temporary, parent / LATEST_NAME)
            failpoints.fire("checkpoint.rename")
            sync_folder(parent)
    finally:
        temporary.unlink(missing_ok=True)


def find_latest(parent: Path, prefix: str = "state-") -> Path | None:
    """The folder to go on from, or None when there is no complete one: all its checksums have been compared.

    It is the one that `latest` names; if that file is missing or the folder is not complete, the complete one with the
    highest number after `prefix`. Each that is passed over is logged as a warning with the reason. First repairs what
    an interrupted replacement left. One rank of a run calls it and tells the others.
    """
    recover_folders(parent, prefix)
    candidates = _numbered(parent, prefix)
    named = _read_latest(parent)
    if named is not None:
        if parent / named in candidates:
            candidates.remove(parent / named)
            candidates.insert(0, parent / named)
        else:
            logger.warning("passed over %r, which %s names: there is no such folder", named, parent / LATEST_NAME)
    for candidate in candidates:
        try:
            verify_folder(candidate)
        except RunFolderError as error:
            logger.warning("passed over %s: %s", candidate, error)
        else:
            return candidate
    return None


def remove_old(parent: Path, prefix: str, keep: int) -> list[Path]:
    """Remove folders that are older (by number) than the `keep` newest complete ones; returns those removed.

    Nothing is removed while there are fewer than `keep` complete ones, and before the newest has been read back with
    its checksums; nor is the folder that `latest` names. What interrupted saves left is swept as well, so no save
    under this prefix may be running.
    """
    if keep < 1:
        raise ValueError(f"at least one folder must be kept, not {keep}")
    recover_folders(parent, prefix)
    _sweep(parent, prefix)
    named = _read_latest(parent)
    num_complete = 0
    removed = []
    for candidate in _numbered(parent, prefix):
        if num_complete < keep:
            num_complete += _is_complete(candidate, checksums=num_complete == 0)
        elif candidate.name != named:
            _remove_folder(candidate)
            removed.append(candidate)
    return removed


def recover_folders(parent: Path, prefix: str) -> None:
    """Undo replacements that were interrupted between their two renames: the former folder gets its name back."""
    for aside in _entries(parent, prefix):
        name, separator, _ = aside.name.partition(_ASIDE)
        final = parent / name
        if separator and not final.exists() and _is_complete(aside, checksums=False):
            logger.warning("%s was being replaced when its run ended; the former one is used", final)
            with contextlib.suppress(FileNotFoundError):
                os.rename(aside, final)


class RunLock:
    """Keeps a second run out of a folder. The kernel drops it when the process ends, however it ends.

    A context manager. Where the file system has no locks, a warning is logged and nothing is locked.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Lock the folder, which is created if need be. Raises `RunFolderError` when it is in use; never waits."""
        if self._descriptor is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        # Not truncated: until the lock is ours, the file says who has it. Never removed: a process that has just
        # opened it would lock a file that the next one does not see.
        descriptor = os.open(self.folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
        except BlockingIOError as error:
            owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise RunFolderError(
                f"{self.folder} is in use by another run ({owner or 'owner unknown'}); "
                f"end that one or choose another project name"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                os.close(descriptor)
                raise
            logger.warning("the file system of %s has no locks: do not start two runs in it", self.folder)
        self._descriptor = descriptor

    def release(self) -> None:
        """Let the next run in. Calling it again changes nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _contents(root: Path) -> tuple[list[Path], list[Path]]:
    """All folders (parents first) and files under `root`; anything else is an error, for it would be lost silently."""
    folders, files = [root], []
    for folder in folders:  # grows while it is walked
        for entry in sorted(folder.iterdir()):
            mode = entry.lstat().st_mode
            if stat.S_ISDIR(mode):
                folders.append(entry)
            elif stat.S_ISREG(mode):
                files.append(entry)
            else:
                raise RunFolderError(f"{entry} is neither a regular file nor a folder; only those can be saved")
    return folders, files


def _sealed(extra: dict[str, Any], files: dict[str, dict[str, int]]) -> dict[str, Any]:
    """The manifest with its own checksum, after a round trip through JSON, as a reader will see it."""
    taken = [key for key in _RESERVED_KEYS if key in extra]
    if taken:
        raise ValueError(f"{', '.join(taken)}: reserved in a manifest")
    content = {**extra, "format_version": FORMAT_VERSION, "files": files}
    manifest = json.loads(json.dumps(content, allow_nan=False))
    return {**manifest, "manifest_crc32": _manifest_crc(manifest)}


def _manifest_crc(manifest: dict[str, Any]) -> int:
    content = {key: value for key, value in manifest.items() if key != "manifest_crc32"}
    return crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST_NAME
    try:
        manifest = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise RunFolderError(f"{path} is not complete: it has no {MANIFEST_NAME}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise RunFolderError(f"{file} cannot be read: {error}") from error
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise RunFolderError(f"{path} is of format version {version!r}; this program reads version {FORMAT_VERSION}")
    try:
        declared_crc = msgspec.convert(manifest, _Manifest).manifest_crc32
    except msgspec.ValidationError as error:
        raise RunFolderError(f"{file} is damaged: {error}") from error
    if declared_crc != _manifest_crc(manifest):
        raise RunFolderError(f"{file} is damaged: its checksum does not match")
    return manifest


def _sync_and_measure(file: Path) -> dict[str, int]:
    size_bytes, crc = measure_file(file, sync=True)
    return {"bytes": size_bytes, "crc32": crc}


def _entries(parent: Path, prefix: str) -> list[Path]:
    if not parent.is_dir():
        return []
    return sorted(entry for entry in parent.iterdir() if entry.name.startswith(prefix))


def _numbered(parent: Path, prefix: str) -> list[Path]:
    """Folders called prefix and a number, the highest number first; temporary ones have more in their names."""
    numbers = {}
    for entry in _entries(parent, prefix):
        suffix = entry.name[len(prefix) :]
        if suffix.isascii() and suffix.isdigit() and entry.is_dir():
            numbers[entry] = int(suffix)
    return sorted(numbers, key=numbers.__getitem__, reverse=True)


def _read_latest(parent: Path) -> str | None:
    try:
        return (parent / LATEST_NAME).read_text(errors="replace").strip()
    except FileNotFoundError:
        return None


def _is_complete(folder: Path, checksums: bool) -> bool:
    try:
        verify_folder(folder, checksums)
    except RunFolderError as error:
        logger.warning("%s does not count as complete: %s", folder, error)
        return False
    return True


def _remove_folder(folder: Path) -> None:
    """Rename first: a removal that is interrupted must not leave something that looks like the folder."""
    doomed = folder.with_name(f"{folder.name}{_TEMPORARY}{new_token()}")
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _sweep(parent: Path, prefix: str) -> None:
    """Remove what interrupted saves left. Former folders that `recover_folders` could use have their names back."""
    for entry in [*_entries(parent, prefix), *_entries(parent, LATEST_NAME + _TEMPORARY)]:
        if _TEMPORARY not in entry.name and _ASIDE not in entry.name:
            continue
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
