"""Log files of ranks and the one line of a failure."""

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from zbgrpo.errors import DataError
from zbgrpo.observe import logs
from zbgrpo.observe.logs import error_line, setup_rank_logging
from zbgrpo.types import Role


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    level = root.level
    yield
    for handler in logs._installed:
        root.removeHandler(handler)
        handler.close()
    logs._installed.clear()
    root.setLevel(level)
    logging.captureWarnings(False)


def test_file_has_rank_role_and_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = setup_rank_logging(tmp_path / "logs", 2, "producer 0", console=False)
    logging.getLogger("zbgrpo.x").info("hello")
    logging.getLogger("zbgrpo.x").warning("careful")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old thing", DeprecationWarning, stacklevel=1)
    assert path == tmp_path / "logs" / "rank-2.log"
    first, second, third, *_ = path.read_text().splitlines()
    assert first.endswith("rank 2 (producer 0) INFO zbgrpo.x: hello")
    assert first[:2] == "20"
    assert "WARNING" in second
    assert "old thing" in third
    assert capsys.readouterr().err == ""


def test_console_gets_warnings_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_rank_logging(tmp_path, 0, Role.CONSUMER, console=True)
    logging.getLogger("a").info("quiet")
    logging.getLogger("a").error("loud")
    assert capsys.readouterr().err == "zbgrpo: rank 0 (consumer) ERROR: loud\n"


def test_setting_up_again_replaces_and_appends(tmp_path: Path) -> None:
    setup_rank_logging(tmp_path, 0, "consumer", console=True)
    logging.getLogger("a").info("one")
    path = setup_rank_logging(tmp_path, 0, "consumer", console=False)
    logging.getLogger("a").info("two")
    assert [line.split()[-1] for line in path.read_text().splitlines()] == ["one", "two"]


def test_error_line_is_one_line() -> None:
    error = DataError("train.jsonl:7: no gt_answer\n  add one")
    assert error_line(2, "producer 0", error) == (
        "zbgrpo: rank 2 (producer 0) failed: DataError: train.jsonl:7: no gt_answer add one"
    )
    assert error_line(0, Role.CONSUMER, MemoryError()) == "zbgrpo: rank 0 (consumer) failed: MemoryError"
    assert len(error_line(0, "consumer", ValueError("x" * 10**6))) < 3000
