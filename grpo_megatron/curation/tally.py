"""Tally: what is known of each problem after one pass over all responses. It holds places of responses, no texts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from grpo_megatron.curation.responses import Response, ResponsePlace
from grpo_megatron.data.questions import problem_digest
from grpo_megatron.data.wilson import wilson


@dataclass
class ProblemTally:
    """`right` and `wrong` have the first few places of different complete texts, with a hash of the text each.

    `best` and `worst` are (score, place) of complete responses.
    """

    first: ResponsePlace
    n: int = 0
    passes: int = 0
    truncated: int = 0
    score_sum: float = 0.0
    token_sum: int = 0
    right: list[tuple[ResponsePlace, int]] = field(default_factory=list)
    wrong: list[tuple[ResponsePlace, int]] = field(default_factory=list)
    best: tuple[float, ResponsePlace] | None = None
    worst: tuple[float, ResponsePlace] | None = None

    @property
    def rate(self) -> float:
        return self.passes / self.n

    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the pass rate."""
        return wilson(self.rate, self.n)


@dataclass(frozen=True)
class CountingRules:
    """`right`: the lowest score of a right response. `keep`: texts per problem and verdict whose places are held."""

    right: float = 1.0
    drop_truncated: bool = False
    first_step: int | None = None
    last_step: int | None = None
    keep: int = 1

    def counts(self, response: Response) -> bool:
        if response.is_replayed or (self.drop_truncated and response.is_truncated):
            return False
        if response.step is None:
            return True
        return (self.first_step or 0) <= response.step and (self.last_step is None or response.step <= self.last_step)


@dataclass
class Tally:
    """`problems` by digest, in the order of their first responses.

    `left_out` counts responses that were replayed or that the rules leave out, `unscorable` those without a score.
    """

    rules: CountingRules
    problems: dict[str, ProblemTally] = field(default_factory=dict)
    left_out: int = 0
    unscorable: int = 0
    trajectories: int = 0

    def add(self, place: ResponsePlace, response: Response) -> None:
        if not self.rules.counts(response):
            self.left_out += 1
            return
        if response.score is None:
            self.unscorable += 1
            return
        digest = problem_digest(response.question, response.answer)
        problem = self.problems.setdefault(digest, ProblemTally(place))
        is_right = response.score >= self.rules.right
        problem.n += 1
        problem.passes += is_right
        problem.truncated += response.is_truncated
        problem.score_sum += response.score
        problem.token_sum += response.num_tokens
        self.trajectories += response.text is None
        # A row ends with the end-of-sequence token, which a truncated response does not have
        if response.text is not None and response.text.strip() and not response.is_truncated:
            _keep(problem.right if is_right else problem.wrong, place, response.text, self.rules.keep)
            if problem.best is None or response.score > problem.best[0]:
                problem.best = response.score, place
            if problem.worst is None or response.score < problem.worst[0]:
                problem.worst = response.score, place

    @property
    def num_responses(self) -> int:
        return sum(problem.n for problem in self.problems.values())


def tally_responses(responses: Iterable[tuple[ResponsePlace, Response]], rules: CountingRules) -> Tally:
    tally = Tally(rules)
    for place, response in responses:
        tally.add(place, response)
    return tally


def _keep(kept: list[tuple[ResponsePlace, int]], place: ResponsePlace, text: str, limit: int) -> None:
    """Add the place if there is room and no equal text. Texts that differ in white space only are equal."""
    if len(kept) < limit:
        digest = int.from_bytes(hashlib.sha256(" ".join(text.split()).encode()).digest()[:8], "big")
        if all(digest != other for _, other in kept):
            kept.append((place, digest))
