"""What may import what, and where the few dangerous things may be: read from the sources of the package."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "zbgrpo"

LAYERS = (
    ("errors", "types"),  # single modules that import nothing of ours, so that others of the same layer may use them
    ("config", "failpoints"),
    ("topology", "data", "rewards", "ledger"),
    ("algorithms", "observe", "planner"),
    ("groups",),
    ("transport", "weights", "checkpoint"),
    ("inference", "trainer", "evaluation"),
    ("engine",),
    ("bench", "launch", "cli"),
    ("__main__",),
)
"""From the bottom. A package imports from lower layers and from itself, never from its neighbours."""

LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MAX_LOOP_LINES = 60


class Import(NamedTuple):
    """One imported module, wherever in the file the statement is."""

    line: int
    module: str
    in_function: bool


class Source:
    """A file of the package."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.relative_to(PACKAGE).as_posix()
        self.text = path.read_text()
        self.tree = ast.parse(self.text)
        parts = path.relative_to(ROOT).with_suffix("").parts
        self.module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.component = self.module.split(".")[1] if "." in self.module else ""
        self.imports = list(self._imports())

    def nodes(self, *kinds: type) -> Iterator[ast.AST]:
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))

    def names(self) -> Iterator[tuple[int, str]]:
        """Every name in the code: variables, attributes, imported names."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name):
                yield node.lineno, node.id
            elif isinstance(node, ast.Attribute):
                yield node.lineno, node.attr
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                whole = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                yield from ((node.lineno, part) for name in whole for part in name.split("."))

    def dotted(self) -> Iterator[tuple[int, str]]:
        """Every `a.b.c` in the code."""
        return ((node.lineno, ast.unparse(node)) for node in self.nodes(ast.Attribute))  # type: ignore[attr-defined]

    def _imports(self) -> Iterator[Import]:
        functions = list(self.nodes(ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        inside = {id(inner) for function in functions for inner in ast.walk(function)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(node.lineno, alias.name, id(node) in inside)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.name}:{node.lineno}: relative import"
                for alias in node.names:
                    # `from zbgrpo.a import b` imports the module b where there is one
                    whole = f"{node.module}.{alias.name}"
                    module = whole if whole in module_names() else str(node.module)
                    yield Import(node.lineno, module, id(node) in inside)


@lru_cache(maxsize=1)
def module_names() -> frozenset[str]:
    names = set()
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names.add(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return frozenset(names)


@lru_cache(maxsize=1)
def sources() -> tuple[Source, ...]:
    return tuple(Source(path) for path in sorted(PACKAGE.rglob("*.py")))


def places(found: Callable[[Source], Iterator[int]], allowed: tuple[str, ...] = ()) -> list[str]:
    """`file:line` of everything found outside the allowed files (a name that ends in / allows a folder)."""
    return [
        f"{source.name}:{line}"
        for source in sources()
        if not any(source.name == name or (name.endswith("/") and source.name.startswith(name)) for name in allowed)
        for line in found(source)
    ]


def importing(*packages: str, at_import_only: bool = False) -> Callable[[Source], Iterator[int]]:
    """Lines that import one of these packages or something in it."""

    def found(source: Source) -> Iterator[int]:
        for line, module, in_function in source.imports:
            meant = any(module == package or module.startswith(package + ".") for package in packages)
            if meant and not (at_import_only and in_function):
                yield line

    return found


def naming(*names: str) -> Callable[[Source], Iterator[int]]:
    """Lines in whose code one of these names occurs, not counting texts and comments."""
    return lambda source: (line for line, name in source.names() if name in names)


# ---------------------------------------------------------------------------------------------------------- layers


def test_every_package_has_a_layer() -> None:
    components = {source.component for source in sources()} - {""}
    assert components <= LAYER_OF.keys()
    assert {"config", "ledger", "transport", "engine", "launch"} <= components, "the sources are found at all"


def test_imports_go_down_only() -> None:
    """Also those inside functions and under TYPE_CHECKING: an import that is only late is still a dependency."""
    wrong = []
    for source in sources():
        for line, module, _ in source.imports:
            other = module.split(".")[1] if module.startswith("zbgrpo.") else ""
            if other and other != source.component and LAYER_OF[source.component] <= LAYER_OF[other]:
                wrong.append(f"{source.name}:{line}: {source.component} imports {module}")
    assert wrong == []


def test_there_are_no_import_cycles() -> None:
    graph = {s.module: {i.module for i in s.imports if i.module in module_names()} - {s.module} for s in sources()}
    # A module of a package does not depend on its `__init__`, which holds a docstring.
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_packages_export_nothing_from_their_init() -> None:
    """So that importing one module never loads its neighbours."""
    assert (
        places(lambda s: (i.line for i in s.imports if s.path.name == "__init__.py" and i.module != "__future__")) == []
    )


# ----------------------------------------------------------------------------------------------------------- sizes


def test_files_and_functions_are_of_readable_size() -> None:
    long_files = [f"{s.name}: {n} lines" for s in sources() if (n := len(s.text.splitlines())) > MAX_FILE_LINES]
    long_functions = [
        f"{source.name}:{node.lineno}: {node.name}: {length} lines"
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert long_files + long_functions == []


@pytest.mark.parametrize("role", ["Producer", "Consumer", "Hub"])
def test_the_loops_of_the_roles_fit_on_a_screen_and_say_what_they_wait_for(role: str) -> None:
    source = next(s for s in sources() if s.name == f"engine/{role.lower()}.py")
    classes = [node for node in source.tree.body if isinstance(node, ast.ClassDef) and node.name == role]
    loops = [node for node in classes[0].body if isinstance(node, ast.FunctionDef) and node.name == "run"]
    assert len(loops) == 1
    assert (loops[0].end_lineno or 0) - loops[0].lineno + 1 <= MAX_LOOP_LINES
    text = (ast.get_docstring(source.tree) or "") + (ast.get_docstring(loops[0]) or "")
    for word in ("consumes", "waits for", "unblocked by"):
        assert word in text, f"{source.name} does not say: {word}"


def test_every_module_has_a_docstring() -> None:
    assert [source.name for source in sources() if not ast.get_docstring(source.tree)] == []


# ------------------------------------------------------------------------------------------ one place for each thing


@pytest.mark.parametrize(
    ("packages", "allowed"),
    [
        (("zmq",), ("transport/sockets.py",)),
        (("mmap", "multiprocessing.shared_memory"), ("transport/ring_file.py",)),
        (("transformers",), ("checkpoint/model_folder.py", "inference/slots.py", "trainer/attention.py", "bench/")),
        (("importlib", "runpy"), ("rewards/custom.py",)),
    ],
)
def test_these_are_imported_in_their_files_only(packages: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    assert places(importing(*packages), allowed) == []


@pytest.mark.parametrize("package", ["vllm", "colossalai", "wandb", "tensorboard", "torch.utils.tensorboard"])
def test_optional_packages_are_imported_in_one_file_inside_functions(package: str) -> None:
    assert places(importing(package, at_import_only=True)) == []
    assert len({place.split(":")[0] for place in places(importing(package))}) <= 1


@pytest.mark.parametrize(
    ("names", "allowed"),
    [
        (("environ", "getenv", "putenv", "unsetenv", "environb"), ("topology/env.py",)),
        (
            ("init_process_group", "new_group", "new_subgroups", "split_group", "init_device_mesh"),
            ("groups/process_groups.py",),
        ),
    ],
)
def test_these_are_named_in_their_files_only(names: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    assert places(naming(*names), allowed) == []


def test_timeouts_use_the_monotonic_clock() -> None:
    """The time of day is for stamps in logs alone: it jumps."""
    stamps = ("observe/events.py", "observe/tensorboard_sink.py", "observe/trace.py")
    assert places(lambda s: (line for line, name in s.dotted() if name in ("time.time", "time.time_ns")), stamps) == []
    assert places(lambda s: (n.lineno for n in s.nodes(ast.ImportFrom) if n.module == "time")) == []  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------ nothing is unpickled

UNPICKLING = (
    "pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "jsonpickle", "msgpack_numpy",
    "multiprocessing", "allow_pickle",
    "recv_pyobj", "send_pyobj",
    "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list", "unsafe_load", "UnsafeLoader", "FullLoader",
)  # fmt: skip
"""Modules and functions that unpickle or run what they read; multiprocessing pickles whatever it passes on."""


def test_nothing_is_unpickled() -> None:
    # The index of a state, with a list of what may be in it.
    assert places(naming(*UNPICKLING), ("checkpoint/tensors.py",)) == []

    def keywords(source: Source) -> Iterator[int]:
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Call):
                continue
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            if "allow_pickle" in given and ast.unparse(given["allow_pickle"]) != "False":
                yield node.lineno
            if ast.unparse(node.func) == "torch.load" and ast.unparse(given.get("weights_only", node)) != "True":
                yield node.lineno

    assert places(keywords) == []


def test_no_text_is_run_as_code() -> None:
    def calls(source: Source) -> Iterator[int]:
        called = ((node.lineno, ast.unparse(node.func)) for node in ast.walk(source.tree) if isinstance(node, ast.Call))
        return (line for line, name in called if name in ("eval", "exec", "__import__"))

    assert places(calls) == []


def test_everything_is_caught_only_where_a_process_ends() -> None:
    def broad(source: Source) -> Iterator[int]:
        for node in ast.walk(source.tree):
            kinds: list[ast.expr | None] = []
            if isinstance(node, ast.ExceptHandler):
                kinds = [*node.type.elts] if isinstance(node.type, ast.Tuple) else [node.type]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
                kinds = [*node.args]
            if any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds):
                yield node.lineno  # type: ignore[attr-defined]

    assert places(broad, ("engine/lifecycle.py", "engine/hub_process.py", "rewards/worker.py")) == []


# --------------------------------------------------------------------------------------------- what an import loads

HEAVY = ("torch", "transformers", "zmq", "math_verify", "sympy", "rich", "tensorboard", "pyarrow", "datasets", "wandb")


def loaded_by(modules: list[str], packages: tuple[str, ...]) -> list[str]:
    """Which of the packages a fresh interpreter has loaded after importing the modules."""
    program = f"import sys, {', '.join(modules)}; print(*(name for name in {packages!r} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_launcher_starts_without_heavy_packages() -> None:
    assert loaded_by(["zbgrpo.launch", "zbgrpo.cli"], HEAVY) == []


def test_the_hub_and_the_relay_run_without_torch() -> None:
    without_zmq = tuple(name for name in HEAVY if name != "zmq")
    assert loaded_by(["zbgrpo.engine.hub", "zbgrpo.engine.relay"], without_zmq) == []


def test_the_lower_layers_need_no_heavy_package() -> None:
    lower = {"errors", "types", "config", "topology", "data", "rewards", "ledger", "observe", "planner"}
    modules = [source.module for source in sources() if source.component in lower]
    assert len(modules) > 20
    assert loaded_by(modules, HEAVY) == []


def test_the_transport_needs_no_torch() -> None:
    modules = [source.module for source in sources() if source.component == "transport"]
    assert loaded_by(modules, tuple(name for name in HEAVY if name != "zmq")) == []


# ------------------------------------------------------------------------------------------------ the test itself


def source_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    """A package with one file."""
    path = tmp_path / "zbgrpo" / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "zbgrpo")
    made = Source(path)
    monkeypatch.setattr(sys.modules[__name__], "sources", lambda: (made,))


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("ledger/x.py", "import zbgrpo.transport.wire", test_imports_go_down_only),
        ("ledger/x.py", "def f():\n    from zbgrpo.transport import wire", test_imports_go_down_only),
        ("ledger/x.py", "from zbgrpo.rewards.pool import Pool", test_imports_go_down_only),
        ("errors.py", "from zbgrpo import types", test_imports_go_down_only),
        ("data/x.py", "import torch\n" * 401, test_files_and_functions_are_of_readable_size),
        ("data/x.py", "def f():\n" + "    pass\n" * 80, test_files_and_functions_are_of_readable_size),
        ("data/x.py", "import os", test_every_module_has_a_docstring),
        ("data/__init__.py", "from zbgrpo.data import rows", test_packages_export_nothing_from_their_init),
        ("data/x.py", "from pickle import loads", test_nothing_is_unpickled),
        ("data/x.py", "torch.load(path)", test_nothing_is_unpickled),
        ("data/x.py", "torch.load(path, weights_only=False)", test_nothing_is_unpickled),
        ("data/x.py", "np.load(path, allow_pickle=True)", test_nothing_is_unpickled),
        ("data/x.py", "socket.recv_pyobj()", test_nothing_is_unpickled),
        ("data/x.py", "eval(text)", test_no_text_is_run_as_code),
        ("data/x.py", "try:\n    f()\nexcept:\n    pass", test_everything_is_caught_only_where_a_process_ends),
        ("data/x.py", "try:\n    f()\nexcept (OSError, Exception):\n    pass",
         test_everything_is_caught_only_where_a_process_ends),
        ("data/x.py", "with contextlib.suppress(Exception):\n    f()",
         test_everything_is_caught_only_where_a_process_ends),
        ("data/x.py", "deadline = time.time() + 1", test_timeouts_use_the_monotonic_clock),
        ("data/x.py", "from time import time", test_timeouts_use_the_monotonic_clock),
    ],
)  # fmt: skip
def test_the_rules_notice_what_they_forbid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, rule: Callable[[], None]
) -> None:
    source_of(tmp_path, monkeypatch, name, text)
    with pytest.raises(AssertionError):
        rule()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import zmq.auth", importing("zmq")),
        ("from multiprocessing import shared_memory", naming("multiprocessing")),
        ("import os\nos.environ['A']", naming("environ")),
        ("from os import getenv as g", naming("getenv")),
        ("if True:\n    import wandb", importing("wandb", at_import_only=True)),
    ],
)
def test_the_searches_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, found: Callable[[Source], Iterator[int]]
) -> None:
    source_of(tmp_path, monkeypatch, "data/x.py", text)
    assert places(found) != []
    assert places(found, ("data/x.py",)) == places(found, ("data/",)) == []
