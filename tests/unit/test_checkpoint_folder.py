"""Folders that are there as a whole or not at all: writing, verifying, finding, removing."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zbgrpo.checkpoint.durable import sync_files
from zbgrpo.checkpoint.folder import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    FolderTransaction,
    find_latest,
    remove_old,
    set_latest,
    verify_folder,
    write_folder,
)
from zbgrpo.errors import RunFolderError

ROOT = Path(__file__).parents[2]


def fill_with(text: str) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        (folder / "weights").mkdir()
        (folder / "weights" / "part-0").write_bytes(text.encode() * 3)
        (folder / "weights" / "part-1").write_bytes(text.encode() * 5)
        (folder / "empty").touch()

    return fill


def content_of(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def save(parent: Path, number: int, text: str | None = None, latest: bool = True) -> Path:
    final = parent / f"state-{number}"
    write_folder(final, fill_with(text or f"text {number}"), {"step": number})
    if latest:
        set_latest(parent, final.name)
    return final


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# -- a folder --


def test_a_written_folder_is_complete_and_its_manifest_tells_what_is_in_it(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "state-7"
    write_folder(final, fill_with("abc"), {"step": 7, "seeds": [1, 2]})
    manifest = verify_folder(final)
    assert (manifest["format_version"], manifest["step"], manifest["seeds"]) == (FORMAT_VERSION, 7, [1, 2])
    assert {name: entry["bytes"] for name, entry in manifest["files"].items()} == {
        "weights/part-0": 9,
        "weights/part-1": 15,
        "empty": 0,
    }
    assert json.loads((final / MANIFEST_NAME).read_text()) == manifest
    assert os.listdir(final.parent) == ["state-7"]


def test_a_manifest_is_optional(tmp_path: Path) -> None:
    write_folder(tmp_path / "step-1", fill_with("abc"), None)
    assert set(verify_folder(tmp_path / "step-1")) == {"format_version", "files", "manifest_crc32"}


@pytest.mark.parametrize("key", ["files", "format_version", "manifest_crc32"])
def test_fields_of_the_manifest_cannot_hide_its_own(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="reserved"):
        write_folder(tmp_path / "state-1", fill_with("abc"), {key: 1})
    assert os.listdir(tmp_path) == []


def test_an_existing_folder_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 1, "old")
    save(tmp_path, 1, "new")
    verify_folder(tmp_path / "state-1")
    assert content_of(tmp_path / "state-1")["weights/part-0"] == b"newnewnew"
    assert sorted(os.listdir(tmp_path)) == ["latest", "state-1"]


def test_an_error_while_filling_leaves_nothing_and_reaches_the_caller(tmp_path: Path) -> None:
    before = content_of(save(tmp_path, 1, "old"))

    def fill(folder: Path) -> None:
        (folder / "part").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "state-1", fill, None)
    assert content_of(tmp_path / "state-1") == before
    assert sorted(os.listdir(tmp_path)) == ["latest", "state-1"]


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("elsewhere"), os.mkfifo])
def test_what_a_manifest_cannot_describe_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    with pytest.raises(RunFolderError, match="odd is neither a regular file nor a folder"):
        write_folder(tmp_path / "state-1", lambda folder: make(folder / "odd"), None)
    assert os.listdir(tmp_path) == []


def test_several_ranks_fill_one_folder(tmp_path: Path) -> None:
    ranks = [FolderTransaction(tmp_path / "state-3", "token") for _ in range(3)]
    assert ranks[0].begin() == ranks[1].path == ranks[2].path
    for index, rank in enumerate(ranks):
        (rank.path / f"rank-{index}").write_text(str(index))
        sync_files([rank.path / f"rank-{index}"])
    assert not (tmp_path / "state-3").exists()
    manifest = ranks[0].commit({"world": 3})
    assert manifest == verify_folder(tmp_path / "state-3")
    assert sorted(manifest["files"]) == ["rank-0", "rank-1", "rank-2"]
    ranks[0].abort()  # nothing happens any more
    assert os.listdir(tmp_path) == ["state-3"]


def test_an_aborted_transaction_leaves_nothing(tmp_path: Path) -> None:
    transaction = FolderTransaction(tmp_path / "state-3", "token")
    (transaction.begin() / "part").write_text("half")
    transaction.abort()
    transaction.abort()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("token", ["", "../x"])
def test_a_token_is_part_of_a_name(tmp_path: Path, token: str) -> None:
    with pytest.raises(ValueError, match="file name"):
        FolderTransaction(tmp_path / "state-3", token)


def test_everything_is_on_the_disk_before_the_rename_and_the_manifest_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        trace.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.partition(".tmp-")[0])
        real_fsync(descriptor)

    def rename(source: Any, target: Any) -> None:
        trace.append("rename")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    write_folder(tmp_path / "state-1", fill_with("abc"), None)
    data = ["empty", "part-0", "part-1", "weights"]
    assert sorted(trace[:4]) == data and trace.index("weights") == 3
    assert trace[4:] == ["state-1", MANIFEST_NAME, "state-1", "rename", tmp_path.name]


# -- verification --


def test_every_changed_byte_is_noticed(tmp_path: Path) -> None:
    final = save(tmp_path, 1)
    manifest = verify_folder(final)
    for file in [path for path in final.rglob("*") if path.is_file()]:
        content = file.read_bytes()
        for position in range(len(content)):
            file.write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])
            try:
                found = verify_folder(final)
            except RunFolderError:
                continue
            assert file.name == MANIFEST_NAME and found == manifest  # its white space may change
        file.write_bytes(content)
    assert verify_folder(final) == manifest


def test_missing_longer_and_shorter_files_are_noticed_without_checksums_too(tmp_path: Path) -> None:
    final = save(tmp_path, 1)
    part = final / "weights" / "part-0"
    content = part.read_bytes()
    for changed in (content + b"x", content[:-1], None):
        part.unlink() if changed is None else part.write_bytes(changed)
        for checksums in (True, False):
            with pytest.raises(RunFolderError, match="part-0"):
                verify_folder(final, checksums)
    part.write_bytes(content[::-1])
    verify_folder(final, checksums=False)
    with pytest.raises(RunFolderError, match="part-0 is damaged: its checksum"):
        verify_folder(final)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is not complete: it has no MANIFEST.json"),
        ("", "cannot be read"),
        ('{"format_version": 1, "files": {', "cannot be read"),
        ("[]", "format version None; this program reads version 1"),
        ('{"format_version": 2}', "format version 2; this program reads version 1"),
        ('{"format_version": 1}', "is damaged"),
        ('{"format_version": 1, "files": {"a": 3}, "manifest_crc32": 0}', "is damaged"),
        ('{"format_version": 1, "files": {}, "manifest_crc32": 0}', "is damaged: its checksum does not match"),
    ],
)
def test_wrong_manifests(tmp_path: Path, text: str | None, message: str) -> None:
    final = save(tmp_path, 1)
    (final / MANIFEST_NAME).unlink()
    if text is not None:
        (final / MANIFEST_NAME).write_text(text)
    with pytest.raises(RunFolderError, match=message) as caught:
        verify_folder(final)
    assert str(final) in str(caught.value)


# -- the newest --


def test_nothing_saved_yet_is_no_error(tmp_path: Path) -> None:
    assert find_latest(tmp_path) is None
    assert find_latest(tmp_path / "missing") is None
    assert remove_old(tmp_path / "missing", "state-", 2) == []


def test_the_latest_file_decides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 100)
    save(tmp_path, 20, latest=False)
    save(tmp_path, 3)
    assert find_latest(tmp_path) == tmp_path / "state-3"
    (tmp_path / "latest").unlink()
    assert find_latest(tmp_path) == tmp_path / "state-100"  # by number, not by name
    assert warnings_in(caplog) == []


def test_damaged_folders_are_passed_over_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in (8, 9, 10, 11):
        save(tmp_path, number)
    damage(tmp_path / "state-11" / "weights" / "part-1")
    (tmp_path / "state-10" / MANIFEST_NAME).unlink()
    assert find_latest(tmp_path) == tmp_path / "state-9"
    first, second = warnings_in(caplog)
    assert "state-11" in first and "part-1 is damaged" in first
    assert "state-10" in second and "is not complete" in second


@pytest.mark.parametrize("content", [b"", b"state-9", b"../elsewhere", b"\xff\xfe\x00", b"state-2.tmp-12"])
def test_a_useless_latest_file_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes) -> None:
    save(tmp_path, 2)
    (tmp_path / "latest").write_bytes(content)
    assert find_latest(tmp_path) == tmp_path / "state-2"
    (warning,) = warnings_in(caplog)
    assert "latest" in warning


def test_other_things_in_the_folder_do_not_count(tmp_path: Path) -> None:
    final = save(tmp_path, 2)
    (tmp_path / "latest").unlink()
    for name in ("state-9.tmp-ab", "state-x", "state-", "state-²", "step-30"):
        shutil.copytree(final, tmp_path / name)
    (tmp_path / "state-31").write_text("a file")
    assert find_latest(tmp_path) == final
    assert find_latest(tmp_path, "step-") == tmp_path / "step-30"


def test_latest_can_only_name_a_complete_folder(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "state-2").mkdir()
    for name in ("state-2", "state-3", "../" + tmp_path.name, ".", ""):
        with pytest.raises(RunFolderError, match="not a complete folder"):
            set_latest(tmp_path, name)
    assert (tmp_path / "latest").read_text() == "state-1\n"


def test_latest_is_replaced_at_once_by_a_file_that_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2, latest=False)
    trace: list[str] = []

    def fsync(descriptor: int) -> None:
        trace.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.partition(".tmp-")[0])

    def replace(source: Path, target: Path) -> None:
        trace.append("replace")
        assert (source.read_text(), target.read_text()) == ("state-2\n", "state-1\n")
        source.rename(target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    set_latest(tmp_path, "state-2")
    assert trace == ["latest", "replace", tmp_path.name]
    assert (tmp_path / "latest").read_text() == "state-2\n"


def test_a_write_that_takes_only_a_part_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: real_write(descriptor, content[:5]))
    verify_folder(save(tmp_path, 1))
    assert (tmp_path / "latest").read_text() == "state-1\n"


# -- cleaning up --


def test_the_newest_complete_ones_stay(tmp_path: Path) -> None:
    for number in (1, 2, 3, 10, 11):
        save(tmp_path, number)
    damage(tmp_path / "state-11" / "weights" / "part-0")
    removed = remove_old(tmp_path, "state-", 2)
    assert removed == [tmp_path / "state-2", tmp_path / "state-1"]
    assert sorted(os.listdir(tmp_path)) == ["latest", "state-10", "state-11", "state-3"]
    assert find_latest(tmp_path) == tmp_path / "state-10"


def test_nothing_is_removed_while_there_are_too_few_complete_ones(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        save(tmp_path, number)
    (tmp_path / "state-3" / MANIFEST_NAME).unlink()
    assert remove_old(tmp_path, "state-", 2) == []
    assert remove_old(tmp_path, "state-", 5) == []
    with pytest.raises(ValueError, match="at least one"):
        remove_old(tmp_path, "state-", 0)


def test_the_one_that_latest_names_stays(tmp_path: Path) -> None:
    for number in (5, 6, 7):
        save(tmp_path, number)
    set_latest(tmp_path, "state-5")
    assert remove_old(tmp_path, "state-", 1) == [tmp_path / "state-6"]


def test_leftovers_of_this_prefix_are_swept(tmp_path: Path) -> None:
    final = save(tmp_path, 2)
    for name in ("state-3.tmp-ab", "state-2.old-cd", "step-3.tmp-ef"):
        shutil.copytree(final, tmp_path / name)
    (tmp_path / "latest.tmp-gh").write_text("state-2")
    assert remove_old(tmp_path, "state-", 2) == []
    assert sorted(os.listdir(tmp_path)) == ["latest", "state-2", "step-3.tmp-ef"]


def test_a_replacement_that_was_interrupted_is_undone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    final = save(tmp_path, 2)
    before = content_of(final)
    for undo in (lambda: find_latest(tmp_path), lambda: remove_old(tmp_path, "state-", 1)):
        final.rename(tmp_path / "state-2.old-ab")
        undo()
        assert content_of(final) == before
    assert "was being replaced" in warnings_in(caplog)[0]
