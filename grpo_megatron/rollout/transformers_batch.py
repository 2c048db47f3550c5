"""RunningBatch: the unfinished requests of the transformers engine. New ones join at the next step, finished ones leave."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from grpo_megatron.rollout.engine import Completion, Request
from grpo_megatron.rollout.token_draw import draw_tokens
from grpo_megatron.rollout.transformers_cache import RowCache, aligned
from grpo_megatron.rollout.transformers_model import FEWEST_ROWS, RowModel


@dataclass
class _Entry:
    """One unfinished request, and what it has drawn so far."""

    number: int  # of its submission
    request_id: str
    request: Request
    stops: frozenset[int]
    generator: random.Random
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens in the cache, after the step that computes the last token drawn."""
        return len(self.request.prompt_ids) + len(self.response_ids)

    def finish_reason(self) -> str | None:
        """Why the last token ends the response, or None."""
        stop, written = self.request.stop, self.request.written
        if self.response_ids[-1] in self.stops:
            return "stop"
        if stop is not None and stop.completed_by([*written, *self.response_ids] if written else self.response_ids):
            return "stop"
        return "length" if len(self.response_ids) == self.request.max_tokens else None


class RunningBatch:
    """`max_rows` bounds the rows that are decoded together, `max_tokens` the prompt tokens of one step (or one prompt)."""

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
        """Queue a request."""
        own = request.stop.token_ids if request.stop else ()
        stops = self._eos_token_ids.union(request.stop_token_ids, own)
        generator = random.Random(request.seed)
        self._waiting.append(_Entry(self._num_submitted, request_id, request, stops, generator))
        self._num_submitted += 1

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests."""
        names = set(request_ids)
        self._waiting = deque(entry for entry in self._waiting if entry.request_id not in names)
        self._leave([row for row, entry in enumerate(self._running) if entry.request_id in names])

    def cache_statistics(self) -> tuple[int, int]:
        """See RolloutEngine: tokens of prompts that were computed for another request of the same step."""
        counts = self._prompt_tokens, self._shared_tokens
        self._prompt_tokens = self._shared_tokens = 0
        return counts

    def step(self) -> list[tuple[str, Completion]]:
        """One token for each running request, and the first one for those that join; what finished, in order of submission."""
        finished = self._decode() if self._running else []
        for joining in self._joining():
            finished += self._prefill(joining)
        finished.sort(key=lambda entry: entry.number)
        return [
            (entry.request_id, Completion(entry.response_ids, entry.logprobs, entry.finish_reason() or ""))
            for entry in finished
        ]

    def _joining(self) -> Iterable[list[_Entry]]:
        """The waiting requests that there is room for, in groups of prompts with one aligned length."""
        groups: dict[int, list[_Entry]] = {}
        prompts: set[tuple[int, ...]] = set()
        room, tokens = self._max_rows - len(self._running), 0
        while self._waiting and room:
            prompt = self._waiting[0].request.prompt_ids
            size = aligned(len(prompt))
            if prompt not in prompts:
                tokens += size
                if prompts and tokens > self._max_tokens:
                    break
                prompts.add(prompt)
            groups.setdefault(size, []).append(self._waiting.popleft())
            room -= 1
        return groups.values()

    def _prefill(self, joining: list[_Entry]) -> list[_Entry]:
        """Compute each different prompt once, and draw the first tokens."""
        prompts = list(dict.fromkeys(entry.request.prompt_ids for entry in joining))
        number_of = {prompt: number for number, prompt in enumerate(prompts)}
        sources = [number_of[entry.request.prompt_ids] for entry in joining]
        logits, computed = self._model.prefill(prompts)
        first, everyone = len(self._running), [*self._running, *joining]
        longest = max(len(e.request.prompt_ids) + e.request.max_tokens for e in everyone)
        self._cache.reserve(max(len(everyone), FEWEST_ROWS), aligned(longest), computed)
        self._cache.insert(first, computed, sources)
        self._running = everyone
        tokens = sum(len(entry.request.prompt_ids) for entry in joining)
        self._prompt_tokens += tokens
        self._shared_tokens += tokens - sum(map(len, prompts))
        return self._draw(first, logits[sources])

    def _decode(self) -> list[_Entry]:
        tokens = [entry.response_ids[-1] for entry in self._running]
        positions = [entry.length - 1 for entry in self._running]
        return self._draw(0, self._model.decode(tokens, positions, self._cache))

    def _draw(self, first: int, logits: Tensor) -> list[_Entry]:
        """The next token of the running requests from row `first` on. Those that finish leave, and are returned."""
        entries = self._running[first:]
        tokens, logprobs = draw_tokens(logits, [e.request for e in entries], [e.generator.random for e in entries])
        done = []
        for row, (entry, token, logprob) in enumerate(zip(entries, tokens, logprobs, strict=True), start=first):
            entry.response_ids.append(token)
            entry.logprobs.append(logprob)
            if entry.finish_reason():
                done.append(row)
        return self._leave(done)

    def _leave(self, rows: list[int]) -> list[_Entry]:
        """Remove rows. Rows from the end take the places of those before it."""
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
