"""Generator: prompts -> samples -> rewards, for this engine replica's share of them.

Every request has its own seed, so which replica generates it, and when, changes no sample. A replica without work takes
waiting requests of others. Each response goes to the reward workers when it is complete, while the engine goes on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grpo_megatron.config import RolloutConfig
from grpo_megatron.data.prompts import reward_item, tokens_at
from grpo_megatron.parallel.mesh import Mesh, RankError
from grpo_megatron.processes.pool import FirstFailure
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rewards.reward import RewardResult, opened_thought, rewards
from grpo_megatron.rollout.engine import FULL, Completion, Request, RolloutEngine, StopTexts, Truncation, sample_seed
from grpo_megatron.types import BY_MODEL, FAILURES, GREEDY, Prompt, Sample


@dataclass(frozen=True)
class SamplingRound:
    """The samples of one `Generator.sample`.

    Sample number k is response k mod len(indices) to prompt k // len(indices).
    """

    prompts: Sequence[Prompt]
    uids: list[str]  # of the prompts, different from each other
    indices: list[int]  # of the responses to one prompt
    round_id: int
    version: int
    temperature: float
    truncation: Truncation
    run_seed: int
    sizes: list[int]  # responses to each prompt, of `indices`
    limits: list[int]  # tokens of a response to each prompt, at most

    def has(self, number: int) -> bool:
        """Returns whether the sample is wanted: its prompt may have fewer than `indices`."""
        place, index = self.of(number)
        return index < self.sizes[place]

    def seed(self, number: int) -> int:
        """Returns the seed of a sample."""
        place, index = self.of(number)
        return sample_seed(self.run_seed, self.round_id, self.uids[place], index)

    def of(self, number: int) -> tuple[int, int]:
        """Returns the place of the prompt and the index of the response."""
        place, i = divmod(number, len(self.indices))
        return place, self.indices[i]


class Generator:
    """The generator of samples and rewards, spread over the engine replicas. It serves training and validation.

    `pool` is None on ranks that are not the leader of their engine replica. `weights_digest` tells what the engine holds.
    """

    shares_work = (
        True  # earlier lengths decide which replica generates a sample, and idle replicas take the requests of others
    )

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
        self.num_unknown = 0  # tokens of None in Completion.kept, since they were recorded
        self.on_complete: Callable[[Sample], None] = lambda sample: None  # on the leader of an engine replica
        self.stop = StopTexts(tokenizer, rollout.stop) if rollout.stop else None
        self.stop_token_ids, self.capacity = tuple(rollout.stop_token_ids), rollout.sequences
        self.weights_digest, self.max_failed_ratio = weights_digest, max_failed_ratio

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        *,
        round_id: int,
        version: int,
        max_tokens: int,
        temperature: float,
        truncation: Truncation = FULL,
        greedy: bool = False,
        uids: Sequence[str] | None = None,
        history: LengthHistory | None = None,
        limits_by_prompt: bool = False,
        metrics: Metrics,
    ) -> list[Sample]:
        """Sample n responses per prompt. Returns this replica's, in (prompt, index) order; its leader has rewards.

        `round_id` (the step) and the prompt's uid seed the responses. A prompt that is in `prompts` twice gets different
        seeds, unless `uids` names what seeds each prompt. `greedy` adds one greedy response per prompt, with index
        `GREEDY`. `version` is that of the engine's weights. `max_tokens` bounds a response, with the observations of its
        environment. `limits_by_prompt`: a prompt's own `n` and `max_tokens` come first. `history` knows how long earlier
        responses were, and learns how long these are; one of several turns does not read it. Raises RankError on every rank
        when the workers of any rank cannot run at all, or when more than `max_failed_ratio` of all samples get no reward.
        """
        sizes = [prompt.n or n if limits_by_prompt else n for prompt in prompts]
        limits = [prompt.max_tokens or max_tokens if limits_by_prompt else max_tokens for prompt in prompts]
        indices = sample_indices(max(sizes, default=n), greedy=greedy)
        names = distinct_uids(prompts) if uids is None else list(uids)
        settings = round_id, version, temperature, truncation, self.seed, sizes, limits
        wanted = SamplingRound(prompts, names, indices, *settings)
        if not self.shares_work:
            history = None
        expected = None if history is None else history.expected(prompts)
        queues = assign_samples(len(prompts), len(indices), self.mesh.num_engine_replicas, expected)
        queues = [[number for number in queue if wanted.has(number)] for queue in queues]
        drawn: list[Sample] = []
        self.grading.begin((prompt.reward for prompt in prompts), len(queues[self.mesh.engine_replica]))
        with metrics.phase("gen"):
            for finished in self._finished(wanted, queues, metrics):
                for _, sample in finished:
                    drawn.append(sample)
                    self.complete(sample)
                self.grading.serve()
        self.record_cache(metrics)
        drawn.sort(key=lambda sample: (sample.prompt_index, sample.index))
        if history is not None:
            tokens = [0] * len(prompts)
            for sample in drawn if self.mesh.is_replica_leader else ():
                tokens[sample.prompt_index] += len(sample.response_ids)
            history.learn(prompts, self.mesh.total(tokens), [size + greedy for size in sizes])
        self.finish_grading(drawn, round_id, version, metrics)
        return drawn

    def _finished(
        self, wanted: SamplingRound, queues: list[list[int]], metrics: Metrics
    ) -> Iterator[list[tuple[int, Sample]]]:
        """Yields what this replica completes: (number, sample) pairs per engine step. `queues[b]`: the numbers of replica b."""

        def request(number: int) -> Request:
            place, index = wanted.of(number)
            limits = (wanted.limits[place], wanted.temperature, wanted.truncation)
            return self.request(wanted.prompts[place], index, wanted.seed(number), *limits)

        functions = {prompt.reward for prompt in wanted.prompts} - {"", BY_MODEL}
        is_compared = any(rewards.facts(name).compares for name in functions)
        everything = len(wanted.prompts) * len(wanted.indices)
        capacity = everything if is_compared else self.capacity  # sharing would tear compared groups apart
        for finished in stream_shared(self.engine, queues, request, wanted.version, self.mesh, capacity):
            yield [(number, self._sample(wanted, number, completion)) for number, completion in finished]

    def _sample(self, wanted: SamplingRound, number: int, completion: Completion) -> Sample:
        place, index = wanted.of(number)
        return Sample(
            prompt=wanted.prompts[place],
            prompt_index=place,
            index=index,
            response_ids=completion.response_ids,
            rollout_logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            version=wanted.version,
            weights_digest=self.weights_digest(),
            seed=wanted.seed(number),
            routes=completion.routes,
            kept=completion.kept,
        )

    def request(
        self,
        prompt: Prompt,
        index: int,
        seed: int,
        max_tokens: int,
        temperature: float,
        truncation: Truncation,
        written: Sequence[int] = (),
    ) -> Request:
        """Returns the engine's request for sample `index`, which goes on with `written`.

        It ends as all responses of the run do.
        """
        return Request(
            prompt_ids=(*prompt.prompt_ids, *written),
            seed=seed,
            max_tokens=max_tokens,
            temperature=0.0 if index == GREEDY else temperature,
            **vars(FULL if index == GREEDY else truncation),
            stop_token_ids=self.stop_token_ids,
            stop=self.stop,
            num_written=len(written),
            images=prompt.images,
        )

    def complete(self, sample: Sample) -> None:
        """Start what reads a complete sample, while the engine goes on: its grading, and `on_complete`. Returns at once."""
        for token, ids in enumerate(sample.kept):
            if ids is None:  # too many to be recorded: the policy cannot compute this token's probability
                sample.loss_mask[token], sample.kept[token] = 0, np.empty(0, dtype=np.int32)
                self.num_unknown += 1
        self.grading.add(sample)
        if self.mesh.is_replica_leader:
            self.on_complete(sample)

    def finish_grading(self, samples: Sequence[Sample], round_id: int, version: int, metrics: Metrics) -> None:
        """Wait for the rewards of `samples`, all that this replica has sampled. Collective. Raises RankError as `sample` does."""
        with metrics.phase("reward"):  # what is left of the grading
            self.mesh.agree(self.grading.finish())
            self.record_kept(samples, metrics)
            what = f"step {version}" if round_id >= 0 else f"the validation before step {version}"
            known = samples if self.mesh.is_replica_leader else []
            check_failures(what, known, self.max_failed_ratio, self.mesh)

    def record_kept(self, samples: Sequence[Sample], metrics: Metrics) -> None:
        """Record how many tokens `rollout.top_k`, `top_p` and `min_p` left, and the bytes of their ids."""
        leader = metrics.when(self.mesh.is_replica_leader)
        known = [sample for sample in samples if sample.kept]
        for sample in known:
            sizes = [0 if ids is None else len(ids) for ids in sample.kept]
            leader.mean("rollout/kept_tokens/mean", sum(sizes), sum(size > 0 for size in sizes))
            leader.max("rollout/kept_tokens/max", max(sizes))
            leader.mean("rollout/kept_tokens/bytes_per_token", 4 * (len(sizes) + sum(sizes)), len(sizes))
        if known:
            leader.mean("rollout/kept_tokens/unknown_ratio", self.num_unknown, sum(len(one.kept) for one in known))
            self.num_unknown = 0

    def record_cache(self, metrics: Metrics) -> None:
        """Record the share of prompt tokens that the engine had in its prefix cache."""
        prompt_tokens, cached_tokens = self.engine.cache_statistics()
        metrics.when(self.mesh.is_replica_leader).mean(
            "rollout/prefix_cache_hit_rate", float(cached_tokens), float(prompt_tokens)
        )


# -- Assignment ---------------------------------------------------------------------------------------------------------


def sample_indices(n: int, *, greedy: bool) -> list[int]:
    """Returns the indices of the responses to one prompt, in order."""
    return [*([GREEDY] if greedy else []), *range(n)]


def distinct_uids(prompts: Sequence[Prompt]) -> list[str]:
    """Returns each prompt's uid with its number of earlier occurrences in the list."""
    seen: Counter[str] = Counter()
    uids = []
    for prompt in prompts:
        uids.append(f"{prompt.uid}#{seen[prompt.uid]}")
        seen[prompt.uid] += 1
    return uids


MAX_REMEMBERED = 65_536  # prompts; the oldest are forgotten


@dataclass
class LengthHistory:
    """The mean tokens of the last responses to each prompt, by uid. The same on every rank."""

    lengths: dict[str, float] = field(default_factory=dict)

    def expected(self, prompts: Sequence[Prompt]) -> list[float]:
        """Returns tokens per response.

        Prompts without a history count as the mean of the others; all as 0 if none has one.
        """
        known = [self.lengths[prompt.uid] for prompt in prompts if prompt.uid in self.lengths]
        mean = sum(known) / len(known) if known else 0.0
        return [self.lengths.get(prompt.uid, mean) for prompt in prompts]

    def learn(self, prompts: Sequence[Prompt], num_tokens: Sequence[int], sizes: Sequence[int]) -> None:
        """Learn the lengths. `num_tokens`: of all responses of each prompt together, on all ranks; `sizes`: how many."""
        for prompt, total, n in zip(prompts, num_tokens, sizes, strict=True):
            self.lengths.pop(prompt.uid, None)  # to the end of the order
            self.lengths[prompt.uid] = total / n
        for uid in list(self.lengths)[: max(0, len(self.lengths) - MAX_REMEMBERED)]:
            del self.lengths[uid]

    def state(self) -> dict[str, Any]:
        return dict(self.lengths)

    def load_state(self, state: dict[str, Any]) -> None:
        self.lengths = {str(uid): float(length) for uid, length in state.items()}


def assign_samples(
    num_prompts: int, per_prompt: int, num_replicas: int, expected: Sequence[float] | None = None
) -> list[list[int]]:
    """Returns for each replica the numbers of its samples, in its order. Sample i of prompt p is p * per_prompt + i.

    Without `expected`, the samples are cut in order of prompts into one range per replica, of nearly equal length. With
    expected tokens per response, complete prompts go longest first to the replica with the fewest expected tokens (Graham's
    LPT rule), so that no replica begins its longest responses last. A prompt's samples stay together and share its cached
    prefix, except where a cut falls.
    """
    total = num_prompts * per_prompt
    if expected is None or len(set(expected)) <= 1 or num_prompts < num_replicas:
        cuts = [replica * total // num_replicas for replica in range(num_replicas + 1)]
        return [list(range(start, end)) for start, end in zip(cuts, cuts[1:], strict=False)]
    queues: list[list[int]] = [[] for _ in range(num_replicas)]
    loads = [0.0] * num_replicas
    for prompt in sorted(range(num_prompts), key=lambda p: -expected[p]):
        replica = loads.index(min(loads))
        queues[replica].extend(range(prompt * per_prompt, (prompt + 1) * per_prompt))
        loads[replica] += expected[prompt] * per_prompt
    return queues


# -- Sharing -----------------------------------------------------------------------------------------------------------
# A engine replica that runs out of work takes waiting requests of the others, at logical times.
#
# An engine decodes `capacity` sequences at a time. A replica hands its engine no more than that; its other requests wait here.
# Every ROUND engine steps, as long as any request waits anywhere, the replicas tell each other how many wait and how many are
# being sampled. From these numbers every rank computes the same moves: requests at the end of the longest queue go to replicas
# with free places. Nothing is sent, because every rank knows all prompts; and nothing depends on how long a step takes, so
# that the same requests are sampled together in every run.

ROUND = 32  # engine steps: at most so long a replica without work waits for the others


def stream_shared(
    engine: RolloutEngine,
    queues: Sequence[Sequence[int]],
    request: Callable[[int], Request],
    version: int,
    mesh: Mesh,
    capacity: int,
) -> Iterator[list[tuple[int, Completion]]]:
    """Yields what finishes on this replica, one list per engine step. `queues[b]` numbers the requests of replica b, in order.

    Collective over the world while anything waits, then over the replica. Raises as RolloutEngine.stream does.
    """
    if all(len(queue) <= capacity for queue in queues) or mesh.num_engine_replicas == 1:
        own = list(queues[mesh.engine_replica])
        for finished in engine.stream([request(number) for number in own], version):
            yield [(own[place], completion) for place, completion in finished]
        return
    waiting = [list(queue) for queue in queues]
    unfinished: dict[str, int] = {}
    engine.require(version)
    try:
        while any(waiting):
            own = waiting[mesh.engine_replica]
            for _ in range(ROUND):
                while own and len(unfinished) < capacity:
                    number = own.pop(0)
                    engine.submit(str(number), request(number), version)
                    unfinished[str(number)] = number
                if unfinished:
                    yield [(unfinished.pop(key), completion) for key, completion in engine.poll()]
            replicas, counts = mesh.num_engine_replicas, [0] * (2 * mesh.num_engine_replicas)
            if mesh.is_replica_leader:
                counts[mesh.engine_replica], counts[replicas + mesh.engine_replica] = len(own), len(unfinished)
            totals = mesh.total(counts)  # of every replica: how many requests wait, and how many its engine has
            waiting = _moved(waiting, totals[:replicas], totals[replicas:], capacity)
        while unfinished:
            yield [(unfinished.pop(key), completion) for key, completion in engine.poll()]
    finally:
        if unfinished and engine.version is not None:
            engine.abort(list(unfinished))


def _moved(
    waiting: Sequence[Sequence[int]], num_waiting: Sequence[int], num_drawn: Sequence[int], capacity: int
) -> list[list[int]]:
    """Returns the queues after the moves.

    A replica takes its own from the front, so that the last `num_waiting` of its list are left.
    """
    queues = [list(queue[len(queue) - left :]) for queue, left in zip(waiting, num_waiting, strict=True)]
    loads = [left + drawn for left, drawn in zip(num_waiting, num_drawn, strict=True)]
    while True:
        taker = loads.index(min(loads))
        giver = max(range(len(queues)), key=lambda replica: (len(queues[replica]), -replica))
        if loads[taker] >= capacity or not queues[giver] or loads[giver] - loads[taker] < 2:
            return queues
        queues[taker].append(queues[giver].pop())
        loads[taker] += 1
        loads[giver] -= 1


# -- Grading: the rewards of the samples of one round ------------------------------------------------------------------
# Workers grade what is complete while the engine generates the rest. Where grading should take less than WORTH_OVERLAP_S of a
# worker's time, as in the last round with the same functions, it waits until all is generated: workers that wake up for
# microseconds would only take the engine's processor. The rewards are the same either way. A reward that compares the samples
# of its batch gets them all at the end.

WORTH_OVERLAP_S = 0.05
FAILED = ("error", "timeout")  # of RewardResult.status; "none" is no failure


class Grading:
    """The grading of one round: `begin`, then `add` each complete sample and call `serve` often, then `finish`.

    Without a pool it does nothing.
    """

    def __init__(self, pool: RewardPool | None, tokenizer: Any) -> None:
        self.pool, self.tokenizer = pool, tokenizer
        self._functions: frozenset[str] = frozenset()  # of this round
        self._seconds_per_sample: dict[frozenset[str], float] = {}  # in the last round with these functions
        self._overlaps = True
        self._samples: list[Sample] = []  # in the order in which the pool got them
        self._waiting: list[Sample] = []  # for the last one to be sampled
        self._kept = FirstFailure(pool)

    def begin(self, rewards: Iterable[str], num_samples: int) -> None:
        """Prepare for the first sample.

        `rewards` names all reward functions of the round, `num_samples` are to be graded here.
        """
        self._samples, self._waiting, self._kept.text = [], [], None
        self._functions = frozenset(rewards) - {BY_MODEL}
        seconds = self._seconds_per_sample.get(self._functions, math.inf)
        self._overlaps = seconds * num_samples > self._worth_overlap
        self._kept.attempt(lambda pool: pool.begin())

    def add(self, sample: Sample) -> None:
        """Queue a complete sample, if a function rewards it, and set its text. Returns at once."""
        if self.pool is None:
            return
        sample.text = self._text(sample.response_ids)
        if sample.prompt.reward != BY_MODEL:
            if self._overlaps and not rewards.facts(sample.prompt.reward).compares:
                self._samples.append(sample)
                self._submit(sample)
            else:
                self._waiting.append(sample)

    def serve(self) -> None:
        """Hand out and take what can be without waiting."""
        if self._overlaps:
            self._kept.attempt(lambda pool: pool.serve())

    def finish(self) -> str | None:
        """Wait for the last result, then set reward, its metrics and steps of all samples.

        Returns why the workers cannot run at all, if so: then every rank must stop.
        """
        for sample in sorted(self._waiting, key=lambda sample: (sample.prompt_index, sample.index)):
            self._samples.append(sample)
            self._submit(sample)
        results: list[RewardResult] = self._kept.attempt(lambda pool: pool.collect()) or []
        if results:
            has_failed = any(r.status in FAILED for r in results)
            seconds = math.inf if has_failed else sum(r.seconds for r in results) / len(results)
            self._seconds_per_sample[self._functions] = seconds
        for sample, result in zip(self._samples, results, strict=False):
            sample.reward = result.reward
            sample.reward_metrics = {
                **result.metrics,
                "ok": float(result.status not in FAILED),
                "timeout": float(result.status == "timeout"),
            }
            sample.reward_texts, sample.reward_failure = result.texts, result.message
            opened = len(opened_thought(sample.prompt.text))
            sample.steps = self._step_tokens(sample, [(end - opened, reward) for end, reward in result.steps])
        return self._kept.text

    @property
    def _worth_overlap(self) -> float:
        """Returns the seconds of all workers together."""
        return 0.0 if self.pool is None else WORTH_OVERLAP_S * self.pool.num_workers

    def _submit(self, sample: Sample) -> None:
        item = reward_item(sample.prompt, sample.text, sample.response_ids, sample.version)
        self._kept.attempt(lambda pool: pool.submit(item))

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def _step_tokens(self, sample: Sample, steps: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
        """Converts (end of the step in the text, reward) -> (index of the token that completes it, reward).

        See `tokens_at`. Steps that end within one token become one step, with their mean reward.
        """
        rewards: dict[int, list[float]] = {}
        ends = tokens_at([end for end, _ in steps], sample.response_ids, self._text)
        for token, (_, reward) in zip(ends, steps, strict=True):
            rewards.setdefault(token, []).append(reward)
        return [(token, sum(values) / len(values)) for token, values in rewards.items()]


def check_failures(what: str, samples: Sequence[Sample], max_failed_ratio: float, mesh: Mesh) -> None:
    """Compare the share of samples without a reward, over all ranks, with `reward.max_failed_ratio`. Collective.

    `samples`: those whose rewards this rank knows. Those that only a reward model scores do not count, and a reward that does
    not apply to a sample has not failed on it. A round whose environments all failed stops the run, too. `what` they are
    begins the message. Raises RankError on every rank.
    """
    samples = [sample for sample in samples if sample.prompt.reward != BY_MODEL]
    failed = [sample for sample in samples if math.isnan(sample.reward) and not is_declined(sample)]
    lost = [sample for sample in samples if sample.status in FAILURES]
    message = next((sample.reward_failure for sample in (*failed, *lost)), "")
    reports = mesh.all_gather((len(samples), len(failed), len(lost), message))
    total, num_failed = sum(report[0] for report in reports), sum(report[1] for report in reports)
    num_lost = sum(report[2] for report in reports)
    reason = next((report[3] for report in reports if report[3]), "no reason is known")
    if num_lost == total > 0 and max_failed_ratio < 1:
        raise RankError(
            f"{what}: the environments of all {total:,} samples failed, so there is nothing to learn from; the first failure:"
            f" {reason}; correct the environment, or set reward.max_failed_ratio=1 to go on all the same"
        )
    if num_failed > max_failed_ratio * total:
        raise RankError(  # on every rank: all have the same reports
            f"{what}: {num_failed:,} of {total:,} samples ({100 * num_failed / total:.0f} %) have no reward, more than"
            f" reward.max_failed_ratio={max_failed_ratio:g} allows; the first failure: {reason};"
            " correct the reward function, or raise reward.max_failed_ratio"
        )


def is_declined(sample: Sample) -> bool:
    """Returns whether the reward function has declined to score the sample (TRL's None). That is no failure."""
    return math.isnan(sample.reward) and sample.reward_metrics.get("ok") == 1.0
