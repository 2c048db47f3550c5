"""Comparison of two traces: the first place where two runs part, whether rounding explains it, and the likely cause.

Two runs that only round differently (another layout, kernel or library) part in every number that a sum has made, by little. So
each stage has a bound on what rounding explains, and a stage beyond its bound is wrong, not only different:

    rows     |difference of means| <= B, and |difference of projections| / sqrt(tokens) <= 4 B,      B = FIRST[dtype] * (1 + u)
    tensors  sqrt(sum of d^2) <= G * sqrt(sum of norm^2), each |d| <= 6 G * (norm + 1e-3 total),  G = GRADIENT[dtype] * (1 + 10 u)
    losses   |difference| <= B * max(1, |loss|, largest |advantage|)

with d the difference of two projections, which estimates the distance of two tensors, and u the optimizer steps before. FIRST is
the bound of the probe after a sync (sync/attest.py). Weights, where u counts the
step's own, too: rms(d) <= UPDATE[dtype] * (1 + u) of the step's update.
Prompts, images, seeds, and rewards of equal responses have no rounding, nor have advantages that follow from rewards alone. A
response parts where two logits are within the rounding of each other, and its routes likewise: n of them are explained while a
Poisson number of mean 2 B * tokens reaches n with a probability above 1e-6.

In the first step whose responses part, gradients and weights are of other samples; after it, nothing is judged. docs/trust.md has
the differences of honest pairs that the bounds were chosen from.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.report.metrics import Array
from grpo_megatron.report.run_folder import RunFolder
from grpo_megatron.report.trace_file import (
    BESIDE,
    MEANS,
    NORMS,
    TERMS,
    StepFile,
    TraceFolder,
    base_name,
    stage_of,
    stage_order,
)
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.run_files import WARM_UP_FOLDER
from grpo_megatron.sync.attest import FIRST
from grpo_megatron.trust.values import row_values, weight_values
from grpo_megatron.types import BRANCH

GRADIENT = {"float32": 1e-4, "bfloat16": 0.1, "fp8": 0.5}
UPDATE = {"float32": 0.02, "bfloat16": 0.3, "fp8": 0.6}
MAX_LEAVES = 8  # that are named of a stage
NEAR = 1e-6  # token weights: sums of numbers of tokens; advantages of equal rewards
REJECTED = 0.1  # the same where rounding decides which tokens rollout_rs rejects
OTHER_SAMPLES, NOT_KEPT, ONLY_IN = "of other samples", "not kept", "only in"
LIGHT = ("gradients", "gradient norm")  # stages that trainer.trace=light leaves out
CHOICES = ("responses", "routes")  # of a token, of an expert, between two numbers that rounding may order
GROUPED = ("grpo", "dr_grpo", "rloo", "remax", "grpo_passk", "gpg", "opo")  # advantages that a group decides

# What reaches no number of a step, and what changes only the order of sums. Of other keys a change may change all.
NO_EFFECT = re.compile(
    r"trainer\.(output_dir|healing|save_freq|test_freq|val_before|resume_mode|verify|accept|stop_|async_save|max_actor_ckpt|save_hf|logger|project"
    r"|experiment|tags|num_logged|trace|rollout_data|timeout_s|stall|peak_tflops|total_)"
)
LAYOUT = re.compile(
    r"trainer\.(nnodes|n_gpus|device)|actor\.(megatron\.|ppo_micro|ppo_max_token|share_prompts)|rollout\.(tensor_model|expert_parallel|gpu_"
    r"|max_num|placement|rollout_ranks|sync|engine_|free_cache|update_weights|enforce_eager)"
)
NOTHING, ROUNDING, RESULTS = "changes no number", "may change rounding", "may change results"
EFFECTS = {"data": RESULTS, "code": RESULTS, "libraries": ROUNDING, "machine": ROUNDING, "layout": ROUNDING}

STAGE_CAUSES = {  # of the first stage that parts, where all stages before it are equal
    "prompts": "the data or their order: rows, data.seed, data.shuffle, the tokenizer, the chat template",
    "images": "the image files, or how they are resized",
    "seeds": "rollout.seed, or a rank with another seed",
    "engine weights": "the weights that were sent: another model folder, or a change between the optimizer step and the sync",
    "sampled by": "samples of another version of the weights: a late replica, or a sync that a replica has missed",
    "responses": "the engine: its kernels, weights, sampling (temperature, top_p, stop tokens), or tokens that a template drops",
    "engine log-probabilities": "the engine: kernels, precision, or a temperature that only the log-probabilities lack",
    "routes": "the router of the engine, or a table of routes that is shifted",
    "rewards": "the reward is no function of the response: a clock, random numbers, a time-out, another row's answer",
    "reward parts": "what the reward reports beside the number is no function of the response: a clock, a load",
    "scores": "a reward model, or the penalty of long responses",
    "old log-probabilities": "the trainer's forward pass: temperature, packing, precision, masks, weights changed after the sync",
    "reference log-probabilities": "the reference: another folder, or renewed at another step",
    "teacher log-probabilities": "a teacher: another folder, or other prompts of it",
    "values": "the critic",
    "corrections": "the rollout correction",
    "advantages": "the advantage estimator, or a group with another member",
    "returns": "the critic's targets: gamma, lambda, rewards at tokens",
    "token weights": "the loss's denominator: per micro-batch or per batch, a mask, the aggregation",
    "losses": "the loss: its terms (clip, KL direction, temperature), or a row that is left out or counts twice",
    "gradients": "the backward pass: coefficients of the loss's terms, its kernels, or gradients that are not cleared",
    "gradient norm": "the reduction of the norm over ranks",
    "weights": "the optimizer: a lost moment, learning rate, clipping, weight decay, or a tensor that was not updated",
    "random state": "something has taken random numbers",
}
ACTS_IN = {  # beginnings of stages, and of the keys that act there: the likely ones where all before is equal
    ("prompts", "images", "seeds"): ("data.", "model.", "rollout.seed", "trainer.seed"),
    ("engine", "sampled", "responses", "routes"): ("rollout.", "model."),
    ("reward", "scores"): ("reward", "rollout.multi_turn"),
    ("old", "reference", "teacher", "values"): ("ref.", "teachers.", "critic.", "actor.", "model.", "rollout."),
    ("",): ("actor.", "algorithm.", "critic.", "reward_model", "sft."),
}
AFTER_RESUME = "; it is the first step after a resume, so look first at what the checkpoint has lost"
ONE_COMPUTES = "a setting, or a pass or optimizer step that one of the runs has left out"
BY_ROUNDING = "rounding: another order of sums, or other kernels ({facts})"


@dataclass(frozen=True)
class Change:
    """A fact that differs between the runs, and what it may change."""

    kind: str  # config | data | code | libraries | machine | layout
    key: str
    left: Any
    right: Any
    effect: str


@dataclass(frozen=True)
class Leaf:
    """A row, tensor or rank that differs, with its numbers on both sides, by name."""

    name: str
    left: dict[str, float | None]  # None: not finite, as the reward of a sample without one
    right: dict[str, float | None]


@dataclass(frozen=True)
class Parting:
    """A stage of a step that differs. `judgement`: "explained", "wrong", or "not judged"; `measured` has the sizes."""

    step: int
    stage: str
    kind: str
    count: int = 0  # of the leaves that differ; 0: the leaves are no longer kept
    total: int = 0
    leaves: tuple[Leaf, ...] = ()
    judgement: str = "not judged"  # or NOT_KEPT
    measured: str = ""


@dataclass
class Diff:
    """The result. `partings`: of the first step that differs, in order; with a tolerance, of every judged step."""

    left: str
    right: str
    changes: list[Change] = field(default_factory=list)
    num_steps: int = 0
    partings: list[Parting] = field(default_factory=list)
    verdict: str = "equal"  # equal | explained | part | wrong
    cause: str = ""
    texts: list[str] = field(default_factory=list)  # both values at the first place, where files hold them
    replays: list[str] = field(default_factory=list)  # what the step gave when it was run again (replay.py)
    independent: list[str] = field(default_factory=list)  # differences that do not follow from the first
    notes: list[str] = field(default_factory=list)

    @property
    def first(self) -> Parting | None:
        """The place where the runs part; with a tolerance, the first one that rounding does not explain, if any is."""
        wrong = [one for one in self.partings if one.judgement == "wrong"] if self.verdict == "wrong" else []
        return next(iter(wrong or self.partings), None)


# -- facts -------------------------------------------------------------------------------------------------------------


def config_of(run: Path) -> dict[str, Any]:
    """Read the settings of a run, with those of its last start. Raises StorageError: the bounds follow from them."""
    folder = RunFolder(run.parent if run.name == WARM_UP_FOLDER else run)
    folder.update()
    if not folder.settings:
        raise StorageError(f"{folder.folder / 'config.yaml'} cannot be read: it is missing, or no config of a run")
    return folder.settings | {key: now for _, changes in folder.attempts[-1:] for key, _, now in changes}


def changes_between(
    left: TraceFolder, right: TraceFolder, old: Mapping[str, Any], new: Mapping[str, Any]
) -> Iterator[Change]:
    """Yield the facts that differ: config (`old`, `new`), data and the user's code, this program, libraries, machine, layout."""
    yield from _config_changes(old, new, _inputs(left) == _inputs(right) != {})
    inputs = [_inputs(side) for side in (left, right)]
    for key in sorted({*inputs[0], *inputs[1]}) if all(inputs) else ():
        if inputs[0].get(key) != inputs[1].get(key):
            yield Change("data", key, inputs[0].get(key), inputs[1].get(key), RESULTS)
    facts = [side.facts[max(side.facts)] for side in (left, right)]
    for kind in ("code", "libraries", "machine", "layout"):
        both = [one.get(kind, {}) for one in facts]
        for key in sorted({*both[0], *both[1]}):
            if both[0].get(key) != both[1].get(key):
                yield Change(kind, key, both[0].get(key), both[1].get(key), EFFECTS[kind])


def _config_changes(left: Mapping[str, Any], right: Mapping[str, Any], same_inputs: bool) -> Iterator[Change]:
    left, right = _whole_tables(left, right), _whole_tables(right, left)
    for key in sorted({*left, *right}):
        if left.get(key) != right.get(key):
            is_path = key.rpartition(".")[2].endswith(("path", "files")) and None not in (left.get(key), right.get(key))
            is_place = same_inputs and is_path  # the same content elsewhere
            effect = NOTHING if is_place or NO_EFFECT.match(key) else ROUNDING if LAYOUT.match(key) else RESULTS
            yield Change("config", key, left.get(key), right.get(key), effect)


def _whole_tables(side: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Joins the keys of a table that the other side lacks, as of a teacher: one value, without keys that are null."""
    there = {key[: end.start()] for key, value in other.items() if value != {} for end in re.finditer(r"\.|$", key)}
    joined: dict[str, Any] = {}
    for key, value in side.items():
        end = next((end.start() for end in re.finditer(r"\.", key) if key[: end.start()] not in there), None)
        if end is None:
            joined[key] = value
        elif value is not None:
            joined.setdefault(key[:end], {})[key[end + 1 :]] = value
    return joined


def _inputs(trace: TraceFolder) -> dict[str, str]:
    """Return a digest for each file that the run has read, by key and name without its folder."""
    return {
        f"{key} {Path(name).name}": str(entry.get("sha256", ""))[:16]
        for key, files in trace.inputs.items()
        for name, entry in files.items()
    }


def precision(settings: Mapping[str, Any]) -> str:
    """Return the key of the bounds: float32, bfloat16 or fp8."""
    is_fp8 = settings.get("actor.megatron.fp8.recipe") or settings.get("rollout.quantization")
    dtype = str(settings.get("model.dtype", "bfloat16"))
    return "fp8" if is_fp8 else dtype if dtype in FIRST else "bfloat16"


# -- the comparison ----------------------------------------------------------------------------------------------------


def compare_runs(left: TraceFolder, right: TraceFolder, *, tolerance: bool = False, scale: float = 1.0) -> Diff:
    """Compare two runs. With `tolerance`, differences are judged by bounds of rounding, times `scale`. Raises StorageError."""
    settings = config_of(left.run), config_of(right.run)
    result = Diff(str(left.run), str(right.run), list(changes_between(left, right, *settings)))
    steps = sorted(step for step in {*left.steps} & {*right.steps} if {*left.steps[step]} & {*right.steps[step]})
    if not steps:
        spans = [
            f"{side.run} has {len(side.steps)} steps, from {min(side.steps, default='none')} on"
            for side in (left, right)
        ]
        raise StorageError(f"the traces have no step in common: {'; '.join(spans)}")
    result.num_steps = len(steps)
    for side, other in ((left, right), (right, left)):
        if more := sorted({*side.steps} - {*other.steps}):
            result.notes.append(
                f"{side.run} has {len(more)} more steps, from step {more[0]} on, which are not compared"
            )
    sides = _Sides(left, right, settings, scale)
    for step in steps:
        partings = list(sides.partings(step, judged=tolerance))
        result.partings += partings
        if partings and (not tolerance or sides.has_ended):
            break
    if sides.skipped:
        result.notes.append(f"not in both traces, and not compared: {', '.join(sorted(sides.skipped))}")
    if result.partings:
        judgements = {one.judgement for one in result.partings}
        result.verdict = "wrong" if "wrong" in judgements else "part" if NOT_KEPT in judgements else "explained"
        if not tolerance:
            result.verdict = "part"
        elif NOT_KEPT in judgements:
            result.notes.append("rows or tensors that are no longer kept (trainer.trace_keep) cannot be judged")
        if sides.has_ended and tolerance:
            result.notes.append(
                f"from step {result.partings[-1].step} on the samples differ, and no later step is judged"
            )
        _explain(result, sides)
    return result


class _Sides:
    """Two traces, read step by step. `has_ended`: after this step the samples differ."""

    def __init__(
        self, left: TraceFolder, right: TraceFolder, settings: tuple[Mapping[str, Any], Mapping[str, Any]], scale: float
    ) -> None:
        self.left, self.right, self.settings = left, right, settings[0]
        self.scale, self.precision = scale, max(map(precision, settings), key=FIRST.__getitem__)
        self.rollouts = [one.get("trainer.rollout_data_dir") for one in settings]
        self._updates, self.num_updates, self.has_ended = Counter[str](), 0, False
        self.skipped: set[str] = set()
        self.unequal: dict[str, list[int]] = {}  # of the step: stage -> leaves that differ
        self._weights: dict[str, Array] = {}  # the projections of the left side's weights before the step, by stage

    def files(self, step: int) -> tuple[StepFile | None, StepFile | None]:
        """Open the files of a step."""
        return self.left.file(step), self.right.file(step)

    def partings(self, step: int, *, judged: bool) -> Iterator[Parting]:
        """Yield the stages of a step that differ, in order."""
        roots = self.left.steps[step], self.right.steps[step]
        self.unequal = {}
        if not self._weights and judged:
            self._keep_weights(self.left.file(step - 1))
        a, b = self.files(step) if roots[0] != roots[1] or judged else (None, None)
        for stage in sorted({*roots[0], *roots[1]}, key=stage_order):
            if stage not in roots[0] or stage not in roots[1]:
                if base_name(stage).endswith(LIGHT):
                    self.skipped.add(base_name(stage))
                    continue
                side = self.left if stage in roots[0] else self.right
                judgement = "wrong" if judged else "not judged"
                yield Parting(step, stage, stage_of(stage).kind, judgement=judgement, measured=f"{ONLY_IN} {side.run}")
            elif roots[0][stage] != roots[1][stage] and (parting := self._parting(step, stage, a, b, judged)):
                yield parting
        self._keep_weights(a)
        for prefix in ("", *BESIDE):
            self._updates[prefix] += sum(stage.startswith(f"{prefix}losses") for stage in roots[0])
        self.num_updates = max(self._updates.values())

    def _keep_weights(self, file: StepFile | None) -> None:
        for stage in (f"{prefix}weights" for prefix in ("", *BESIDE)):
            if file is not None and stage in file:
                self._weights[stage] = file.numbers(stage)[:, 1].astype(np.float64)

    def _parting(self, step: int, stage: str, a: StepFile | None, b: StepFile | None, judged: bool) -> Parting | None:
        kind, sides = stage_of(stage).kind, (self.left, self.right)
        if kind == "rank" and len({json.dumps(side.facts_at(step)["layout"], sort_keys=True) for side in sides}) > 1:
            return None  # another layout has other random states
        if a is None or b is None:
            return Parting(step, stage, kind, judgement=NOT_KEPT if judged else "not judged")
        names = [
            file.rows if kind == "row" else side.tensors(stage) if kind == "tensor" else file.terms(stage)
            for side, file in zip(sides, (a, b), strict=True)
        ]
        if a.count(stage) != b.count(stage) or names[0] != names[1]:
            self.has_ended = True
            alone = [one for one in {*names[0]} ^ {*names[1]} if kind == "row"]
            measured = f"other {kind}s" + (f", first sample {min(alone)[1]} of prompt {min(alone)[0]}" if alone else "")
            measured += f" ({a.count(stage)} | {b.count(stage)}, not compared)"
            return Parting(step, stage, kind, 0, b.count(stage), (), "wrong" if judged else "not judged", measured)
        wrong = self.unequal[stage] = list(a.differing(b, stage))
        numbers = a.numbers(stage), b.numbers(stage)
        leaves = [self._leaf(a, stage, number, *numbers) for number in wrong[:MAX_LEAVES]]
        judgement, measured = self._judge(stage, a, b) if judged else ("not judged", "")
        if stage in CHOICES:
            self.has_ended = True
        return Parting(step, stage, kind, len(wrong), a.count(stage), tuple(leaves), judgement, measured)

    def _leaf(self, file: StepFile, stage: str, number: int, left: Any, right: Any) -> Leaf:
        facts = stage_of(stage)
        name = f"{facts.kind} {number}"
        if facts.kind == "row":
            prompt, index = file.rows[number]
            branch = f", branch {index // BRANCH}" if index >= BRANCH else ""
            name = f"row {number}: prompt {file.uids[prompt]!r}, sample {index % BRANCH if branch else index}{branch}"
        elif facts.kind == "tensor":
            names = self.left.tensors(stage)
            name = names[number] if number < len(names) else name
        elif facts.kind == "term":
            name = file.terms(stage)[number]
        values = ([float(v) if math.isfinite(v) else None for v in side[number]] for side in (left, right))
        return Leaf(name, *(dict(zip(facts.numbers, side, strict=True)) for side in values))

    # -- what rounding explains ----------------------------------------------------------------------------------------

    def _judge(self, stage: str, a: StepFile, b: StepFile) -> tuple[str, str]:
        base, kind = base_name(stage), stage_of(stage).kind
        bound = self.scale * FIRST[self.precision] * (1 + self.num_updates)
        if base == "random state":
            return "not judged", ""
        if base == "engine weights":
            return ("explained", "as the weights before") if self.num_updates else ("wrong", "before any update")
        if base == "sampled by":
            return "explained" if "engine weights" in self.unequal else "wrong", "by the digests of the weights"
        if base in CHOICES:
            tokens = float(a.numbers("responses")[:, 0].sum())
            count, expected = len(self.unequal[stage]), 2 * bound * tokens
            return _named(poisson_tail(count, expected) > 1e-6), f"{count} rows, {expected:.2g} expected by rounding"
        if kind == "row":
            return self._judge_rows(stage, base, a, b, bound)
        if any(choice in self.unequal for choice in CHOICES):
            return "explained", OTHER_SAMPLES
        if kind == "tensor" and base.endswith("weights"):
            return self._judge_weights(stage, a, b)
        num_updates = self.num_updates + int(stage.removeprefix(base))
        if kind == "term":
            return self._judge_losses(stage, a, b, self.scale * FIRST[self.precision] * (1 + num_updates))
        bound = self.scale * GRADIENT[self.precision] * (1 + 10 * num_updates)
        left, right = (side.numbers(stage).astype(np.float64) for side in (a, b))
        if kind == "step":
            ratio = float(abs(left - right)[0, 0] / max(left[0, 0], 1e-30))
            return _named(ratio <= bound), f"{ratio:.2g} of it, bound {bound:.2g}"
        distance, norms = abs(left - right)[:, 1], left[:, 0]
        total = math.sqrt(float((norms**2).sum())) or 1e-30
        ratio = math.sqrt(float((distance**2).sum())) / total
        single = distance / (norms + 1e-3 * total)
        worst = int(single.argmax())
        is_explained = ratio <= bound and single[worst] <= 6 * bound
        text = f"{ratio:.2g} of the norm, bound {bound:.2g}; most in {self.left.tensors(stage)[worst]}: {single[worst]:.2g}"
        return _named(is_explained), text

    def _judge_rows(self, stage: str, base: str, a: StepFile, b: StepFile, bound: float) -> tuple[str, str]:
        is_routed = base.endswith(("log-probabilities", "corrections"))
        names = ("prompts", "images", *(CHOICES if is_routed else CHOICES[:1]))
        others = {row for name in names if name != base for row in self.unequal.get(name, ())}
        rows = [row for row in self.unequal[stage] if row not in others]
        if base in ("advantages", "token weights") and others:
            return "explained", OTHER_SAMPLES
        if not rows:
            return "explained", f"{len(self.unequal[stage])} rows with other responses or routes"
        left, right = (side.numbers(stage)[rows].astype(np.float64) for side in (a, b))
        is_rounded = stage_of(stage).numbers == MEANS
        if not is_rounded:
            is_model = base == "scores" and self.settings.get("reward_model.path")
            largest = float(abs(left - right).max()) if left.size else math.inf
            return _named(bool(is_model) and largest <= bound), f"{len(rows)} rows with equal responses"
        rejects = bool(self.settings.get("algorithm.rollout_correction.rollout_rs")) and self.precision != "float32"
        if base == "token weights" or (base == "advantages" and self._is_of_rewards(a)):
            bound = REJECTED if rejects else NEAR
        distances = row_distances(left, right, a.numbers("responses")[rows, 0])
        scales = np.maximum(1.0, abs(left[:, 0])) if base != "token weights" else np.maximum(abs(left[:, 0]), 1e-30)
        ratio = float((distances / scales).max())
        in_one = [(side.nodes(stage, 0, 0, side.count(stage))[rows] == 0).sum() for side in (a, b)]
        lacks = ", and rows that only one run trains on" if in_one[0] != in_one[1] else ""
        return _named(ratio <= bound and not lacks), f"up to {ratio:.2g} per token, bound {bound:.2g}{lacks}"

    def _judge_losses(self, stage: str, a: StepFile, b: StepFile, bound: float) -> tuple[str, str]:
        left, right = (side.numbers(stage)[:, 0].astype(np.float64) for side in (a, b))
        largest = abs(a.numbers("advantages")[:, 0]).max(initial=1.0) if "advantages" in a else 1.0
        ratios = abs(left - right) / np.maximum(abs(left), largest)
        worst = int(ratios.argmax())
        return _named(ratios[worst] <= bound), f"{a.terms(stage)[worst]} by {ratios[worst]:.2g}, bound {bound:.2g}"

    def _is_of_rewards(self, file: StepFile) -> bool:
        """Tell whether advantages follow from rewards alone, and these are equal."""
        has_models = "values" in file or "teacher log-probabilities" in file or "scores" in self.unequal
        is_grouped = self.settings.get("algorithm.adv_estimator", "grpo") in GROUPED
        return is_grouped and not has_models and not self.settings.get("algorithm.use_kl_in_reward")

    def _judge_weights(self, stage: str, a: StepFile, b: StepFile) -> tuple[str, str]:
        if stage not in self._weights:  # a reward model that has learned long ago; or a step that is no longer kept
            return (NOT_KEPT if stage == "weights" else "not judged"), "the weights before are needed"
        left, right = (side.numbers(stage)[:, 1].astype(np.float64) for side in (a, b))
        old = self._weights[stage]
        update = float(np.sqrt(((left - old) ** 2).mean()))
        ratio = float(np.sqrt(((left - right) ** 2).mean())) / (update or 1e-30)
        of_step = sum(name.startswith(stage.replace("weights", "losses")) for name in self.left.steps[a.step])
        bound = self.scale * UPDATE[self.precision] * (1 + self.num_updates + of_step)
        return _named(ratio <= bound), f"{ratio:.2g} of the step's update, bound {bound:.2g}"


def row_distances(left: Array, right: Array, tokens: Array) -> Array:
    """Estimate how far rows are apart per token, from means and projections, float64 [n, 2] each. `tokens`, [n]: of the rows."""
    means, projections = abs(left - right).T
    return np.maximum(means, projections / np.sqrt(np.maximum(tokens, 1).astype(np.float64)) / 4)


def _named(is_explained: bool) -> str:
    return "explained" if is_explained else "wrong"


def poisson_tail(count: int, mean: float) -> float:
    """Compute the probability that a Poisson number of this mean is `count` or more."""
    if count > mean + 40 * math.sqrt(mean + 1):
        return 0.0
    term, below = math.exp(-mean), 0.0
    for k in range(count):
        below += term
        term *= mean / (k + 1)
    return max(0.0, 1.0 - below) if below < 0.999 else sum(_terms(count, mean))


def _terms(count: int, mean: float) -> Iterator[float]:
    for k in range(count, count + 50):
        yield math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) if mean > 0 else 0.0


# -- the explanation ---------------------------------------------------------------------------------------------------


def _cause_of(base: str) -> str:
    """Return the likely cause of a stage, with the model that is trained beside the policy before it."""
    prefix = next((one for one in BESIDE if base.startswith(one)), "")
    return f"{f'of the {prefix.strip()}: ' if prefix else ''}{STAGE_CAUSES[base.removeprefix(prefix)]}"


def likely_first(stage: str, keys: Sequence[str]) -> list[str]:
    """Sort keys that differ: those that act in the stage where two runs part come first."""
    stage = re.sub(f"^({'|'.join(BESIDE)})", "", stage)
    acting = next(begin for stages, begin in ACTS_IN.items() if stage.startswith(stages))
    return sorted(keys, key=lambda key: not key.startswith(acting))


def _explain(result: Diff, sides: _Sides) -> None:
    """Add the likely cause, the values, and differences that do not follow from the first."""
    first = result.first
    assert first is not None
    base = base_name(first.stage)
    rounding = [change for change in result.changes if change.effect == ROUNDING and change.kind != "config"]
    changed = [change.key for change in result.changes if change.effect == RESULTS]
    is_alone = first.measured.startswith(ONLY_IN)
    is_discrete = is_alone or stage_of(first.stage).numbers not in (MEANS, NORMS, NORMS[:1], TERMS)
    if result.verdict == "explained" or (rounding and not is_discrete and first.judgement == "not judged"):
        result.cause = BY_ROUNDING.format(
            facts=", ".join(f"{c.kind} {c.key}" for c in rounding[:4]) or "the same facts"
        )
        if result.verdict == "part":
            result.cause += "; --tolerance says whether rounding explains it. Otherwise: " + _cause_of(base)
    else:
        result.cause = ONE_COMPUTES if is_alone else _cause_of(base)
    if first.step in (*sides.left.facts, *sides.right.facts) and first.step > min(sides.left.facts):
        result.cause += AFTER_RESUME
    if changed:
        result.cause += f"; what differs and may change results: {', '.join(likely_first(base, changed)[:6])}"
    result.independent = list(_independent(result, sides))
    result.texts = list(_values(first, sides))


def _values(first: Parting, sides: _Sides) -> Iterator[str]:
    """Yield both values of the first row or tensor where files hold them, and the layers whose tensors differ."""
    runs, (file, other) = (sides.left.run, sides.right.run), sides.files(first.step)
    if file is None or other is None or not first.leaves:
        return
    numbers, base = list(file.differing(other, first.stage)), base_name(first.stage)
    if first.kind == "row":
        prompt, index = file.rows[numbers[0]]
        row = sum(sample >= 0 for _, sample in file.rows[: numbers[0]])  # of the table, which has no greedy responses
        yield from row_values(runs, sides.rollouts, first.step, base, (file.uids[prompt], prompt, index), row)
    elif first.kind == "tensor":
        known = sides.left.tensors(first.stage)
        names = [known[number] for number in numbers if number < len(known)]
        layers = sorted({int(match[1]) for name in names if (match := re.search(r"layers\.(\d+)\.", name))})
        if first.count > len(first.leaves):
            yield f"in layers {', '.join(map(str, layers))}, and {sum('layers.' not in name for name in names)} tensors outside"
        if base in ("weights", "engine weights"):
            steps_done = first.step + int(base == "weights")
            yield from weight_values(runs, steps_done, first.leaves[0].name)


def _independent(result: Diff, sides: _Sides) -> Iterator[str]:
    """Yield the rows of later stages of the first step whose groups have no earlier difference."""
    first = result.first
    assert first is not None
    file = sides.files(first.step)[0]
    if first.kind != "row" or file is None or len({one.step for one in result.partings}) > 1:
        return
    is_grouped = sides.settings.get("algorithm.adv_estimator") in GROUPED
    reached: set[int] = set()
    for stage in sorted(sides.unequal, key=stage_order):
        if stage_of(stage).kind != "row" or stage == "token weights" or (stage == "advantages" and not is_grouped):
            continue
        prompts = {file.rows[row][0] for row in sides.unequal[stage]}
        if reached and (more := sorted(prompts - reached)):
            yield f"{stage} of {len(more)} other prompts, first {file.uids[more[0]]!r}"
        reached |= prompts


# -- one run: the seams of its resumes ---------------------------------------------------------------------------------


def compare_seams(trace: TraceFolder, warm_up: TraceFolder | None = None) -> Diff:
    """Check that each resume of a run has begun with the state that the step before it has left. Raises StorageError."""
    result = Diff(str(trace.run), str(trace.run))
    if warm_up is not None and any(facts.get("state") for facts in warm_up.facts.values()):
        result = compare_seams(warm_up)
        result.left = result.right = str(trace.run)
        result.cause = result.cause and f"in the warm-up {result.cause}"
    for start, facts in sorted(trace.facts.items()):
        state, before = facts.get("state") or {}, trace.facts_at(start - 1)
        if not state:
            continue
        result.num_steps += 1
        for stage, at_resume in state.items():
            made = [
                step for step in trace.steps if step < start and stage in trace.steps[step]
            ]  # a reward model: not in each
            if stage == "optimizer":
                left = trace.saved.get(start - 1)
            else:
                left = trace.steps[max(made)][stage] if start - 1 in trace.steps and made else None
            if left is None:
                result.notes.append(
                    f"the {stage} at the resume in step {start} has no record before it, and is not compared"
                )
            elif left != at_resume and (stage != "random state" or facts["layout"] == before["layout"]):
                result.partings.append(Parting(start, stage, "step", measured="not what the step before has left"))
                result.verdict = "part"
    if not result.num_steps:
        raise StorageError(f"{trace.run} was never resumed, so it has no seam")
    if (first := result.first) and not result.cause:
        place = f"the {first.stage} after step {first.step - 1} and at the resume"
        result.cause = f"{place} differ: the checkpoint lost or changed them"
    return result


def leaf_lines(leaves: Sequence[Leaf]) -> Iterator[str]:
    """Write each leaf with its numbers on both sides."""
    for leaf in leaves:
        sides = [
            {name: "none" if v is None else f"{v:.8g}" for name, v in side.items()} for side in (leaf.left, leaf.right)
        ]
        yield "  ".join([leaf.name, *(f"{name} {text} | {sides[1][name]}" for name, text in sides[0].items())])
