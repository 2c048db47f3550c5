"""The tokenizer of a Hugging Face folder: loaded from its files, never from the network, and never by running its code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.reading import ReadError
from grpo_megatron.reading.bounds import path_problem
from grpo_megatron.reading.json_text import read_json
from grpo_megatron.reading.regular import read_text, special_file_in

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
