"""What a user can get wrong ends with one clear first line that names the culprit."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.launching import FLAGS, Finished, Run, run, write_rows

ONE = "-t 1 -i 1 --max-steps 1 "


def _ends_with(finished: Finished, *culprits: str) -> None:
    assert finished.status != 0
    assert finished.first_line, finished.output[-3000:]
    for culprit in culprits:
        assert culprit in finished.first_line, finished.first_line
    traceback = finished.output.find("Traceback (most recent call last)")
    assert traceback < 0 or traceback > finished.output.find(finished.first_line), finished.output[-3000:]


@pytest.mark.parametrize(
    ("flags", "culprits"),
    [
        ("-m nowhere/at/all", ["nowhere/at/all", "no such folder"]),
        ("-d nowhere.jsonl", ["nowhere.jsonl"]),
        ("-d bad.jsonl", ["bad.jsonl:2"]),
        ("-d few.jsonl", ["few.jsonl", "too few rows", "2", "4"]),
        ("-t 3", ["3 trainers + 1", "2"]),
        ("infrence.top_k=3", ["infrence.top_k", "inference.top_k"]),
        ("-g 1", ["-g", "1"]),
        ("-tbs 4 -tMbs 3", ["4", "3", "-tbs"]),
        ("-cbsl 2", ["-cbsl", "2", "4"]),
        ("-rt reward.py:missing", ["reward.py:missing"]),
        ("--consumer-python nowhere/python", ["nowhere/python", "install.sh colossalai"]),
    ],
)
def test_bad_flag(workplace: Path, flags: str, culprits: list[str]) -> None:
    (workplace / "bad.jsonl").write_text('{"messages": {"role": "user", "content": "a"}, "gt_answer": "1"}\n{oops\n')
    write_rows(workplace / "few.jsonl", [{"content": "a"}, {"content": "b"}])
    _ends_with(run(workplace, 2, f"{ONE} -p bad {flags}", 90), *culprits)


def test_default_data_file_points_to_the_quickstart(workplace: Path) -> None:
    common = [flag for flag in FLAGS if flag not in ("-d", "train.jsonl")]
    finished = Run(workplace, 2, f"{ONE} -p bad", common).wait(90)
    _ends_with(finished, "data.jsonl", "launch/quickstart.sh")


def test_finished_run_says_so_and_another_configuration_is_refused(workplace: Path) -> None:
    assert run(workplace, 2, f"{ONE} -p done").status == 0
    again = run(workplace, 2, f"{ONE} -p done")
    assert again.status == 0 and "has finished with step 1" in again.output
    other = run(workplace, 2, "-t 1 -i 1 --max-steps 2 -p done -lr 0.5")
    _ends_with(other, "model_out/done/state-1", "-lr/--learning-rate", "0.5")
    (workplace / "model_out" / "foreign" / "state-1").mkdir(parents=True)
    (workplace / "model_out" / "foreign" / "state-1" / "weights.bin").write_text("not ours")
    _ends_with(run(workplace, 2, f"{ONE} -p foreign --resume model_out/foreign/state-1"), "model_out/foreign/state-1")


def test_tiny_shared_memory_names_the_size(workplace: Path) -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("needs root and mount namespaces")
    import sys

    from tests.support.launching import start

    launch = (
        f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:0"
    )
    script = (
        f"mount -t tmpfs -o size=1m tmpfs /dev/shm && exec {launch} -m zbgrpo.launch {' '.join(FLAGS)} {ONE} -p shm"
    )
    process = start(["unshare", "-m", "sh", "-c", f"{script} transport.ring_bytes=8000000"], workplace)
    output, _ = process.communicate(timeout=90)
    _ends_with(Finished(process.returncode, output), "/dev/shm", "needs 80000")


def test_rows_that_cannot_be_rewarded_are_dropped_counted_and_named(workplace: Path) -> None:
    from tests.support.launching import summary

    rows = [{"content": f"{n}+1", "extra": {"bad": n % 5 == 0}} for n in range(40)]
    write_rows(workplace / "picky.jsonl", rows)
    finished = run(workplace, 2, "-t 1 -i 1 --max-steps 6 -p picky -d picky.jsonl -rt reward.py:picky")
    assert finished.status == 0, finished.output[-3000:]
    totals = summary(workplace, "picky")
    assert totals["dropped_by_reason"]["reward_error"] > 0
    assert "this row is bad on purpose" in (workplace / "logs" / "picky" / "rank-1.log").read_text()


def test_no_effective_group_ends_with_the_counts(workplace: Path) -> None:
    write_rows(workplace / "hopeless.jsonl", [{"content": f"{n}+1"} for n in range(8)])
    finished = run(workplace, 2, "-t 1 -i 1 -p hopeless -d hopeless.jsonl -rt reward.py:never -a DAPO -tbs 4")
    _ends_with(finished, "no group was effective", "8")
