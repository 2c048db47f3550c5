"""A random model with a tokenizer of single bytes and a chat template, and an engine without a model.

Any text is a prompt, and no file is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.evaluation.ask import AskedModel, Asker
from grpo_megatron.rollout.engine import Completion, Request
from tests.fakes import LoneMesh, SeedEngine
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


class TextEngine(SeedEngine):
    """Answers a request by the tokens of `script(request)`, in the poll after it. `end`: a token behind them.

    The answer is cut (reason "length") where `max_tokens` is below `shortest`.
    """

    def __init__(self, tokenizer: Any, script: Callable[[Request], str], end: str = "", shortest: int = 0) -> None:
        super().__init__()
        self.tokenizer, self.script, self.shortest = tokenizer, script, shortest
        self.end = [tokenizer.convert_tokens_to_ids(end)] if end else []

    def poll(self) -> list[tuple[str, Completion]]:
        finished, self._queue = self._queue, {}
        return [(key, self._completion(request)) for key, request in finished.items()]

    def _completion(self, request: Request) -> Completion:
        ids = [*self.tokenizer(self.script(request))["input_ids"], *self.end]
        return Completion(ids, [-0.5] * len(ids), "length" if request.max_tokens < self.shortest else "stop")

    def shutdown(self) -> None: ...


class FakeAsker(Asker):
    """Asks `engine`, in a world of this process."""

    def __init__(self, model: AskedModel, engine: Any) -> None:
        self.model, self.engine, self.mesh = model, engine, LoneMesh()
        self.capacity = model.options.max_num_seqs or 256
