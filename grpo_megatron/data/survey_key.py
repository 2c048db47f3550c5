"""The key under which the numbers of a survey are cached: a digest of everything that they depend on.

It holds the contents of the data files, the task, the template, the tokenizer's files, the versions of the packages that
tokenise, and the sources of this folder. Where one of them is not known the key is None, and nothing is cached: a task or a
tokenizer that was made in Python.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpo_megatron.config import DataConfig
from grpo_megatron.data.cache import content_key
from grpo_megatron.data.conversation import TurnRenderer
from grpo_megatron.data.dataset_folder import files_of_split
from grpo_megatron.data.task import Task

DATE = "strftime_now"  # in a chat template
TOKENIZER_NAMES = ("tokenizer", "special_tokens_map", "added_tokens", "vocab", "merges", "spiece", "sentencepiece")


def survey_key(
    kind: Sequence[object],
    paths: Sequence[Path],
    task: Task,
    data: DataConfig,
    tokenizer: Any,
    renderer: TurnRenderer | None,
) -> str | None:
    """64 hexadecimal digits, or None. `kind`: which numbers these are, as JSON."""
    folder = Path(getattr(tokenizer, "name_or_path", "") or "")
    if DATE in str(tokenizer.chat_template):  # today's prompts are not yesterday's
        return None
    if ":" in data.task or (not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer.model").is_file()):
        return None
    files = [content_key(file) for path in paths for file in files_of_split(path)]
    tokens = [
        [file.name, content_key(file)] for file in sorted(folder.iterdir()) if file.stem.startswith(TOKENIZER_NAMES)
    ]
    known = [
        *(kind, files, task.name, task.sha256, tokens, tokenizer.chat_template, tokenizer.eos_token_id),
        *(data.apply_chat_template, data.system_prompt, list(renderer.tools) if renderer else None),
        *(version("transformers"), version("tokenizers"), _sources_sha256()),
    ]
    return hashlib.sha256(json.dumps(known, default=str).encode()).hexdigest()


@functools.cache
def _sources_sha256() -> str:
    known = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        known.update(path.read_bytes())
    return known.hexdigest()
