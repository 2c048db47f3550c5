"""Which prompts are tokenised before the run: those whose bytes do not show that they fit. Draws tokenise what they draw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.data import sampler
from grpo_megatron.data.arithmetic import build_tokenizer
from grpo_megatron.data.prompts import BOUNDARY, LengthBound, load_prompts, most_tokens
from grpo_megatron.data.rows import Question
from grpo_megatron.data.written import load_supervised

PLAIN = DataConfig(task="arithmetic", apply_chat_template=False)


class CountedTokenizer:
    """The quickstart's tokenizer, which counts the texts that it is given."""

    def __init__(self) -> None:
        self.tokenizer, self.texts = build_tokenizer(), list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, texts: Any, **options: Any) -> Any:
        self.texts += [texts] if isinstance(texts, str) else texts
        return self.tokenizer(texts, **options)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_only_prompts_that_may_be_too_long_are_tokenised(tmp_path: Path) -> None:
    """The quickstart's tokenizer has one token per digit. Of 40 tokens, BOUNDARY = 32 and the stand-in's 1 are taken."""

    tokenizer = CountedTokenizer()
    file = write(tmp_path / "a.jsonl", [{"prompt": "1" * length, "answer": "1"} for length in (7, 8, 40, 41)])
    data = PLAIN.model_copy(update={"max_prompt_length": 8 + BOUNDARY})
    prompts = load_prompts(data, [file], tokenizer)
    lengths = [len(text) for text in tokenizer.texts]
    assert lengths == [7, 1, 8, 40, 41]  # the check of the first text, the stand-in, rows that may be too long
    assert [len(prompt.text) for prompt in prompts] == [7, 8, 40]
    tokenizer.texts.clear()
    assert len(prompts[0].prompt_ids) == 7 and prompts[0].prompt_ids and tokenizer.texts == ["1" * 7]
    tokenizer.texts.clear()  # and rows with responses
    rows = [{"prompt": "1", "response": "2" * length} for length in (1, 9, 10)]
    data = PLAIN.model_copy(update={"max_response_length": 10})
    groups = load_supervised(data, [write(tmp_path / "b.jsonl", rows)], tokenizer)
    assert tokenizer.texts == ["1", "1", "1", "2" * 10] and len(groups) == 2


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<sep>{{ m['content'] | trim }}{% endfor %}?",
        "{% for m in messages %}{{ m['content'] | tojson }}{% endfor %}",  # longer by what JSON escapes: no bound
        "{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}",  # no bound
        "{% if messages | length > 2 %}{{ raise_exception('no') }}{% endif %}{{ messages[0]['content'] }}",
    ],
)
def test_templates_give_a_bound_only_where_contents_stay(template: str) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template

    def render(question: Question) -> str:
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:
            raise ConfigError(str(error)) from error

    bound = LengthBound(64, render, lambda texts: tokenizer(list(texts))["input_ids"])
    long_chat = [{"role": role, "content": "1"} for role in ("system", "user", "user")]
    stays = "tojson" not in template and template.count("m['content']") < 2
    assert bound.fits("1" * 20) == bound.fits(long_chat[1:]) == stays
    assert bound.fits(long_chat) == (stays and "raise" not in template)
    assert not bound.fits("1" * 40) and not bound.fits([{"role": "user", "content": "1", "name": "x"}])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.text(max_size=30))
def test_a_text_has_no_more_tokens_than_bytes(text: str) -> None:
    """By a byte-level tokenizer without merges, after each of the normalisations that tokenizers use."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for normalizer in (normalizers.NFC(), normalizers.NFD(), normalizers.NFKC(), normalizers.NFKD()):
        tokenizer.normalizer = normalizer
        assert len(tokenizer.encode(text).ids) <= most_tokens(text)


def test_prompts_are_made_when_they_are_read_and_the_last_ones_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "KEPT", 10)
    rows = [{"prompt": "1+1", "answer": "2", "notes": f"x{n}"} for n in range(100)]
    prompts = load_prompts(PLAIN, [write(tmp_path / "a.jsonl", rows)], build_tokenizer())
    prompt = prompts[34]
    assert (prompt.uid, prompt.answer, prompt.columns["notes"]) == ("arithmetic/a/34", "2", "x34")
    assert prompts[34] is prompt
    made = [prompts[n] for n in range(9)]
    assert prompts[34] is prompt and prompts[8] is made[8]
    assert all(prompts[n] for n in range(40, 50)) and prompts[34] is not prompt


def test_a_plan_of_many_rows_measures_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("grpo_megatron.data.prompts.SAMPLED_FROM", 90)
    monkeypatch.setattr("grpo_megatron.data.rows.ROWS_PER_CHUNK", 16)
    rows = [{"prompt": "1" * (n % 9 + 1), "answer": "1"} for n in range(90)]
    file, tokenizer = write(tmp_path / "a.jsonl", rows), build_tokenizer()
    data = PLAIN.model_copy(update={"max_prompt_length": 7})
    assert len(load_prompts(data, [file], tokenizer)) == 70
    caplog.clear()
    assert len(load_prompts(data, [file], tokenizer, is_plan=True)) == 90
    assert "of 48 prompts are longer than 7 tokens" in caplog.text  # 8 of each of 6 chunks
