"""Generator: prompts -> samples -> rewards, for this rollout block's share of them.

The requests are ordered by prompt, then by sample, and cut into one contiguous range per rollout block, of nearly equal
length. So a prompt's samples stay together and share its cached prefix, except where a cut falls. Every request has its
own seed: the cuts decide only where a sample is drawn. Each response goes to the reward workers when it is complete, while
the others are still drawn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from grpo_megatron.config import RolloutConfig
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.rewards.workers.pool import RewardPool
from grpo_megatron.rollout.engine import Request, RolloutEngine, sample_seed
from grpo_megatron.rollout.stop import StopTexts
from grpo_megatron.sampling.failures import check_failures
from grpo_megatron.sampling.grading import Grading
from grpo_megatron.types import GREEDY, Prompt, Sample


class Generator:
    """Draws and rewards n samples of every prompt, spread over the rollout blocks. Serves training and validation.

    `pool` is None on ranks that are not the leader of their rollout block. `weights_digest` tells what the engine holds.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        pool: RewardPool | None,
        tokenizer: Any,
        mesh: Mesh,
        rollout: RolloutConfig,
        weights_digest: Callable[[], str],
        *,
        max_failed_ratio: float = 1.0,
    ) -> None:
        self.engine, self.tokenizer, self.mesh, self.seed = engine, tokenizer, mesh, rollout.seed
        self.grading = Grading(pool, tokenizer)
        self.stop = StopTexts(tokenizer, rollout.stop) if rollout.stop else None
        self.stop_token_ids = tuple(rollout.stop_token_ids)
        self.weights_digest, self.max_failed_ratio = weights_digest, max_failed_ratio

    def draw(
        self,
        prompts: Sequence[Prompt],
        n: int,
        *,
        draw_id: int,
        version: int,
        max_tokens: int,
        temperature: float,
        top_p: float = 1.0,
        greedy: bool = False,
        metrics: Metrics,
    ) -> list[Sample]:
        """This block's samples, in (prompt, index) order. Collective. Only the block's leader knows their rewards.

        `draw_id` (the step) and the prompt's uid seed the draws. A prompt that is in `prompts` twice gets different
        seeds. `greedy` adds one greedy response per prompt, with index `GREEDY`. `version` is that of the engine's
        weights. Raises RankError on every rank when the reward workers of any rank cannot run at all, or when more than
        `max_failed_ratio` of all ranks' samples get no reward.
        """
        local_requests = share_of_block(len(prompts), n, self.mesh, greedy=greedy)
        uids = distinct_uids(prompts)
        requests = [
            Request(
                prompt_ids=prompts[p].prompt_ids,
                seed=sample_seed(self.seed, draw_id, uids[p], i),
                max_tokens=max_tokens,
                temperature=0.0 if i == GREEDY else temperature,
                top_p=1.0 if i == GREEDY else top_p,
                stop_token_ids=self.stop_token_ids,
                stop=self.stop,
            )
            for p, i in local_requests
        ]
        samples: dict[int, Sample] = {}
        self.grading.begin(prompt.reward for prompt in prompts)
        with metrics.phase("gen"):
            for finished in self.engine.stream(requests, version):
                for number, completion in finished:
                    p, i = local_requests[number]
                    samples[number] = Sample(
                        prompt=prompts[p],
                        prompt_index=p,
                        index=i,
                        response_ids=completion.response_ids,
                        rollout_logprobs=completion.logprobs,
                        finish_reason=completion.finish_reason,
                        version=version,
                        weights_digest=self.weights_digest(),
                    )
                    self.grading.add(samples[number])
                self.grading.serve()
        self._record_cache(metrics)
        drawn = [samples[number] for number in range(len(requests))]
        self._finish_grading(drawn, draw_id, version, metrics)
        return drawn

    def _finish_grading(self, samples: Sequence[Sample], draw_id: int, version: int, metrics: Metrics) -> None:
        with metrics.phase("reward"):  # what is left of the grading
            self.mesh.agree(self.grading.finish())
            what = f"step {version}" if draw_id >= 0 else f"the validation before step {version}"
            known = samples if self.mesh.is_block_leader else []
            check_failures(what, known, self.max_failed_ratio, self.mesh)

    def _record_cache(self, metrics: Metrics) -> None:
        prompt_tokens, cached_tokens = self.engine.cache_statistics()
        metrics.when(self.mesh.is_block_leader).mean(
            "rollout/prefix_cache_hit_rate", float(cached_tokens), float(prompt_tokens)
        )


def share_of_block(num_prompts: int, n: int, mesh: Mesh, *, greedy: bool) -> list[tuple[int, int]]:
    """(prompt, sample) indices that this rollout block draws, in order: see the module's header."""
    indices = ([GREEDY] if greedy else []) + list(range(n))
    wanted = [(p, i) for p in range(num_prompts) for i in indices]
    blocks, block = mesh.num_rollout_blocks, mesh.rollout_block
    return wanted[block * len(wanted) // blocks : (block + 1) * len(wanted) // blocks]


def distinct_uids(prompts: Sequence[Prompt]) -> list[str]:
    """Each prompt's uid with its number of earlier occurrences in the list."""
    seen: Counter[str] = Counter()
    uids = []
    for prompt in prompts:
        uids.append(f"{prompt.uid}#{seen[prompt.uid]}")
        seen[prompt.uid] += 1
    return uids


def record_reward_metrics(metrics: Metrics, samples: Sequence[Sample]) -> None:
    """Means of what the reward functions reported besides the reward, and the shares of samples that they failed on."""
    for sample in samples:
        if sample.index == GREEDY:
            continue
        for name, value in sample.reward_metrics.items():
            if name == "ok":
                metrics.mean("reward/failed_ratio", 1.0 - value, 1)
            elif name == "timeout":
                metrics.mean("reward/timeout_ratio", value, 1)
            else:
                metrics.mean(f"reward/{name}/mean", value, 1)


def record_source_metrics(metrics: Metrics, samples: Sequence[Sample]) -> None:
    """For each source: the mean reward, the number of samples, the mean length of responses in tokens."""
    for sample in samples:
        if sample.index == GREEDY:
            continue
        source = sample.prompt.source
        metrics.sum(f"data/source/{source}/samples", 1)
        metrics.mean(f"response_length/source/{source}/mean", len(sample.response_ids), 1)
        if not math.isnan(sample.reward):
            metrics.mean(f"reward/source/{source}/mean", sample.reward, 1)
