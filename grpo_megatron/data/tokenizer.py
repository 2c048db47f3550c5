"""The tokenizer of a Hugging Face folder: loaded from its files, never from the network, and never by running its code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.reading import ReadError, path_problem, read_json, read_text, shown, special_file_in

MAX_TEMPLATE = 1 << 20  # bytes of a chat template
END_NAMES = ("im_end", "eot", "eos", "</s>", "end")  # of end-of-sequence tokens, the likeliest first


def load_tokenizer(path: Path | str, data: DataConfig) -> Any:
    """The transformers tokenizer in folder `path`, with `data.chat_template` if one is set. Never uses the network.

    Raises ConfigError: no such folder, no tokenizer in it, no end-of-sequence token, unreadable template.
    """
    if path_problem(path) or not Path(path).is_dir():
        raise ConfigError(f"tokenizer folder {str(path)!r} does not exist (model.tokenizer_path, or else model.path)")
    from transformers import AutoTokenizer, LlamaTokenizer  # takes seconds, so only where it is needed

    try:
        if problem := special_file_in(Path(path)):
            raise ReadError(f"it holds {problem}; remove it")
        loader = LlamaTokenizer if _is_sentencepiece_alone(Path(path)) else AutoTokenizer
        # False: by default it offers to run the folder's code, at a terminal
        tokenizer = loader.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # transformers raises many kinds; tokenizers a PanicException, which is no Exception
        reason = str(error).strip().partition("\n")[0][:300]
        raise ConfigError(
            f"no tokenizer in {str(path)!r} ({reason}); set model.tokenizer_path to a folder with tokenizer.json"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(_no_end(tokenizer, Path(path)))
    if data.chat_template is not None:
        try:
            tokenizer.chat_template = read_text(data.chat_template, MAX_TEMPLATE)
        except (OSError, ReadError) as error:
            raise ConfigError(f"cannot read data.chat_template={str(data.chat_template)!r}: {error}") from error
    return tokenizer


def _no_end(tokenizer: Any, folder: Path) -> str:
    """What to write where the folder names no end-of-sequence token, as one with tokenizer.json alone."""
    special = [token for token in tokenizer.get_added_vocab() if len(token) < 100][:12]
    likely = [token for part in END_NAMES for token in special if part in token]
    example = json.dumps({"eos_token": [*likely, *special, "</s>"][0]})
    file = folder / "tokenizer_config.json"
    text = f"the tokenizer in {str(folder)!r} has no eos_token, so no response could end; "
    text += f"add the key eos_token to {file}" if file.exists() else f"write the file {file} with the line {example}"
    text += ", where the model ends its answers with that token"
    if special:
        text += f" (special tokens here: {', '.join(special)})"
    return f"{text}. If you may not write there, copy the folder and set model.tokenizer_path to the copy"


def _is_sentencepiece_alone(folder: Path) -> bool:
    """Whether the folder has SentencePiece's tokenizer.model of Llama's kind, and nothing that names a tokenizer class.

    AutoTokenizer then takes a class that leaves out the space before the first word: other ids than SentencePiece's own.
    """
    if not (folder / "tokenizer.model").exists():
        return False
    if any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return False
    config = folder / "config.json"
    return not config.exists() or read_json(config).get("model_type") in ("llama", "mistral", "mixtral")


# -- EndTokens: the tokens that end an answer. One rule for training, validation, evaluation, generation and export ----
# An answer ends with the tokenizer's end-of-sequence token, or with any `eos_token_id` of config.json and of
# generation_config.json. A chat model often has several. Llama 3 Instruct: 128001 <|end_of_text|>, 128008 <|eom_id|> and
# 128009 <|eot_id|>. A server stops at all of them, so a policy has to be trained with all of them.

GENERATION_FILE = "generation_config.json"
EOS_KEY = "eos_token_id"


@dataclass(frozen=True)
class EndTokens:
    """`sources`: token id -> where it comes from, in ascending order of the ids."""

    sources: dict[int, tuple[str, ...]]

    @property
    def ids(self) -> list[int]:
        """The token ids, ascending."""
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
