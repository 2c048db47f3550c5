"""A random model with a tokenizer of single bytes and a chat template: any text is a prompt, and no file is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.tiny import make_model

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> Any:
    from transformers import Qwen2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    special = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    vocab = {character: index for index, character in enumerate(bytes_to_unicode().values())}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], **special)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_folder(
    folder: Path, seed: int = 0, tokens: Sequence[str] = (), chat_template: str = TEMPLATE, **changes: Any
) -> Path:
    """A model folder with weights and tokenizer. `tokens`: further special tokens; the last one ends a turn."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat_template
    if tokens:
        tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
        tokenizer.eos_token = tokens[-1]
    settings = {"vocab_size": 320, "max_position_embeddings": 2048, "num_hidden_layers": 2, "hidden_size": 64}
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    make_model(folder, seed=seed, **{**settings, **ids, "num_attention_heads": 2, **changes})
    tokenizer.save_pretrained(folder)
    return folder


def gsm8k_rows(count: int) -> list[dict[str, str]]:
    return [{"question": f"What is {i} plus {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(count)]
