"""Careful reading of files that users write: a bounded size, regular files only, and messages of bounded length.

What a message may show of a value; limits on paths and integers; bytes and lines of a regular file; JSON, lines of JSON and
YAML, without duplicate keys. All raise `ReadError`. Its message is a predicate ("is a FIFO, not a regular file"); the caller
puts the file's name first.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, ClassVar

import msgspec
import yaml


class ReadError(ValueError):
    """The content of a file cannot be used."""


# -- Bounds: how much of a value a message shows, and which texts, paths and integers are accepted ---------------------

MAX_SHOWN = 200  # characters of one value in a message
MAX_NUMBER = 100  # characters of one number in a file: Python converts longer ones in quadratic time
MAX_COMPONENT, MAX_PATH = 255, 4096  # bytes of a file's name and of a path, on every usual file system of Linux
MAX_INTEGER = 2**63 - 1


def cut(text: str, limit: int = MAX_SHOWN) -> str:
    """The text, or its beginning with the number of characters that are left out."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text) - limit:,} more characters)"


def shown(value: object, limit: int = MAX_SHOWN) -> str:
    """`repr(value)`, cut. A long text is cut before `repr` copies it."""
    if isinstance(value, str):
        return repr(value) if len(value) <= limit else f"{value[:limit]!r}... ({len(value) - limit:,} more characters)"
    try:
        return cut(repr(value), limit)
    except (ValueError, RecursionError):  # an integer with too many digits, or a table nested too deeply
        return f"a value of type {type(value).__name__} that cannot be shown"


def text_problem(text: str) -> str | None:
    """Why a text of a config cannot be used: a path or an argument of a program cannot hold NUL."""
    return "it contains the character NUL" if "\0" in text else surrogate_problem(text)


def surrogate_problem(text: str) -> str | None:
    """Why a text cannot be encoded. JSON and YAML can spell half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"it contains {text[error.start]!a}, half of a surrogate pair, which is no character"
    return None


def path_problem(path: str | os.PathLike[str]) -> str | None:
    """Why no file system can hold this path."""
    text = os.fspath(path)
    if problem := text_problem(text):
        return problem
    longest = max(len(part.encode()) for part in text.split("/"))
    if longest > MAX_COMPONENT:
        return f"a name in it has {longest:,} bytes; file systems take at most {MAX_COMPONENT}"
    if len(text.encode()) > MAX_PATH:
        return f"it has {len(text.encode()):,} bytes; a path may have at most {MAX_PATH:,}"
    return None


def integer_problem(value: int) -> str | None:
    """Why an integer cannot be passed on: torch and vLLM take signed integers of 64 bits."""
    if -MAX_INTEGER <= value <= MAX_INTEGER:
        return None
    return f"it needs {value.bit_length():,} bits; an integer may have 63 and a sign"


# -- Bytes and lines of regular files. A FIFO would block for ever, and a device may have no end -----------------------

SPECIAL_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def read_regular(path: Path | str, max_bytes: int) -> bytes:
    """The content of a regular file. Raises OSError, ReadError."""
    check_regular(path)
    with open(path, "rb") as file:
        content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise ReadError(f"has {os.fstat(file.fileno()).st_size:,} bytes; at most {max_bytes:,} are read")
    return content


def read_text(path: Path | str, max_bytes: int) -> str:
    """The same as text. Raises OSError, ReadError."""
    try:
        return read_regular(path, max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ReadError(f"is not UTF-8 text ({error.reason} at byte {error.start})") from None


def lines_of(file: IO[bytes], max_bytes: int) -> Iterator[bytes | ReadError]:
    """Every line of an open file without its newline, or why it cannot be read: it is longer than `max_bytes`."""
    while line := file.readline(max_bytes + 1):
        if len(line) <= max_bytes or line.endswith(b"\n"):
            yield line.removesuffix(b"\n")
            continue
        length = len(line)
        while not line.endswith(b"\n") and (line := file.readline(max_bytes)):
            length += len(line)
        yield ReadError(f"has {length:,} bytes; at most {max_bytes:,} are read")


def check_regular(path: Path | str) -> None:
    """Raises ReadError unless `path` is a regular file or a link to one; OSError if there is none."""
    if problem := path_problem(path):
        raise ReadError(f"cannot be opened: {problem}")
    kind = stat.S_IFMT(os.stat(path).st_mode)
    if kind in SPECIAL_KINDS:
        raise ReadError(f"is {SPECIAL_KINDS[kind]}, not a regular file")


def special_file_in(folder: Path) -> str | None:
    """Names a FIFO, socket or device in a folder that a library is going to read, or in its subfolders. None: no such file."""
    entries = sorted(folder.iterdir())
    for entry in entries:
        if entry.is_dir():
            with contextlib.suppress(PermissionError):
                entries += sorted(entry.iterdir()) if entry.parent == folder else []
        try:
            check_regular(entry)
        except ReadError as error:
            return f"{shown(str(entry.relative_to(folder)))}, which {error}"
        except OSError:  # a link that leads nowhere
            continue
    return None


# -- JSON --------------------------------------------------------------------------------------------------------------
# Python's parser takes duplicate keys silently, raises RecursionError, and refuses long integers without a place.

MAX_JSON = 1 << 29  # bytes; the largest tokenizers have some 40 MB


def read_json(path: Path | str, max_bytes: int = MAX_JSON) -> Any:
    """The value in a file. Raises OSError, ReadError."""
    return parse_json(read_regular(path, max_bytes))


def parse_json(content: bytes | str) -> Any:
    """The JSON value. NaN and Infinity are accepted, as Python writes them. Raises ReadError."""
    try:
        if isinstance(content, bytes):
            content = content.decode(json.detect_encoding(content), "surrogatepass")
        return _DECODER.decode(content)
    except UnicodeDecodeError:
        raise ReadError("is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ReadError(f"is not JSON ({error.msg} at line {error.lineno}, column {error.colno})") from None
    except RecursionError:
        raise ReadError("is not JSON that can be read (nested too deeply)") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ReadError(f"has the key {shown(twice)} twice in one object; keep one")
    return found


def _integer(digits: str) -> int:
    if len(digits) > MAX_NUMBER:
        raise ReadError(f"has an integer of {len(digits):,} digits; at most {MAX_NUMBER} are read")
    return int(digits)


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer)  # json.loads would make one for each text


# -- Lines of JSON, read by msgspec where it is as strict --------------------------------------------------------------
# msgspec parses a line five times as fast as `parse_json` (measured), but it is less strict in three things: it keeps the
# last of two equal keys, reads integers of any length, and has another limit of nesting. So its value is taken only if it has
# one key for each `:` of the line that can follow a key, no integer beyond 64 bits, and at most SURE_LEVELS levels.
# `parse_json` reads all other lines, and those that msgspec refuses.

SURE_LEVELS = 64  # of a value that msgspec's result is taken for; data have fewer than ten
BEHIND_KEYS = (b'":', b" :", b"\t:", b"\r:", b"\n:")  # how the `:` behind a key can be written
UNSURE = 1 << 62  # more keys than a line can have

_decode = msgspec.json.Decoder().decode


def parse_json_line(line: bytes) -> Any:
    """The JSON value of a line, as `parse_json` gives it. A ReadError is returned, not raised: later lines are read too."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = _decode(line)
        if _is_sure(line, value):
            return value
    try:
        return parse_json(line)
    except ReadError as error:
        return error


def _is_sure(line: bytes, value: Any) -> bool:
    """Whether each `:` that can follow a key is one of a key of `value`: then no key was there twice."""
    keys = _count_keys(value)
    return keys == line.count(b":") or keys == sum(map(line.count, BEHIND_KEYS))


def _count_keys(value: Any, level: int = 0) -> int:
    """The keys of all objects in a value; UNSURE with a long integer or many levels."""
    kind = type(value)
    if kind is dict:
        count, items = len(value), value.values()
    elif kind is list:
        count, items = 0, value
    else:
        return UNSURE if kind is int and not -MAX_INTEGER <= value <= MAX_INTEGER else 0
    if level == SURE_LEVELS:
        return UNSURE
    for item in items:
        if type(item) is not str:
            count += _count_keys(item, level + 1)
    return count


# -- YAML as plain data: tables, lists, texts, numbers, true, false and null -------------------------------------------
# PyYAML's SafeLoader keeps the last of two equal keys silently, follows aliases that expand to gigabytes, and converts long
# numbers in quadratic time. Here each of these is an error with its line. A date stays a text: no key of a config is a date.

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
    yaml_implicit_resolvers = {  # noqa: RUF012 - the base class declares it without ClassVar
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
