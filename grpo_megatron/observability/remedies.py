"""Remedies: which key of the config to change, and the seconds per step that it could win at most.

Every number is measured: the time that the remedy is about, in the profiled steps. A remedy wins all of it only if nothing
else takes its place, so it is an upper bound. Two remedies may be about the same time, so their seconds do not add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_megatron.observability.step_time import TAIL, StepTime, TimeParts

PASSES = ("update_actor", "old_log_prob", "ref", "values", "update_critic", "reward_model", "update_reward_model")
NUM_SHOWN = 3
CHANGES = "this changes the method"


@dataclass(frozen=True)
class Remedy:
    """`seconds` per step."""

    key: str
    advice: str
    seconds: float
    from_what: str


def largest_remedies(time: StepTime, settings: Mapping[str, Any]) -> list[Remedy]:
    """At most three, the largest first. `settings`: the run's config, "section.key" -> value."""
    found = [remedy for remedy in all_remedies(time, settings) if remedy.seconds > 0]
    return sorted(found, key=lambda remedy: -remedy.seconds)[:NUM_SHOWN]


def all_remedies(time: StepTime, settings: Mapping[str, Any]) -> Iterator[Remedy]:
    """Every remedy that the config leaves open, those of no seconds too."""
    phases = time.by_phase()

    def own(phase: str) -> float:
        """Everything in a phase but waiting: that is charged to the phase of the late rank."""
        seconds = phases.get(phase, TimeParts())
        return seconds.total - seconds.waiting + time.waiting_for(phase)

    yield Remedy(
        "rollout.tensor_model_parallel_size",
        "raise it: fewer engines, which finish at different times",
        time.waiting_for("gen"),
        "waiting for ranks that were still in gen",
    )
    yield Remedy(
        "actor.ppo_max_token_len_per_gpu",
        "lower it: smaller micro-batches balance ranks and pipeline stages better",
        sum(time.waiting_for(phase) for phase in PASSES),
        "waiting for ranks that were still in a forward or backward pass",
    )
    yield Remedy(
        "reward.num_workers",
        "raise it: more processes grade while the engine draws",
        phases.get("reward", TimeParts()).idle + time.waiting_for("reward"),
        "idle in reward, and waiting for ranks in it",
    )
    is_delta = settings.get("rollout.sync") == "delta"
    yield Remedy(
        "rollout.update_weights_bucket_megabytes" if is_delta else "rollout.sync",
        "raise it: fewer rounds" if is_delta else "set it to delta: only changed elements are sent",
        own("update_weights"),
        "all of update_weights",
    )
    yield Remedy("trainer.test_freq", "raise it: validate less often", own("testing"), "all of testing")
    yield Remedy("trainer.save_freq", "raise it: save less often", own("save_checkpoint"), "all of save_checkpoint")
    yield Remedy(
        "trainer.rollout_data_dir", "set it to null", own("dump_rollout_generations"), "all of dump_rollout_generations"
    )
    yield from _passes(phases, settings)
    yield from _idle(phases, settings)
    yield Remedy(
        "data.max_response_length",
        f"lower it: few long responses keep the engine busy; {CHANGES}",
        time.tail_s / time.num_rank_steps,
        f"engine steps with at most 1/{TAIL} of the requests unfinished",
    )


def _passes(phases: Mapping[str, TimeParts], settings: Mapping[str, Any]) -> Iterator[Remedy]:
    def busy(phase: str) -> float:
        seconds = phases.get(phase, TimeParts())
        return seconds.computing + seconds.moving

    epochs = settings.get("actor.ppo_epochs", 1)
    yield Remedy(
        "actor.ppo_epochs",
        f"set it to 1 instead of {epochs}; {CHANGES}",
        busy("update_actor") * (epochs - 1) / epochs,
        f"{epochs - 1} of {epochs} passes of update_actor",
    )
    mini = settings.get("actor.ppo_mini_batch_size")
    if mini not in (None, settings.get("data.train_batch_size")) or epochs > 1:
        yield Remedy(
            "actor.ppo_mini_batch_size",
            "set it to data.train_batch_size, with actor.ppo_epochs=1: one update per rollout needs no pass before it; "
            + CHANGES,
            busy("old_log_prob"),
            "old_log_prob without waiting",
        )
    in_reward = settings.get("algorithm.use_kl_in_reward")
    yield Remedy(
        "algorithm.use_kl_in_reward" if in_reward else "actor.kl_loss_coef",
        f"{'set it to false' if in_reward else 'set it to 0'}: no reference is needed without a KL; {CHANGES}",
        busy("ref"),
        "ref without waiting",
    )


def _idle(phases: Mapping[str, TimeParts], settings: Mapping[str, Any]) -> Iterator[Remedy]:
    has_environment = settings.get("rollout.multi_turn.environment") is not None
    if has_environment:
        yield Remedy(
            "rollout.multi_turn.num_workers",
            "raise it: more processes run environments and tools",
            phases.get("gen", TimeParts()).idle,
            "idle in gen",
        )
    if settings.get("trainer.device", "auto") not in ("auto", "cpu"):
        return
    working = ("gen", *PASSES)[1 if has_environment else 0 :]
    yield Remedy(
        "trainer.n_gpus_per_node",
        "lower it on CPU, if there are more ranks than free cores",
        sum(phases.get(phase, TimeParts()).idle for phase in working),
        "phases that compute, while the process had no core or slept",
    )
