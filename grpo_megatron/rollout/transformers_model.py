"""RowModel: a causal language model of transformers that prefills prompts and decodes rows of different lengths together.

The bits of a row's logits do not depend on the other rows. Measured with torch 2.11 and 2.13, float32, one thread: a matrix
product computes a row in the same way for any number of rows from 4 on (one AVX-512 processor) or from 16 on (another, with AMX:
4 is enough for 64 columns, 16 from 512 on). Attention is the same for any padding that keeps the number of keys a multiple of
16. So there are never fewer than `FEWEST_ROWS` rows, and prompts and caches are padded to a multiple of 32 tokens.
tests/rollout/test_transformers.py compares the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.config import ConfigError

# -- RowCache: the keys and values of the rows that a model decodes together, written in place. PromptCache: those of pr
# transformers' own dynamic cache copies all keys and values at every token. Here a row keeps its place, and has its own length.
# The lengths that a step reads are rounded up to a multiple of `ALIGNMENT` and masked: then the kernels of torch on CPU compute
# the same bits for a row, whatever the other rows are (measured with one thread; see transformers_model.py).

ALIGNMENT = 32  # tokens


def aligned(length: int) -> int:
    """`length` rounded up."""
    return -(-length // ALIGNMENT) * ALIGNMENT


class PromptCache:
    """Keys and values that a pass over whole prompts computes. transformers' attention calls `update` once per layer."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []  # keys and values [prompts, heads, tokens, dimensions]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Attention over the prompts themselves."""
        assert layer == len(self.layers)
        self.layers.append((keys, values))
        return keys, values

    def token_bytes(self) -> int:
        """Keys and values of one token, in all layers."""
        parts = [part for pair in self.layers for part in pair]
        return sum(part.shape[1] * part.shape[3] * part.element_size() for part in parts)


class RowCache:
    """Keys and values of each layer, [rows, heads, tokens, dimensions]. Memory beyond a row's length is finite, and masked."""

    def __init__(self) -> None:
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._rows = self._positions = torch.empty(0, dtype=torch.int64)
        self._count = self._length = 0

    @property
    def size(self) -> tuple[int, int]:
        """(rows, tokens) that there is memory for."""
        keys = self._layers[0][0] if self._layers else torch.empty(0, 0, 0, 0)
        return keys.shape[0], keys.shape[2]

    def reserve(self, rows: int, tokens: int, prompts: PromptCache) -> None:
        """Make room for rows of up to `tokens` tokens, of the kind of `prompts`. Keeps what is there."""
        old_rows, old_tokens = self.size
        if rows <= old_rows and tokens <= old_tokens:
            return
        rows, tokens = max(rows, old_rows), aligned(max(tokens, old_tokens))
        old, self._layers = self._layers, []
        for pair in prompts.layers:
            grown = [part.new_zeros(rows, part.shape[1], tokens, part.shape[3]) for part in pair]
            if old:
                for part, before in zip(grown, old.pop(0), strict=True):  # freed layer by layer
                    part[:old_rows, :, :old_tokens] = before
            self._layers.append((grown[0], grown[1]))

    def insert(self, first: int, prompts: PromptCache, sources: Sequence[int]) -> None:
        """Rows from `first` on become copies of the prompts with these indices."""
        index = torch.tensor(sources)
        for mine, given in zip(self._layers, prompts.layers, strict=True):
            for part, prompt in zip(mine, given, strict=True):
                part[first : first + len(sources), :, : prompt.shape[2]] = prompt[index]

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy rows over others."""
        if sources:
            from_rows, to_rows = torch.tensor(sources), torch.tensor(targets)
            for pair in self._layers:
                for part in pair:
                    part[to_rows] = part[from_rows]

    def begin(self, positions: Tensor) -> Tensor:
        """Before a step of the first rows, whose new tokens stand at `positions` [n]. The step's mask [n, 1, 1, tokens]."""
        self._count = len(positions)
        self._rows, self._positions = torch.arange(self._count), positions
        self._length = aligned(int(positions.max()) + 1)
        is_hidden = torch.arange(self._length) > positions.unsqueeze(1)  # [n, tokens]
        dtype = self._layers[0][0].dtype
        mask = torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, float("-inf"))
        return mask[:, None, None]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store the keys and values [n, heads, 1, dimensions] of a step's tokens; returns those of the whole rows."""
        own_keys, own_values = self._layers[layer]
        own_keys[self._rows, :, self._positions] = keys[:, :, 0]
        own_values[self._rows, :, self._positions] = values[:, :, 0]
        return own_keys[: self._count, :, : self._length], own_values[: self._count, :, : self._length]


FEWEST_ROWS = 16
_ATTENTION = "grpo_megatron_rows"


class RowModel:
    """`module` is the transformers model, with undefined weights. Raises ConfigError for a model that it cannot compute."""

    def __init__(self, folder: Path | str, dtype: str) -> None:
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

        AttentionInterface.register(_ATTENTION, _attention)
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise ConfigError(
                f"rollout.engine=transformers: the layers of {str(folder)!r} are of the types {', '.join(sorted(kinds))},"
                " and this engine computes full attention only; set rollout.engine=vllm"
            )
        self.module: Any = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=_ATTENTION
        )
        self.module.eval().requires_grad_(False)
        self.vocab_size: int = config.vocab_size
        self._decoder, self._head = self.module.get_decoder(), self.module.get_output_embeddings()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, PromptCache]:
        """The logits [n, V] after each prompt, and the prompts' keys and values."""
        cache = PromptCache()
        hidden = self._hidden(prompts, cache)  # [n, T, h]
        last = torch.tensor([len(ids) - 1 for ids in prompts])
        return self._logits(hidden[torch.arange(len(prompts)), last]), cache

    def decode(self, tokens: Sequence[int], positions: Sequence[int], cache: RowCache) -> Tensor:
        """The logits [n, V] after one more token in each of the first n rows of `cache`, at `positions`."""
        fill = [0] * (FEWEST_ROWS - len(tokens))
        input_ids, places = torch.tensor([[*tokens, *fill]]).T, torch.tensor([*positions, *fill])  # [n, 1], [n]
        output = self._decoder(
            input_ids=input_ids,
            position_ids=places.unsqueeze(1),
            attention_mask=cache.begin(places),
            past_key_values=cache,
            use_cache=True,
        )
        return self._logits(output.last_hidden_state[:, 0])[: len(tokens)]

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities of the tokens 1, 2, ... of each sequence."""
        hidden = self._hidden(sequences, PromptCache())
        rows = []
        for state, ids in zip(hidden, sequences, strict=True):
            logprobs = self._logits(state[: len(ids) - 1]).log_softmax(-1)  # [T - 1, V]
            rows.append(logprobs.gather(1, torch.tensor(ids[1:], dtype=torch.int64).unsqueeze(1))[:, 0].tolist())
        return rows

    def _hidden(self, sequences: Sequence[Sequence[int]], cache: PromptCache) -> Tensor:
        length = aligned(max(map(len, sequences)))
        tokens = torch.tensor([[*ids, *[0] * (length - len(ids))] for ids in sequences])  # [n, T]
        positions = torch.arange(length)
        is_hidden = positions > positions.unsqueeze(1)  # causal: no real token sees the padding after it
        mask = torch.zeros(length, length, dtype=self.module.dtype).masked_fill_(is_hidden, float("-inf"))
        output = self._decoder(
            input_ids=tokens,
            position_ids=positions.expand(len(sequences), -1),
            attention_mask=mask[None, None],
            past_key_values=cache,
            use_cache=True,
        )
        states: Tensor = output.last_hidden_state
        return states

    def _logits(self, states: Tensor) -> Tensor:
        """[n, h] -> [n, V], float32."""
        count = len(states)
        if count < FEWEST_ROWS:
            states = torch.nn.functional.pad(states, (0, 0, 0, FEWEST_ROWS - count))
        logits: Tensor = self._head(states)[:count].float()
        return logits


def import_transformers() -> None:
    """Import what this engine needs of transformers. Once, in the process that CPU ranks are forked from."""
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401 - what other families import too


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' own function copies the heads that a group shares; torch's reads them where they are."""
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2).contiguous(), None
