"""TransformersEngine: transformers' modules as a RolloutEngine on the CPU. For small models it is faster than vLLM.

vLLM on CPU spends some 4 ms per step on its scheduler and on Python for each token (measured with 64 sequences); the step of a
model of 0.4 M parameters takes 1.5 ms. This engine has a static list of rows instead of pages, computes a prompt once for all
of its samples, and samples with one uniform number per token. Larger models are faster in vLLM, whose kernels have packed
weights. Every rank has the full model and serves its requests alone. There is no tensor parallelism, no quantisation and no
GPU path.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from grpo_megatron.config import ConfigError, RolloutConfig, Section
from grpo_megatron.data.images import image_patches, published_processor, rope_positions
from grpo_megatron.exact import rowwise
from grpo_megatron.exact.rowwise import FEWEST_ROWS, aligned
from grpo_megatron.rollout.engine import Completion, EngineSetup, Request, StatefulEngine, load_verified
from grpo_megatron.sync.digest import slice_digest
from grpo_megatron.types import KeptIds, PromptImage, WeightBucket

Images = tuple[PromptImage, ...]  # of one prompt

_ATTENTION, _EXACT_ATTENTION = "grpo_megatron_rows", "grpo_megatron_exact"


class PromptCache:
    """Keys and values of a pass over full prompts. transformers' attention calls `update` once per layer."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []  # keys and values [prompts, heads, tokens, dimensions]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Stores a layer's keys and values, and returns them: the prompts attend to themselves."""
        assert layer == len(self.layers)
        self.layers.append((keys, values))
        return keys, values

    def token_bytes(self) -> int:
        """Returns the bytes of one token's keys and values in all layers."""
        return sum(part.shape[1] * part.shape[3] * part.element_size() for pair in self.layers for part in pair)


class RowCache:
    """Keys and values of each layer, [rows, heads, tokens, dimensions]. Memory beyond a row's length is finite, and masked.

    transformers' dynamic cache copies all keys and values at every token. Here a row keeps its place and its length. The
    lengths that a step reads are rounded up to full blocks and masked.
    """

    def __init__(self) -> None:
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._rows = self._positions = torch.empty(0, dtype=torch.int64)
        self._count = self._length = 0

    @property
    def size(self) -> tuple[int, int]:
        """The (rows, tokens) that there is memory for."""
        keys = self._layers[0][0] if self._layers else torch.empty(0, 0, 0, 0)
        return keys.shape[0], keys.shape[2]

    def reserve(self, rows: int, tokens: int, prompts: PromptCache) -> None:
        """Makes room for rows of up to `tokens` tokens, of the kind of `prompts`. Keeps what is there."""
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
        """Copies the prompts with the indices `sources` into the rows from `first` on."""
        index = torch.tensor(sources)
        for rows, computed in zip(self._layers, prompts.layers, strict=True):
            for part, prompt in zip(rows, computed, strict=True):
                part[first : first + len(sources), :, : prompt.shape[2]] = prompt[index]

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies rows over others."""
        if sources:
            from_rows, to_rows = torch.tensor(sources), torch.tensor(targets)
            for pair in self._layers:
                for part in pair:
                    part[to_rows] = part[from_rows]

    def begin(self, positions: Tensor) -> int:
        """Begins a step of the first rows, with new tokens at `positions` [n]. Returns how many tokens of a row it reads."""
        self._count = len(positions)
        self._rows, self._positions = torch.arange(self._count), positions
        self._length = aligned(int(positions.max()) + 1)
        return self._length

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Stores the keys and values [n, heads, 1, dimensions] of a step's tokens; returns those of the full rows."""
        all_keys, all_values = self._layers[layer]
        all_keys[self._rows, :, self._positions] = keys[:, :, 0]
        all_values[self._rows, :, self._positions] = values[:, :, 0]
        return all_keys[: self._count, :, : self._length], all_values[: self._count, :, : self._length]


class RowModel:
    """A model of transformers that prefills prompts, and decodes rows of different lengths together.

    The bits of a row's logits do not depend on the other rows. Measured with torch 2.11 and 2.13, float32, one thread: a matrix
    product computes a row in the same way for any number of rows from 4 on (one AVX-512 processor) or from 16 on (another, with
    AMX: 4 is enough for 64 columns, 16 from 512 on). Attention is the same for any padding that keeps the number of keys a
    multiple of 16. So there are never fewer than FEWEST_ROWS rows, and prompts and caches are padded to a multiple of 32
    (exact/rowwise.py). tests/rollout/test_transformers.py compares the bits.
    """

    def __init__(self, folder: Path | str, dtype: str, *, exact: bool = False) -> None:
        """Builds `module` with undefined weights. `exact`: the expressions of `model.exact`.

        Raises ConfigError for a model that it cannot compute.
        """
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        AttentionInterface.register(_ATTENTION, _attention)
        AttentionInterface.register(_EXACT_ATTENTION, _exact_attention)
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        text, vision = config.get_text_config(), getattr(config, "vision_config", None)
        kinds, window = getattr(text, "layer_types", None) or [], getattr(text, "sliding_window", None)
        self._windows = {kind: None if kind == "full_attention" else window for kind in sorted(kinds)} or {"": window}
        if not {*kinds} <= {"full_attention", "sliding_attention"}:
            raise ConfigError(
                f"rollout.engine=transformers: the layers of {str(folder)!r} are of the types"
                f" {', '.join(self._windows)}, and this engine computes full_attention and sliding_attention only; set"
                " rollout.engine=vllm"
            )
        attention: Any = _EXACT_ATTENTION if exact else _ATTENTION
        if vision is not None:
            attention = {"text_config": attention, "vision_config": "sdpa"}
        built: Any = AutoModelForCausalLM if vision is None else AutoModelForImageTextToText
        self.module: Any = built.from_config(config, dtype=getattr(torch, dtype), attn_implementation=attention)
        if exact:
            _use_exact_expressions(self.module)
        self.module.eval().requires_grad_(False)
        self.vocab_size: int = text.vocab_size
        self.log_softmax = rowwise.log_softmax if exact else functools.partial(torch.log_softmax, dim=-1)
        self._decoder, self._head = self.module.get_decoder(), self.module.get_output_embeddings()
        self._embed = self.module.get_input_embeddings()
        self._tower: Any = getattr(self.module.base_model, "visual", None)
        self._vision: Any = vision
        self._norm = published_processor(config.model_type)[:2]
        self.features: dict[str, Tensor] = {}  # image's digest -> features; to be emptied when the weights change

    def tensors(self) -> dict[str, Tensor]:
        """Returns the live weights by their names in files. In memory a model with a tower has other names."""
        state = self.module.state_dict()
        if self._tower is None:
            return state  # type: ignore[no-any-return]
        prefix = re.compile(r"^model\.(?=visual\.)|(?<=^model\.)language_model\.")
        return {prefix.sub("", name): tensor for name, tensor in state.items()}

    def prefill(self, prompts: Sequence[Sequence[int]], images: Sequence[Images] = ()) -> tuple[Tensor, PromptCache]:
        """Computes the logits [n, V] after each prompt, and the prompts' keys and values. `images`: of each; empty: none."""
        cache = PromptCache()
        hidden = self._hidden(prompts, cache, images)  # [n, T, h]
        last = torch.tensor([len(ids) - 1 for ids in prompts])
        return self._logits(hidden[torch.arange(len(prompts)), last]), cache

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], cache: RowCache, shifts: Sequence[int] | None = None
    ) -> Tensor:
        """Computes the logits [n, V] after one more token in each of the first n rows of `cache`, at `positions`.

        `shifts`: RoPE's position of a row's new tokens, less their position (`_rope_shift`); None: zero.
        """
        fill = [0] * (FEWEST_ROWS - len(tokens))
        input_ids, places = torch.tensor([[*tokens, *fill]]).T, torch.tensor([*positions, *fill])  # [n, 1], [n]
        rotations = places if shifts is None else places + torch.tensor([*shifts, *fill])
        mask = self._mask(places.unsqueeze(1), cache.begin(places))
        states = self._states(self._embed(input_ids), rotations.unsqueeze(1), mask, cache)
        return self._logits(states[:, 0])[: len(tokens)]

    def logprobs(self, sequences: Sequence[Sequence[int]], images: Sequence[Images] = ()) -> list[list[float]]:
        """Computes log-probabilities of the tokens 1, 2, ... of each sequence."""
        hidden = self._hidden(sequences, PromptCache(), images)
        rows = []
        for state, ids in zip(hidden, sequences, strict=True):
            logprobs = self.log_softmax(self._logits(state[: len(ids) - 1]))  # [T - 1, V]
            rows.append(logprobs.gather(1, torch.tensor(ids[1:], dtype=torch.int64).unsqueeze(1))[:, 0].tolist())
        return rows

    def _hidden(self, sequences: Sequence[Sequence[int]], cache: PromptCache, images: Sequence[Images] = ()) -> Tensor:
        length = aligned(max(map(len, sequences)))
        tokens = torch.tensor([[*ids, *[0] * (length - len(ids))] for ids in sequences])  # [n, T]
        embeddings, positions = self._embed(tokens), torch.arange(length)
        mask = self._mask(positions.unsqueeze(0), length)  # causal: no real token sees the padding after it
        rotations, deep = positions.expand(len(sequences), -1), dict[str, Any]()
        if any(images):
            per_row = [torch.from_numpy(rope_positions(length, row_images)) for row_images in images]
            rotations = torch.stack(per_row, dim=1)  # [3, n, T]
            is_image, inner = torch.zeros(tokens.shape, dtype=torch.bool), []
            for row, image in ((row, image) for row, row_images in enumerate(images) for image in row_images):
                place, features = slice(image.first, image.first + image.num_tokens), self._features(image)
                embeddings[row, place], is_image[row, place] = features[0], True
                inner.append(features[1:])
            if levels := torch.cat(inner, dim=1).unbind():
                deep = {"visual_pos_masks": is_image, "deepstack_visual_embeds": levels}
        return self._states(embeddings, rotations, mask, cache, **deep)

    def _mask(self, positions: Tensor, length: int) -> Any:
        """Returns the mask [n, 1, t, length] of tokens at `positions` [n, t]; of several types of layers, one for each."""
        distance, masks = positions.unsqueeze(-1) - torch.arange(length), {}
        for kind, window in self._windows.items():
            is_hidden = (distance < 0) | (distance >= (window or length))
            mask = torch.zeros(is_hidden.shape, dtype=self.module.dtype).masked_fill_(is_hidden, float("-inf"))
            masks[kind] = mask.unsqueeze(1)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _features(self, image: PromptImage) -> Tensor:
        """Computes the features of an image and, for DeepStack, those of inner layers [1 + levels, tokens, h]."""
        if image.digest not in self.features:
            merge = self._vision.spatial_merge_size
            patches = image_patches(image, self._vision.patch_size, merge, self._norm)
            grid = torch.tensor([[1, image.size[0] * merge, image.size[1] * merge]])
            output = self._tower(torch.from_numpy(patches).to(self.module.dtype), grid_thw=grid)
            features = [getattr(output, "pooler_output", output), *getattr(output, "deepstack_features", ())]
            self.features[image.digest] = torch.stack(features)
        return self.features[image.digest]

    def _states(
        self, embeddings: Tensor, rotations: Tensor, mask: Any, cache: PromptCache | RowCache, **deep: Any
    ) -> Tensor:
        """Computes hidden states [n, T, h]. `rotations`: RoPE's positions [n, T], or [3, n, T] with images."""
        states: Tensor = self._decoder(
            inputs_embeds=embeddings,
            position_ids=rotations,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **deep,
        ).last_hidden_state
        return states

    def _logits(self, states: Tensor) -> Tensor:
        """Computes [n, h] -> [n, V], float32."""
        count = len(states)
        if count < FEWEST_ROWS:
            states = torch.nn.functional.pad(states, (0, 0, 0, FEWEST_ROWS - count))
        logits: Tensor = self._head(states)[:count].float()
        return logits


def _rope_shift(request: Request) -> int:
    """Returns RoPE's position of a token after the images, less its position: an image counts as its longer edge."""
    return sum(max(image.size) - image.num_tokens for image in request.images)


def import_transformers() -> None:
    """Imports the modules of transformers that this engine needs. Once, in the process that CPU ranks are forked from."""
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
    """Computes attention without a copy of the heads that a group shares, which transformers' function makes."""
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2).contiguous(), None


def _exact_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Computes attention of `model.exact`. A prompt is longer than one token: it is padded to full blocks."""
    if query.shape[2] > 1:
        output = rowwise.attention(query, key, value, scale=scaling)
    else:
        positions = (attention_mask[:, 0, 0] == 0).sum(1) - 1
        output = rowwise.decoding_attention(query, key, value, positions, scaling)
    return output.transpose(1, 2).contiguous(), None


def _use_exact_expressions(module: torch.nn.Module) -> None:
    """Replaces the layers' computations by the expressions of `model.exact`."""

    def row_parallel(layer: Any, x: Tensor) -> Tensor:  # no family has a bias there
        return rowwise.partial_product(x, layer.weight).to(x.dtype)

    def product(layer: Any, x: Tensor) -> Tensor:
        return rowwise.product(x, layer.weight, layer.bias)

    def norm(layer: Any, x: Tensor) -> Tensor:
        return rowwise.rms_norm(x, layer.weight, layer.variance_epsilon)

    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.Linear):
            expression = row_parallel if name.endswith((".o_proj", ".down_proj")) else product
            layer.forward = functools.partial(expression, layer)  # type: ignore[method-assign]
        elif type(layer).__name__.endswith("RMSNorm"):
            layer.forward = functools.partial(norm, layer)
        elif hasattr(layer, "act_fn"):
            layer.act_fn.forward = rowwise.silu  # type: ignore[union-attr]


# -- Sampling ----------------------------------------------------------------------------------------------------------

_BELOW_ONE = 1 - 2.0**-50  # times a sum, it stays below the sum


def sample_tokens(
    logits: Tensor,
    requests: Sequence[Request],
    uniform: Sequence[Callable[[], float]],
    log_softmax: Callable[[Tensor], Tensor] = functools.partial(torch.log_softmax, dim=-1),  # noqa: B008
) -> tuple[list[int], list[float], list[KeptIds]]:
    """Samples one token for each row of logits [n, V], by the temperature and truncation of the row's request.

    Inverts the cumulative distribution at one uniform number per token. `uniform[row]` gives the next number of the row's
    generator in [0, 1). A greedy row (temperature 0) uses none: it gets the most likely token and its log-probability at
    temperature 1. Rows do not depend on each other. The sums are in float64, so that a vocabulary of 10^5 tokens loses
    nothing. Returns the tokens, their log-probabilities and `Completion.kept`.
    """
    temperatures = [request.temperature or 1.0 for request in requests]
    if set(temperatures) != {1.0}:
        logits = logits / torch.tensor(temperatures).unsqueeze(1)
    if any(request.top_k > 0 or request.top_p < 1 or request.min_p > 0 for request in requests):
        logits = torch.stack([_cut(row, request) for row, request in zip(logits, requests, strict=True)])
    logprobs = log_softmax(logits)
    sums = logprobs.double().exp_().cumsum(-1)
    is_greedy = [request.temperature == 0 for request in requests]
    numbers = [0.0 if g else min(u(), _BELOW_ONE) for g, u in zip(is_greedy, uniform, strict=True)]
    targets = torch.tensor(numbers, dtype=torch.float64).unsqueeze(1) * sums[:, -1:]
    tokens = torch.searchsorted(sums, targets, right=True)  # the first sum above: never a token of probability 0
    if any(is_greedy):
        tokens = torch.where(torch.tensor(is_greedy).unsqueeze(1), logprobs.argmax(-1, keepdim=True), tokens)
    kept: list[KeptIds] = []
    for request, row in zip(requests, logits, strict=True):
        ids = row.isfinite().nonzero()[:, 0].int().numpy() if request.max_kept else None
        kept.append(ids if ids is not None and len(ids) < min(request.max_kept, len(row)) else None)
    return tokens[:, 0].tolist(), logprobs.gather(1, tokens)[:, 0].tolist(), kept


def _cut(logits: Tensor, request: Request) -> Tensor:
    """Puts minus infinity outside the tokens of logits [V] that the request's truncation keeps (`Truncation`)."""
    if request.min_p > 0:
        logits = logits.masked_fill(logits < logits.max() + math.log(request.min_p), float("-inf"))
    if 0 < request.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(request.top_k).values[-1], float("-inf"))
    if request.top_p < 1:
        ordered, order = logits.sort(descending=True, stable=True)
        probabilities = ordered.double().softmax(0)
        is_out = probabilities.cumsum(0) - probabilities >= request.top_p
        is_out[0] = False
        logits = logits.masked_fill(torch.zeros_like(is_out).scatter_(0, order, is_out), float("-inf"))
    return logits


# -- The engine --------------------------------------------------------------------------------------------------------


@dataclass
class _Entry:
    """One unfinished request, and its response so far."""

    number: int  # of its submission
    request_id: str
    request: Request
    stops: frozenset[int]
    generator: random.Random
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[KeptIds] = field(default_factory=list)

    def finish_reason(self) -> str | None:
        """Returns why the last token ends the response, or None."""
        stop, written = self.request.stop, self.request.written
        if self.response_ids[-1] in self.stops:
            return "stop"
        if stop is not None and stop.completed_by([*written, *self.response_ids] if written else self.response_ids):
            return "stop"
        return "length" if len(self.response_ids) == self.request.max_tokens else None


def _prompt(request: Request) -> tuple[Any, ...]:
    """Returns everything that the keys and values of a prompt depend on."""
    return (request.prompt_ids, *((image.digest, image.first) for image in request.images))


class RunningBatch:
    """The unfinished requests. New ones join at the next step, finished ones leave at once.

    `max_rows` bounds the rows that are decoded together, `max_tokens` the prompt tokens of one step (or one prompt).
    """

    def __init__(self, model: RowModel, max_rows: int, max_tokens: int, eos_token_ids: Iterable[int]) -> None:
        self._model, self._max_rows, self._max_tokens = model, max_rows, max_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._cache = RowCache()
        self._waiting: deque[_Entry] = deque()
        self._running: list[_Entry] = []  # in the order of the cache's rows
        self._num_submitted = 0
        self._prompt_tokens = self._shared_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def __contains__(self, request_id: str) -> bool:
        return any(entry.request_id == request_id for entry in (*self._waiting, *self._running))

    def add(self, request_id: str, request: Request) -> None:
        """Queues a request."""
        stops, generator = self._eos_token_ids.union(request.all_stop_token_ids), random.Random(request.seed)
        self._waiting.append(_Entry(self._num_submitted, request_id, request, stops, generator))
        self._num_submitted += 1

    def abort(self, request_ids: Sequence[str]) -> None:
        """Removes requests."""
        names = set(request_ids)
        self._waiting = deque(entry for entry in self._waiting if entry.request_id not in names)
        self._leave([row for row, entry in enumerate(self._running) if entry.request_id in names])

    def cache_statistics(self) -> tuple[int, int]:
        """See RolloutEngine; hits are tokens of prompts that were computed for another request of the same step."""
        counts = self._prompt_tokens, self._shared_tokens
        self._prompt_tokens = self._shared_tokens = 0
        return counts

    def step(self) -> list[tuple[str, Completion]]:
        """Samples a token for each running request, and the first one for those that join.

        Returns what has finished, in order of submission.
        """
        finished = self._decode() if self._running else []
        for joining in self._joining():
            finished += self._prefill(joining)
        finished.sort(key=lambda entry: entry.number)
        return [
            (
                entry.request_id,
                Completion(entry.response_ids, entry.logprobs, entry.finish_reason() or "", kept=entry.kept),
            )
            for entry in finished
        ]

    def _joining(self) -> Iterable[list[_Entry]]:
        """Removes waiting requests while there is room, in groups of prompts with one aligned length."""
        groups: dict[int, list[_Entry]] = {}
        prompts: set[Any] = set()
        room, tokens = self._max_rows - len(self._running), 0
        while self._waiting and room:
            request = self._waiting[0].request
            size = aligned(len(request.prompt_ids))
            if _prompt(request) not in prompts:
                tokens += size
                if prompts and tokens > self._max_tokens:
                    break
                prompts.add(_prompt(request))
            groups.setdefault(size, []).append(self._waiting.popleft())
            room -= 1
        return groups.values()

    def _prefill(self, joining: list[_Entry]) -> list[_Entry]:
        """Computes each different prompt once, and samples the first tokens."""
        different = {_prompt(entry.request): entry.request for entry in joining}
        number_of = {prompt: number for number, prompt in enumerate(different)}
        sources = [number_of[_prompt(entry.request)] for entry in joining]
        prompts = [request.prompt_ids for request in different.values()]
        logits, computed = self._model.prefill(prompts, [request.images for request in different.values()])
        first, everyone = len(self._running), [*self._running, *joining]
        longest = max(len(e.request.prompt_ids) + e.request.max_tokens for e in everyone)
        self._cache.reserve(max(len(everyone), FEWEST_ROWS), aligned(longest), computed)
        self._cache.insert(first, computed, sources)
        self._running = everyone
        tokens = sum(len(entry.request.prompt_ids) for entry in joining)
        self._prompt_tokens += tokens
        self._shared_tokens += tokens - sum(map(len, prompts))
        return self._sample(first, logits[sources])

    def _decode(self) -> list[_Entry]:
        tokens = [entry.response_ids[-1] for entry in self._running]
        positions = [len(entry.request.prompt_ids) + len(entry.response_ids) - 1 for entry in self._running]
        shifts = [_rope_shift(entry.request) for entry in self._running]
        return self._sample(0, self._model.decode(tokens, positions, self._cache, shifts if any(shifts) else None))

    def _sample(self, first: int, logits: Tensor) -> list[_Entry]:
        """Adds a token to the running requests from row `first` on. Removes and returns those that finish."""
        entries = self._running[first:]
        requests, numbers = [e.request for e in entries], [e.generator.random for e in entries]
        sampled = zip(entries, *sample_tokens(logits, requests, numbers, self._model.log_softmax), strict=True)
        done = []
        for row, (entry, token, logprob, kept) in enumerate(sampled, start=first):
            entry.response_ids.append(token)
            entry.logprobs.append(logprob)
            if entry.request.max_kept:
                entry.kept.append(kept)
            if entry.finish_reason():
                done.append(row)
        return self._leave(done)

    def _leave(self, rows: list[int]) -> list[_Entry]:
        """Removes rows. Rows from the end take the places of those before it."""
        if not rows:
            return []
        gone = set(rows)
        size = len(self._running) - len(rows)
        left = [self._running[row] for row in rows]
        holes = [row for row in rows if row < size]
        movers = [row for row in range(size, len(self._running)) if row not in gone]
        self._cache.move(movers, holes)
        for source, target in zip(movers, holes, strict=True):
            self._running[target] = self._running[source]
        del self._running[size:]
        return left


class TransformersOptions(Section):
    """`rollout.engine_options` of this engine."""

    kv_cache_gib: float = Field(1.0, gt=0, le=4096)  # most memory for keys and values on one rank


class TransformersEngine(StatefulEngine):
    """`rollout.engine: transformers`. Raises ConfigError for a model or a device that it cannot serve."""

    Options = TransformersOptions
    requires = {"transformers": "transformers"}  # noqa: RUF012 - declared as ClassVar in the base class
    has_exact_rows = True
    reads_images = returns_kept = True
    serves_experts = False  # transformers keeps the experts of a layer in one tensor

    @classmethod
    def problems(cls, rollout: RolloutConfig, options: TransformersOptions) -> Iterator[str]:
        """See RolloutEngine."""
        if (tp := rollout.tensor_model_parallel_size) > 1:
            yield (
                f"rollout.tensor_model_parallel_size={tp} with rollout.engine=transformers: this engine has the whole model"
                " on each rank; set rollout.tensor_model_parallel_size=1 (actor.megatron's may be larger), or"
                " rollout.engine=vllm"
            )
        if rollout.quantization is not None:
            yield (
                f"rollout.quantization={rollout.quantization} with rollout.engine=transformers: this engine computes in"
                " model.dtype; leave rollout.quantization out, or set rollout.engine=vllm"
            )
        if rollout.engine_kwargs:
            yield (
                f"rollout.engine_kwargs={rollout.engine_kwargs} with rollout.engine=transformers: they are arguments of"
                " vllm.LLM; leave them out"
            )

    def __init__(self, setup: EngineSetup) -> None:
        if setup.device.is_cuda:
            raise ConfigError(
                "rollout.engine=transformers has no GPU path; set rollout.engine=vllm or trainer.device=cpu"
            )
        self._mesh, self._tensors, self._max_model_len = setup.mesh, setup.tensors, setup.max_model_len
        with setup.device.preserve_rng():  # transformers samples initial weights
            self._model = RowModel(setup.model_path, setup.dtype, exact=setup.exact)
        self._vocab_size = self._model.vocab_size
        self._weights = self._model.tensors()
        if unknown := [name for name in setup.tensors.tensors if name not in self._weights]:
            raise ConfigError(
                f"rollout.engine=transformers: transformers' model has no tensor {unknown[0]!r} (and {len(unknown) - 1}"
                " more): it keeps this architecture's weights in another form; set rollout.engine=vllm"
            )
        self._max_tokens = setup.rollout.max_num_batched_tokens
        max_rows = min(setup.rollout.sequences, self._num_rows(setup.options))
        self._queue = RunningBatch(self._model, max_rows, self._max_tokens, setup.eos_token_ids)
        self._can_sleep = setup.rollout.free_cache_engine

    def _num_rows(self, options: TransformersOptions) -> int:
        """Counts the rows of the largest length that fit into the cache."""
        with torch.inference_mode():
            token_bytes = self._model.prefill([[0]])[1].token_bytes()
        row_bytes = token_bytes * aligned(self._max_model_len)
        rows = int(options.kv_cache_gib * 2**30) // row_bytes
        if not rows:
            raise ConfigError(
                f"rollout.engine_options.kv_cache_gib={options.kv_cache_gib:g}: one sequence of {self._max_model_len} tokens"
                f" needs {token_bytes} bytes x {aligned(self._max_model_len)} = {row_bytes / 2**30:.3g} GiB; set at least"
                " that"
            )
        return rows

    # -- weights -------------------------------------------------------------------------------------------------------

    def load_weights(self, stream: Iterator[WeightBucket], version: int) -> None:
        """See RolloutEngine. Collective over the world."""
        self._version = None
        self._model.features.clear()
        self._mesh.agree(load_verified(stream, self._tensors.tensors, self._load, self._unloadable()))
        self._version = version

    @torch.no_grad()
    def _load(self, bucket: WeightBucket) -> None:
        for name, tensor in bucket:
            self._weights[name].copy_(tensor)

    def digests(self) -> dict[str, int]:
        """See RolloutEngine. Digests the live memory of every parameter, which is complete on each rank."""
        self._require_usable(awake=False)
        digests = [slice_digest(self._weights[name], tensor, 0) for name, tensor in self._tensors.tensors.items()]
        return dict(zip(self._tensors.tensors, torch.stack(digests).tolist(), strict=True))

    # -- generation ----------------------------------------------------------------------------------------------------

    def submit(self, request_id: str, request: Request, version: int) -> None:
        self.require(version)
        self._require_new(request_id, request)
        self._queue.add(request_id, request)

    def _working(self) -> contextlib.AbstractContextManager[Any]:
        return torch.inference_mode()

    @torch.inference_mode()
    def logprobs(self, sequences: list[list[int]], images: Sequence[tuple[PromptImage, ...]] = ()) -> list[list[float]]:
        self._require_sequences(sequences, images)
        rows: list[list[float]] = []
        per_pass = max(1, self._max_tokens // aligned(self._max_model_len))
        for first in range(0, len(sequences), per_pass):
            part = slice(first, first + per_pass)
            rows += self._model.logprobs(sequences[part], images[part])
        return rows

    def shutdown(self) -> None:
        """See RolloutEngine. May be called twice."""
        self._version, self._broken = None, "the engine has been shut down"
        self._queue = RunningBatch(self._model, 1, 1, ())  # frees the cache
