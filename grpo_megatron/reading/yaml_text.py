"""YAML as plain data: tables, lists, texts, numbers, true, false and null.

PyYAML's SafeLoader keeps the last of two equal keys silently, follows aliases that expand to gigabytes, and converts long
numbers in quadratic time. Here each of these is an error with its line. A date stays a text: no key of a config is a date.
"""

from __future__ import annotations

from typing import Any, ClassVar

import yaml

from grpo_megatron.reading import ReadError
from grpo_megatron.reading.bounds import MAX_NUMBER, cut, shown, text_problem

MAX_YAML = 1 << 18  # bytes; PyYAML reads some 100 KB in a second
MAX_LEVELS = 50  # tables and lists within each other
MAX_NODES = 20_000  # values, with each alias counted in full
PLAIN = ("null", "bool", "int", "float", "str", "seq", "map")
TAG = "tag:yaml.org,2002:"


def parse_yaml(text: str) -> Any:
    """The value of a YAML text. Raises ReadError."""
    if len(text) > MAX_YAML:
        raise ReadError(f"it has {len(text):,} characters; at most {MAX_YAML:,} are read")
    if problem := text_problem(text):  # PyYAML's own message has no remedy
        raise ReadError(problem)
    try:
        return _unshared(_PlainLoader(text).get_single_data())
    except yaml.YAMLError as error:
        raise ReadError(cut(str(error), 600)) from None


def _unshared(value: Any) -> Any:
    """A copy in which each alias is a table or list of its own: an override of one must not change the other."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


class _PlainLoader(yaml.SafeLoader):
    yaml_constructors: ClassVar[dict[Any, Any]] = {
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(TAG) in PLAIN  # None: the constructor that refuses a tag
    }
    yaml_implicit_resolvers = {  # noqa: RUF012 - as PyYAML declares it
        first: [(tag, pattern) for tag, pattern in resolvers if tag != f"{TAG}timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._sizes: dict[int, int] = {}  # by id of the node: its values; an alias is as large as what it stands for

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        self._depth += 1
        if self._depth > MAX_LEVELS:
            raise _mistake(f"more than {MAX_LEVELS} tables and lists within each other", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if not isinstance(event, yaml.AliasEvent):
            self._sizes[id(node)] = 1 + sum(self._sizes[id(part)] for part in _parts(node))
        elif id(node) not in self._sizes:  # still being read
            raise _mistake("an alias stands for a table or a list that contains it", event.start_mark)
        if max(len(self._sizes), self._sizes[id(node)]) > MAX_NODES:
            raise _mistake(f"more than {MAX_NODES:,} values, with aliases counted in full", event.start_mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _mistake("a key is a table or a list; write a text", key.start_mark)
            if key.value in lines:
                first = lines[key.value]
                raise _mistake(f"the key {shown(key.value)} is there twice, first in line {first}", key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError, LookupError) as error:  # of an explicit tag: `!!int x`
            raise _mistake(f"{shown(node.value)} is no {node.tag.removeprefix(TAG)}", node.start_mark) from error

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        if node.tag in (f"{TAG}int", f"{TAG}float") and len(value) > MAX_NUMBER:
            raise _mistake(f"a number of {len(value):,} characters; at most {MAX_NUMBER} are read", node.start_mark)
        if problem := text_problem(value):
            raise _mistake(f"a text cannot be used: {problem}", node.start_mark)
        return value


def _parts(node: Any) -> list[Any]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _mistake(problem: str, mark: Any) -> yaml.YAMLError:
    return yaml.YAMLError(f"line {mark.line + 1}, column {mark.column + 1}: {problem}")
