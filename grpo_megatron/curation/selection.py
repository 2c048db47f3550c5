"""Which problems to keep, by their measured pass rates.

DUPO (WebSailor, arXiv 2507.02592) leaves out, before training, what all of 8 responses solve: `drop_all_right`.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_megatron.curation.tally import ProblemTally, Tally


@dataclass(frozen=True)
class RateBand:
    """Bounds of the pass rate, both inclusive, and of the number of responses that it was measured with."""

    min_rate: float = 0.0
    max_rate: float = 1.0
    drop_all_right: bool = False
    drop_all_wrong: bool = False
    min_samples: int = 1

    def reason(self, problem: ProblemTally) -> str | None:
        """Why the problem is left out; None: it is kept."""
        if problem.n < self.min_samples:
            return f"fewer than {self.min_samples} responses"
        if self.drop_all_right and problem.passes == problem.n:
            return "all right"
        if self.drop_all_wrong and problem.passes == 0:
            return "all wrong"
        if problem.rate < self.min_rate:
            return f"pass rate below {self.min_rate:g}"
        if problem.rate > self.max_rate:
            return f"pass rate above {self.max_rate:g}"
        return None


def kept_problems(tally: Tally, band: RateBand) -> list[ProblemTally]:
    return [problem for problem in tally.problems.values() if band.reason(problem) is None]
