"""Chunks: the next tokens of unfinished responses, so many of each. What `rollout.partial` draws with.

A response that has been drawn to its token t goes on as a request whose prompt is prompt and response so far. It has a seed
of its own, made of run, draw, prompt, sample and t: not of the step, the rank, or what else is drawn. The first chunk
has the seed of a response that is drawn at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from grpo_megatron.rollout.engine import Request, sample_seed
from grpo_megatron.sampling.generator import Generator
from grpo_megatron.types import UNFINISHED, Draw, Prompt, Sample


class Chunks:
    """`size` tokens at a time, of responses of at most `max_tokens`, drawn at `temperature`."""

    def __init__(self, generator: Generator, *, size: int, max_tokens: int, temperature: float) -> None:
        self.generator, self.size, self.max_tokens, self.temperature = generator, size, max_tokens, temperature

    def begin(self, prompt: Prompt, index: int, version: int) -> Sample:
        """A response without tokens. `advance` sets its digest."""
        return Sample(prompt, 0, index, [], [], UNFINISHED, version)

    def advance(self, responses: Sequence[tuple[Sample, int, str]], version: int) -> None:
        """Draw up to `size` tokens of each unfinished (sample, draw id, uid), by weights `version`. Collective over the block.

        What becomes complete goes to the reward workers at once.
        """
        generator = self.generator
        requests = [self._request(*response) for response in responses]
        for finished in generator.engine.stream(requests, version):
            for number, completion in finished:
                sample = responses[number][0]
                self._extend(sample, completion.response_ids, completion.logprobs, version)
                is_cut = completion.finish_reason == "length" and len(sample.response_ids) < self.max_tokens
                sample.finish_reason = UNFINISHED if is_cut else completion.finish_reason
                if not is_cut:
                    generator.grading.add(sample)
            generator.grading.serve()

    def _request(self, sample: Sample, draw_id: int, uid: str) -> Request:
        start = len(sample.response_ids)
        request = self.generator.request(
            (*sample.prompt.prompt_ids, *sample.response_ids),
            sample.index,
            sample_seed(self.generator.seed, draw_id, f"{uid}@{start}" if start else uid, sample.index),
            min(self.size, self.max_tokens - start),
            self.temperature,
            top_p=1.0,
        )
        return replace(request, num_written=start)

    def _extend(self, sample: Sample, ids: list[int], logprobs: list[float], version: int) -> None:
        start, digest = len(sample.response_ids), self.generator.weights_digest()
        if not sample.draws or sample.draws[-1].version != version:
            sample.draws.append(Draw(start, start, version, digest))
        sample.response_ids.extend(ids)
        sample.rollout_logprobs.extend(logprobs)
        sample.loss_mask.extend([1] * len(ids))
        sample.draws[-1] = replace(sample.draws[-1], end=len(sample.response_ids))
        sample.weights_digest = sample.draws[0].weights_digest
