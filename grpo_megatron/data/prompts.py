"""Prompts: rows of a task's files -> token ids, by the tokenizer's chat template or as plain text.

The warm-up's supervised rows go through the same rendering, so that both phases see the same prompts.
"""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.data.rows import read_rows, text_field
from grpo_megatron.data.sampler import Sampler
from grpo_megatron.data.tasks import Question, Task, get_task, read_question
from grpo_megatron.types import Prompt

logger = logging.getLogger(__name__)

PromptSampler = Sampler[Prompt]
OfflineGroup = tuple[Prompt, list[list[int]], list[float]]  # a prompt, its responses, their rewards


def load_tokenizer(path: Path | str, data: DataConfig) -> Any:
    """The transformers tokenizer in folder `path`, with `data.chat_template` put in. Never asks the network.

    Raises ConfigError: no such folder, no tokenizer in it, no end-of-sequence token, unreadable template.
    """
    if not Path(path).is_dir():
        raise ConfigError(f"tokenizer folder {str(path)!r} does not exist (model.tokenizer_path, or else model.path)")
    from transformers import AutoTokenizer  # seconds; only who loads a tokenizer pays for it

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers raises many kinds here
        reason = str(error).strip().partition("\n")[0][:300]
        raise ConfigError(
            f"no tokenizer in {str(path)!r} ({reason}); set model.tokenizer_path to a folder with tokenizer.json"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer in {str(path)!r} has no eos_token, so that no response could end;"
            " add it to its tokenizer_config.json"
        )
    if data.chat_template is not None:
        try:
            tokenizer.chat_template = data.chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read data.chat_template={str(data.chat_template)!r}: {error}") from error
    return tokenizer


def load_prompts(
    data: DataConfig,
    files: Sequence[Path],
    tokenizer: Any,
    reward_override: str | None = None,
    max_model_length: int | None = None,
    max_samples: int | None = None,
) -> list[Prompt]:
    """The prompts of `files` (data.train_files, or data.val_files with `max_samples` = data.val_max_samples), in order.

    A prompt longer than data.max_prompt_length tokens, or `max_model_length` - data.max_response_length, is dropped and
    counted; with data.filter_overlong_prompts=false it is an error. `uid` is "source/file stem/row number" (from 0,
    dropped rows counted). `max_samples` takes the first rows over all files. Raises ConfigError (a ValueError).
    """
    task = get_task(data.task)
    reward = reward_override or task.reward
    if reward is None:
        raise ConfigError(f"data.task={data.task!r} has no reward of its own; set reward.function")
    limit = _prompt_limit(data, max_model_length)
    _check_files(files)
    rows = [
        (f"{task.name}/{Path(file).stem}/{number}", question, answer)
        for file in files
        for number, (question, answer) in enumerate(read_rows(file, task.read_row))
    ][:max_samples]
    texts = [_render(data, task, question, tokenizer, uid) for uid, question, _ in rows]
    prompts = [
        Prompt(uid, tuple(ids), text, answer, task.name, reward)
        for (uid, _, answer), text, ids in zip(rows, texts, _encode_prompts(data, texts, tokenizer), strict=True)
    ]
    short = [len(prompt.prompt_ids) <= limit for prompt in prompts]
    return _drop_overlong(data, prompts, short, f"prompts are longer than {limit} tokens", [p.uid for p in prompts])


def load_supervised(data: DataConfig, files: Sequence[Path], tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, response ids with the end-of-sequence token) of rows {"prompt", "response"}, in order.

    Rows over data.max_prompt_length or data.max_response_length tokens are dropped or refused as in `load_prompts`.
    Raises ConfigError.
    """
    answered = load_offline_groups(data, files, tokenizer, {"response": 1.0})
    return [(list(prompt.prompt_ids), responses[0]) for prompt, responses, _ in answered]


def load_offline_groups(
    data: DataConfig, files: Sequence[Path], tokenizer: Any, fields: Mapping[str, float]
) -> list[OfflineGroup]:
    """Prompts with responses that somebody else wrote: of each row the prompt, and `fields`, name -> reward.

    {"response": 1.0} for supervised training, {"chosen": 1.0, "rejected": 0.0} for preferences. Otherwise as
    `load_supervised`.
    """
    task = get_task(data.task)
    _check_files(files)
    rows = [
        (f"{task.name}/{Path(file).stem}/{number}", question, texts)
        for file in files
        for number, (question, texts) in enumerate(
            read_rows(file, lambda row: (read_question(row), [text_field(row, name) for name in fields]))
        )
    ]
    texts = [_render(data, task, question, tokenizer, f"row {uid}") for uid, question, _ in rows]
    encoded = _encode_prompts(data, texts, tokenizer)
    responses = _encode_responses([response for _, _, written in rows for response in written], tokenizer)
    answered = [
        (
            Prompt(uid, tuple(ids), text, "", task.name, ""),
            responses[number * len(fields) : (number + 1) * len(fields)],
            list(fields.values()),
        )
        for number, ((uid, _, _), text, ids) in enumerate(zip(rows, texts, encoded, strict=True))
    ]
    short = [
        len(p.prompt_ids) <= data.max_prompt_length and all(len(r) <= data.max_response_length for r in written)
        for p, written, _ in answered
    ]
    what = f"rows exceed {data.max_prompt_length} prompt or {data.max_response_length} response tokens"
    return _drop_overlong(data, answered, short, what, [f"row {number}" for number in range(len(answered))])


def _encode_responses(texts: list[str], tokenizer: Any) -> list[list[int]]:
    """Token ids that end with the end-of-sequence token."""
    eos = tokenizer.eos_token_id
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    return [ids if ids[-1:] == [eos] else [*ids, eos] for ids in encoded]


def _prompt_limit(data: DataConfig, max_model_length: int | None) -> int:
    if max_model_length is None:
        return data.max_prompt_length
    room = max_model_length - data.max_response_length
    if room < 1:
        raise ConfigError(
            f"data.max_response_length={data.max_response_length} leaves no room for a prompt: the model's longest"
            f" sequence is {max_model_length} tokens; set it below that"
        )
    return min(data.max_prompt_length, room)


def _check_files(files: Sequence[Path]) -> None:
    if not files:
        raise ConfigError("no data files; set data.train_files (data.val_files, sft.train_files)")
    stems: dict[str, Path] = {}
    for file in map(Path, files):
        if file.stem in stems:
            raise ConfigError(
                f"data files {str(stems[file.stem])!r} and {str(file)!r} have the same name without extension, and a"
                " prompt's uid is made of it; rename one"
            )
        stems[file.stem] = file


def _render(data: DataConfig, task: Task, question: Question, tokenizer: Any, where: str) -> str:
    """The prompt's text. Raises ConfigError when the template is missing or fails."""
    if not data.apply_chat_template:
        if data.system_prompt is not None:
            raise ConfigError(
                "data.system_prompt needs a chat template, and data.apply_chat_template is false; unset one of them"
            )
        if not isinstance(question, str):
            raise ConfigError(f"{where} is a list of chat messages; set data.apply_chat_template=true")
        return question
    if tokenizer.chat_template is None:
        raise ConfigError(
            "the tokenizer has no chat template; set data.chat_template to a Jinja file (ChatML:"
            " examples/templates/chatml.jinja), or data.apply_chat_template=false to use the text as it stands"
        )
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
    system_prompt = task.system_prompt if data.system_prompt is None else data.system_prompt
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # whatever the template raises
        raise ConfigError(
            f"the chat template fails on {where}: {type(error).__name__}: {error}"
            ' (a template without system turns: set data.system_prompt="")'
        ) from error


def _encode_prompts(data: DataConfig, texts: list[str], tokenizer: Any) -> list[list[int]]:
    # a template writes its special tokens itself; plain text gets the tokenizer's own (BOS of the Llama family)
    encoded: list[list[int]] = tokenizer(texts, add_special_tokens=not data.apply_chat_template)["input_ids"]
    if not data.apply_chat_template:  # a tokenizer that closes every text would end the response before it begins
        encoded = [ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids for ids in encoded]
    if texts:
        _check_round_trip(texts[0], tokenizer)
    for text, ids in zip(texts, encoded, strict=True):
        if not ids:
            raise ConfigError(f"the tokenizer makes no token of the prompt {text[:80]!r}")
    return encoded


def _check_round_trip(text: str, tokenizer: Any) -> None:
    """Warn when the tokenizer loses text: what a tokenizer class that does not fit its files does, without an error."""
    back = tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])
    if "".join(unicodedata.normalize("NFKC", back).split()) != "".join(unicodedata.normalize("NFKC", text).split()):
        logger.warning("the tokenizer (%s) turns %r into %r", type(tokenizer).__name__, text[:120], back[:120])


def _drop_overlong(data: DataConfig, items: list[Any], short: list[bool], what: str, names: list[str]) -> list[Any]:
    dropped = short.count(False)
    if not dropped:
        return items
    message = f"{dropped} of {len(items)} {what} (the first: {names[short.index(False)]})"
    if dropped == len(items):
        raise ConfigError(f"{message}: nothing is left; raise data.max_prompt_length")
    if not data.filter_overlong_prompts:
        raise ConfigError(f"{message}; raise data.max_prompt_length, or set data.filter_overlong_prompts=true")
    logger.warning("%s and are dropped (data.filter_overlong_prompts)", message)
    return [item for item, keep in zip(items, short, strict=True) if keep]
