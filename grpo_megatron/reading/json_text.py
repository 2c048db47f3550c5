"""JSON. Python's parser takes duplicate keys silently, raises RecursionError, and refuses long integers without a place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpo_megatron.reading import ReadError
from grpo_megatron.reading.bounds import MAX_NUMBER, shown
from grpo_megatron.reading.regular import read_regular

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
