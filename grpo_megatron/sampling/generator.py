"""Generator: prompts -> samples -> rewards, this rollout block's share.

The requests, prompt by prompt and sample by sample, are cut into equal runs, one a block: a prompt's samples stay
together (and share its cached prefix) except where a cut falls. Every draw has a seed of its own, so the cuts change
nothing but where a sample is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.rewards.workers.pool import RewardPool
from grpo_megatron.rollout.engine import Request, RolloutEngine, sample_seed
from grpo_megatron.types import GREEDY, Prompt, Sample


class Generator:
    """Draws and reward_metrics n samples of every prompt, spread over the rollout blocks. Serves training and evaluation."""

    def __init__(self, engine: RolloutEngine, pool: RewardPool | None, tokenizer: Any, mesh: Mesh, seed: int) -> None:
        self.engine, self.pool, self.tokenizer, self.mesh, self.seed = engine, pool, tokenizer, mesh, seed

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
        """This block's samples, in (prompt, index) order; scored on the block's leader only.

        `draw_id` (the step) and the prompt's uid seed the draws; a prompt that comes twice in `prompts` is drawn anew.
        `greedy`: one greedy response more of every prompt, with index `GREEDY`.
        """
        indices = ([GREEDY] if greedy else []) + list(range(n))
        requests = [(p, i) for p in range(len(prompts)) for i in indices]
        blocks, block = self.mesh.num_rollout_blocks, self.mesh.rollout_block
        mine = requests[block * len(requests) // blocks : (block + 1) * len(requests) // blocks]
        seeds = self._uids(prompts)
        with metrics.phase("gen"):
            completions = self.engine.generate(
                [
                    Request(
                        prompt_ids=prompts[p].prompt_ids,
                        seed=sample_seed(self.seed, draw_id, seeds[p], i),
                        max_tokens=max_tokens,
                        temperature=0.0 if i == GREEDY else temperature,
                        top_p=1.0 if i == GREEDY else top_p,
                    )
                    for p, i in mine
                ],
                version,
            )
            samples = [
                Sample(
                    prompt=prompts[p],
                    prompt_index=p,
                    index=i,
                    response_ids=completion.response_ids,
                    rollout_logprobs=completion.logprobs,
                    finish_reason=completion.finish_reason,
                    version=version,
                )
                for (p, i), completion in zip(mine, completions, strict=True)
            ]
        with metrics.phase("reward"):
            problem = None
            try:
                self._score(samples)
            except RuntimeError as error:  # the workers cannot run at all: no rank may go on
                problem = str(error)
            self.mesh.agree(problem)
        return samples

    def _uids(self, prompts: Sequence[Prompt]) -> list[str]:
        seen: Counter[str] = Counter()
        uids = []
        for prompt in prompts:
            uids.append(f"{prompt.uid}#{seen[prompt.uid]}")
            seen[prompt.uid] += 1
        return uids

    def _score(self, samples: list[Sample]) -> None:
        if self.pool is None:
            return
        for sample in samples:
            sample.text = self._text(sample.response_ids)
        results = self.pool.grade([(s.prompt.reward, s.text, s.prompt.answer) for s in samples])
        for sample, result in zip(samples, results, strict=True):
            sample.reward, sample.reward_metrics = (
                result.reward,
                {**result.metrics, "ok": float(result.status == "ok")},
            )
            sample.reward_metrics["timeout"] = float(result.status == "timeout")
            sample.steps = self._step_tokens(sample, result.steps)

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def _step_tokens(self, sample: Sample, steps: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
        """(end in the text, reward) -> (token that completes it, reward): the last of the shortest run with that text.

        Steps that end within one token are one step, with their mean reward.
        """
        ids, low = sample.response_ids, 0
        rewards: dict[int, list[float]] = {}
        for end, reward in steps:
            high = len(ids) - 1
            while low < high:
                middle = (low + high) // 2
                if len(self._text(ids[: middle + 1])) >= end:
                    high = middle
                else:
                    low = middle + 1
            rewards.setdefault(low, []).append(reward)
        return [(token, sum(values) / len(values)) for token, values in rewards.items()]


def score_metrics(metrics: Metrics, samples: Sequence[Sample]) -> None:
    """Means of whatever the rewards reported beside the score; failures of the rewards themselves."""
    for sample in samples:
        for name, value in sample.reward_metrics.items() if sample.index != GREEDY else ():
            if name == "ok":
                metrics.mean("reward/failed_ratio", 1.0 - value, 1)
            elif name == "timeout":
                metrics.mean("reward/timeout_ratio", value, 1)
            else:
                metrics.mean(f"reward/{name}/mean", value, 1)
