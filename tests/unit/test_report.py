"""`zbgrpo report`: what is on the page, of any run folder, and the page itself in a browser without a network."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.browser import Browser, find_browser
from tests.support.launching import Run, make_workplace, metrics
from tests.support.run_logs import World, finished, killed
from zbgrpo import cli
from zbgrpo.config.load import dump_yaml, load_yaml
from zbgrpo.errors import RunFolderError
from zbgrpo.observe.metrics import METRIC_KEYS, MetricsWriter
from zbgrpo.observe.report import contents, figures, timeline
from zbgrpo.observe.report.folder import read_run
from zbgrpo.observe.report.page import json_for_script, write_report
from zbgrpo.observe.rolloutlog import RolloutLog, rollout_group
from zbgrpo.observe.timeledger import ACCOUNTS
from zbgrpo.observe.tracefile import TraceFile, TraceHeader
from zbgrpo.types import GroupPayload, Uid

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><!--<script>"
CONFIG = """
project: PROJECT
cluster: {num_trainers: 2, num_inferencer: 2}
trainer: {train_batch_size: 2, train_minibatch_size: 1}
inference: {num_generations: 2}
ledger: {max_staleness: 1, max_token_lag: 3}
evaluation: {datasets: {heldout: heldout.jsonl}}
"""


def data_of(page: Path) -> dict[str, Any]:
    """The data inside a page, as its scripts get it."""
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert len(found) == 1
    data: dict[str, Any] = json.loads(found[0])
    return data


def run_folder(base: Path, world: World, project: str = "made-up", steps: int = 0) -> Path:
    """The folder of a made-up run: its event logs, metrics of `steps` steps, evaluations, rollouts, a trace."""
    folder = world.write(base / "logs" / project)
    (folder / "config.yaml").write_text(dump_yaml(load_yaml(CONFIG.replace("PROJECT", json.dumps(project)))))
    (folder / "metrics.jsonl").unlink()
    writer = MetricsWriter(folder)
    for step in range(1, steps + 1):
        values: dict[str, Any] = dict.fromkeys(METRIC_KEYS, 0.5)
        writer.write(step, values | {"wall_s": 2.0 * step, "train/kl": None, "reward/mean": step % 7})
    for step, accuracy in ((0, 0.25), (steps, 0.75)):
        writer.write_eval({"step": step, "task": "heldout", "accuracy": accuracy})
    writer.close()
    payload = GroupPayload(
        np.array([1, 2], np.int32),
        np.array([3, 4, 5, 6], np.int32),
        np.zeros(4, np.float32),
        np.array([2, 2], np.int32),
        np.array([10.0, 0.0], np.float32),
        np.ones(2, np.float32),
        np.array([1.0, 0.0], np.float32),
        np.zeros(2, np.int32),
        np.array([[0, 0, 0], [1, 0, 0], [1, 1, 1]], np.int32),
    )
    texts = [HOSTILE, "right-to-left \u202e and \x1b[31m red"]
    group = rollout_group(Uid(0, 3), f"prompt {HOSTILE}", texts, payload, [1.0, -1.0])
    RolloutLog(base / "rollouts" / project).write(0, [group])
    return folder


def trace_of(folder: Path, process: str, rank: int, *records: tuple[Any, ...], run: str = "run-1") -> None:
    """Appends to the trace of one process."""
    made = TraceHeader(
        process=process,
        rank=rank,
        role=process.partition(" ")[0],
        run=run,
        clock="one",
        monotonic=0.0,
        wall=1000.0 if run == "run-1" else 2000.0,
    )
    name = "hub" if rank < 0 else f"rank-{rank}"
    file = TraceFile(folder / "trace" / f"{name}.jsonl", made, 1_000_000)
    file.write(records)
    file.close()


def add_trace(folder: Path, num_turns: int = 300) -> None:
    """A hub, a consumer and two producers, for `num_turns` turns of a second."""
    hub: list[tuple[Any, ...]] = [("b", 0.5, "evaluation", 0, {"version": 0}), ("e", 3.0, "evaluation", 0, {})]
    consumer: list[tuple[Any, ...]] = [("P", 0.0, 1.0, {"startup": 1.0})]
    producer: list[tuple[Any, ...]] = [("P", 0.0, 1.0, {"startup": 1.0})]
    for n in range(1, num_turns):
        hub += [("C", float(n), "leased", n % 5), ("i", n + 0.9, "commit", {"version": n})]
        consumer += [
            ("P", float(n), 0.7, {"busy": 0.7}),
            ("P", n + 0.7, 0.3, {"starved": 0.3}),
            ("X", float(n), 0.6, "work", "forward/backward", {"step": n, "minibatch": 0}),
            ("X", n + 0.6, 0.1, "work", "optimizer step", {"step": n}),
            ("X", n + 0.7, 0.2, "broadcast", "broadcast", {"version": n}),
        ]
        producer.append(("P", float(n), 1.0, {"busy": 0.75, "starved": 0.2, "blocked_on_weights": 0.05}))
    trace_of(folder, "hub", -1, *hub)
    trace_of(folder, "consumer 0", 0, *consumer)
    trace_of(folder, "producer 0", 2, *producer, ("b", 3.0, "evaluation", 3, {"version": 3}))
    trace_of(folder, "producer 1", 3, *producer)


# ------------------------------------------------------------------------------------------ any folder


def test_a_resumed_and_finished_run(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, finished(), steps=3)
    add_trace(folder)
    page, trace = write_report(folder)
    assert page == folder / "report.html" and trace == folder / "trace" / "trace.json" and trace.exists()
    data = data_of(page)
    assert data["state"] == {"kind": "finished", "text": "finished"}
    groups = data["groups"]
    world_totals = {"leased": 22, "consumed": 12, "filtered": 1, "dropped": 4, "returned": 1}
    together = dict(zip(groups["columns"], groups["rows"][-1]["values"], strict=True))
    assert {name: together[name] for name in world_totals} == world_totals
    assert [start["version"] for start in groups["starts"]] == [0, 2]
    assert groups["taken_back"] == 4 and groups["live"] == {"leased": 0, "buffered": 0, "planned": 0}
    assert groups["dropped_by_reason"] == {"reward_error": 1, "end": 3}
    assert sum(data["lags"]["series"][0]["values"]) == 14, "every group once, whatever step it was for"
    assert data["rollouts"]["groups"][0]["responses"][0]["text"] == HOSTILE
    titles = [chart["title"] for chart in data["curves"]["charts"]]
    assert "Accuracy" in titles and not any("KL" in title for title in titles)
    accuracy = next(chart for chart in data["curves"]["charts"] if chart["title"] == "Accuracy")
    assert accuracy["points"] == [{"name": "evaluation heldout", "values": [[0, 0.25], [3, 0.75]]}]
    (cards,) = [[card["value"] for card in data["headline"] if card["label"] == "accuracy, heldout"]]
    assert cards == ["25.0 → 75.0 %"]


def test_a_killed_run_with_a_torn_line(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, killed(), steps=2)
    for name in ("events/hub.jsonl", "metrics.jsonl", "eval.jsonl"):
        with open(folder / name, "ab") as file:
            file.write(b'{"kind":"leased","le')
    data = data_of(write_report(folder)[0])
    assert data["state"]["kind"] == "open"
    assert data["groups"]["live"]["planned"] == 2
    assert data["curves"]["steps"] == [1, 2] and data["timelines"] == []
    assert any("hub.jsonl was cut off" in note for note in data["notes"])
    assert {card["label"]: card["value"] for card in data["headline"]}["samples/s"] == "4"  # 2 steps of 8 in 4 s


def test_an_old_summary_is_not_that_of_the_new_start(tmp_path: Path) -> None:
    world = finished()
    world.hub += [{"kind": "snapshot", "version": 3}, {"kind": "started", "run": "0b", "version": 3}]
    data = data_of(write_report(run_folder(tmp_path, world))[0])
    assert data["state"] == {"kind": "open", "text": "did not finish, or is still running"}


def test_a_stop_that_left_out_a_step_that_was_begun(tmp_path: Path) -> None:
    """Consumers leave out what the stop would throw away, so that the run may end a step before the plan does."""
    world = finished()
    assert world.summary is not None
    world.summary |= {"exit_reason": "stopped by SIGTERM"}
    world.line("hub", "plan", entry="end")["entry"] = "stop"
    world.line("hub", "plan", entry="stop")["version"] += 1
    data = data_of(write_report(run_folder(tmp_path, world))[0])
    assert data["state"] == {"kind": "stopped", "text": "stopped by SIGTERM"}


@pytest.mark.parametrize(
    ("lines", "kind", "text"),
    [
        ([{"kind": "failed", "error": "rank 2 failed: no memory"}], "failed", "failed: rank 2 failed: no memory"),
        (
            [{"kind": "stop_request", "peer": "consumer:0", "reason": "SIGTERM"}],
            "open",
            "asked to stop (SIGTERM), and did not finish",
        ),
    ],
)
def test_how_a_run_ended(tmp_path: Path, lines: list[dict[str, Any]], kind: str, text: str) -> None:
    world = killed()
    world.hub += lines
    assert data_of(write_report(run_folder(tmp_path, world))[0])["state"] == {"kind": kind, "text": text}


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    data = data_of(write_report(tmp_path)[0])
    assert data["state"]["kind"] == "open"
    assert data["curves"]["charts"] == [] and data["rollouts"]["groups"] == [] and data["times"]["rows"] == []


def test_time_by_rank_is_from_the_best_source(tmp_path: Path) -> None:
    world = killed()
    shares = dict.fromkeys(ACCOUNTS, 0.0)
    world.ranks[0].append({"kind": "commit", "version": 4, "skipped": False, "times": {**shares, "busy": 3.0}})
    world.ranks[2].append({"kind": "decode", "version": 4, "times": {**shares, "busy": 1.0, "starved": 1.0}})
    folder = run_folder(tmp_path, world)
    times = figures.times(read_run(folder))
    assert [(row["rank"], row["role"], row["seconds"]) for row in times["rows"]] == [
        (0, "consumer", 3.0),
        (2, "producer", 2.0),
    ]
    assert times["bubble"] == {"consumers": 0.0, "producers": 0.5}
    add_trace(folder, 11)
    times = figures.times(read_run(folder))
    assert [row["rank"] for row in times["rows"]] == [0, 2, 3] and "trace" in times["source"]
    assert times["bubble"]["consumers"] == pytest.approx(0.3)
    assert times["bubble"]["producers"] == pytest.approx(0.25)
    booked = {**shares, "busy": 0.9, "starved": 0.1}
    world.end()
    assert world.summary is not None
    summary = world.summary | {
        "time_shares": {"0": {"role": "consumer", "shares": booked}},
        "bubble": {"consumers": 0.1, "producers": None},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "events" / "hub.jsonl").write_text("".join(json.dumps(event) + "\n" for event in world.hub))
    times = figures.times(read_run(folder))
    assert len(times["rows"]) == 1 and times["rows"][0]["bubble"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("log_dir", "saved", "expected"),
    [
        ("./logs", "./rollouts", "rollouts/made-up"),
        ("out/logs", "out/rollouts", "out/rollouts/made-up"),
        ("./logs", "/elsewhere", "/elsewhere/made-up"),
    ],
)
def test_rollouts_are_looked_for_where_the_run_was_started(
    tmp_path: Path, log_dir: str, saved: str, expected: str
) -> None:
    folder = tmp_path / log_dir / "made-up"
    folder.mkdir(parents=True)
    settings = f"project: made-up\nobserve: {{log_dir: {log_dir}, rollout_save_dir: {saved}}}\n"
    (folder / "config.yaml").write_text(settings)
    run = read_run(folder)
    assert run.folder(run.config.observe.rollout_save_dir) == tmp_path / expected


def test_what_is_too_long_is_cut_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "MAX_CHARACTERS", 10)
    monkeypatch.setattr(contents, "MAX_RESPONSES", 1)
    (group,) = data_of(write_report(run_folder(tmp_path, killed()))[0])["rollouts"]["groups"]
    assert group["num_responses"] == 2 and len(group["responses"]) == 1
    assert group["responses"][0]["text"] == HOSTILE[:10] and group["responses"][0]["cut"] == len(HOSTILE) - 10


def test_settings_say_what_is_not_the_default(tmp_path: Path) -> None:
    sections = {part["name"]: part["rows"] for part in contents.settings(read_run(run_folder(tmp_path, killed())))}
    rows = {row["name"]: row for row in sections["trainer"]}
    assert rows["train_batch_size"] == {"name": "train_batch_size", "value": "2", "default": "32"}
    assert rows["max_grad_norm"] == {"name": "max_grad_norm", "value": "1.0"}


def test_of_many_steps_neighbours_are_averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "MAX_STEPS", 4)
    curves = figures.curves(read_run(run_folder(tmp_path, killed(), steps=7)))
    assert curves["steps"] == [2, 4, 6, 7] and curves["averaged"] == 2
    reward = next(chart for chart in curves["charts"] if chart["title"] == "Reward")
    assert reward["series"][0]["values"] == [1.5, 3.5, 5.5, 0.0]


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "config.yaml: no such file; give the log folder of a run"),
        (lambda folder: (folder / "config.yaml").write_text("nonsense: 1\n"), "nonsense"),
        (lambda folder: (folder / "config.yaml").write_text("{"), "config.yaml"),
        (
            lambda folder: (
                (folder / "config.yaml").write_text(CONFIG),
                (folder / "metrics.jsonl").write_text('{"step": 1}\nx\n{"step": 2}\n'),
            ),
            "metrics.jsonl:2",
        ),
        (
            lambda folder: (
                (folder / "config.yaml").write_text(CONFIG),
                (folder / "events").mkdir(),
                (folder / "events" / "hub.jsonl").write_text('{"kind": "leased"}\n'),
            ),
            "hub.jsonl:1: not an event of this program",
        ),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, message: str
) -> None:
    make(tmp_path)
    assert cli.main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("zbgrpo: ") and error.count("\n") == 1 and message in error
    assert not (tmp_path / "report.html").exists()


def test_where_the_page_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path, killed())
    assert cli.main(["report", str(folder), "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").exists() and not (folder / "report.html").exists()
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}: open it in a browser\n"
    assert cli.main(["report", str(folder), "-o", str(tmp_path / "no" / "page.html")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ the page


def test_no_text_can_leave_its_block() -> None:
    text = json_for_script({HOSTILE: [HOSTILE, "\u2028 & ' \""]})
    assert "<" not in text and json.loads(text) == {HOSTILE: [HOSTILE, "\u2028 & ' \""]}


def test_the_page_asks_for_nothing(tmp_path: Path) -> None:
    text = write_report(run_folder(tmp_path, killed(), HOSTILE.replace("/", ":")))[0].read_text()
    assert text.count("<script") == 2 and text.count("</script>") == 2
    outside = re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.DOTALL)
    addresses = set(re.findall(r"https?://[^\"' )]+", outside))
    assert addresses == {"http://www.w3.org/2000/svg"}, "the name of a format, not an address"
    assert not re.search(r"<[^>]*\b(?:src|href)=|@import|url\(", outside)
    assert "default-src &#x27;none&#x27;" in text


# ------------------------------------------------------------------------------------------ timeline


def test_many_intervals_are_put_together_without_losing_time() -> None:
    rng = np.random.default_rng(0)
    intervals, at = [], 1000.0
    for _ in range(5000):
        length = float(rng.exponential(0.01))
        share = float(rng.random())
        account, rest = (int(n) for n in rng.choice(len(ACCOUNTS), 2, replace=False))
        intervals.append(timeline.Interval(at, length, {account: length * share, rest: length * (1 - share)}))
        at += length
    made, step = timeline.grouped(intervals, 200)
    assert len(made) <= 200 and step > 0
    for account in range(len(ACCOUNTS)):
        total = sum(interval.accounts.get(account, 0.0) for interval in intervals)
        assert sum(interval.accounts.get(account, 0.0) for interval in made) == pytest.approx(total)
    assert timeline.grouped(intervals, 5000) == (intervals, 0.0)


def test_a_timeline_per_start(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, killed())
    add_trace(folder, 4)
    trace_of(folder, "hub", -1, ("C", 1.0, "leased", 1), run="run-2")
    trace_of(folder, "consumer 0", 0, ("P", 2.0, 0.5, {"busy": 0.5}), run="run-2")
    first, second = timeline.timelines(read_run(folder).trace)
    assert [row["name"] for row in first["rows"]] == ["consumer 0", "producer 0", "producer 1"]
    consumer = first["rows"][0]
    assert consumer["accounts"][:10] == [0, 1_000_000, 1, 6, 1000, 0, 700_000, 1, 0, 1000]
    assert [track["name"] for track in consumer["tracks"]] == ["work", "broadcast"]
    names = first["names"]
    assert consumer["tracks"][0]["spans"][:8] == [
        1_000_000, 600_000, names.index("forward/backward"), 1, 0, 100_000, names.index("optimizer step"), 1,
    ]  # fmt: skip
    assert first["rows"][1]["tracks"][0]["spans"] == [3_000_000, 1_000_000, names.index("evaluation"), 3]
    assert first["commits"] == [[1_900_000, 1], [2_900_000, 2], [3_900_000, 3]]
    assert second["length"] == 1_500_000 and second["rows"][0]["accounts"] == [1_000_000, 500_000, 1, 0, 1000]


# ------------------------------------------------------------------------------------------ in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium (apt-get install chromium)")
    with Browser(program, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


READY = "document.documentElement.dataset.ready === 'yes' && document.querySelector('canvas')?.dataset.drawn > 0"


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_the_page_works_without_a_network(browser: Browser, tmp_path: Path, scheme: str, width: int) -> None:
    folder = run_folder(tmp_path, finished(), "hostile-" + HOSTILE.replace("/", ":"), steps=40)
    add_trace(folder, 3000)
    page, _ = write_report(folder)
    browser.events.clear()
    browser.resize(width, 900, mobile=width < 700)
    browser.scheme(scheme)
    browser.open(page, READY)
    assert browser.complaints() == []
    assert all(address.startswith("file://") for address in browser.requests())
    assert browser.value("document.documentElement.scrollWidth") <= width, "nothing sticks out to the side"

    # What a model has written is text.
    assert browser.value("document.title").startswith("hostile-")
    assert browser.value("document.querySelectorAll('img, script:not([type])').length") == 1
    shown = browser.value("[...document.querySelectorAll('#rollouts pre')].map(pre => pre.textContent)")
    assert shown == [f"prompt {HOSTILE}", HOSTILE, "right-to-left \\u202e and \\u001b[31m red"]

    # The canvas has more than one colour where ranks are.
    colours = """(() => {
      const canvas = document.querySelector('canvas'), found = new Set();
      const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
      for (let n = 0; n < data.length; n += 4) if (data[n + 3] === 255) found.add(data.slice(n, n + 3).join());
      return [...found];
    })()"""
    assert len(browser.value(colours)) >= 5

    # Hovering says what is there; charts have it in their legends.
    browser.value("document.querySelector('canvas').scrollIntoView({block: 'center', behavior: 'instant'})")
    box = browser.value("document.querySelector('canvas').getBoundingClientRect().toJSON()")
    x, y = box["x"] + 0.6 * box["width"], box["y"] + 95
    browser.mouse("mouseMoved", x, y)
    browser.wait_for("!document.getElementById('tooltip').hidden")
    assert "rank 0, consumer 0" in browser.value("document.getElementById('tooltip').textContent")
    before = browser.value("(({from, to}) => to - from)(document.querySelector('canvas').dataset)")
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-300, modifiers=2)
    browser.wait_for(f"(({{from, to}}) => to - from)(document.querySelector('canvas').dataset) < {before} / 2")
    browser.mouse("mousePressed", x - 60, y, button="left", buttons=1, clickCount=1)
    browser.mouse("mouseMoved", x + 20, y, button="left", buttons=1)
    zoomed = browser.value("(({from, to}) => to - from)(document.querySelector('canvas').dataset)")
    browser.mouse("mouseReleased", x + 20, y, button="left", clickCount=1)
    browser.wait_for(f"(({{from, to}}) => to - from)(document.querySelector('canvas').dataset) < {zoomed} / 2")
    browser.value("[...document.querySelectorAll('button')].find(b => b.textContent === 'all').click()")
    browser.wait_for("(({from, to}) => to - from)(document.querySelector('canvas').dataset) > 2.9e9")

    browser.value("document.querySelector('.chart svg').scrollIntoView({block: 'center', behavior: 'instant'})")
    box = browser.value("document.querySelector('.chart svg').getBoundingClientRect().toJSON()")
    browser.mouse("mouseMoved", box["x"] + box["width"] / 2, box["y"] + 80)
    browser.wait_for(
        "/^step \\d+$/.test(document.querySelector('#curves .controls').textContent.replace('smooth', ''))"
    )
    legend = browser.value("document.querySelector('.chart .legend').textContent")
    assert re.fullmatch(r"mean \d", legend), legend
    assert browser.complaints() == []


def test_a_run_without_anything_has_a_page_too(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    page, _ = write_report(tmp_path)
    browser.events.clear()
    browser.open(page, "document.documentElement.dataset.ready === 'yes'")
    assert browser.complaints() == []
    assert browser.value("document.querySelectorAll('section').length") == 6


# ------------------------------------------------------------------------------------------ a real run


@pytest.mark.slow
def test_a_real_run_that_is_killed_and_resumed(tmp_path: Path) -> None:
    workplace = make_workplace(tmp_path)
    flags = ["-t", "1", "-i", "1", "-p", "traced", "-si", "2", "-ed", '{"heldout": "heldout.jsonl"}']
    run = Run(workplace, 2, [*flags, "--max-steps", "500"])
    run.wait_until((workplace / "model_out" / "traced" / "state-2" / "run.json").exists)
    run.wait_for_step("traced", 3)
    run.kill_all()
    folder = workplace / "logs" / "traced"
    unfinished = data_of(write_report(folder)[0])
    assert unfinished["state"]["kind"] == "open" and len(unfinished["timelines"]) == 1
    assert {0} <= {row["rank"] for row in unfinished["times"]["rows"]} <= {0, 1}, "as far as they had been written"

    last = max(line["step"] for line in metrics(workplace, "traced")) + 3
    done = Run(workplace, 2, [*flags, "--max-steps", str(last)]).wait()
    assert done.status == 0, done.output[-3000:]
    page, trace = write_report(folder)
    data = data_of(page)
    assert data["state"]["kind"] == "finished" and trace is not None
    assert len(data["timelines"]) == 2 and len(data["groups"]["starts"]) == 2
    newest = data["timelines"][-1]
    assert [(row["name"], row["clock"]) for row in newest["rows"]] == [("consumer 0", "same"), ("producer 0", "same")]
    expected = {"forward/backward", "optimizer step", "snapshot", "broadcast", "apply", "save state", "evaluation"}
    assert expected <= set(newest["names"])
    traced = {(life.header.rank, life.header.run): life for life in read_run(folder).trace}
    booked = {row["rank"]: row["shares"] for row in data["times"]["rows"]}
    run_id = max(traced.values(), key=lambda life: life.header.wall).header.run
    for rank in (0, 1):
        seconds = timeline.account_seconds(traced[rank, run_id])
        total = sum(seconds.values())
        for account in ("busy", "starved", "eval"):
            assert seconds[account] / total == pytest.approx(booked[rank][account], abs=0.05), account
    merged = json.loads(trace.read_text())["traceEvents"]
    assert {"lease", "reward", "evaluation row", "buffered", "planned"} <= {
        event["cat"] for event in merged if event["ph"] == "b"
    }
    opened = sum(event["ph"] == "b" for event in merged)
    assert opened == sum(event["ph"] == "e" for event in merged) > 0


@pytest.mark.slow
def test_a_real_run_without_a_trace_that_is_stopped(tmp_path: Path) -> None:
    workplace = make_workplace(tmp_path)
    run = Run(workplace, 2, "-t 1 -i 1 -p untraced --max-steps 500 observe.trace=false")
    run.wait_for_step("untraced", 2)
    run.process.send_signal(signal.SIGTERM)
    run.wait()
    folder = workplace / "logs" / "untraced"
    assert not (folder / "trace").exists()
    page, trace = write_report(folder)
    data = data_of(page)
    assert trace is None and data["timelines"] == []
    assert data["state"] == {"kind": "stopped", "text": "stopped by SIGTERM"}
    assert len(data["times"]["rows"]) == 2


def test_a_folder_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no such file; give the log folder of a run, such as logs/GRPO"):
        write_report(tmp_path / "nowhere")
