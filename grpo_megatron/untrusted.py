"""Careful reading of files that users write: a bounded size, regular files only, and messages of bounded length.

What a message or a terminal may show of a value; secrets; limits on paths and integers; bytes of a regular file; JSON and
YAML, without duplicate keys. All raise `ReadError`. Its message is a predicate ("is a FIFO, not a regular file"); the caller
puts the file's name first.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import yaml

try:
    from yaml.cyaml import CParser  # type: ignore[attr-defined]
except ImportError:  # this PyYAML was built without libyaml
    CParser = None  # type: ignore[assignment, misc]


class ReadError(ValueError):
    """The content of a file cannot be used."""


# -- Bounds: how much of a value a message shows, and which texts, paths and integers are accepted ---------------------

MAX_SHOWN = 200  # characters of one value in a message
MAX_NUMBER = 100  # characters of one number in a file: Python converts longer ones in quadratic time
MAX_COMPONENT, MAX_PATH = 255, 4096  # bytes of a file's name and of a path, on every usual file system of Linux
MAX_INTEGER = 2**63 - 1


def cut(text: str, limit: int = MAX_SHOWN) -> str:
    """Returns the text, or its beginning with the number of characters that are left out."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text) - limit:,} more characters)"


def shown(value: object, limit: int = MAX_SHOWN) -> str:
    """Returns `repr(value)`, cut, without secrets. A long text is cut before `repr` copies it."""
    if isinstance(value, str):
        more = f"... ({len(value) - limit:,} more characters)" if len(value) > limit else ""
        return repr(redacted(value[:limit])) + more
    try:
        return cut(redacted(repr(redacted(value))), limit)
    except (ValueError, RecursionError):  # an integer with too many digits, or a table nested too deeply
        return f"a value of type {type(value).__name__} that cannot be shown"


# -- Secrets: never written to a record, a message or a terminal --------------------------------------------------------

REDACTED = "<redacted>"  # is written instead
_WORD = r"(?:secret|passw(?:or)?d|passphrase|credentials?)"  # also a word of plain texts
_NAME = (
    r"(?:(?:api|access|secret|private|wandb|swanlab)[_.-]?key(?:[_-]id)?"
    r"|(?:auth|access|api|hf|hub|bearer|wandb|refresh|session)[_.-]?token)"
)
SECRET_KEY = re.compile(rf"(?:{_WORD}|{_NAME})$|(?:^|\.)(?:token|use_wandb|authorization)$", re.IGNORECASE)
_RANDOM = r"(?=[A-Za-z]{0,40}\d)[A-Za-z0-9]{16,}"  # no word: `sk-large-model-2024` stays
_HASH = r"(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{40}"
_PEM = (  # a block that is cut ends with its last line of base64
    r"-----BEGIN (?:[A-Z\d]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:(?:(?!-----)[\s\S]){0,20000}-----END [A-Z\d ]{1,40}-----|(?:(?:\\[rn]|\s)*[A-Za-z\d+/=]{16,})*)"
)
SECRET_FORM = re.compile(
    rf"\b(?:hf_[A-Za-z0-9]{{20,}}|sk-(?=(?:\w{{1,40}}-){{0,5}}{_RANDOM})[\w-]{{20,}}"
    rf"|wandb_v\d_(?=\w{{0,40}}{_RANDOM})\w{{20,}}|gh[pousr]_[A-Za-z0-9]{{20,}}|github_pat_\w{{20,}}"
    rf"|glpat-(?=[\w-]{{0,40}}[A-Z\d])[\w-]{{16,}}|xox[abeprs]-\d[\w-]{{9,}}|AKIA[0-9A-Z]{{16}}|AIza[\w-]{{30,}}"
    rf"|(?:npm_|gsk_|r8_|nvapi-|pypi-)(?=[\w-]{{0,40}}{_RANDOM})[\w-]{{20,}}"
    r"|eyJ[\w-]{10,400}\.eyJ[\w-]{10,}\.[\w-]{10,})"
    rf"|(?P<kept>(?i:\b(?:git|commit|revision|checkout|sha-?1|hash)\W{{1,3}}){_HASH}\b)"  # no key of wandb
    rf"|\b(?<![/.:@-]){_HASH}(?![\w/])"  # of wandb; a commit in a path stays
    rf"|{_PEM}"
    r"|(?P<head>(?i:\bauthorization: (?:bearer|basic) |\bbearer (?=[\w.~+/=-]{0,40}\d)))[\w.~+/=-]{8,}"
    r"|(?P<scheme>://)[^\s/@:'\"]*:[^\s/@'\"]+(?=@)"  # user:password@host
    r"|(?P<query>(?i:[?&]token=|[?&]sig=|-signature=))[^\s&'\"]+"
)
SECRET_ASSIGNED = re.compile(
    rf"({_NAME}|{_WORD})(['\"]?(?:=|: ?| = | )['\"]?)"
    r"(?!<redacted>|\$|os\.|(?:none|null|true|false|str|int)(?!\w))([^\s'\",;}]+)",
    re.IGNORECASE,
)
IN_TEXT = re.compile(rf"{_WORD}(?:: | = )['\"]?", re.IGNORECASE)  # `The secret: it is ...`
MIXED = re.compile(r"\d.*[A-Za-z]|[A-Za-z].*\d")
OPTION = re.compile(r"(?:^|[^\w-])--[\w.-]*$")  # ends before the name, as does a line's beginning:
ALONE = re.compile(r"(?:^|\n)[ -]*$")
REVISION_KEY = re.compile(r"(?:revision|commit|sha1?|hash)$", re.IGNORECASE)


def redacted(value: Any, key: str = "") -> Any:
    """Returns a value without secrets, which are told by the key (`api_key`) or by their form (`hf_...`, `user:password@`)."""
    if type(value) is dict:
        return {name: redacted(item, f"{key}.{name}") for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(redacted(item, key) for item in value)
    if not isinstance(value, str):
        return value
    if value and SECRET_KEY.search(key):
        return REDACTED
    if REVISION_KEY.search(key) and re.fullmatch(_HASH, value):
        return value
    formless = SECRET_FORM.sub(_without_secret, value)
    return SECRET_ASSIGNED.sub(_without_value, formless)


def _without_secret(match: re.Match[str]) -> str:
    return match["kept"] or f"{match['head'] or match['scheme'] or match['query'] or ''}{REDACTED}"


def _without_value(match: re.Match[str]) -> str:
    """Tells an assignment from a sentence about secrets. Where a sentence may be one, a value has a letter and a digit."""
    name, separator, value = match.groups()
    before, after = (
        match.string[max(0, match.start() - 44) : match.start()],
        match.string[match.end() : match.end() + 1],
    )
    is_assigned = OPTION.search(before) if separator.isspace() else not IN_TEXT.match(name + separator)
    is_line = separator == ": " and ALONE.search(before) and after in ("", "\n")
    is_value = is_assigned or is_line or (not separator.isspace() and MIXED.search(value[:99]))
    return f"{name}{separator}{REDACTED}" if is_value else match[0]


# Control characters but the line end and the tab; marks that turn the direction of writing; halves of surrogate pairs.
STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Show characters that steer a terminal, or reorder its text, as <U+001B>, and no secrets."""
    return STEERING.sub(lambda match: f"<U+{ord(match[0]):04X}>", redacted(text))


def visible_line(text: str) -> str:
    """Make the text visible, in one line."""
    return " ".join(visible(text).split())


def reason_of(error: Exception) -> str:
    """Says why the system refuses. An error of a library (pyarrow) has a message only; its first line counts."""
    return getattr(error, "strerror", None) or cut(str(error).partition("\n")[0]) or type(error).__name__


def text_problem(text: str) -> str | None:
    """Says why a text of a config cannot be used: a path or an argument of a program cannot hold NUL."""
    return "it contains the character NUL" if "\0" in text else surrogate_problem(text)


def surrogate_problem(text: str) -> str | None:
    """Says why a text cannot be encoded. JSON and YAML can spell half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"it contains {text[error.start]!a}, half of a surrogate pair, which is no character"
    return None


def path_problem(path: str | os.PathLike[str]) -> str | None:
    """Says why no file system can hold this path."""
    text = os.fspath(path)
    if problem := text_problem(text):
        return problem
    longest = max(len(part.encode()) for part in text.split("/"))
    if longest > MAX_COMPONENT:
        return f"a name in it has {longest:,} bytes; file systems take at most {MAX_COMPONENT}"
    if len(text.encode()) > MAX_PATH:
        return f"it has {len(text.encode()):,} bytes; a path may have at most {MAX_PATH:,}"
    return None


def existing_part(folder: Path) -> tuple[Path, str | None]:
    """Returns the part of a path that exists, and why it is no folder; None: it is one."""
    part = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    kind = "a file, not a folder" if part.exists() else "a link that leads nowhere"
    return part, None if part.is_dir() else f"{str(part)!r} is {kind}; choose another"


def integer_problem(value: int) -> str | None:
    """Says why an integer cannot be passed on: torch and vLLM take signed integers of 64 bits."""
    if -MAX_INTEGER <= value <= MAX_INTEGER:
        return None
    return f"it needs {value.bit_length():,} bits; an integer may have 63 and a sign"


# -- Bytes of regular files. A FIFO would block for ever, and a device may have no end -----------------------

SPECIAL_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
SPECIAL_KINDS |= dict.fromkeys((stat.S_IFCHR, stat.S_IFBLK), "a device")


def read_regular(path: Path | str, max_bytes: int) -> bytes:
    """Reads a regular file. Raises OSError, ReadError."""
    check_regular(path)
    with open(path, "rb") as file:
        content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise ReadError(f"has {os.fstat(file.fileno()).st_size:,} bytes; at most {max_bytes:,} are read")
    return content


def read_text(path: Path | str, max_bytes: int) -> str:
    """Reads a regular file as UTF-8 text. Raises OSError, ReadError."""
    try:
        return read_regular(path, max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ReadError(f"is not UTF-8 text ({error.reason} at byte {error.start})") from None


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
            continue
        try:
            check_regular(entry)
        except ReadError as error:
            return f"{shown(str(entry.relative_to(folder)))}, which {error}"
        except OSError:  # a link that leads nowhere
            continue
    return None


_OTHER_CONTENT = {
    b"version https://git-lfs": "a pointer of Git LFS in place of the file; fetch it (git lfs pull)",
    b"\x1f\x8b\x08": "compressed by gzip; decompress it (gunzip)",
    **dict.fromkeys((b"\xff\xfe{\x00", b"\xfe\xff\x00{"), "text in UTF-16; write UTF-8 (iconv -f UTF-16 -t UTF-8)"),
}


def stand_in(file: Path) -> str | None:
    """Names what a file holds in place of its content. None: neither a pointer of Git LFS nor a gzip file."""
    with contextlib.suppress(OSError), file.open("rb") as stream:
        start = stream.read(max(map(len, _OTHER_CONTENT)))
        return next((text for mark, text in _OTHER_CONTENT.items() if start.startswith(mark)), None)
    return None


# -- JSON --------------------------------------------------------------------------------------------------------------
# Python's parser takes duplicate keys silently, raises RecursionError, and refuses long integers without a place.

MAX_JSON = 1 << 29  # bytes; the largest tokenizers have some 40 MB


def read_json(path: Path | str, max_bytes: int = MAX_JSON) -> Any:
    """Reads JSON from a file. Raises OSError, ReadError."""
    return parse_json(read_regular(path, max_bytes))


def parse_json(content: bytes | str) -> Any:
    """Parses JSON. NaN and Infinity are accepted, as Python writes them. Raises ReadError."""
    try:
        if isinstance(content, bytes):
            content = content.decode(json.detect_encoding(content), "surrogatepass")
        return _DECODER.decode(content)
    except UnicodeDecodeError:
        raise ReadError("is not UTF-8") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in error.doc else ""  # one line of a file: the caller names its number
        raise ReadError(f"is not JSON ({error.msg}: {line}column {error.colno})") from None
    except RecursionError:
        raise ReadError("is not JSON that can be read (nested too deeply)") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ReadError(f"has the key {shown(twice)} twice in one object; keep one")
    return table


def _integer(digits: str) -> int:
    if len(digits) > MAX_NUMBER:
        raise ReadError(f"has an integer of {len(digits):,} digits; at most {MAX_NUMBER} are read")
    return int(digits)


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer)  # json.loads would make one for each text


# -- YAML as plain data: tables, lists, texts, numbers, true, false and null -------------------------------------------
# PyYAML's SafeLoader keeps the last of two equal keys silently, follows aliases that expand to gigabytes, and converts long
# numbers in quadratic time. Here each of these is an error with its line. A date stays a text: no key of a config is a date.

MAX_YAML = 1 << 18  # bytes; PyYAML reads some 100 KB in a second
MAX_LEVELS = 50  # tables and lists within each other
MAX_NODES = 20_000  # values, with each alias counted in full
EXPONENT = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+\Z")
ONLY_LIBYAML = re.compile("[\t\ufeff!?]|[|>][-+0-9]*#")  # libyaml reads it otherwise in some places
TOO_DEEP = f"more than {MAX_LEVELS} tables and lists within each other"
TAG = "tag:yaml.org,2002:"
PLAIN: dict[type, tuple[str, ...]] = {  # kind of a node -> its tags
    yaml.ScalarNode: ("null", "bool", "int", "float", "str"),
    yaml.SequenceNode: ("seq",),
    yaml.MappingNode: ("map",),
}


def parse_yaml(text: str) -> Any:
    """Parses YAML. Raises ReadError."""
    if len(text) > MAX_YAML:
        raise ReadError(f"it has {len(text):,} characters; at most {MAX_YAML:,} are read")
    if problem := text_problem(text):  # PyYAML's own message has no remedy
        raise ReadError(problem)
    with contextlib.suppress(yaml.YAMLError, RecursionError):  # the other parser reports it
        if CParser is not None and not ONLY_LIBYAML.search(text):
            return _fast_loader()(text).value()
    try:
        return _PlainLoader(text).value()
    except yaml.YAMLError as error:
        text = str(error).replace('in "<unicode string>", ', "at ")
        raise ReadError(
            cut(re.sub(r"\n(?=\S)", "\n  ", text), 600)
        ) from None  # what is not indented is a problem of its own
    except RecursionError:
        raise ReadError(TOO_DEEP) from None


class _PlainLoader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012 - the base class declares it without ClassVar
        first: [(tag, pattern) for tag, pattern in resolvers if tag != f"{TAG}timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    num_values = 0

    def value(self) -> Any:
        """Reads the value of the text. Raises YAMLError, RecursionError."""
        node = self.get_single_node()
        return None if node is None else self.plain(node)

    def plain(self, node: Any, level: int = 1) -> Any:
        """Reads the value of a node. An alias is a copy: an override of one section must not change the other."""
        self.num_values += 1
        if level > MAX_LEVELS:
            raise _mistake(TOO_DEEP, node)
        if self.num_values > MAX_NODES:
            raise _mistake(f"more than {MAX_NODES:,} values, with aliases counted in full", node)
        if node.tag.removeprefix(TAG) not in PLAIN[type(node)]:
            raise _mistake(f"could not determine a constructor for the tag {shown(node.tag)}", node)
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(item, level + 1) for item in node.value]
        return self._table(node, level) if isinstance(node, yaml.MappingNode) else self._scalar(node)

    def _table(self, node: Any, level: int) -> dict[Any, Any]:
        table: dict[Any, Any] = {}
        merged: dict[Any, Any] = {}
        lines: dict[str, int] = {}
        for key, item in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _mistake("a key is a table or a list; write a text", key)
            if key.value in lines:
                raise _mistake(f"the key {shown(key.value)} is there twice, first in line {lines[key.value]}", key)
            lines[key.value] = key.start_mark.line + 1
            value = self.plain(item, level + 1)
            if key.tag != f"{TAG}merge":
                table[self.plain(key, level + 1)] = value
                continue
            for given in reversed(value if isinstance(value, list) else [value]):  # the first one of a list wins
                if not isinstance(given, dict):
                    raise _mistake("<< takes a table, or a list of tables", item)
                merged |= given
        return merged | table

    def _scalar(self, node: Any) -> Any:
        if node.tag in (f"{TAG}int", f"{TAG}float") and len(node.value) > MAX_NUMBER:
            raise _mistake(f"a number of {len(node.value):,} characters; at most {MAX_NUMBER} are read", node)
        if problem := text_problem(node.value):
            raise _mistake(f"a text cannot be used: {problem}", node)
        try:
            return self.construct_object(node)
        except (ValueError, OverflowError, LookupError) as error:  # of an explicit tag: `!!int x`
            raise _mistake(f"{shown(node.value)} is no {node.tag.removeprefix(TAG)}", node) from error


_PlainLoader.add_implicit_resolver(f"{TAG}float", EXPONENT, list("-+0123456789"))  # as YAML 1.2; PyYAML wants 1.0e-3


def yaml_text(content: dict[str, Any], **style: Any) -> str:
    """Returns plain data as YAML, in its own order. `style`: options of `yaml.dump`."""
    dumper = yaml.SafeDumper if CParser is None else yaml.CSafeDumper
    return str(yaml.dump(content, Dumper=dumper, sort_keys=False, **style))


@functools.cache
def _fast_loader() -> type[_PlainLoader]:
    """Returns a loader of libyaml's events, which takes a quarter of the time, with PyYAML's nodes.

    Nodes of libyaml's binding that are nested too deeply would end the process.
    """

    class FastLoader(CParser, _PlainLoader):  # type: ignore[misc]
        get_single_node = yaml.SafeLoader.get_single_node

        def __init__(self, text: str) -> None:
            CParser.__init__(self, text)
            for base in (yaml.composer.Composer, yaml.constructor.SafeConstructor, yaml.resolver.Resolver):
                base.__init__(self)

    return FastLoader


def _mistake(problem: str, node: Any) -> yaml.YAMLError:
    mark = node.start_mark
    return yaml.YAMLError(f"line {mark.line + 1}, column {mark.column + 1}: {problem}")
