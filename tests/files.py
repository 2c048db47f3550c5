"""The files that tests read. tests/data has all that `make test` needs: slices, real configs, small tokenizers (NOTICE).

The variable GRPO_TEST_DATA names a folder with whole benchmark files and tokenizers, in the same places below it. Tests
marked `real_data` read them: they count whole files or compare with published numbers. Without the variable these tests
are deselected (tests/conftest.py).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.data.responses import load_offline_groups

DATA = Path(__file__).resolve().parent / "data"
CONFIGS = DATA / "hf_configs"
QWEN_SMALL = DATA / "tokenizers" / "qwen_small" / "tokenizer.json"  # the first 3,840 of Qwen2's 151,387 merges
WHOLE = Path(os.environ.get("GRPO_TEST_DATA") or DATA).resolve()
SLICE_AND_WHOLE = [pytest.param(DATA, id="slice"), pytest.param(WHOLE, id="whole", marks=pytest.mark.real_data)]


def published_config(name: str) -> dict[str, Any]:
    """A config.json of the hub."""
    return json.loads((CONFIGS / f"{name}.json").read_text())  # type: ignore[no-any-return]


def row_files(path: Path, *rows: Any) -> list[Path]:
    """A file of JSON lines, as the list of files that a run names."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [path]


def load_supervised(*arguments: Any) -> list[tuple[list[int], Any]]:
    """(prompt ids, response) of each row of `load_offline_groups(data, files, tokenizer, {"response": 1.0}, ...)`."""
    groups = load_offline_groups(*arguments[:3], {"response": 1.0}, *arguments[3:])
    return [(list(prompt.prompt_ids), response) for prompt, [response], _ in groups]
