"""Reports: what the user hears of the results of a pool; and results made of the workers' replies."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_megatron.rewards.reward import RewardResult
from grpo_megatron.workers.process import printable

logger = logging.getLogger(__name__)


def result_of(reply: Mapping[str, Any], name: str) -> RewardResult:
    """The result that a reply of a worker tells (worker.py), of the reward `name`."""
    seconds = reply.get("seconds", 0.0)
    if "error" in reply:
        status = "timeout" if reply.get("status") == "timeout" else "error"
        message = printable(f"reward {name!r}: {reply['error']}")
        return RewardResult(float("nan"), {}, status, message, seconds=seconds)  # type: ignore[arg-type]
    if "none" in reply:
        return RewardResult(float("nan"), status="none", seconds=seconds)
    texts = {key: printable(text) for key, text in reply["texts"].items()}
    steps = tuple((end, value) for end, value in reply["steps"])
    return RewardResult(reply["reward"], reply["metrics"], steps=steps, texts=texts, seconds=seconds)


class Reports:
    """Warnings; that an entry is no metric is told once."""

    def __init__(self) -> None:
        self._named: set[tuple[str, str]] = set()  # reward, entry

    def report_failures(self, results: Sequence[RewardResult]) -> None:
        """How many items of a batch could not be graded, and why the first one."""
        failed = [result for result in results if result.status in ("error", "timeout")]
        if failed:
            logger.warning(
                "%d of %d samples could not be graded (%d timeouts); the first: %s",
                len(failed),
                len(results),
                sum(result.status == "timeout" for result in failed),
                failed[0].message,
            )

    def name_texts(self, name: str, texts: Mapping[str, str]) -> None:
        """The entries of a result that are no metrics."""
        for key in [key for key in texts if (name, key) not in self._named]:
            self._named.add((name, key))
            logger.warning(
                "reward %r: its entry %r is no finite number, so it is no metric; it is written beside the logged samples",
                name,
                key,
            )
