"""What the schema says about itself: every key with its type and default, and how a value of a key is checked.

A *leaf* is one setting, named by its path: `project`, `inference.num_generations`. Only leaves have values; sections
only group them.
"""

from __future__ import annotations

import difflib
import functools
import math
import types
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import msgspec
from msgspec import inspect

from zbgrpo.config.schema import RunConfig
from zbgrpo.errors import ConfigError


class Leaf(NamedTuple):
    """One setting of the schema."""

    path: str
    type: Any
    """Annotation as msgspec takes it, with bounds."""
    default: Any
    """Value of the schema; None where a preset, another field or the world decides."""


@functools.cache
def leaves() -> types.MappingProxyType[str, Leaf]:
    """Every leaf by its path, in the order of the schema."""
    found: dict[str, Leaf] = {}

    def collect(section: type[msgspec.Struct], prefix: str) -> None:
        for info in msgspec.structs.fields(section):
            path = prefix + info.name
            if isinstance(info.type, type) and issubclass(info.type, msgspec.Struct):
                collect(info.type, path + ".")
                continue
            default = info.default if info.default is not msgspec.NODEFAULT else cast(Any, info.default_factory)()
            found[path] = Leaf(path, info.type, default)

    collect(RunConfig, "")
    return types.MappingProxyType(found)


@functools.cache
def sections() -> tuple[str, ...]:
    """Names of the sections, in the order of the schema."""
    return tuple(dict.fromkeys(path.split(".")[0] for path in leaves() if "." in path))


def get(config: RunConfig, path: str) -> Any:
    """Value of a leaf of `config`."""
    return functools.reduce(getattr, path.split("."), cast(Any, config))


def build(values: dict[str, Any]) -> RunConfig:
    """A RunConfig with `values` (checked ones, by path) and the schema's defaults for everything else."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        section, _, key = path.rpartition(".")
        if section:
            tree.setdefault(section, {})[key] = value
        else:
            tree[key] = value
    section_types = {info.name: info.type for info in msgspec.structs.fields(RunConfig)}
    return RunConfig(**{k: section_types[k](**v) if k in sections() else v for k, v in tree.items()})


def convert(path: str, value: Any, source: str) -> Any:
    """`value` as the type of the leaf `path`.

    Raises ConfigError, whose message begins with `source` (the key or flag that set the value), when the type or a
    bound does not fit. Infinite numbers are refused everywhere: no setting has a use for one.
    """
    leaf = leaves()[path]
    try:
        result = msgspec.convert(value, leaf.type)
    except msgspec.ValidationError:
        expected = describe(leaf.type)
        if source.startswith("-"):  # a flag is left out rather than set to null
            expected = expected.removesuffix(" or null")
        raise ConfigError(f"{source}: expected {expected}, got {_show(value)}") from None
    numbers = result if isinstance(result, tuple) else (result,)
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        raise ConfigError(f"{source}: expected a finite number, got {_show(value)}")
    return result


def is_text(path: str) -> bool:
    """Whether the leaf holds free text (or nothing)."""
    return _is(path, inspect.StrType)


def is_mapping(path: str) -> bool:
    """Whether the leaf holds a mapping of the user's own keys."""
    return _is(path, inspect.DictType)


def _is(path: str, kind: type) -> bool:
    info = inspect.type_info(leaves()[path].type)
    options = info.types if isinstance(info, inspect.UnionType) else (info,)
    return any(isinstance(option, kind) for option in options)


def describe(annotation: Any) -> str:
    """A type in words: `int >= 1`, `one of mask, wait`, `str or null`."""
    return _describe(inspect.type_info(annotation))


def _describe(info: inspect.Type) -> str:
    if isinstance(info, inspect.UnionType):
        return " or ".join(_describe(option) for option in info.types)
    if isinstance(info, (inspect.IntType, inspect.FloatType)):
        name = "int" if isinstance(info, inspect.IntType) else "number"
        bounds = {">": info.gt, ">=": info.ge, "<": info.lt, "<=": info.le}
        limits = [f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None]
        return " ".join([name, " and ".join(limits)]).strip()
    if isinstance(info, inspect.LiteralType):
        return "one of " + ", ".join(str(value) for value in info.values)
    if isinstance(info, inspect.ListType):
        return f"list of {_describe(info.item_type)}"
    if isinstance(info, inspect.TupleType):
        return f"[{', '.join(_describe(item) for item in info.item_types)}]"
    if isinstance(info, inspect.DictType):
        return f"mapping of {_describe(info.key_type)} to {_describe(info.value_type)}"
    return {"StrType": "str", "BoolType": "true or false", "NoneType": "null"}[type(info).__name__]


def _show(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that `name` was most likely meant to be; None when none is close."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return close[0] if close else None


def unknown_key_error(key: str, source: str) -> ConfigError:
    """The error for a key that the schema lacks; `source` ("" or "FILE: ") goes in front."""
    if key in sections():
        first = next(path for path in leaves() if path.startswith(key + "."))
        return ConfigError(f"{source}{key}: is a section; set one of its keys, as in {first}=VALUE")
    section = key.partition(".")[0]
    if close := _nearest_key(key):
        hint = f"the nearest is {close}"
    elif "." in key and section in sections():
        hint = f"keys of {section}: {', '.join(_names_in(section))}"
    else:
        hint = f"sections: {', '.join(sections())}"
    return ConfigError(f"{source}unknown key {key}; {hint}")


def _names_in(section: str) -> list[str]:
    return [path.partition(".")[2] for path in leaves() if path.startswith(section + ".")]


def _nearest_key(key: str) -> str | None:
    """The leaf (or section) that `key` is a slip of: in its last name, its section, or the choice of a section."""
    by_name = {path.rpartition(".")[2]: path for path in reversed(list(leaves()))}  # the first of each name
    section, _, name = key.rpartition(".")
    if not section:
        close = name if name in by_name else nearest(name, (*sections(), *by_name))
        return by_name.get(close or "", close)
    section = section if section in sections() else nearest(section, sections()) or ""
    if close := nearest(name, _names_in(section)):
        return f"{section}.{close}"
    return by_name.get(nearest(name, by_name) or "")
