"""A setting that is parsed and never read is a promise that nobody keeps: every key of the schema is read by the code.

Found in the sources, without running them: an attribute `.field` counts as read where the value before the dot is known
to be the section that has the field. Types are followed through annotations, assignments, attributes of `self`,
properties and calls, which is all that the package does with its configuration.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pytest

from zbgrpo.config import fields, schema

PACKAGE = Path(__file__).resolve().parents[2] / "zbgrpo"
ROOT_TYPE = "RunConfig"
SECTIONS = {
    info.type.__name__: info.name
    for info in msgspec.structs.fields(schema.RunConfig)
    if isinstance(info.type, type) and issubclass(info.type, msgspec.Struct)
}
"""Class of a section to its name."""

NOT_A_USE = {
    *(f"config/{name}.py" for name in ("schema", "fields", "flags", "load", "validate", "dryrun", "memory")),
    *(f"observe/report/{name}.py" for name in ("contents", "figures", "folder")),
}
"""What parses, checks and shows settings; that is no use of them."""

READ_ELSEWHERE = {
    "algorithm.name": "picks the preset that config/load.py writes into the keys that were left out",
    "cluster.memory_gib": "--dry-run says what does not fit",
}
"""Keys that are used in one of those files all the same."""

Types = dict[str, str]
"""Names of a scope, or attributes of a class, to the class of their value."""


class Reads:
    """What a set of modules reads of the configuration.

    `leaves`: keys (`section.field`, `field`) read directly. `properties`: those of RunConfig that are used.
    """

    def __init__(self, trees: Iterable[ast.Module], shown_only: Iterable[ast.Module] = ()) -> None:
        """`shown_only`: modules whose classes and functions are known, but whose reads do not count."""
        counted = list(trees)
        every = [*counted, *shown_only, ast.parse(Path(schema.__file__).read_text())]
        self.attributes: dict[str, Types] = {}
        self.functions: Types = {}
        self.leaves: set[str] = set()
        self.properties: set[str] = set()
        for node in (node for tree in every for node in tree.body):
            if isinstance(node, ast.ClassDef):
                self._declare(node)
            elif isinstance(node, ast.FunctionDef) and (kind := self._named(node.returns)):
                self.functions[node.name] = kind
        for _ in range(3):  # attributes of `self` may be assigned from attributes of other classes
            for node in (node for tree in every for node in tree.body):
                if isinstance(node, ast.ClassDef):
                    self._visit_class(node, counting=False)
        for tree in counted:
            self._visit(tree.body, {}, counting=True)

    # --------------------------------------------------------------------------------------------- declarations

    def _declare(self, node: ast.ClassDef) -> None:
        known = self.attributes.setdefault(node.name, {})
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                known[item.target.id] = self._named(item.annotation)
            elif isinstance(item, ast.FunctionDef):
                known[item.name] = self._named(item.returns)

    def _named(self, annotation: ast.expr | None) -> str:
        """The class in an annotation; `X | None` and `Optional[X]` are X. Empty when there is none to follow."""
        match annotation:
            case ast.Name(id=name):
                return name
            case ast.Constant(value=str(text)):
                return self._named(ast.parse(text, mode="eval").body)
            case ast.BinOp(left=left, right=right):
                return self._named(left) or self._named(right)
            case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
                return self._named(inner)
            case ast.Attribute(attr=name):
                return name
        return ""

    # ------------------------------------------------------------------------------------------------- scopes

    def _visit_class(self, node: ast.ClassDef, counting: bool) -> None:
        for item in node.body:
            if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._visit_function(item, {"self": node.name, "cls": node.name}, counting)

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, outer: Types, counting: bool) -> None:
        scope = dict(outer)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            if argument.annotation is not None:
                scope[argument.arg] = self._named(argument.annotation)
        self._visit(node.body, scope, counting)

    def _visit(self, body: list[ast.stmt], scope: Types, counting: bool) -> None:
        for statement in body:
            if isinstance(statement, ast.ClassDef):
                self._visit_class(statement, counting)
            elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._visit_function(statement, scope, counting)
            else:
                self._visit_statement(statement, scope, counting)

    def _visit_statement(self, statement: ast.stmt, scope: Types, counting: bool) -> None:
        inner: list[list[ast.stmt]] = []
        for node in _own_nodes(statement, inner):
            if counting and isinstance(node, (ast.Attribute, ast.Call)):
                self._count(node, scope)
            if isinstance(node, ast.NamedExpr):
                self._assign(node.target, node.value, scope)
        match statement:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._assign(target, value, scope)
            case ast.AnnAssign(target=target, annotation=annotation):
                self._bind(target, self._named(annotation), scope)
        for body in inner:
            self._visit(body, scope, counting)

    def _assign(self, target: ast.expr, value: ast.expr, scope: Types) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for each, its_value in zip(target.elts, value.elts, strict=False):
                self._assign(each, its_value, scope)
        else:
            self._bind(target, self._type(value, scope), scope)

    def _bind(self, target: ast.expr, kind: str, scope: Types) -> None:
        if isinstance(target, ast.Name):
            scope[target.id] = kind
        elif isinstance(target, ast.Attribute) and kind and (owner := self._type(target.value, scope)):
            self.attributes.setdefault(owner, {})[target.attr] = kind

    # -------------------------------------------------------------------------------------------- expressions

    def _type(self, node: ast.expr, scope: Types) -> str:
        match node:
            case ast.Name(id=name):
                return scope.get(name, "")
            case ast.Attribute(value=value, attr=attr):
                return self.attributes.get(self._type(value, scope), {}).get(attr, "")
            case ast.Call(func=ast.Name(id=name)):
                return name if name in self.attributes else self.functions.get(name, "")
            case ast.Call(func=ast.Attribute(attr="replace"), args=[first, *_]):
                return self._type(first, scope)
            case ast.Call(func=ast.Attribute(attr=name) as called):
                own = self._type(called, scope)
                return own or self.functions.get(name, "")
            case ast.NamedExpr(value=value):
                return self._type(value, scope)
        return ""

    def _count(self, node: ast.Attribute | ast.Call, scope: Types) -> None:
        match node:
            case ast.Attribute(value=value, attr=attr, ctx=ast.Load()):
                pass
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(attr)), *_]):
                pass
            case _:
                return
        kind = self._type(value, scope)
        if kind in SECTIONS:
            self.leaves.add(f"{SECTIONS[kind]}.{attr}")
        elif kind == ROOT_TYPE:
            self.leaves.add(attr)
            self.properties.add(attr)


def _own_nodes(node: ast.AST, bodies: list[list[ast.stmt]]) -> Iterator[ast.AST]:
    """The nodes below `node` except those of statements inside it, whose lists are added to `bodies`."""
    yield node
    for _, value in ast.iter_fields(node):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            bodies.append(value)
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _own_nodes(child, bodies)


def read_leaves(used: Iterable[ast.Module], shown_only: Iterable[ast.Module] = ()) -> set[str]:
    """Keys that `used` reads, those that a used property of RunConfig reads among them."""
    reads = Reads(used, shown_only)
    root = next(
        node
        for node in ast.parse(Path(schema.__file__).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == ROOT_TYPE
    )
    bodies = {item.name: item for item in root.body if isinstance(item, ast.FunctionDef)}
    found, waiting = set(reads.leaves), reads.properties & bodies.keys()
    done: set[str] = set()
    while waiting:
        name = waiting.pop()
        done.add(name)
        inner = Reads([])
        inner._visit_function(bodies[name], {"self": ROOT_TYPE}, counting=True)
        found |= inner.leaves
        waiting |= (inner.properties & bodies.keys()) - done
    return found & fields.leaves().keys()


def package() -> tuple[list[ast.Module], list[ast.Module]]:
    """Modules whose reads count, and those whose reads do not."""
    used, shown = [], []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        (shown if path.relative_to(PACKAGE).as_posix() in NOT_A_USE else used).append(tree)
    return used, shown


def unread(used: Iterable[ast.Module], shown_only: Iterable[ast.Module]) -> str:
    """Keys that nobody reads, without those that are exempt."""
    return ", ".join(sorted(fields.leaves().keys() - read_leaves(used, shown_only) - READ_ELSEWHERE.keys()))


def test_every_setting_is_read() -> None:
    keys = unread(*package())
    assert not keys, f"parsed and never read: {keys}"


def test_exemptions_are_needed() -> None:
    """An entry that has become untrue would hide the next mistake."""
    assert not READ_ELSEWHERE.keys() & read_leaves(*package())
    assert READ_ELSEWHERE.keys() <= fields.leaves().keys()


def test_the_checker_finds_most_settings_by_itself() -> None:
    used, shown = package()
    assert len(used) > 60 and len(shown) == len(NOT_A_USE)
    found = read_leaves(used, shown)
    assert {"project", "seed", "trainer.learning_rate", "ledger.max_staleness", "observe.wandb"} <= found
    assert found > read_leaves([]) == set()


# ------------------------------------------------------------------------------------------- the checker itself

PROGRAM = """
from zbgrpo.config.schema import DataConfig, RunConfig, TrainerConfig

class Trainer:
    def __init__(self, config: TrainerConfig, model):
        self.config, self.model = config, model

    def rate(self):
        return self.config.learning_rate

class Rank:
    def __init__(self, config: RunConfig | None):
        self.config = config

class Producer:
    def __init__(self, rank: Rank):
        self.rank = rank
        self.inference = rank.config.inference

    def run(self):
        data = self.rank.config.data
        for _ in range(data.num_episodes):
            if (limit := self.rank.config.ledger).max_steps:
                return lambda: self.inference.temperature

def build(rank: Rank) -> Trainer:
    reward, (weights) = rank.config.reward, rank.config.weights
    def inner():
        return getattr(reward, "num_workers") + weights.bucket_bytes
    return Trainer(config=rank.config.trainer, model=rank.config.model.path)

def others(document, config: RunConfig):
    document.trainer.precision
    config.checkpoint.save_dir = document.data.path
    build(config).config.schedule
    return config.project
"""


def test_the_checker_follows_what_the_package_does() -> None:
    assert read_leaves([ast.parse(PROGRAM)]) == {
        "trainer.learning_rate",
        "trainer.schedule",
        "data.num_episodes",
        "ledger.max_steps",
        "inference.temperature",
        "reward.num_workers",
        "weights.bucket_bytes",
        "model.path",
        "project",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(config: RunConfig): return config.buffer_limit",
         {"ledger.buffer_limit", "trainer.train_minibatch_size", "cluster.num_trainers", "trainer.tensor_parallel_size",
          "trainer.pipeline_parallel_size"}),
        ("def f(config: RunConfig): return config.num_slots",
         {"inference.inference_microbatch_size", "inference.num_generations"}),
        ("def f(config): return config.trainer.precision", set()),  # who knows what that is
        ("def f(config: RunConfig): config.trainer.precision = 1", set()),
        ("def f(config: RunConfig): config = other; return config.trainer.precision", set()),
        ("def f(c: Optional[DataConfig]): return c.path", {"data.path"}),
        ('def f(c: "DataConfig"): return c.path', {"data.path"}),
        ("def f(c: schema.DataConfig): return c.path", {"data.path"}),
        ("def f(c: DataConfig): return [c.path for _ in c.names if c.skip_bad_rows]",
         {"data.path", "data.skip_bad_rows"}),
        ("def f(c: RunConfig): return structs.replace(c, seed=1).data.path", {"data.path"}),
        ("def load() -> RunConfig: ...\ndef f(): return load().seed", {"seed"}),
        ("class A:\n    @property\n    def c(self) -> RunConfig: ...\ndef f(a: A): return a.c.seed", {"seed"}),
    ],
)  # fmt: skip
def test_what_counts_as_read(text: str, expected: set[str]) -> None:
    assert read_leaves([ast.parse(text)]) == expected


def test_an_unread_setting_is_noticed() -> None:
    """The package without its reads of one setting."""
    used, shown = package()
    key = "trainer.gradient_checkpointing"
    without = [ast.parse(ast.unparse(tree).replace(".gradient_checkpointing", ".something_else")) for tree in used]
    assert key not in unread(used, shown) and key in unread(without, shown)


def test_reading_in_a_check_or_the_dry_run_alone_is_no_use() -> None:
    text = "def f(config: RunConfig): return config.observe.rollout_interval"
    assert read_leaves([], [ast.parse(text)]) == set()
    assert {"config/validate.py", "config/dryrun.py"} <= NOT_A_USE
    assert all((PACKAGE / name).is_file() for name in NOT_A_USE)
