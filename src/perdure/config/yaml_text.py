"""YAML as recipes use it: the core schema of YAML 1.2, unique keys, text keys.

PyYAML follows YAML 1.1, where ``1e-4`` is text, ``off`` is a boolean, ``1:30`` is the number 90 and
``010`` is 8. Settings want none of that, so scalars are resolved by the table below, both when
reading and when writing.
"""

# pyright: reportUnknownMemberType=false
# (the stubs of PyYAML leave node and dumper arguments untyped)

from __future__ import annotations

import re
from typing import Any, cast

import yaml

from perdure.core.errors import ConfigError

_SCALARS: tuple[tuple[str, str, str], ...] = (
    ("null", r"~|null|", "~n"),
    ("bool", r"true|false", "tf"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|nan)", "-+."),
)
"""Tag, what a plain scalar of that kind looks like, its possible first characters."""

_INT_LIMIT = 2**63
_MOST_VALUES = 100_000
"""Values of a document with its aliases written out; beyond it is a trap, not a recipe."""


class _Loader(yaml.SafeLoader):
    """Reads with the scalars above; aliases may not multiply beyond all bounds."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _expanded(node, {}) > _MOST_VALUES:
            raise yaml.constructor.ConstructorError(
                None, None, f"more than {_MOST_VALUES} values", node.start_mark
            )
        return node


class _Dumper(yaml.SafeDumper):
    """Writes with the scalars above, without anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        del data
        return True


def _construct_mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(
                None, None, "a key must be plain text", key_node.start_mark
            )
        key = cast("str", key_node.value)
        if key in mapping:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} appears twice", key_node.start_mark
            )
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    value = int(loader.construct_scalar(node))
    if not -_INT_LIMIT <= value < _INT_LIMIT:
        raise yaml.constructor.ConstructorError(
            None, None, "a whole number must fit into 64 bits", node.start_mark
        )
    return value


def _expanded(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """Values a node stands for when every alias is written out. Ends with recursive ones too."""
    if node not in known:
        known[node] = 1
        parts: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            parts = node.value
        elif isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        known[node] = 1 + sum(_expanded(part, known) for part in parts)
    return known[node]


_Loader.yaml_implicit_resolvers = {}
_Dumper.yaml_implicit_resolvers = {}
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
for _kind, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_kind}",
            re.compile(f"^(?:{_pattern})$"),
            ["", *_first] if _kind == "null" else list(_first),
        )


def parse(text: str, *, where: str) -> Any:
    """The value of a YAML document; None for an empty one.

    Raises:
        ConfigError: Not YAML, more than one document, or a key appears twice.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        raise ConfigError(
            f"not valid YAML: {error.problem or error.context}",
            where=place,
            rule="one YAML mapping with unique keys is expected",
            way_out="correct that line",
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"not valid YAML: {str(error).splitlines()[0]}",
            where=where,
            rule="one YAML mapping with unique keys is expected",
            way_out="correct the text",
        ) from error


def render(value: Any) -> str:
    """YAML text that :func:`parse` reads back as ``value``; keys keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=96)
