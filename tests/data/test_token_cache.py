"""A prompt is tokenised once, by the survey: draws, later readers and other processes take its ids from the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config import DataConfig
from grpo_megatron.data import survey, token_cache
from grpo_megatron.data.arithmetic import build_tokenizer
from grpo_megatron.data.cache import DIGEST, data_cache
from grpo_megatron.data.prompts import load_prompts
from grpo_megatron.data.token_cache import RECORD
from grpo_megatron.data.tokenizer import load_tokenizer

PLAIN = DataConfig(task="arithmetic", apply_chat_template=False)
ROWS = 40  # in chunks of 16, so that no child process is started


class CountedTokenizer:
    """The quickstart's tokenizer, which counts the texts that it is given."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer, self.texts = load_tokenizer(folder, PLAIN), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, texts: Any, **options: Any) -> Any:
        self.texts += 1 if isinstance(texts, str) else len(texts)
        return self.tokenizer(texts, **options)


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CountedTokenizer:
    monkeypatch.setattr(survey, "ROWS_PER_CHUNK", 16)
    monkeypatch.setattr(survey, "MIN_CACHED", 1)
    monkeypatch.setenv("GRPO_MEGATRON_CACHE", str(tmp_path / "cache"))
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    rows = [{"prompt": "1" * (n % 9 + 1) + f"+{n}", "answer": "1"} for n in range(ROWS)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return CountedTokenizer(tmp_path / "tokenizer")


def read(
    tokenizer: CountedTokenizer, data: DataConfig = PLAIN, max_samples: int | None = None
) -> tuple[int, list[Any], int]:
    """The texts that loading tokenises, the prompts' ids, and the texts that drawing all of them tokenises."""
    before = tokenizer.texts
    prompts = load_prompts(data, [Path(tokenizer.name_or_path).parent / "a.jsonl"], tokenizer, max_samples=max_samples)
    loaded = tokenizer.texts
    ids = [prompt.prompt_ids for prompt in prompts]
    drawn = tokenizer.texts - loaded
    assert ids == [tuple(tokenizer.tokenizer(prompt.text)["input_ids"]) for prompt in prompts]
    return loaded - before, ids, drawn


def entries() -> list[Path]:
    return sorted(data_cache().folder.glob("tokens-*/*"))


def test_draws_and_second_readers_do_not_tokenise(tokenizer: CountedTokenizer) -> None:
    loaded, ids, drawn = read(tokenizer)
    assert (loaded, drawn, len(ids), len(entries())) == (ROWS + 1, 0, ROWS, 3)  # + 1: the check of the first text
    assert read(tokenizer) == (0, ids, 0)
    again = CountedTokenizer(Path(tokenizer.name_or_path))
    assert read(again) == (0, ids, 0)
    assert read(again, max_samples=20) == (21, ids[:20], 0)


def test_damaged_and_missing_entries_are_tokenised_again(tokenizer: CountedTokenizer) -> None:
    ids = read(tokenizer)[1]
    first, second, third = entries()
    whole = first.read_bytes()
    place = DIGEST + 5 * RECORD.size
    for content in (
        whole[:-1] + bytes([whole[-1] ^ 1]),  # an id of the last row
        whole[:place] + b"\xff\xff\xff\xff" + whole[place + 4 :],  # the number of ids of row 5
        whole[: place + 15] + b"\xff" + whole[place + 16 :],  # their place
        whole[:-4],
    ):
        first.write_bytes(content)
        assert read(tokenizer) == (0, ids, 1)
    first.write_bytes(second.read_bytes())  # right for other rows
    assert read(tokenizer) == (0, ids, 16)
    first.write_bytes(whole[:DIGEST])
    third.unlink()
    assert read(tokenizer) == (0, ids, 24)


def test_another_template_has_other_ids(tokenizer: CountedTokenizer) -> None:
    chat = PLAIN.model_copy(update={"apply_chat_template": True, "task": "jsonl"})
    keys = set()
    for number, template in enumerate(["{{ messages[-1]['content'] }}", "{{ messages[-1]['content'] }}?"], start=1):
        tokenizer.tokenizer.chat_template = template
        before = tokenizer.texts
        file = Path(tokenizer.name_or_path).parent / "a.jsonl"
        prompts = load_prompts(chat, [file], tokenizer, "gsm8k")
        assert tokenizer.texts - before == ROWS + 1
        assert len(prompts[0].prompt_ids) == 2 + number  # 1+0, then 1+0?
        keys |= {entry.parent.name for entry in entries()}
        assert len(keys) == number


def test_a_large_data_set_is_not_kept_on_disk_and_a_small_one_in_memory(
    tokenizer: CountedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "MIN_CACHED", ROWS + 1)
    small = read(tokenizer)
    assert small[0] == ROWS + 1 and small[2] == 0 and not entries()
    monkeypatch.setattr(survey, "MIN_CACHED", 1)
    chunks = [small[1][start : start + 16] for start in range(0, ROWS, 16)]
    sizes = [DIGEST + len(chunk) * RECORD.size + 4 * sum(map(len, chunk)) for chunk in chunks]
    monkeypatch.setattr(token_cache, "MAX_TOKEN_BYTES", 3 * max(sizes))
    assert read(tokenizer) == small and [entry.stat().st_size for entry in entries()] == sizes
    for entry in data_cache().folder.glob("*/*"):
        entry.unlink()
    monkeypatch.setattr(token_cache, "MAX_TOKEN_BYTES", 3 * max(sizes) - 1)
    too_large = sizes.count(max(sizes)) * 16
    assert read(tokenizer) == (ROWS + 1, small[1], too_large) and len(entries()) == 3 - too_large // 16
