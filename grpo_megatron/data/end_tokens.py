"""EndTokens: the tokens that end an answer. One rule for training, validation, evaluation, generation and export.

An answer ends with the tokenizer's end-of-sequence token, or with any `eos_token_id` of config.json and of
generation_config.json. A chat model often has several. Llama 3 Instruct: 128001 <|end_of_text|>, 128008 <|eom_id|> and
128009 <|eot_id|>. A server stops at all of them, so a policy has to be trained with all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.reading.bounds import shown
from grpo_megatron.reading.json_text import read_json

GENERATION_FILE = "generation_config.json"
EOS_KEY = "eos_token_id"


@dataclass(frozen=True)
class EndTokens:
    """`sources`: token id -> where it comes from, in ascending order of the ids."""

    sources: dict[int, tuple[str, ...]]

    @property
    def ids(self) -> list[int]:
        return list(self.sources)

    def lines(self, tokenizer: Any) -> Iterator[str]:
        """One line per token: id, text, and where it comes from."""
        for token, sources in self.sources.items():
            yield f"{token} {tokenizer.decode([token])!r} ({', '.join(sources)})"


def read_end_tokens(tokenizer: Any, model_folder: Path, vocab_size: int | None = None) -> EndTokens:
    """The end tokens of a model with this tokenizer. `model_folder` has config.json, and perhaps generation_config.json.

    `vocab_size`: rows of the embedding. Raises ConfigError for a file that cannot be read, and for a value that is no token.
    """
    found: dict[int, list[str]] = {tokenizer.eos_token_id: ["tokenizer"]}
    for name in ("config.json", GENERATION_FILE):
        path = model_folder / name
        if not path.exists():
            continue
        for token in _tokens_of(path, vocab_size):
            found.setdefault(token, []).append(name)
    return EndTokens({token: tuple(found[token]) for token in sorted(found)})


def _tokens_of(path: Path, vocab_size: int | None) -> list[int]:
    """The end tokens that a file names, each once."""
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); correct or remove it") from error
    value = config.get(EOS_KEY) if isinstance(config, dict) else None
    named: list[Any] = value if isinstance(value, list) else [value]
    tokens = [token for token in dict.fromkeys(map(_hashable, named)) if token is not None]
    for token in tokens:
        if type(token) is not int or token < 0 or (vocab_size is not None and token >= vocab_size):
            ids = "a token id" if vocab_size is None else f"a token id below the vocabulary's {vocab_size}"
            raise ConfigError(f"{path}: {EOS_KEY} holds {shown(token)}, which is not {ids}; correct it")
    return tokens


def _hashable(value: Any) -> Any:
    return str(value) if isinstance(value, list | dict) else value
