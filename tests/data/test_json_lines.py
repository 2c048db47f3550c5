"""Lines of JSON: the quick parser and the strict one agree on every line, and plain lines do not wait for the strict one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron import reading
from grpo_megatron.reading import ReadError, parse_json, parse_json_line

PLAIN = [{"question": f"Tom: {n} apples?", "answer": "#### 3"} for n in range(3)]
VERL = {"prompt": [{"role": "user", "content": "1: 2"}], "reward_model": {"ground_truth": "72"}, "n": [1.5, None, True]}

AWKWARD = [
    *(b'{"a": 1, "a": 2}', b'{"a": {"b": 1, "b": 1}}', b'[{"a": 1}, {"a" : 1, "a":1}]', b'{"a:": 1, "a:": 2}'),
    *(b'{"a": ":", "a": 2, "b": "x"}', b'{"\\u0061": 1, "a": 2}', b'{"a": "\\":", "a": "\\":"}'),
    *(b"9" * 19, b"9" * 100, b"9" * 101, b"-" + b"9" * 101, b'{"a": [' + b"1" * 101 + b"]}", b"1" * 19 + b".5"),
    *(b"NaN [Infinity,-Infinity] 1e999 -0 -0.0 1E5 01 1. .5 2.2250738585072011e-308".split()),
    *(b'"\\ud800" "\\ud83d\\ude00" "\xed\xa0\x80" "\xff" "a\\tb" "\x00" "\x7f" "\\x" "\\u00"'.split()),
    *(b'{"a":1,} [1,] tru {1:2} \xef\xbb\xbf1 1\x00 \xff\xfe1\x00'.split()),
    *(b"1 2", b"{} {}", b"", b" 1 \r", b'"a\tb"'),
    *(b"[" * 70 + b"]" * 70, b'{"a": ' * 70 + b"1" + b"}" * 70, b"[" * 100_000),
]


def outcomes(values: Any) -> list[str]:
    """Errors by their message; NaN is written as nan, so that it equals itself."""
    return [f"wrong: {value}" if isinstance(value, ReadError) else repr(value) for value in values]


def strict(line: bytes) -> Any:
    try:
        return parse_json(line)
    except ReadError as error:
        return error


def test_awkward_lines_are_read_as_by_the_strict_parser() -> None:
    for line in AWKWARD:
        assert outcomes([parse_json_line(line)]) == outcomes([strict(line)]), line[:80]
    assert str(parse_json_line(b'{"a": 1, "a": 2}')) == "has the key 'a' twice in one object; keep one"


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(alphabet='":,{}[]\\ a\u00e9\u2028\ud800', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='":\\ ab', max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    value=VALUES,
    separators=st.sampled_from([(",", ":"), (", ", ": "), (" ,", " :"), ("\t,\r", "\t:\r")]),
    is_ascii=st.booleans(),
    place=st.integers(0, 60),
    removed=st.integers(0, 3),
    inserted=st.sampled_from([b"", b"", b'"a": 1,', b'"', b":", b"\\", b"}", b"e", b"1" * 101, b"\xff"]),
)
def test_changed_lines_are_read_as_by_the_strict_parser(
    value: Any, separators: tuple[str, str], is_ascii: bool, place: int, removed: int, inserted: bytes
) -> None:
    line = json.dumps(value, separators=separators, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    if inserted:
        line = line[:place] + inserted + line[place + removed :]
    assert outcomes([parse_json_line(line)]) == outcomes([strict(line)])


def test_plain_lines_do_not_wait_for_the_strict_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    monkeypatch.setattr(reading, "parse_json", lambda line: seen.append(line) or parse_json(line))
    lines = [json.dumps(row).encode() for row in [*PLAIN, VERL]]
    assert list(map(parse_json_line, lines)) == [*PLAIN, VERL] and not seen
    twice, deep = b'{"a": "1", "a": "2"}', b"[" * 70 + b"]" * 70
    assert isinstance(parse_json_line(twice), ReadError) and parse_json_line(deep) == parse_json(deep)
    assert seen == [twice, deep]
