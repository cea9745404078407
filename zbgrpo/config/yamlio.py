"""YAML as configuration files need it: strict about repeated keys, and numbers such as `1e-6` are numbers.

PyYAML follows YAML 1.1, in which `1e-6` is text and `2024-01-01` a date; neither is what somebody who writes a
learning rate or a project's name means.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from zbgrpo.errors import ConfigError

_FLOAT_WITHOUT_POINT = re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$")
_FLOAT_WITH_UNSIGNED_EXPONENT = re.compile(r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)[eE][0-9]+$")
_FLOAT_TAG = "tag:yaml.org,2002:float"
_MERGE_TAG = "tag:yaml.org,2002:merge"
_TIMESTAMP_TAG = "tag:yaml.org,2002:timestamp"


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE_TAG:
                continue  # `<<: *other` may repeat keys: that is its use
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # the base class reports it
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is set twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    def represent_text(self, text: str) -> yaml.ScalarNode:
        # YAML takes some characters for line breaks and folds them; only double quotes keep every text as it is.
        plain = all(character.isprintable() or character == "\n" for character in text)
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _Dumper.represent_text)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP_TAG]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _class in (_Loader, _Dumper):
    # The dumper needs the same rules, so that it quotes a text that looks like such a number.
    _class.add_implicit_resolver(_FLOAT_TAG, _FLOAT_WITHOUT_POINT, list("-+0123456789"))
    _class.add_implicit_resolver(_FLOAT_TAG, _FLOAT_WITH_UNSIGNED_EXPONENT, list("-+.0123456789"))


def parse(text: str, source: str) -> Any:
    """The value that `text` stands for; None for an empty text. Errors are ConfigErrors that begin with `source`."""
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}" if mark and "\n" in text else ""
        raise ConfigError(f"{source}{where}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a scalar of a known form that Python cannot hold
        raise ConfigError(f"{source}: not valid YAML: {error}") from None


def dump(tree: Any) -> str:
    """`tree` (mappings, lists, text, numbers) as YAML that `parse` gives back unchanged, keys in their order."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
