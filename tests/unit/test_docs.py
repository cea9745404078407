"""What the documentation says is so: flags, paths, commands, examples, and the scripts it points to."""

from __future__ import annotations

import ast
import functools
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_config_flags import SEED_FLAGS
from zbgrpo.config import fields
from zbgrpo.config.flags import FLAGS, WITHOUT_MEANING
from zbgrpo.config.load import load_config
from zbgrpo.observe.metrics import METRIC_KEYS
from zbgrpo.rewards.messages import RewardSpec, ScoreRequest
from zbgrpo.rewards.score import build_scorer

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [ROOT / "README.md", *(page for d in ("docs", "launch", "docker", "configs") for page in ROOT.glob(f"{d}/*.md"))]
)
CLI = ROOT / "zbgrpo/cli.py"
SCRIPTS = [*sorted(ROOT.glob("launch/*.sh")), *sorted(ROOT.glob("launch/slurm/*.s*")), ROOT / ".ci/run"]

FLAG = re.compile(r"(?<![\w./-])(--?[A-Za-z][\w-]*)(?![\w>-])")
FOREIGN_FLAGS = {
    "torchrun": {
        "--nproc-per-node", "--standalone", "--max-restarts", "--signals-to-handle", "--master-addr", "--master-port",
        "--rdzv-endpoint",
    },
    "python and pip": {"-m", "-c", "-e", "-d", "--index-url", "--no-index", "--find-links", "--no-build-isolation"},
    "docker": {"-f", "-t", "-v", "-w", "-it", "--build-arg", "--rm", "--ipc", "--shm-size", "--gpus", "--ulimit"},
    "Slurm and the shell": {
        "-n", "--nodes", "--ntasks-per-node", "--gpus-per-node", "--signal", "--time", "--array",
    },
    "launch/test.sh": {"--fast", "--all", "--vllm", "--colossalai", "--slurm", "--netns", "--faults"},
}  # fmt: skip
"""Flags of other programs that the pages show."""

FORBIDDEN = re.compile(
    r"/work\b|\bsessions?\b|(?<![\w-])shared/|\bpypi\.org\b|\bdownload\.pytorch\.org\b", re.IGNORECASE
)


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code_blocks(text: str) -> Iterator[str]:
    """Fenced and indented blocks of a page."""
    yield from re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"(?:^ {4}.*\n)+", outside, re.MULTILINE)


def code(text: str) -> str:
    """All that a page shows as code."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return "\n".join([*code_blocks(text), *re.findall(r"`([^`]+)`", outside)])


def known_flags() -> set[str]:
    own = {name for flag in FLAGS for name in flag.names} | set(WITHOUT_MEANING)
    verbs = CLI.read_text() + (CLI.parent / "planner" / "arguments.py").read_text()
    cli = set(re.findall(r'"(--[a-z][a-z-]*)"', verbs))
    return own | cli | set().union(*FOREIGN_FLAGS.values()) | {"--config", "--dry-run", "--help"}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_flag_exists(page: Path) -> None:
    unknown = set(FLAG.findall(code(page.read_text()))) - known_flags()
    assert not unknown, f"{page_id(page)} names flags that do not exist: {sorted(unknown)}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_verb_exists(page: Path) -> None:
    verbs = set(re.findall(r"(?<![\w./-])zbgrpo ([a-z][a-z-]+)\b", code(page.read_text())))
    unknown = {verb for verb in verbs if f'"{verb}"' not in CLI.read_text()}
    assert not unknown, f"{page_id(page)} names verbs that `zbgrpo` does not have: {sorted(unknown)}"


def run_commands() -> Iterator[tuple[str, list[str]]]:
    """(page, arguments) of every command on a page that starts a run."""
    for page in PAGES:
        for block in code_blocks(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                found = re.search(r"(?:-m zbgrpo\.launch|launch/local\.sh|launch/multinode\.sh|\.sbatch) (.*)", line)
                if found and "[flags]" not in line:
                    arguments = shlex.split(found[1], comments=True)
                    yield page_id(page), [a for a in arguments if a != "..."]


COMMANDS = list(run_commands())


@pytest.mark.parametrize(("page", "arguments"), COMMANDS, ids=[f"{p}-{n}" for n, (p, _) in enumerate(COMMANDS)])
def test_every_command_is_a_valid_configuration(
    page: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    load_config(arguments, None)


def test_there_are_commands_to_check() -> None:
    assert len(COMMANDS) >= 6


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page_id(page)} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}, target
    for path in re.findall(r"`((?:zbgrpo|tests|launch|docs|configs|docker)/[\w./-]+\.\w+)`", text):
        assert (ROOT / path).exists(), f"{page_id(page)} names {path}"


CITED = re.compile(r"`(tests/[\w/]+\.py)::([\w:]+)`")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_cited_tests_exist(page: Path) -> None:
    for path, name in CITED.findall(page.read_text()):
        assert name in names_in(ROOT / path), f"{page_id(page)} cites {path}::{name}"


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    """Tests of a file: `test_this`, `TestThat::test_this`. None where there is no such file."""
    found = []
    for node in ast.parse(path.read_text()).body if path.exists() else []:
        if isinstance(node, ast.FunctionDef):
            found.append(node.name)
        elif isinstance(node, ast.ClassDef):
            found += [f"{node.name}::{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)]
    return frozenset(name for name in found if re.search(r"(^|::)test_", name))


# ------------------------------------------------------------------------------------------ docs/seed_flags.md


def seed_rows(title: str) -> list[list[str]]:
    """Cells of the tables below a heading of docs/seed_flags.md, without their heads."""
    section = (ROOT / "docs/seed_flags.md").read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    heads = {number - 1 for number, line in enumerate(lines) if line.startswith("|---")}
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for number, line in enumerate(lines)
        if number not in heads and not line.startswith("|---")
    ]


def test_every_flag_of_the_seed_has_its_row_and_no_other_flag() -> None:
    rows = [row[0] for row in seed_rows("Flags")]
    known = [", ".join(f"`{name}`" for name in (short, long) if name) for short, long, *_ in SEED_FLAGS]
    assert sorted(rows) == sorted([*known, *(f"`{name}`" for name in WITHOUT_MEANING)])


@pytest.mark.parametrize("row", seed_rows("Flags"), ids=lambda row: row[0])
def test_the_row_of_a_flag_says_its_default_whether_it_is_there_and_what_covers_it(row: list[str]) -> None:
    names, default, here, covered = row
    assert CITED.search(covered) and here
    path = next((flag.path for flag in FLAGS if f"`{flag.long}`" in names), None)
    if path is None:
        return
    value = fields.get(load_config([]).config, path)
    if value not in (None, False, {}):
        assert default == f"`{value}`"


def test_keys_and_metrics_of_the_page_exist() -> None:
    keys = re.findall(
        r"`(\w+\.\w+)(?:=[^`]*)?`", " ".join(row[1] for row in seed_rows("What the seed fixes, and its key here"))
    )
    assert len(keys) > 12 and set(keys) <= fields.leaves().keys()
    metrics = [row for row in seed_rows("Outputs") if len(row) == 2]
    here = {name for row in metrics for name in re.findall(r"`(\w+/\w+)`", row[1])}
    assert len(here) > 7 and here <= METRIC_KEYS.keys()


@pytest.mark.parametrize("title", ["Checks", "Outputs", "Debts that were not taken over"])
def test_every_promise_of_the_page_is_covered(title: str) -> None:
    rows = [row for row in seed_rows(title) if len(row) == 3]
    assert len(rows) >= 4 and all(CITED.search(row[2]) for row in rows)


def tree_paths() -> set[str]:
    """Paths in the annotated tree of README.md; two spaces of indentation a level."""
    section = (ROOT / "README.md").read_text().partition("## The repository")[2]
    paths, folders = set(), [""]
    for line in next(code_blocks(section)).splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        for name in re.split(r"  +", line.strip()) if depth == 0 and "." in line.split()[0] else [line.split()[0]]:
            if " " not in name:
                path = "".join([*folders[1 : depth + 1], name])
                paths.add(path.rstrip("/"))
                folders[depth + 1 :] = [name] if name.endswith("/") else []
    return paths


def test_the_tree_exists() -> None:
    missing = sorted(path for path in tree_paths() if not (ROOT / path).exists())
    assert not missing, f"in the tree of README.md, but not on the disk: {missing}"


def test_the_tree_is_complete() -> None:
    listing = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    files = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()
    expected = set()
    for file in (Path(f) for f in files if (ROOT / f).exists()):
        if file.name in ("__init__.py", "py.typed", ".gitignore") or str(file) == "README.md":
            continue
        detailed = file.parts[0] in ("zbgrpo", "tests", "docs")
        expected.add("/".join(file.parts[: 2 if detailed else 1]))
    shown = tree_paths() | {path.split("/")[0] for path in tree_paths()}
    assert not expected - shown, f"on the disk, but not in the tree of README.md: {sorted(expected - shown)}"


def test_the_tree_is_read_as_it_is_written() -> None:
    assert {"zbgrpo/ledger", "zbgrpo/types.py", "docs/rewards.md", "launch", "setup.py", "LICENSE"} <= tree_paths()


@pytest.mark.parametrize("script", SCRIPTS, ids=page_id)
def test_scripts_parse(script: Path) -> None:
    checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
    "path",
    [*PAGES, *(s for s in SCRIPTS if s.parent.name != ".ci"), *sorted(ROOT.glob("docker/Dockerfile.*")),
     *sorted(ROOT.glob("configs/*.yaml")), ROOT / "setup.py", ROOT / "constraints.txt"],
    ids=page_id,
)  # fmt: skip
def test_nothing_of_one_machine(path: Path) -> None:
    found = FORBIDDEN.search(path.read_text())
    assert found is None, f"{page_id(path)}: {found and found[0]!r}"


def score(block: str, function: str, folder: Path, request: ScoreRequest) -> float:
    file = folder / f"{function}.py"
    file.write_text(block)
    outcome = build_scorer(RewardSpec(f"{file}:{function}")).score(request)
    assert outcome.error is None, outcome.error
    return outcome.reward


def python_blocks(page: str) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL))


def test_the_reward_in_the_readme_works(tmp_path: Path) -> None:
    block = python_blocks("README.md")
    rewards = [
        score(block, "short_and_right", tmp_path, ScoreRequest(response, gt_answer="42"))
        for response in ("42", "It is 42.", "43", "")
    ]
    assert rewards == [1.0, 0.5 + 0.5 / 3, 0.0, 0.0]


def test_the_reward_in_the_docs_works(tmp_path: Path) -> None:
    block = python_blocks("docs/rewards.md")
    row = {"keys": ["name", "age"]}
    rewards = [
        score(block, "valid_json", tmp_path, ScoreRequest(response, gt_answer="-", row=row))
        for response in ('{"name": "A", "age": 3}', '{"name": "A"}', "[1]", "A is 3")
    ]
    assert rewards == [1.0, 0.2, 0.2, 0.0]


def test_what_is_required_is_pinned() -> None:
    """Every package that setup.py names is in constraints.txt, except loggers and readers asked for by name."""
    required: set[str] = set()
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("REQUIRED", "EXTRAS['dev']"):
            texts = [item.value for item in node.value.elts if isinstance(item, ast.Constant)]  # type: ignore[attr-defined]
            required |= {re.match(r"[\w.-]+", text)[0].lower() for text in texts}  # type: ignore[index]
    pins = (ROOT / "constraints.txt").read_text()
    pinned = {name.lower() for name in re.findall(r"^([\w.-]+)==", pins, re.MULTILINE)}
    assert len(required) > 10
    assert not required - pinned
