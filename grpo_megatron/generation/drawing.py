"""Drawing the answers of `generate` on the rollout engine, with the requests that training and validation make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_megatron.device import Device
from grpo_megatron.evaluation.engine import WEIGHTS_VERSION, load_engine
from grpo_megatron.generation.settings import GenerationSettings
from grpo_megatron.parallel.mesh import Mesh, build_mesh
from grpo_megatron.rollout.engine import Request, RolloutEngine, StopTexts, sample_seed

# -- TextStream: the text of an answer while its tokens are drawn, each character once it is complete ------------------

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what the first bytes of a character decode to


class TextStream:
    """Writes the text that each new token adds. What it has written in the end is the decoded answer.

    A token decodes to something else at the beginning of a text than within it. So the new tokens are decoded behind those
    that were written last, and only what exceeds the latter is written.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], write: Callable[[str], None]) -> None:
        self._decode, self._write = decode, write
        self._ids: Sequence[int] = ()
        self._first = self._end = 0  # of the tokens that were written last
        self._written = ""

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def add(self, ids: Sequence[int]) -> None:
        """`ids` are all tokens so far, of which the last is new."""
        self._ids = ids
        text, before = self._decode(ids[self._first :]), self._decode(ids[self._first : self._end])
        if len(text) > len(before) and not text.endswith(_INCOMPLETE):
            self._write_piece(text[len(before) :])
            self._first, self._end = self._end, len(ids)

    def finish(self, ids: Sequence[int] | None = None) -> str:
        """Write the rest, incomplete characters too. `ids`: the whole answer; None: the tokens so far. Returns its text."""
        whole = self._decode(self._ids if ids is None else ids)
        if not whole.startswith(self._written):  # a tokenizer that changes what it has decoded before
            self._write_piece("\n" + whole)
        elif len(whole) > len(self._written):
            self._write_piece(whole[len(self._written) :])
        return whole

    def _write_piece(self, piece: str) -> None:
        self._written += piece
        self._write(piece)


COLLECTIVE_TIMEOUT_S = 24 * 3600.0  # of a collective


@dataclass(frozen=True)
class ModelAnswer:
    """One answer. `finish_reason`: "stop" at an end token or a stop text, "length" when it was cut, "user" by the user."""

    sample: int
    text: str
    num_tokens: int
    finish_reason: str


class WatchedStop(StopTexts):
    """Stop texts, or none, and a watcher of each token: engines ask after every token whether it completes a text."""

    def __init__(self, stop: StopTexts | None, watch: Callable[[Sequence[int]], None]) -> None:
        self.token_ids = stop.token_ids if stop else ()
        self._stop, self._watch = stop, watch

    def completed_by(self, response_ids: Sequence[int]) -> bool:
        self._watch(response_ids)
        return self._stop is not None and self._stop.completed_by(response_ids)


class Answerer:
    """The engine of this process, or this rank's part of it."""

    def __init__(self, settings: GenerationSettings) -> None:
        """Collective over the ranks. Raises RankError."""
        self.settings, options = settings, settings.options
        device = Device(options.device)
        self.mesh: Mesh = build_mesh(
            device, tp=1, pp=1, rollout_tp=options.tp, seed=options.seed, timeout_s=COLLECTIVE_TIMEOUT_S
        )
        self.engine: RolloutEngine = load_engine(
            settings.source,
            self.mesh,
            device,
            options,
            dtype=settings.dtype,
            max_model_len=settings.max_model_len,
            eos_token_ids=settings.end_tokens.ids,
        )
        stop = settings.style.stop
        self._stop = StopTexts(settings.tokenizer, stop) if stop else None

    def all_answers(self) -> Iterator[list[ModelAnswer]]:
        """Of each prompt of the settings, in order; `--max-num-seqs` of them are drawn at a time."""
        prompts, count = self.settings.prompts, self.settings.options.samples
        size = max(1, self.settings.options.max_num_seqs // count)
        for start in range(0, len(prompts), size):
            batch = prompts[start : start + size]
            drawn = self.answers([(one.prompt_ids, one.uid) for one in batch], self.settings.max_tokens)
            yield from (drawn[n * count : (n + 1) * count] for n in range(len(batch)))

    def answers(self, prompts: Sequence[tuple[Sequence[int], str]], max_tokens: int) -> list[ModelAnswer]:
        """`--samples` answers of each (token ids, uid), prompt by prompt. The uid decides the draws."""
        keys = [(ids, uid, sample) for ids, uid in prompts for sample in range(self.settings.options.samples)]
        requests = [self._request(ids, uid, sample, max_tokens, self._stop) for ids, uid, sample in keys]
        completions = self.engine.generate(requests, WEIGHTS_VERSION)
        return [
            ModelAnswer(sample, self._decode(one.response_ids), len(one.response_ids), one.finish_reason)
            for (_, _, sample), one in zip(keys, completions, strict=True)
        ]

    def streamed(
        self, ids: Sequence[int], uid: str, max_tokens: int, write: Callable[[str], None], is_ended: Callable[[], bool]
    ) -> ModelAnswer:
        """One answer, in one process. `write` gets its text in pieces. `is_ended`, asked after each step, ends it."""
        text = TextStream(self._decode, write)
        request = self._request(ids, uid, 0, max_tokens, WatchedStop(self._stop, text.add))
        self.engine.submit(uid, request, WEIGHTS_VERSION)
        while not is_ended():
            for _, one in self.engine.poll():
                return ModelAnswer(0, text.finish(one.response_ids), len(one.response_ids), one.finish_reason)
        self.engine.abort([uid])
        return ModelAnswer(0, text.finish(), text.num_tokens, "user")

    def _request(self, ids: Sequence[int], uid: str, sample: int, max_tokens: int, stop: StopTexts | None) -> Request:
        options = self.settings.options
        return Request(
            prompt_ids=tuple(ids),
            seed=sample_seed(options.seed, 0, uid, sample),
            max_tokens=max_tokens,
            temperature=options.temperature,
            top_p=options.top_p if options.temperature else 1.0,
            top_k=(options.top_k or -1) if options.temperature else -1,
            stop_token_ids=tuple(self.settings.style.stop_token_ids),
            stop=stop,
        )

    def _decode(self, ids: Any) -> str:
        return str(self.settings.tokenizer.decode(ids, skip_special_tokens=True))
