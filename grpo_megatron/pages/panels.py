"""Panels: which metrics are drawn together, with title, unit, a sentence on how to read them, and reference lines.

Metrics that no entry of PANELS names get panels of their own, by the part of their name before the last slash. So rewards
and tasks that the user adds appear without a change here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# -- the known panels, in their order on the page ----------------------------------------------------------------------
# A metric belongs to the first panel that names it. docs/metrics.md says more about each.


@dataclass(frozen=True)
class PanelRule:
    """A known panel. `patterns`: a regular expression of a metric's whole name, and its label, in which "\\1" is a group."""

    group: str
    title: str
    unit: str
    text: str
    patterns: tuple[tuple[str, str], ...]
    log: bool = False
    references: tuple[tuple[float, str], ...] = ()
    guard: str = ""  # of the section `guards`, whose band becomes reference lines
    always: bool = False  # also where nothing changes: a reward that stays at 0 should be seen


LEARNING, ANSWERS, STABILITY, COST = "Learning", "Responses", "Stability", "Speed and memory"
CRITIC, REWARD_MODEL, VALIDATION = "Critic", "Reward model", "Validation in detail"
PANELS: tuple[PanelRule, ...] = (
    PanelRule(
        LEARNING,
        "Training reward",
        "mean of the samples",
        "Before penalties, over all samples of the step. It should rise; noise from step to step is normal, since each step"
        " has other prompts.",
        ((r"critic/score/mean", "before penalties"), (r"critic/rewards/mean", "after penalties")),
        always=True,
    ),
    PanelRule(
        LEARNING,
        "Validation accuracy",
        "share solved",
        "Held-out problems, the same ones each time. If it falls while the training reward rises, the model exploits the"
        " reward.",
        ((r"val-core/(.+)/mean@\d+", r"\1"),),
        always=True,
    ),
    PanelRule(
        LEARNING,
        "Loss on held-out rows",
        "nats",
        "Should fall. When it rises again, training has gone on for too long.",
        ((r"val/loss/(.+)", r"\1"),),
    ),
    PanelRule(
        LEARNING,
        "Reward by source",
        "mean of the samples",
        "The same reward, for each source of the training data.",
        ((r"reward/source/(.+)/mean", r"\1"),),
    ),
    PanelRule(
        LEARNING,
        "Parts of the reward",
        "mean of the samples",
        "What the reward functions report besides the reward itself. A part that rises alone is a part that is exploited.",
        ((r"reward/(?!source/)(.+)/mean", r"\1"),),
    ),
    PanelRule(
        LEARNING,
        "Groups without a signal",
        "share of the groups",
        "Groups whose samples all have the same reward teach nothing. Above 0.8, change the difficulty of the data, or set"
        " algorithm.filter_groups.enable.",
        (
            (r"critic/zero_variance_ratio", "equal rewards"),
            (r"critic/all_best_ratio", "all with the best reward"),
            (r"critic/all_worst_ratio", "all with the worst reward"),
        ),
        references=((0.8, "too many"),),
    ),
    PanelRule(
        LEARNING,
        "Preferences",
        "share",
        "How often the model ranks the chosen answer higher, or judges a step as its label says. Chance is 0.5.",
        ((r"actor/(pair_accuracy|step_accuracy|dpo_accuracy)", r"\1"),),
        references=((0.5, "chance"),),
    ),
    PanelRule(
        LEARNING,
        "Policy loss",
        "",
        "Of the update. In supervised training it should fall; in reinforcement learning its level says little.",
        ((r"actor/pg_loss", "loss"),),
    ),
    PanelRule(
        ANSWERS,
        "Response length",
        "tokens",
        "A mean that climbs to the limit, with truncated responses, means that answers no longer end.",
        ((r"response_length/(mean)", r"\1"), (r"response_length/(max)", r"\1"), (r"response_length/(min)", r"\1")),
        always=True,
        guard="response_length",
    ),
    PanelRule(
        ANSWERS,
        "Responses that did not end",
        "share of the responses",
        "Cut off by the limit, as long as the limit, or empty. Above a tenth, raise data.max_response_length or penalise"
        " length.",
        (
            (r"response/truncated_ratio", "cut off"),
            (r"response_length/clip_ratio", "at the limit"),
            (r"response/aborted_ratio", "empty"),
        ),
    ),
    PanelRule(
        ANSWERS,
        "Rewards that failed",
        "share of the samples",
        "Should be 0. The reward function raised, timed out, or gave no number; the log names the reason.",
        ((r"reward/((?:failed|timeout|unscorable)_ratio)", r"\1"),),
    ),
    PanelRule(
        ANSWERS,
        "Turns",
        "per trajectory",
        "Turns of the model in one trajectory.",
        ((r"trajectory/turns(.*)", r"turns\1"),),
    ),
    PanelRule(
        STABILITY,
        "Entropy of the policy",
        "nats per token",
        "Falls as the policy decides. Near 0 it explores no longer; a sudden rise is the beginning of a collapse.",
        ((r"actor/entropy", "entropy"),),
        always=True,
        guard="entropy",
    ),
    PanelRule(
        STABILITY,
        "Gradient norm",
        "L2 norm, before clipping",
        "Spikes of more than ten times the usual value are a warning; lower actor.optim.lr, or look at the samples there.",
        ((r"actor/grad_norm", "gradient norm"),),
        always=True,
        guard="grad_norm",
    ),
    PanelRule(
        STABILITY,
        "KL divergence",
        "nats per token",
        "Distance of the policy from its reference, and from itself before the update. A fast rise means steps that are too"
        " large.",
        (
            (r"actor/kl_loss", "to the reference"),
            (r"actor/reward_kl_penalty", "to the reference, in the reward"),
            (r"actor/ppo_kl", "to the policy before the update"),
        ),
        guard="kl",
    ),
    PanelRule(
        STABILITY,
        "Clipped tokens",
        "share of the tokens",
        "Tokens whose gradient the ratio clip removed. Above 0.2 the updates of a step differ too much from the policy that"
        " drew its samples.",
        ((r"actor/pg_clipfrac(.*)", r"clipped\1"),),
    ),
    PanelRule(
        STABILITY,
        "Engine against policy",
        "|difference| of log-probabilities, nats per token",
        "The same weights, computed by the engine and by the trainer. Near 1e-6 in float32, near 1e-2 in bfloat16. A rise"
        " means that they do not compute the same model.",
        (
            (r"training/rollout_logp_diff_mean", "mean"),
            (r"training/rollout_logp_diff_p99", "99th percentile"),
            (r"training/rollout_logp_diff_max", "largest"),
        ),
        log=True,
        guard="rollout_gap",
    ),
    PanelRule(
        STABILITY,
        "Error of the engine's probabilities",
        "factor, mean over tokens",
        "Mean of exp |difference|. 1 is perfect.",
        ((r"rollout_corr/mult_prob_error", "factor"),),
        references=((1.05, "suspect"),),
    ),
    PanelRule(
        STABILITY,
        "Effective sample size",
        "share",
        "Of the importance weights of the rollout correction. Below 0.5 few tokens decide the update.",
        ((r"rollout_corr/rollout_is_eff_sample_size", "effective"),),
        references=((0.5, "low"),),
    ),
    PanelRule(
        STABILITY,
        "Learning rate",
        "",
        "After warm-up and decay.",
        ((r"actor/lr", "learning rate"),),
    ),
    PanelRule(
        STABILITY,
        "Guards that fired",
        "optimizer steps",
        "How often a guard found something in the step. The events below and the log say what.",
        ((r"guards/(.+)", r"\1"), (r"actor/skipped_updates", "updates left out")),
    ),
    PanelRule(
        CRITIC,
        "Loss of the critic",
        "",
        "Should fall and then stay level.",
        ((r"critic/vf_loss", "loss"),),
    ),
    PanelRule(
        CRITIC,
        "Explained variance",
        "share",
        "Of the returns, by the critic's values. 1 is perfect; at 0 or below the critic does not help.",
        ((r"critic/vf_explained_var", "explained"),),
        references=((0.0, "no help"),),
    ),
    PanelRule(CRITIC, "Values", "", "", ((r"critic/(values|returns|vpred)[/_]mean", r"\1"),)),
    PanelRule(REWARD_MODEL, "Reward model", "", "", ((r"reward_model/(.+)", r"\1"),)),
    PanelRule(
        COST,
        "Throughput",
        "tokens per second and device",
        "Prompt and response tokens of the step.",
        ((r"perf/throughput", "whole step"), (r"perf/throughput_train", "without validation")),
    ),
    PanelRule(
        COST,
        "Arithmetic per device",
        "TFLOP/s",
        "Of the passes of the trainer, counted from the model's shape.",
        ((r"perf/tflops/(.+)", r"\1"),),
    ),
    PanelRule(
        COST,
        "Use of the device",
        "share of its peak",
        "Model FLOPs utilization (MFU) of the trainer's passes.",
        ((r"perf/mfu(.*)", r"MFU\1"),),
    ),
    PanelRule(
        COST,
        "Imbalance and padding",
        "share",
        "Work that the busiest replica has more than the mean, and padded tokens. Near 0 is good.",
        ((r"perf/dp_(imbalance_\w+)", r"\1"), (r"perf/padding_ratio", "padding")),
    ),
    PanelRule(COST, "Memory", "GiB", "The highest of all ranks.", ((r"perf/((?:cpu|max)_memory_\w+)_gb", r"\1"),)),
    PanelRule(
        COST,
        "Weight sync",
        "bytes per step",
        "Received by the rank that receives most.",
        ((r"sync/bytes_received", "received"),),
    ),
)


# -- the panels of a page ----------------------------------------------------------------------------------------------

PHASE = re.compile(r"timing_s/(?!step$).+")  # drawn in a stack, not as curves
MAX_CURVES = 8  # in one panel
OTHER = "Other metrics"


@dataclass
class PagePanel:
    """A panel of the page. `curves` has pairs of a metric and its label."""

    group: str
    title: str
    unit: str = ""
    text: str = ""
    log: bool = False
    references: list[tuple[float, str]] = field(default_factory=list)
    curves: list[tuple[str, str]] = field(default_factory=list)
    always: bool = False


def page_panels(names: Iterable[str], guards: Mapping[str, Any]) -> list[PagePanel]:
    """The panels of these metrics, each of which has at least one. `guards`: the section of the run's config."""
    left = [name for name in names if not PHASE.fullmatch(name)]
    panels: list[PagePanel] = []
    for rule in PANELS:
        curves = [(name, label) for name in left if (label := _label(rule, name)) is not None]
        curves.sort(key=lambda curve: _place(rule, curve[0]))
        found = {name for name, _ in curves}
        left = [name for name in left if name not in found]
        for first in range(0, len(curves), MAX_CURVES):
            panel = PagePanel(rule.group, rule.title, rule.unit, rule.text, rule.log, always=rule.always)
            panel.references = [*rule.references, *_band(guards.get(rule.guard))]
            panel.curves = curves[first : first + MAX_CURVES]
            panels.append(panel)
    return [*panels, *_other_panels(left)]


def _label(rule: PanelRule, name: str) -> str | None:
    for pattern, label in rule.patterns:
        if match := re.fullmatch(pattern, name):
            return match.expand(label)
    return None


def _place(rule: PanelRule, name: str) -> int:
    """Curves of a panel are in the order of its patterns."""
    return next(place for place, (pattern, _) in enumerate(rule.patterns) if re.fullmatch(pattern, name))


def _band(band: object) -> Iterator[tuple[float, str]]:
    if isinstance(band, Mapping):
        for bound in ("low", "high"):
            if isinstance(band.get(bound), int | float):
                yield float(band[bound]), f"guard, {bound}"


def _other_panels(names: Sequence[str]) -> Iterator[PagePanel]:
    """A panel per prefix: `a/b/mean` and `a/b/max` together; of `a/b` and `a/c` each has its own, since units may differ."""
    prefixes: dict[str, list[str]] = {}
    for name in sorted(names):
        head, _, last = name.rpartition("/")
        is_statistic = bool(re.fullmatch(r"mean|max|min|std|p\d+", last))
        prefixes.setdefault(head if is_statistic else name, []).append(name)
    for prefix, members in prefixes.items():
        group = VALIDATION if prefix.startswith(("val-aux/", "val/", "val-core/")) else OTHER
        curves = [(name, name.removeprefix(prefix).strip("/") or name.rpartition("/")[2]) for name in members]
        yield PagePanel(group, prefix, curves=curves)
