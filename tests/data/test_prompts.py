"""Prompts from files: rendering, limits, uids; with the quickstart's tokenizer and, if there, the real one of Qwen."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.data import sampler
from grpo_megatron.data.prompts import BOUNDARY, LengthBound, load_prompts, most_tokens
from grpo_megatron.data.responses import load_offline_groups
from grpo_megatron.data.rows import Question
from grpo_megatron.data.tokenizer import class_beside, load_tokenizer
from grpo_megatron.evaluation.ask import placed_prompt
from grpo_megatron.starting.generated import build_tokenizer
from tests.files import DATA, QWEN_SMALL, WHOLE, load_supervised, row_files
from tests.runs import write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
CHATML = ROOT / "examples" / "templates" / "chatml.jinja"
PLAIN = DataConfig(task="arithmetic", apply_chat_template=False)
TEMPLATE = "{% for m in messages %}{{ '<sep>' if m['role'] == 'system' else '' }}{{ m['content'] }}{% endfor %}?"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


def _sums(path: Path, lengths: list[int]) -> Path:
    return row_files(path, *({"prompt": "1" * length, "answer": "1"} for length in lengths))[0]


def test_fields_of_a_prompt(tmp_path: Path, tokenizer: Any) -> None:
    [file] = row_files(tmp_path / "val.jsonl", {"prompt": "Tom has 23 apples<sep>", "answer": "23"})
    (prompt,) = load_prompts(PLAIN, [file], tokenizer)
    found = prompt.uid, prompt.answer, prompt.source, prompt.reward
    assert found == ("arithmetic/val/0", "23", "arithmetic", "arithmetic")
    assert prompt.text == "Tom has 23 apples<sep>" == tokenizer.decode(prompt.prompt_ids)
    assert len(prompt.prompt_ids) == 7
    assert replace(prompt, text="23").prompt_ids == prompt.prompt_ids  # as for trajectories and stored samples
    (prompt,) = load_prompts(PLAIN, [file], tokenizer, reward_override="my.module:score")
    assert prompt.reward == "my.module:score" and prompt.data_source == "" and prompt.messages is None
    row = {"prompt": "1+1", "answer": "2", "data_source": "sums", "extra_info": {"level": 3}, "hints": ["two"]}
    (prompt,) = load_prompts(PLAIN, row_files(tmp_path / "a.jsonl", row), tokenizer)
    assert (prompt.columns, prompt.data_source) == (row, "sums")  # what reward functions may read


def test_the_documented_words_of_the_tiny_model(tokenizer: Any) -> None:
    listed = (ROOT / "docs/first_task.md").read_text().partition("The tiny model reads digits")[2].partition("\n\n")[0]
    words = {token.strip() for token in tokenizer.get_added_vocab() if "<" not in token}
    assert set(re.findall(r"`(\w+)`", listed)) == words


def test_overlong_prompts_and_a_tokenizer_that_loses_text_are_reported(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    file = _sums(tmp_path / "train.jsonl", [3, 9, 8, 10, 1])
    data = PLAIN.model_copy(update={"max_prompt_length": 8})
    prompts = load_prompts(data, [file], tokenizer)
    assert [prompt.uid for prompt in prompts] == [f"arithmetic/train/{row}" for row in (0, 2, 4)]
    assert "2 of 5 prompts are longer than 8 tokens (the first: arithmetic/train/1) and are dropped" in caplog.text
    strict = data.model_copy(update={"filter_overlong_prompts": False})
    with pytest.raises(ValueError, match="2 of 5 prompts are longer .*data.filter_overlong_prompts=true"):
        load_prompts(strict, [file], tokenizer)
    caplog.clear()
    rows = [{"prompt": text, "answer": "2"} for text in ("1+1", "Paul has 2")]
    tokenizer.save_pretrained(tmp_path / "tiny")
    loaded = load_tokenizer(tmp_path / "tiny", PLAIN)
    load_prompts(PLAIN, row_files(tmp_path / "val.jsonl", *rows), loaded)
    load_prompts(PLAIN, [tmp_path / "val.jsonl"], loaded)
    reported = "turns 'Paul has 2' into ' has 2', without 'Paul': the model cannot read what its vocabulary lacks"
    assert caplog.text.count(reported) == 1
    write_tokenizer(tmp_path / "words")  # transformers loads words of plain files by the class of config.json
    (tmp_path / "words" / "config.json").write_text('{"model_type": "qwen2"}')
    user = row_files(tmp_path / "user.jsonl", {"prompt": "user 2", "answer": "2"})  # a word of the file
    load_prompts(PLAIN, user, load_tokenizer(tmp_path / "words", PLAIN))
    about = "(saved as TokenizersBackend, loaded as Qwen2Tokenizer) turns 'user 2' into '2', without 'user': that class does not"
    assert about in caplog.text and "files alone to another folder, and set model.tokenizer_path" in caplog.text
    caplog.clear()
    write_tokenizer(tmp_path / "alone")  # the remedy: no config.json beside the files
    alone = load_tokenizer(tmp_path / "alone", PLAIN)
    load_prompts(PLAIN, user, alone)
    assert "turns" not in caplog.text and class_beside(tmp_path / "words", alone) == "Qwen2Tokenizer"
    assert class_beside(tmp_path / "words", load_tokenizer(tmp_path / "words", PLAIN)) == ""
    words = load_tokenizer(tmp_path / "words", PLAIN)
    placed_prompt(words, "generate/0", "Paul Otto 2", [], is_chat=False)  # of the command `generate`
    assert "turns 'Paul Otto 2' into '2', without 'Paul', 'Otto': " in caplog.text
    with pytest.raises(ValueError, match="5 of 5 prompts .*nothing is left; raise data.max_prompt_length"):
        load_prompts(data, [_sums(tmp_path / "long.jsonl", [9] * 5)], tokenizer)


def test_several_files_and_a_maximum(tmp_path: Path, tokenizer: Any) -> None:
    files = [_sums(tmp_path / "a.jsonl", [1, 2]), _sums(tmp_path / "b.jsonl", [3, 4])]
    prompts = load_prompts(PLAIN, files, tokenizer, max_samples=3)
    assert [prompt.uid for prompt in prompts] == ["arithmetic/a/0", "arithmetic/a/1", "arithmetic/b/0"]
    (tmp_path / "other").mkdir()
    same_names = load_prompts(PLAIN, [files[0], _sums(tmp_path / "other" / "a.jsonl", [1])], tokenizer)
    here = tmp_path.name
    assert [prompt.uid for prompt in same_names] == [
        f"arithmetic/{uid}" for uid in (f"{here}.a/0", f"{here}.a/1", "other.a/0")
    ]
    with pytest.raises(ValueError, match="a.jsonl' is named twice; name it once"):
        load_prompts(PLAIN, [files[0], files[0]], tokenizer)
    with pytest.raises(ValueError, match="no data files; set data.train_files"):
        load_prompts(PLAIN, [], tokenizer)


def test_errors_name_the_key_to_change(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _sums(tmp_path / "a.jsonl", [1])
    [chat] = row_files(tmp_path / "chat.jsonl", {"prompt": [{"role": "user", "content": "1"}], "answer": "1"})
    with pytest.raises(ValueError, match="no chat template; set data.chat_template .* data.apply_chat_template=false"):
        load_prompts(DataConfig(task="arithmetic"), [file], tokenizer)
    with pytest.raises(ValueError, match="data.task='jsonl' has no reward of its own; set reward.function"):
        load_prompts(DataConfig(task="jsonl"), [file], tokenizer)
    with pytest.raises(ValueError, match="jsonl/chat/0 is a list of chat messages"):
        load_prompts(DataConfig(task="jsonl", apply_chat_template=False), [chat], tokenizer, "gsm8k")
    with pytest.raises(ValueError, match="'gsm8k_lm_eval' has plain text prompts only; set data.apply_chat_template"):
        rows = row_files(tmp_path / "row.jsonl", {"question": "1", "answer": "#### 1"})
        load_prompts(DataConfig(task="gsm8k_lm_eval"), rows, tokenizer, "gsm8k")
    with pytest.raises(ValueError, match="data.system_prompt needs a chat template"):
        load_prompts(PLAIN.model_copy(update={"system_prompt": "x"}), [file], tokenizer)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no system role') }}")
    with pytest.raises(ValueError, match="template fails on jsonl/chat/0: TemplateError: no system role"):
        load_prompts(DataConfig(task="jsonl"), [chat], tokenizer, "gsm8k")


def test_system_prompts(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the task, or of the config, "" for none; a system turn in the row wins over both."""
    system, *users = ({"role": role, "content": text} for role, text in (("system", "2"), ("user", "1"), ("user", "3")))
    rows = [{"prompt": turns, "answer": ""} for turns in (users[:1], [system, users[1]])]
    files = row_files(tmp_path / "chat.jsonl", *rows)
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    for system_prompt, expected in [(None, "1?"), ("", "1?"), ("9", "<sep>91?")]:
        prompts = load_prompts(DataConfig(task="jsonl", system_prompt=system_prompt), files, tokenizer, "gsm8k")
        assert [prompt.text for prompt in prompts] == [expected, "<sep>23?"]
        assert tokenizer.decode(prompts[1].prompt_ids) == "<sep>23?"
    assert prompts[0].messages == [{"role": "system", "content": "9"}, {"role": "user", "content": "1"}]


def test_supervised_rows_end_with_eos_and_are_rendered_like_prompts(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "1+1<sep>", "response": "<answer>2</answer>"}, {"prompt": "2<sep>", "response": "2<eos>"}]
    files = row_files(tmp_path / "sft.jsonl", *rows)
    pairs = load_supervised(PLAIN, files, tokenizer)
    assert [tokenizer.decode(prompt) for prompt, _ in pairs] == ["1+1<sep>", "2<sep>"]
    assert [tokenizer.decode(response.ids) for _, response in pairs] == ["<answer>2</answer><eos>", "2<eos>"]
    short = PLAIN.model_copy(update={"max_response_length": 3})
    assert len(load_supervised(short, files, tokenizer)) == 1
    with pytest.raises(ValueError, match="line 1: field 'response' is missing"):
        load_supervised(PLAIN, [_sums(tmp_path / "x.jsonl", [1])], tokenizer)


def test_tokenizer_folders_that_cannot_be_used(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match="does not exist .model.tokenizer_path"):
        load_tokenizer(tmp_path / "gone", PLAIN)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no tokenizer in .*set model.tokenizer_path"):
        load_tokenizer(tmp_path / "empty", PLAIN)
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "qwen2"}')  # transformers makes an empty tokenizer
    with pytest.raises(ValueError, match=r"no tokenizer in .*\(none of merges.txt, tokenizer.json"):
        load_tokenizer(tmp_path / "empty", PLAIN)
    (tmp_path / "empty" / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="tokenizer.json is a pointer of Git LFS in place of the file; fetch it"):
        load_tokenizer(tmp_path / "empty", PLAIN)
    tokenizer.save_pretrained(tmp_path / "empty")
    (tmp_path / "empty" / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match="tokenizer_config.json is no JSON object"):
        load_tokenizer(tmp_path / "empty", PLAIN)
    tokenizer.save_pretrained(tmp_path / "good")
    load_tokenizer(tmp_path / "good", PLAIN)
    assert "was saved as" not in caplog.text
    config = json.loads((tmp_path / "good" / "tokenizer_config.json").read_text())
    other = tokenizer.save_pretrained(tmp_path / "other") and tmp_path / "other"
    (other / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "LlamaTokenizer"}))
    with patch("transformers.AutoTokenizer.from_pretrained", lambda *args, **kwargs: tokenizer):
        load_tokenizer(other, PLAIN)
    assert f"saved as LlamaTokenizer, and transformers loads it as {type(tokenizer).__name__}" in caplog.text
    with pytest.raises(ValueError, match="cannot read data.chat_template='gone.jinja'"):
        load_tokenizer(tmp_path / "good", DataConfig(chat_template=Path("gone.jinja")))
    loaded = load_tokenizer(tmp_path / "good", DataConfig(chat_template=CHATML))
    assert loaded.chat_template == CHATML.read_text()
    _check_values_of_the_template(tmp_path)
    (tmp_path / "good" / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    with pytest.raises(ValueError, match="has no eos_token"):
        load_tokenizer(tmp_path / "good", PLAIN)


def _check_values_of_the_template(folder: Path) -> None:
    """`chat_template_kwargs` reach the template as keywords of transformers do, also in its macros and loops."""
    template = folder / "thinking.jinja"
    template.write_text(
        "{% macro end() %}{{ '' if enable_thinking is defined and enable_thinking is false else '<think>' }}{% endmacro %}"
        "{% for m in messages %}{{ m.content }} {{ words | default([]) | join('+') }}{{ end() }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "hello"}]
    for values in ({}, {"enable_thinking": False}, {"enable_thinking": True, "words": ["a", "b"]}):
        plain = load_tokenizer(folder / "good", DataConfig(chat_template=template))
        with_values = load_tokenizer(folder / "good", DataConfig(chat_template=template, chat_template_kwargs=values))
        wanted = plain.apply_chat_template(messages, tokenize=False, **values)
        assert with_values.apply_chat_template(messages, tokenize=False) == wanted
        assert ("<think>" in wanted) == values.get("enable_thinking", True)
    for values in ({"enable_thinkng": False}, {"messages": []}, {"think": False}):
        with pytest.raises(
            ValueError, match=f"'{next(iter(values))}' is no variable .* it reads enable_thinking, words;"
        ):
            load_tokenizer(folder / "good", DataConfig(chat_template=template, chat_template_kwargs=values))
    template.write_text("{% generation %}{{ a }}{% endgeneration %}{% for m in")
    with pytest.raises(ValueError, match="the chat template cannot be read"):
        load_tokenizer(folder / "good", DataConfig(chat_template=template, chat_template_kwargs={"a": 1}))


@pytest.mark.parametrize("template", sorted((DATA / "templates/real").glob("*.jinja")), ids=lambda path: path.stem)
def test_thinking_is_switched_in_published_templates(template: Path, tmp_path: Path) -> None:
    """As transformers' keyword does. Where a template has no switch, the key is refused by name."""
    write_tokenizer(tmp_path)
    plain = load_tokenizer(tmp_path, DataConfig(chat_template=template))
    messages = [{"role": "user", "content": "How many?"}]
    prompts = []
    for value in (False, True):
        values = DataConfig(chat_template=template, chat_template_kwargs={"enable_thinking": value})
        if template.stem not in ("qwen3", "qwen3_5_think", "glm4moe"):
            with pytest.raises(ConfigError, match="'enable_thinking' is no variable"):
                load_tokenizer(tmp_path, values)
            continue
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
        prompts.append(load_tokenizer(tmp_path, values).apply_chat_template(messages, **options))
        assert prompts[-1] == plain.apply_chat_template(messages, enable_thinking=value, **options)
        assert prompts[-1].rstrip().endswith("</think>") is not value


@pytest.mark.parametrize(
    ("source", "im_start"),
    [(QWEN_SMALL, 4097), pytest.param(WHOLE / "tokenizers/qwen/tokenizer.json", 151644, marks=pytest.mark.real_data)],
    ids=["small", "whole"],
)
def test_real_gsm8k_with_qwens_real_tokenizer_in_chatml(source: Path, im_start: int, tmp_path: Path) -> None:
    questions, im_end = DATA / "gsm8k" / "test.jsonl", im_start + 1
    shutil.copyfile(source, tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
    )
    data = DataConfig(task="gsm8k", chat_template=CHATML, max_prompt_length=512)
    tokenizer = load_tokenizer(tmp_path, data)
    prompts = load_prompts(data, [questions], tokenizer, max_samples=200)
    assert len(prompts) == 200
    first = prompts[0]
    assert (first.uid, first.answer, first.reward, first.source) == ("gsm8k/test/0", "18", "gsm8k", "gsm8k")
    assert first.text == (
        "<|im_start|>system\nReason step by step. End with one line that holds only #### and the final number, as in:"
        " #### 42<|im_end|>\n<|im_start|>user\n"
        + json.loads(questions.read_text().splitlines()[0])["question"]
        + "<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.decode(first.prompt_ids) == first.text
    assert [first.prompt_ids.count(token) for token in (im_start, im_end)] == [3, 2]
    assert tokenizer.eos_token_id == im_end


# -- Which prompts are tokenised before the run: those whose bytes do not show that they fit. Samples tokenise what they sample


class CountedTokenizer:
    """The quickstart's tokenizer, which counts the texts that it is given."""

    def __init__(self) -> None:
        self.tokenizer, self.texts = build_tokenizer(), list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, texts: Any, **options: Any) -> Any:
        self.texts += [texts] if isinstance(texts, str) else texts
        return self.tokenizer(texts, **options)


def test_only_prompts_that_may_be_too_long_are_tokenised(tmp_path: Path) -> None:
    """The quickstart's tokenizer has one token per digit. Of 40 tokens, BOUNDARY = 32 and the stand-in's 1 are taken."""

    tokenizer = CountedTokenizer()
    file = _sums(tmp_path / "a.jsonl", [7, 8, 40, 41])
    data = PLAIN.model_copy(update={"max_prompt_length": 8 + BOUNDARY})
    prompts = load_prompts(data, [file], tokenizer)
    lengths = [len(text) for text in tokenizer.texts]
    assert lengths == [
        7,
        8,
        40,
        41,
        1,
        8,
        40,
        41,
    ]  # the check of the first texts, the stand-in, rows that may be too long
    assert [len(prompt.text) for prompt in prompts] == [7, 8, 40]
    tokenizer.texts.clear()
    assert len(prompts[0].prompt_ids) == 7 and prompts[0].prompt_ids and tokenizer.texts == ["1" * 7]
    tokenizer.texts.clear()  # and rows with responses
    rows = [{"prompt": "1", "response": "2" * length} for length in (1, 9, 10)]
    data = PLAIN.model_copy(update={"max_response_length": 10})
    groups = load_offline_groups(data, row_files(tmp_path / "b.jsonl", *rows), tokenizer, {"response": 1.0})
    assert tokenizer.texts == ["1", "1", "1", "1", "2" * 10] and len(groups) == 2


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
    prompts = load_prompts(PLAIN, row_files(tmp_path / "a.jsonl", *rows), build_tokenizer())
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
    file, tokenizer = _sums(tmp_path / "a.jsonl", [n % 9 + 1 for n in range(90)]), build_tokenizer()
    data = PLAIN.model_copy(update={"max_prompt_length": 7})
    assert len(load_prompts(data, [file], tokenizer)) == 70
    caplog.clear()
    assert len(load_prompts(data, [file], tokenizer, is_plan=True)) == 90
    assert "of 48 prompts are longer than 7 tokens" in caplog.text  # 8 of each of 6 chunks
