"""The printed plan: what a config means in numbers before anything is started, warnings, and whether it fits a GPU.

The texts are in the template report/page/plan.txt; tables, warnings and the verdict are made here. `train --dry-run` and `plan`
print it, and `plan --search` prints the layouts that fit.
"""

from __future__ import annotations

import itertools
import math
import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_megatron.algo import losses
from grpo_megatron.checks.components import sources_of
from grpo_megatron.checks.layout import cpu_engine_problems
from grpo_megatron.checks.machine import (
    NO_DEVICE,
    device_problems,
    gpu_engine_problems,
    is_auto_cpu,
    logger_problems,
    package_problems,
)
from grpo_megatron.checks.methods import steps_of_epochs, suspicions
from grpo_megatron.checks.reward_call import reward_lines, trial_lines
from grpo_megatron.cli.healing import Fallbacks
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.config.problems import Problem, counted, written
from grpo_megatron.data.sampler import Mixture
from grpo_megatron.data.stream import is_endless
from grpo_megatron.device import Device, count_cuda_devices, device_bytes, read_hardware
from grpo_megatron.models.engine_cache import engine_cache, engine_weights
from grpo_megatron.models.layers.precision import capability_problems, hardware_problems
from grpo_megatron.planning.cost import Workload
from grpo_megatron.planning.gpus import FP8_SPEEDUP, GPUS, REFERENCE, Gpu, PlannedMachine
from grpo_megatron.planning.layout import ROLLOUT_TP, TP, data_parallel_size
from grpo_megatron.planning.parameters import (
    DTYPE_BYTES,
    RunModels,
    StageMemory,
    Stages,
    image_tokens,
    memory_of_stages,
    teacher_scores_bytes,
)
from grpo_megatron.planning.phases import (
    ESTIMATED,
    GIB,
    PARTS,
    PROCESS_BYTES,
    Phase,
    host_parts,
    image_bytes,
    memory_phases,
    route_bytes,
    shortage,
)
from grpo_megatron.planning.search import Fit, PlannedLayout, estimated, fit, nearest_layouts
from grpo_megatron.planning.traffic import border_traffic, kept_by_syncs, staged_bytes, weight_sync_lines
from grpo_megatron.report.kit import text_page
from grpo_megatron.rollout.vllm.arguments import loops_over_requests
from grpo_megatron.rollout.vllm.versions import installed_vllm
from grpo_megatron.storage.files import write_file
from grpo_megatron.storage.run_files import on_disk, steps_of
from grpo_megatron.training.checkpoint import checkpoint_bytes
from grpo_megatron.transformer_engine import FLASH_ATTENTION, attention_gap
from grpo_megatron.untrusted import reason_of, redacted, yaml_text

if TYPE_CHECKING:
    from grpo_megatron.checks.validate import Checked

PAGE_WIDTH = 120  # characters per line of a plan, where the width of the terminal is not known
NAME_WIDTH = 18  # of a row: all texts begin in the same column, and long ones go on below it


@dataclass(frozen=True)
class PlanPage:
    """`sections`: title -> lines. `problem`: why the run cannot fit, if this is certain. The text ends with the verdict.

    It has no secrets: a config is quoted in it.
    """

    sections: dict[str, list[str]]
    verdict: list[str]
    problem: str | None

    def __str__(self) -> str:
        sections = {**self.sections, "Verdict": self.verdict}.items()
        return redacted("\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections))  # type: ignore[no-any-return]


def plan_page(
    config: Config,
    checked: Checked,
    world_size: int,
    gpu: Gpu | None,
    *,
    host_gib: float | None = None,
    elsewhere: bool = False,
    width: int = PAGE_WIDTH,
) -> PlanPage:
    """Makes the page of a valid config, in lines of at most `width` characters where that is possible.

    `gpu`: the one to fit; None: that of this machine, if it has one. `host_gib`: host memory of a node, to fit too.
    `elsewhere`: the plan is for other machines.
    """
    gpu = gpu if gpu is not None or elsewhere else _own_gpu(config)
    models, per_node = checked.models, min(config.trainer.n_gpus_per_node, world_size)
    work = Workload.of(config, models)
    machine = PlannedMachine(gpu or GPUS[REFERENCE], world_size, per_node)
    is_on_gpus = config.trainer.device != "cpu"
    fitted = fit(config, models, world_size, machine.gpu.usable_bytes) if gpu is not None and is_on_gpus else None
    cache = fitted.cache if fitted is not None else None
    roles = {"rollout_ranks": config.num_rollout_ranks, "lag": config.rollout.lag}
    stages = models.stages(config)
    stage = max(stage.total for stage in stages[0])
    hosts: list[NodeMemory] = []  # of each role
    if is_on_gpus:
        hosts = [NodeMemory.of(config, models, world_size, memory_of_stages(config, world_size, *stages), per_node)]
        hosts += [NodeMemory.of_rollout(config, models, world_size)] if config.num_rollout_ranks else []
    itemsize, rows = DTYPE_BYTES[config.model.dtype], checked.num_trained
    warnings = list(plan_warnings(config, models, work, machine, fitted, checked))
    if not elsewhere and is_for_this_machine(config):
        warnings += core_warning(config, world_size)
    phases = []
    if is_on_gpus:
        all_phases = memory_phases(config, models.arch, world_size, *stages)
        phases = list(_phase_lines(config, models, all_phases, gpu.usable_gib if gpu is not None else None, width - 2))
    text = text_page(
        "plan",
        config=config,
        checked=checked,
        world_size=world_size,
        dp=data_parallel_size(config, world_size),
        n=work.samples_per_prompt,
        losses=losses,
        device=_row(*_device(config)),
        rewards=_rows(reward_lines(config, checked.reward_calls)),
        trials=_rows(trial_lines(checked.reward_calls)),
        memory="\n".join(_memory_lines(stages[0], memory_of_stages(config, world_size, *stages))),
        hosts=hosts,
        engine_shard=engine_weights(config.rollout, models.arch, itemsize) / GIB,
        sent=stage * itemsize / GIB,
        weight_sync=_rows(weight_sync_lines(config, models.arch, world_size)) if config.has_rollouts else "",
        steps=steps_of_epochs(config, rows),
        tasks={source.name: source.data.task for source in sources_of(config)},
        sources=checked.train_prompts.sources if isinstance(checked.train_prompts, Mixture) else (),
        endless=is_endless,
        prompt="\n".join(_prompt_lines(checked)),
        phases="\n".join(phases),
        borders="\n".join(_border_lines(config, models, work, world_size)),
        fit=fitted,
        cache=cache,
        machine=machine,
        work=work,
        healing=_rows(Fallbacks(config, models, machine.gpu).lines()) if config.trainer.healing.is_on else "",
        seconds=None if fitted is None else estimated(fitted, work, machine, **roles).seconds,
        warnings="\n".join(line for warning in warnings for line in wrapped_item(warning, width - 2)),
        counted=counted,
        image_tokens=image_tokens,
        divided=lambda number, parts: f"{number // parts:,}" if number % parts == 0 else f"{number / parts:,.1f}",
        commas=lambda number, places=None: f"{number:,}" if places is None else f"{number:,.{places}f}",
        repr=repr,
        written=written,
        GIB=GIB,
        FP8_SPEEDUP=FP8_SPEEDUP,
    )
    verdict, problem = [], None
    if hosts and host_gib is not None:
        host = max(hosts, key=lambda of_role: of_role.node_gib)
        verdict, problem = [host.verdict(host_gib)], host.misfit(host_gib)
    if fitted is None:
        verdict += verdict_without_gpu(config, models, world_size)
        if gpu is not None:
            verdict[-1] = f"--gpu {gpu.name} is not looked at: {verdict[-1]}; add trainer.device=cuda"
        return PlanPage(_laid_out(text, width - 2), verdict, problem)
    verdict += verdict_lines(config, models, work, machine, fitted, width - 2)
    is_known = machine.gpu.name in GPUS  # not of a size alone, or this machine's, which its own check knows
    lacking = next(capability_problems(config, machine.gpu.capability), None) if is_known else None
    if lacking is not None:
        verdict[-1] = f"DOES NOT RUN ON {machine.gpu.name}: {lacking}"
    return PlanPage(_laid_out(text, width - 2), verdict, lacking or misfit(fitted) or problem)


@dataclass(frozen=True)
class NodeMemory:
    """Bytes of one rank in its node's host memory, by what they are for, and the ranks of a node."""

    parts: dict[str, float]
    ranks: int
    remedies: tuple[str, ...]
    role: str = ""  # of another node than one that trains

    @classmethod
    def of(
        cls, config: Config, models: RunModels, world_size: int, stages: list[StageMemory], ranks: int
    ) -> NodeMemory:
        """Counts the stage that needs most. A node may have ranks of several stages, so this is an upper bound."""
        kept = 0.0 if config.num_rollout_ranks else kept_by_syncs(config, models.arch, world_size)
        has_reference = bool(stages[0].reference) and config.actor.lora.rank is None
        of_all = {
            "weights kept by syncs": kept,
            "weights on their way": staged_bytes(config, models.arch, world_size)[0],
            "routes": route_bytes(config, models.arch, world_size, "engine"),
            "images": image_bytes(config, models.arch, world_size, has_reference=has_reference),
            "scores of teachers": teacher_scores_bytes(config, models.teachers, world_size),
        }
        if config.trainer.healing.is_mirrored:  # of two steps; on several nodes a rank's part is on two of them
            size = checkpoint_bytes(models.arch, config.model.dtype, config.actor.lora)
            of_all["states in memory"] = 2 * size * min(2, config.trainer.nnodes) / world_size
        of_all = {name: size for name, size in of_all.items() if size}
        of_stages = [host_parts(config, models.arch, world_size, stage) | of_all for stage in stages]
        keys = {
            "actor.megatron.offload_optimizer=false": config.actor.megatron.offload_optimizer,
            "actor.megatron.offload_reference=false": config.actor.megatron.offload_reference,
            "critic.offload=false": config.critic.offload,
            "trainer.async_save=false": config.trainer.async_save,
            "rollout.lag=1": config.rollout.lag > 1,
            "trainer.healing.memory=false": config.trainer.healing.is_mirrored,
        }
        remedies = tuple(key for key, is_set in keys.items() if is_set)
        return cls(max(of_stages, key=lambda parts: sum(parts.values())), ranks, remedies)

    @classmethod
    def of_rollout(cls, config: Config, models: RunModels, world_size: int) -> NodeMemory:
        """Counts a node whose ranks only sample."""
        parts = {
            "process": float(PROCESS_BYTES),
            "weights kept by syncs": kept_by_syncs(config, models.arch, world_size),
            "weights on their way": staged_bytes(config, models.arch, world_size)[1],
            "routes": route_bytes(config, models.arch, config.num_rollout_ranks, "engine"),
        }
        ranks, remedies = min(config.num_rollout_ranks, config.trainer.n_gpus_per_node), ["rollout.lag=1"]
        parts = {name: size for name, size in parts.items() if size}
        return cls(parts, ranks, tuple(remedies * (config.rollout.lag > 1)), " that samples")

    @property
    def node_gib(self) -> float:
        """Sums over all ranks of a node."""
        return self.ranks * sum(self.parts.values()) / GIB

    def __str__(self) -> str:
        terms = [f"{'~ ' if name == 'process' else ''}{size / GIB:.2f} {name}" for name, size in self.parts.items()]
        rank = self.node_gib / self.ranks
        return f"{' + '.join(terms)} = {rank:.2f} at most; {self.ranks} x {rank:.2f} = {self.node_gib:.0f} per node{self.role}"

    def verdict(self, gib: float) -> str:
        answer = "FITS" if self.node_gib <= gib else "DOES NOT FIT"
        return f"{answer} {gib:g} GiB of host memory per node{self.role} ({counted(self.ranks, 'rank')}: {self.node_gib:.0f} GiB)"

    def misfit(self, gib: float) -> str | None:
        """Says what is wrong, for the end of a dry run; None unless the exact parts alone are too large."""
        size = sum(size for name, size in self.parts.items() if name != "process") / GIB
        if self.ranks * size <= gib:
            return None
        return (
            f"{counted(self.ranks, 'rank')} of a node{self.role} x {size:.2f} GiB = {self.ranks * size:.0f} GiB of host memory,"
            f" without the processes themselves, is more than --host-memory {gib:g}; set"
            f" {', '.join((*self.remedies, 'more nodes'))} (each rank then has fewer bytes of weights and optimizer)"
        )


def _row(name: str, text: str) -> str:
    """Writes a row as the template has it."""
    return f"{name} :: {' '.join(text.split())}"


def _rows(pairs: Iterable[tuple[str, str]]) -> str:
    return "\n".join(itertools.starmap(_row, pairs))


def _laid_out(text: str, width: int) -> dict[str, list[str]]:
    """Returns title -> lines of the sections that have lines. Rows have their texts in one column, at most `width` wide."""
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in filter(str.strip, text.splitlines()):
        name, is_row, rest = line.partition(" :: ")
        if line.startswith("# "):
            lines = sections[line[2:]] = []
        elif is_row and len(name) < NAME_WIDTH:
            row, indent = f"{name:<{NAME_WIDTH}}{rest}", " " * NAME_WIDTH
            lines += textwrap.wrap(row, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
        else:
            lines.append(line.rstrip())
    return {title: lines for title, lines in sections.items() if lines}


def wrapped_item(text: str, width: int) -> list[str]:
    """Wraps an item of a list."""
    return textwrap.wrap(
        text, width, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


# -- This machine ------------------------------------------------------------------------------------------------------


def is_for_this_machine(config: Config) -> bool:
    """Says if the ranks can run here; `trainer.device=auto` is the CPU on a machine without CUDA devices."""
    return config.trainer.device in ("cpu", "auto") or count_cuda_devices() > 0


def readiness(config: Config, checked: Checked, world_size: int) -> str:
    """Says if a run can start here, in one line: READY, or READY EXCEPT for what this machine cannot show.

    `config`: as given, before ids of the Hub were replaced by folders. Raises ConfigError: a folder without weights.
    """
    path = config.model.path
    if not checked.has_weights and path == checked.config.model.path:
        raise ConfigError(
            f"NOT READY: model.path={str(path)!r} has no weights (*.safetensors); fetch them, or use the"
            " command plan, which needs none"
        )
    if never := list(gpu_engine_problems(config)):
        raise ConfigError(f"NOT READY: {Problem.of(never[0]).text}")
    problems = [*logger_problems(config), *package_problems(config), *device_problems(config, world_size)]
    problems += [
        *hardware_problems(config),
        *(cpu_engine_problems(config, checked.arch) if is_auto_cpu(config) else ()),
    ]
    missing = [] if checked.has_weights else ["the weights are still on the Hub"]
    missing += [Problem.of(problem).text.partition(";")[0] for problem in problems]
    missing += [f"in the episode above {text}" for who, text in checked.episode if who == "WARNING"]
    trainer, begins = config.trainer, "starts"
    if trainer.resume_mode == "auto" and (checkpoints := on_disk(trainer.output_dir)):
        begins = (
            f"goes on after step {steps_of(checkpoints[-1])} of {trainer.total_training_steps}, from {checkpoints[-1]}"
        )
    how = f"by torchrun on each of the {trainer.nnodes} nodes " if trainer.nnodes > 1 else ""
    if missing:
        return f"READY EXCEPT: {'; '.join(missing)}" + (f"; {how}the run {begins}" if how or begins != "starts" else "")
    return f"READY: {how or 'without --dry-run '}the run {begins}"


def _own_gpu(config: Config) -> Gpu | None:
    """Reads this machine's GPU; its peaks are those of REFERENCE. Not run on a GPU yet."""
    size = device_bytes(config.trainer.device)
    if size is None:
        return None
    capability = read_hardware(config.trainer.device).capability or GPUS[REFERENCE].capability
    return replace(GPUS[REFERENCE], name="this machine's GPU", usable_gib=size / GIB, capability=capability)


def _device(config: Config) -> tuple[str, str]:
    """Makes a row: the kernels that a rank would use here, or that the plan is for another machine."""
    device = config.trainer.device
    if device != "cpu" and count_cuda_devices() == 0:
        meaning = "here a run would be on the CPU" if device == "auto" else "a plan for another machine"
        return "device", f"{device}, and {NO_DEVICE}: {meaning}"
    try:
        from grpo_megatron.models.layers.spec import choose_kernels
    except ImportError:
        return "kernels", "unknown: Megatron-Core is not installed here"
    try:
        return "kernels", choose_kernels(config.actor.megatron, Device(device), config.model.dtype).describe()
    except ConfigError as error:
        return "kernels", f"not available on this machine: {error}"


# -- Tables, and one prompt with special tokens as the tokenizer writes them -------------------------------------------

MAX_CHARACTERS = 3000  # of a long prompt, both ends
LABEL_WIDTH, CELL_WIDTH = 22, 8  # of the table of phases


def _prompt_lines(checked: Checked) -> Iterator[str]:
    """Shows the prompt on which the reward was called, else the first one of the run. Nothing without prompts or a tokenizer."""
    called = [trial.prompt for trial in checked.reward_calls[:1]]
    offline = [group[0] for group in checked.offline_groups[:1]]
    prompt = next(
        (prompts[0] for prompts in (called, checked.train_prompts, checked.val_prompts, offline) if prompts), None
    )
    if prompt is None or checked.tokenizer is None:
        return
    yield f"{prompt.uid}, {counted(len(prompt.prompt_ids), 'token')}:"
    hidden = {place for image in prompt.images for place in range(image.first + 1, image.first + image.num_tokens)}
    ids = [token for place, token in enumerate(prompt.prompt_ids) if place not in hidden]  # one token per image
    text = str(checked.tokenizer.decode(ids, skip_special_tokens=False))
    if len(text) > MAX_CHARACTERS:
        half = MAX_CHARACTERS // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half:,} characters are not shown ...]\n{text[-half:]}"
    yield from (f"  | {line}" for line in text.split("\n"))


def _memory_lines(policy: Stages, memories: Sequence[StageMemory]) -> Iterator[str]:
    """Yields a line per pipeline stage: what `planning/` counts, and the sum."""
    others = [name for name in ("reward model", "critic", "teachers") if getattr(memories[0], name.replace(" ", "_"))]
    titles = ["weights", "gradients", "optimizer", "reference", *others]
    widths = [max(9, len(title)) for title in (*titles, "together")]
    header = " ".join(f"{title:>{width}}" for title, width in zip((*titles, "together"), widths, strict=True))
    yield f"{'stage':>5} {'layers':>6} {'parameters':>15} {header}"
    for number, memory in enumerate(memories):
        sizes = [*(getattr(memory, title.replace(" ", "_")) for title in titles), memory.total]
        cells = " ".join(f"{size / GIB:>{width}.3f}" for size, width in zip(sizes, widths, strict=True))
        yield f"{number:>5} {policy[number].layers:>6} {policy[number].total:>15,} {cells}"


def _phase_lines(
    config: Config, models: RunModels, phases: list[Phase], device_gib: float | None, width: int
) -> Iterator[str]:
    """Yields a column per phase, a row per part; then the smallest device that fits, or whether `device_gib` does."""
    count = (width - LABEL_WIDTH) // CELL_WIDTH
    for start in range(0, len(phases), count):
        for label, *cells in _phase_table(config, models, phases[start : start + count], device_gib):
            yield f"{label:<{LABEL_WIDTH}}" + "".join(f"{cell:>{CELL_WIDTH}}" for cell in cells)
    if device_gib is None:
        yield "--gpu NAME (or GIB) marks the phases that do not fit."


def _phase_table(
    config: Config, models: RunModels, phases: list[Phase], device_gib: float | None
) -> Iterator[Sequence[str]]:
    yield "", *(phase.name for phase in phases)
    if config.actor.megatron.pipeline_model_parallel_size > 1:
        yield "fullest stage", *(str(phase.stage) for phase in phases)
    for name in PARTS:
        sizes = [phase.parts.get(name) for phase in phases]
        if any(sizes):
            label = f"~ {name}" if name in ESTIMATED else name
            yield label, *("-" if size is None else f"{size / GIB:.2f}" for size in sizes)
    if device_gib is None:
        if config.has_rollouts:
            yield "engine's share", *(f"{p.utilization:g} x" if p.utilization else "-" for p in phases)
        yield "a device of", *(f"{phase.smallest_device / GIB:.2f}" for phase in phases)
        return
    device = device_gib * GIB
    shares = [phase.utilization * device_gib for phase in phases]
    if config.has_rollouts:
        yield "engine's share", *(f"{share:.2f}" if share else "-" for share in shares)
        length = config.data.max_prompt_length + config.data.max_response_length
        cache = engine_cache(config.rollout, models.arch, DTYPE_BYTES[config.model.dtype], device, length)
        has_share = [
            phase.utilization > 0 and phase.name != "start" for phase in phases
        ]  # at the start it must be free
        for label, size in (("weights", cache.weights), ("~ workspace", cache.workspace), ("~ KV cache", cache.cache)):
            yield f"  of it {label}", *(f"{max(0.0, size) / GIB:.2f}" if has else "-" for has in has_share)
    yield "together", *(f"{p.total / GIB + share:.2f}" for p, share in zip(phases, shares, strict=True))
    yield f"of {device_gib:.5g}", *("fits" if phase.fits(device) else "NO" for phase in phases)


def _border_lines(config: Config, models: RunModels, work: Workload, world_size: int) -> Iterator[str]:
    traffic = border_traffic(config, models, work, world_size)
    for item in traffic:
        yield f"{item.name if item.is_exact else f'~ {item.name}':<18}{item.size / 1e9:>12,.1f} GB"
    if traffic:
        yield f"{'together':<18}{sum(item.size for item in traffic) / 1e9:>12,.1f} GB"


# -- Warnings: what works, but costs more than the user may think ------------------------------------------------------

IDLE = 0.02  # a share of idle ranks that is worth a warning
BUBBLE = 0.2  # a share of the pipeline's time


def plan_warnings(
    config: Config, models: RunModels, work: Workload, machine: PlannedMachine, fitted: Fit | None, checked: Checked
) -> Iterator[str]:
    """Yields warnings. `fitted`: the fit to a GPU, if one was named."""
    yield from suspicions(config)
    yield from _groups_over_nodes(config, work, machine)
    if fitted is not None and fitted.cache is not None:
        yield from _small_cache(config, work, machine, fitted)
    yield from _copied_cache(config, models)
    yield from _unfused_attention(config, machine)
    yield from _uneven_batches(config, work, machine)
    yield from _pipeline_bubble(config, work, machine)
    yield from _few_rows(config, checked)
    if config.has_rollouts:
        yield from _looped_requests(config, models)


def core_warning(config: Config, world_size: int) -> Iterator[str]:
    """Ranks that share the cores of this machine, which `world_size` ranks are planned for."""
    cores = os.cpu_count() or 1
    ranks = min(config.trainer.n_gpus_per_node, world_size)
    if ranks > cores:
        yield (
            f"{ranks} ranks on this machine's {cores} cores: each gets {cores / ranks:.2g} of one; lower"
            " trainer.n_gpus_per_node, or expect the step to take longer by that factor"
        )


def _groups_over_nodes(config: Config, work: Workload, machine: PlannedMachine) -> Iterator[str]:
    arch, per_node = work.arch, machine.per_node
    gpu = machine.gpu
    for key, size in ((TP, config.actor.megatron.tensor_model_parallel_size), (ROLLOUT_TP, _rollout_tp(config))):
        if size > 1 and (per_node % size if size < per_node else size > per_node):
            megabytes = 4 * arch.num_layers * arch.hidden_size * work.itemsize * (size - 1) / size / 1e6
            megabytes /= 2 if key == ROLLOUT_TP else 1  # an all-reduce is two of the four transfers per layer
            yield (
                f"{key}={size} spans nodes of {per_node}: {megabytes:.3g} MB per token and forward pass cross the"
                f" network, at {gpu.network_bytes_per_s / 1e9:g} GB/s per GPU instead of"
                f" {gpu.nvlink_bytes_per_s / 1e9:g}; set a divisor of {per_node}"
            )


def _rollout_tp(config: Config) -> int:
    return config.rollout.tensor_model_parallel_size if config.has_rollouts else 1


def _small_cache(config: Config, work: Workload, machine: PlannedMachine, fitted: Fit) -> Iterator[str]:
    assert fitted.cache is not None
    at_once = fitted.cache.sequences(fitted.length)
    wanted = min(fitted.cache.max_num_seqs, math.ceil(work.samples * _rollout_tp(config) / machine.world_size))
    share = f"rollout.gpu_memory_utilization={config.rollout.gpu_memory_utilization:g}"
    if fitted.cache.cache <= 0 or not at_once:
        yield (
            f"the engine's weights of {fitted.cache.weights / 2**30:.2f} GiB and workspace of about"
            f" {fitted.cache.workspace / 2**30:.2f} GiB leave {max(0.0, fitted.cache.cache) / 2**30:.2f} GiB of its"
            f" {config.rollout.gpu_memory_utilization * fitted.device / 2**30:.2f} GiB for the cache, less than one"
            f" sequence of {fitted.length:,} tokens; raise {share} or {ROLLOUT_TP}={_rollout_tp(config)}"
        )
    elif at_once < wanted / 2:
        yield (
            f"the engine's cache holds {at_once:,} sequences of {fitted.length:,} tokens, and {wanted:,} are to be sampled"
            f" at once: long responses wait or are computed again; raise {share} or {ROLLOUT_TP}={_rollout_tp(config)}"
        )


def _copied_cache(config: Config, models: RunModels) -> Iterator[str]:
    tp, groups = _rollout_tp(config), models.arch.num_query_groups
    if models.arch.latent is not None and tp > 1:
        yield f"{ROLLOUT_TP}={tp}: the latents of each token are in the cache of all {tp} ranks of an engine"
    elif tp > groups:
        yield (
            f"{ROLLOUT_TP}={tp} and {groups} key-value heads: each head is in the cache of {tp // groups} ranks;"
            f" {groups} or fewer would hold as many tokens per GPU"
        )


def _unfused_attention(config: Config, machine: PlannedMachine) -> Iterator[str]:
    """Says what Transformer Engine lacks on the GPU that the plan is for, whatever is installed here."""
    megatron, gpu = config.actor.megatron, machine.gpu
    reason = attention_gap(gpu.capability, deterministic=megatron.deterministic)
    if reason is None or config.trainer.device == "cpu" or megatron.transformer_impl == "local":
        return
    needs_engine = megatron.fp8.recipe or megatron.context_parallel_size > 1 or megatron.transformer_impl != "auto"
    without = "the run is refused" if needs_engine else "the run takes Megatron-Core's local layers, which are slower"
    yield f"{gpu.name}: {reason}; without {FLASH_ATTENTION} {without}"


def _uneven_batches(config: Config, work: Workload, machine: PlannedMachine) -> Iterator[str]:
    dp = data_parallel_size(config, machine.world_size)
    shares = [("each optimizer step", work.rows * work.epochs // work.updates, dp, "data-parallel ranks")]
    if work.generates:
        shares.append(("a step", work.samples, machine.world_size // _rollout_tp(config), "engines"))
    for what, samples, parts, noun in shares:
        most = math.ceil(samples / parts)
        idle = 1 - samples / parts / most
        if idle > IDLE:
            yield (
                f"{samples:,} samples of {what} over {parts:,} {noun}: {most:,} at most and"
                f" {samples / parts:.3g} on average, so {idle:.0%} of them are idle; choose a multiple of {parts:,}"
                " (data.train_batch_size x rollout.n, actor.ppo_mini_batch_size)"
            )


def _pipeline_bubble(config: Config, work: Workload, machine: PlannedMachine) -> Iterator[str]:
    pp = config.actor.megatron.pipeline_model_parallel_size
    length = config.data.max_prompt_length + config.data.max_response_length
    per_rank = work.rows * work.epochs / work.updates / data_parallel_size(config, machine.world_size)
    tokens = per_rank * length
    count = max(1, math.ceil(tokens / config.actor.ppo_max_token_len_per_gpu))
    bubble = (pp - 1) / (count + pp - 1)
    if bubble > BUBBLE:
        yield (
            f"at most {count} micro-batches per optimizer step for {pp} pipeline stages: {bubble:.0%} of the update is"
            " idle; lower actor.ppo_max_token_len_per_gpu or actor.megatron.pipeline_model_parallel_size"
        )


def _few_rows(config: Config, checked: Checked) -> Iterator[str]:
    rows = 0 if is_endless(checked.train_prompts) else len(checked.train_prompts) or len(checked.offline_groups)
    batches = [("data.train_batch_size", config.data.train_batch_size, rows)]
    if config.sft.steps:
        batches.append(("sft.train_batch_size", config.sft.train_batch_size, len(checked.supervised_rows)))
    for key, batch, found in batches:
        if 0 < found < batch:
            yield f"{key}={batch} and {counted(found, 'row')}: every step has each row {batch / found:,.1f} times on average"


def _looped_requests(config: Config, models: RunModels) -> Iterator[str]:
    """Warns of a vLLM that loops over requests; the one installed here is taken for that of the run."""
    rollout, arch, version = config.rollout, models.arch, installed_vllm()
    is_on_gpus = rollout.engine == "vllm" and config.trainer.device != "cpu"
    records = config.actor.moe.route_replay == "engine"
    model = config.model.dtype, arch.family, arch.num_experts > 0
    if is_on_gpus and loops_over_requests(rollout, *model, version, record_routes=records):
        yield (
            f"vllm {version} takes its first model runner for this run, which samples for each seeded request by a call of its"
            " own: as many calls from the host per token as sequences are decoded (rollout.max_num_seqs); install vllm 0.32,"
            " which needs one"
        )


# -- The verdict: whether the run fits a GPU, what to change if not, and the nearest layouts that do -------------------


def verdict_lines(
    config: Config, models: RunModels, work: Workload, machine: PlannedMachine, fitted: Fit, width: int = PAGE_WIDTH
) -> Iterator[str]:
    """Yields the lines for a named GPU. The last line is the verdict itself."""
    if machine.gpu.remark:
        yield machine.gpu.remark
    problems = [shortage(config, phase, fitted.device) for phase in fitted.full_phases]
    if not fitted.has_cache:
        problems.append(f"the engine's cache does not hold one sequence of {fitted.length:,} tokens (see the warnings)")
    if not fitted.fits:
        yield (
            "too large even without the estimated parts:"
            if fitted.is_impossible
            else "too large by the estimated parts (~):"
        )
    for problem in problems:
        yield from wrapped_item(problem, width)
    if not fitted.fits:
        near = nearest_layouts(config, models, work, machine)
        yield "nearest layouts that fit, with their estimated step:" if near else "no layout that was tried fits"
        for planned in near:
            yield from _described(planned, config)
    yield _verdict(machine.gpu, fitted)


def _verdict(gpu: Gpu, fitted: Fit) -> str:
    name, size = fitted.fullest
    room = f"{gpu.name}, {round(gpu.usable_gib, 2):g} GiB usable" if "GiB" not in gpu.name else gpu.name
    fullest = f"fullest phase: {name}, {size / GIB:.2f} GiB"
    return f"{'FITS' if fitted.fits else 'DOES NOT FIT'} {room} ({fullest})"


def misfit(fitted: Fit) -> str | None:
    """Says what is wrong, for the end of a dry run; None unless the exact parts alone are too large."""
    if not fitted.is_impossible:
        return None
    names = ", ".join(phase.name for phase in fitted.full_phases) or "rollout"
    return (
        f"the run does not fit a GPU of {fitted.device / GIB:.2f} GiB, even without the estimated parts (phase {names});"
        " the plan's verdict says what to change"
    )


def _described(planned: PlannedLayout, config: Config) -> Iterator[str]:
    changes = list(planned.layout.overrides(config))
    name, size = planned.fit.fullest
    yield f"  {planned.seconds.step:.0f} s, fullest phase {name} {size / GIB:.2f} GiB:"
    yield from (f"      {change}" for change in changes)


def verdict_without_gpu(config: Config, models: RunModels, world_size: int) -> Iterator[str]:
    """Lists the known GPUs that fit."""
    if config.trainer.device == "cpu":
        yield "no GPU to fit: trainer.device=cpu, and only the memory of GPUs is counted"
        return
    verdicts: dict[str, list[str]] = {"FITS": [], "DOES NOT FIT": [], "DOES NOT RUN ON": []}
    for name, gpu in GPUS.items():
        fits = fit(config, models, world_size, gpu.usable_bytes).fits
        runs = not any(capability_problems(config, gpu.capability))
        verdicts[("FITS" if fits else "DOES NOT FIT") if runs else "DOES NOT RUN ON"].append(name)
    verdicts["FITS"] = verdicts["FITS"] or ["none of the known GPUs"]
    yield "--gpu NAME or --gpu GIB says what to change, and which layouts fit."
    yield "; ".join(f"{verdict} {', '.join(names)}" for verdict, names in verdicts.items() if names)


# -- The resolved configuration: every key with its value, as a file that can be run -----------------------------------
# A run finds nothing in its folder that it has not written itself, so the file is beside it.

HEADER = "# Every key of a run with its value. A dry run has written this file, and the next one replaces it.\n"


def resolved_problem(path: Path) -> str | None:
    """Says why --resolved-config cannot be written; None if nothing is known against it."""
    if path.exists():
        return f"--resolved-config {path} exists; name another file, or remove it"
    if not path.absolute().parent.is_dir():
        return f"--resolved-config {path}: no folder {str(path.parent)!r}; make it, or name another file"
    return None


def write_resolved(config: Config, path: Path | None) -> str:
    """Write the file of --resolved-config; None: write or replace OUTPUT_DIR.resolved.yaml, where this can be done.

    Returns its path, or why it was not written. Raises ConfigError for --resolved-config. Only a relative output folder may
    get a new parent folder: an absolute one may be that of another machine.
    """
    values = config.record()
    text = yaml_text(values, width=100, default_flow_style=None)
    if path is not None:
        if problem := resolved_problem(path):
            raise ConfigError(problem)
        try:
            write_file(path, text)
        except OSError as error:
            raise ConfigError(f"cannot write --resolved-config {path}: {reason_of(error)}") from error
        return str(path)
    output_dir, elsewhere = config.trainer.output_dir, "--resolved-config FILE writes it elsewhere"
    path = output_dir / "run.resolved.yaml"  # of a folder without a name of its own, such as "."
    if output_dir.name not in ("", ".."):
        path = output_dir.with_name(f"{output_dir.name}.resolved.yaml")
    try:
        if path.exists() and not path.read_bytes().startswith(HEADER.encode()):
            return f"not written: {path} is not of a dry run; {elsewhere}"
        if not output_dir.is_absolute():
            path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, HEADER + text)
    except OSError as error:
        return f"not written: {path}: {reason_of(error)}; {elsewhere}"
    return str(path)
