"""`grpo-megatron init MODEL --task TASK --train FILE ...`: a commented config for a model, a task and a machine.

The comments say why a value is what it is. What is written was checked as `train --dry-run` checks it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from grpo_megatron.checks.validate import validate
from grpo_megatron.config import Config, ConfigError, DataConfig
from grpo_megatron.config.options import Argument, Option, Options
from grpo_megatron.data.task import get_task, task_names
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.memory.parameters import RunModels
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import read_architecture
from grpo_megatron.planning.cost import PlannedMachine, Workload
from grpo_megatron.planning.gpus import GPUS, REFERENCE, Gpu, find_gpu
from grpo_megatron.planning.layout import FULL_RECOMPUTATION
from grpo_megatron.planning.search import PlannedLayout, search
from grpo_megatron.reading import parse_yaml
from grpo_megatron.registry import find_modules
from grpo_megatron.storage.atomic import write_file

PER_NODE = 8
CPU_RANKS = 2


class InitOptions(Options):
    """The options of `init`."""

    program, description = "init", "Write a commented config for a model, a task and a machine."
    model: Annotated[Path, Argument("a local Hugging Face folder", "MODEL")]
    task: Annotated[str, Option(f"a task file, or one of {', '.join(task_names())} (default gsm8k)")] = "gsm8k"
    train: Annotated[tuple[str, ...], Option("training rows", "FILE")]
    val: Annotated[tuple[str, ...], Option("held-out rows", "FILE")] = ()
    reward: Annotated[str | None, Option("your own reward, instead of the task's", "MODULE:FUNCTION")] = None
    cpu: Annotated[bool, Option(f"train on this machine's CPU, on {CPU_RANKS} ranks")] = False
    gpus: Annotated[int, Option(f"GPUs of all nodes (default {PER_NODE})", "N", low=1, high=999_999)] = PER_NODE
    gpus_per_node: Annotated[int, Option(f"GPUs per node (default {PER_NODE})", "N", low=1, high=999_999)] = PER_NODE
    gpu: Annotated[
        str,
        Option(
            f"{', '.join(GPUS)} (a100 is a100-80), or GiB of memory (default {REFERENCE})",
            "NAME|GIB",
            flags=("--gpu", "--gpu-memory"),
        ),
    ] = REFERENCE
    output: Annotated[Path, Option("the file to write (default grpo.yaml)", "YAML")] = Path("grpo.yaml")


# -- the layout: the fastest that fits, by the plan's memory arithmetic and cost model (planning/) ---------------------


@dataclass(frozen=True)
class Machine:
    """`gpu` None: CPU ranks, which share the memory of their machine."""

    nodes: int
    per_node: int
    gpu: Gpu | None

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


def suggest(config: Config, arch: Architecture, machine: Machine) -> PlannedLayout:
    """For GPUs. Raises ConfigError if no layout fits."""
    assert machine.gpu is not None
    models = RunModels(arch)
    planned = PlannedMachine(machine.gpu, machine.ranks, machine.per_node)
    found = search(config, models, Workload.of(config, models), planned).found
    if not found:
        raise ConfigError(
            f"{arch.num_parameters() / 1e9:.2f}e9 parameters on {machine.ranks} GPUs of {machine.gpu.usable_gib:g} GiB: no layout"
            " fits; give more --gpus, or another --gpu"
        )
    return found[0]


# -- The text of a new config: YAML with a comment for each choice -----------------------------------------------------

COLUMN = 36  # of the comments
CPU_BATCH, GPU_BATCH = 8, 64  # prompts per step
CPU_GROUP, GPU_GROUP = 4, 8  # samples per prompt
CPU_TOKENS, GPU_TOKENS = 4096, 16384  # of a micro-batch


@dataclass(frozen=True)
class NewRun:
    """What the user has asked for, and what was read of the model. Lengths in tokens."""

    options: InitOptions
    arch: Architecture
    has_template: bool
    max_prompt: int
    max_response: int

    @property
    def output_dir(self) -> Path:
        """The output folder of the run, named as the config."""
        return Path("outputs") / self.options.output.stem


def config_text(run: NewRun, machine: Machine, planned: PlannedLayout | None = None) -> str:
    """`planned` None: on the CPU, or without a layout, to plan one."""
    sections = [
        _header(run, machine),
        _model(run, machine),
        _data(run, machine),
        _reward(run),
        _actor(run, machine, planned),
        _rollout(machine, planned),
        iter(["algorithm:", _line("  adv_estimator: grpo", "(reward - mean of the group) / its standard deviation")]),
        _trainer(run, machine),
    ]
    return "\n\n".join(filter(None, ("\n".join(section) for section in sections))) + "\n"


def _line(text: str, comment: str) -> str:
    return f"{text:<{COLUMN - 1}} # {comment}"  # a comment needs the space before it, also behind a long value


def _header(run: NewRun, machine: Machine) -> Iterator[str]:
    arch = run.arch
    where = f"{machine.ranks} ranks on a CPU"
    if machine.gpu is not None:
        where = f"{machine.nodes} x {machine.per_node} GPUs, {machine.gpu.name}"
    yield f"# GRPO on the task {run.options.task}."
    yield f"# Model: {arch.family}, {_count(arch.num_parameters())} parameters, {arch.num_layers} layers. Machine: {where}."
    if machine.gpu is not None and machine.gpu.remark:
        yield f"# --gpu {machine.gpu.remark}."
    yield "# Only what matters most is here: `grpo-megatron keys SECTION` lists every key with its default."


def _model(run: NewRun, machine: Machine) -> Iterator[str]:
    yield "model:"
    yield f"  path: {_text(run.options.model)}"
    if machine.gpu is None:
        yield _line("  dtype: float32", "on a CPU; engine and policy then agree to six digits")
    else:
        yield _line("  dtype: bfloat16", "Adam keeps a copy of the weights in float32")


def _data(run: NewRun, machine: Machine) -> Iterator[str]:
    batch, group = (CPU_BATCH, CPU_GROUP) if machine.gpu is None else (GPU_BATCH, GPU_GROUP)
    yield "data:"
    yield f"  task: {_text(run.options.task)}"
    yield f"  train_files: {_texts(run.options.train)}"
    if run.options.val:
        yield f"  val_files: {_texts(run.options.val)}"
    yield _line(f"  train_batch_size: {batch}", f"prompts per step; x rollout.n {group} = {batch * group} samples")
    yield _line(f"  max_prompt_length: {run.max_prompt}", "tokens; longer prompts are left out")
    yield _line(
        f"  max_response_length: {run.max_response}", "tokens; longer answers are cut: see response_length/clip_ratio"
    )
    if not run.has_template:
        yield _line("  apply_chat_template: false", "the tokenizer has no chat template: prompts are plain text")


def _reward(run: NewRun) -> Iterator[str]:
    if run.options.reward is not None:
        yield "reward:"
        yield _line(f"  function: {run.options.reward}", "looked for in the current folder and beside this file")


def _actor(run: NewRun, machine: Machine, planned: PlannedLayout | None) -> Iterator[str]:
    on_cpu = machine.gpu is None
    tokens = max(CPU_TOKENS if on_cpu else GPU_TOKENS, run.max_prompt + run.max_response)
    tokens = tokens if planned is None else planned.layout.tokens
    yield "actor:"
    yield _line("  use_kl_loss: false", "true: a reference model holds the policy near its start (kl_loss_coef)")
    yield "  clip_ratio_low: 0.2"
    yield _line("  clip_ratio_high: 0.28", "above clip_ratio_low, entropy falls more slowly (DAPO, 2503.14476)")
    yield _line(f"  ppo_max_token_len_per_gpu: {tokens}", "tokens of a micro-batch; only memory and speed depend on it")
    rate = "1.0e-5" if on_cpu else "1.0e-6"
    yield _line(f"  optim: {{lr: {rate}}}", "the first key to change if the reward does not rise")
    if planned is not None:
        yield from _megatron(machine, planned)


def _megatron(machine: Machine, planned: PlannedLayout) -> Iterator[str]:
    layout, (phase, size) = planned.layout, planned.fit.fullest
    assert machine.gpu is not None
    yield "  megatron:"
    copies, gib, seconds = machine.ranks // (layout.tp * layout.pp), size / 2**30, planned.seconds.step
    yield f"    # A copy of the model is on tp {layout.tp} x pp {layout.pp} GPUs; {copies} copies share a batch. Estimated: of"
    yield f"    # all layouts that fit, this has the shortest step, {seconds:.0f} s; phase {phase} needs most memory, {gib:.0f}"
    yield f"    # of {machine.gpu.usable_gib:g} GiB. `grpo-megatron plan CONFIG --search` lists the others."
    yield _line(f"    tensor_model_parallel_size: {layout.tp}", "matrices are cut; stays within a node")
    yield _line(f"    pipeline_model_parallel_size: {layout.pp}", "layers are cut; may cross nodes")
    if layout.ep > 1:
        yield _line(f"    expert_model_parallel_size: {layout.ep}", "experts are divided over so many copies")
    yield _line("    use_distributed_optimizer: true", "Adam's state is divided over the copies")
    if layout.offload_optimizer:
        yield _line("    offload_optimizer: true", "gradients and Adam's state are on the host during rollouts")
    if layout.offload_reference:
        yield _line("    offload_reference: true", "and so is the reference model, if there is one")
    if layout.recompute:
        yield "    # Activations are computed again in the backward pass: less memory, a third more work of an update."
        table = ", ".join(f"{key}: {value}" for key, value in FULL_RECOMPUTATION.items())
        yield f"    override_transformer_config: {{{table}}}"


def _rollout(machine: Machine, planned: PlannedLayout | None) -> Iterator[str]:
    on_cpu = machine.gpu is None
    yield "rollout:"
    yield _line(f"  n: {CPU_GROUP if on_cpu else GPU_GROUP}", "samples per prompt: the group of GRPO")
    if on_cpu:
        yield _line("  enforce_eager: true", "no compilation, which takes longer than a short run")
    if planned is not None:
        layout = planned.layout
        yield _line(f"  tensor_model_parallel_size: {layout.rollout_tp}", "GPUs of one engine")
        yield _line(
            f"  gpu_memory_utilization: {layout.utilization:g}", "the engine's share of a GPU while it generates"
        )


def _trainer(run: NewRun, machine: Machine) -> Iterator[str]:
    yield "trainer:"
    yield _line("  total_training_steps: 100", "or total_epochs")
    if run.options.val:
        yield _line("  test_freq: 10", "steps between validations; the first is before step 0")
    else:
        yield _line("  val_before_train: false", "there are no data.val_files")
        yield "  test_freq: -1"
    yield _line("  save_freq: 20", "steps between checkpoints; a stopped run goes on from the newest")
    yield f"  nnodes: {machine.nodes}"
    yield f"  n_gpus_per_node: {machine.per_node}"
    if machine.gpu is None:
        yield "  device: cpu"
    yield f"  output_dir: {_text(run.output_dir)}"
    yield "  logger: [console, jsonl, tensorboard]"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.1f} million"


def _text(value: object) -> str:
    """A YAML scalar: plain where that is safe, else in quotes."""
    text = str(value)
    is_plain = text[:1].isalpha() or text[:1] in "/."
    return text if is_plain and all(char.isalnum() or char in "/._-" for char in text) else json.dumps(text)


def _texts(values: Sequence[str]) -> str:
    return f"[{', '.join(map(_text, values))}]"


def write_config(options: InitOptions) -> int:
    """Write the config; returns the exit code. Raises ConfigError, and then nothing was written."""
    output = options.output
    if output.exists():
        raise ConfigError(f"{output} exists; name another file with --output, or remove it")
    find_modules(output)  # the user's reward is called
    arch = _architecture(options.model)
    machine = _machine(options)
    run = _new_run(options, arch, machine)

    text = config_text(run, machine)
    if machine.gpu is not None:
        text = config_text(run, machine, suggest(_config(text), arch, machine))
    validate(_config(text), machine.ranks, dry_run=True, rehearsed=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_file(output, text)
    print(f"wrote {output}. Read its comments, then:")
    print(f"  grpo-megatron train {output} --dry-run{_gpu_option(machine)}")
    print(f"  grpo-megatron train {output}")
    return 0


def _gpu_option(machine: Machine) -> str:
    """For a plan on a machine without that GPU."""
    if machine.gpu is None:
        return ""
    return f" --gpu {machine.gpu.name if machine.gpu.name in GPUS else f'{machine.gpu.usable_gib:g}'}"


def _architecture(folder: Path) -> Architecture:
    try:
        return read_architecture(folder)
    except ValueError as error:
        raise ConfigError(f"MODEL {str(folder)!r}: {error}; name a Hugging Face folder of a supported model") from error


def _machine(options: InitOptions) -> Machine:
    if options.cpu:
        return Machine(1, CPU_RANKS, None)
    per_node = min(options.gpus, options.gpus_per_node)
    if options.gpus % per_node:
        raise ConfigError(f"--gpus {options.gpus} is no multiple of --gpus-per-node {per_node}")
    try:
        gpu = find_gpu(options.gpu)
    except ValueError as error:
        raise ConfigError(f"--gpu {error}") from error
    return Machine(options.gpus // per_node, per_node, gpu)


def _new_run(options: InitOptions, arch: Architecture, machine: Machine) -> NewRun:
    if options.reward is None and not get_task(options.task).graders:
        raise ConfigError(
            f"task {options.task} does not grade answers; name your function with --reward my_module:reward"
        )
    on_cpu, room = machine.gpu is None, arch.max_position_embeddings
    max_response = min(256 if on_cpu else 2048, room // 2)
    max_prompt = min(512 if on_cpu else 1024, room - max_response)
    return NewRun(options, arch, _has_template(options.model), max_prompt, max_response)


def _has_template(model: Path) -> bool:
    try:
        return load_tokenizer(model, DataConfig()).chat_template is not None
    except ConfigError as error:
        raise ConfigError(f"{error}\n  (for init, put the tokenizer's files into MODEL)") from error


def _config(text: str) -> Config:
    raw: Any = parse_yaml(text)
    return Config.model_validate(raw)
