"""`grpo-megatron init MODEL --task TASK --train FILE ...`: a commented config for a model, a task and a machine.

The comments say why a value is what it is. What is written was checked as `train --dry-run` checks it.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jinja2

from grpo_megatron.checks.components import grades_itself
from grpo_megatron.checks.validate import validate
from grpo_megatron.config import Config, ConfigError, DataConfig
from grpo_megatron.config.options import Argument, Option, Options
from grpo_megatron.config.section import read_section
from grpo_megatron.data.task import get_task, task_names
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.environments.pool import find_environment
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import read_architecture
from grpo_megatron.planning.cost import Workload
from grpo_megatron.planning.gpus import GPUS, REFERENCE, Gpu, PlannedMachine, find_gpu
from grpo_megatron.planning.layout import FULL_RECOMPUTATION
from grpo_megatron.planning.parameters import RunModels
from grpo_megatron.planning.search import PlannedLayout, search
from grpo_megatron.registry import find_modules
from grpo_megatron.storage.files import write_file
from grpo_megatron.storage.hub import model_folder
from grpo_megatron.untrusted import ReadError, parse_yaml, reason_of, shown

PER_NODE = 8
CPU_RANKS = 2
LORA_RANK = 32  # verl's documentation: smaller ones may learn more slowly


class InitOptions(Options):
    """The options of `init`."""

    program, description = "init", "Write a commented config for a model, a task and a machine."
    model: Annotated[Path, Argument("a Hugging Face folder, or an id of the Hub", "MODEL")]
    task: Annotated[str, Option(f"a task file, or one of {', '.join(task_names())} (default gsm8k)")] = "gsm8k"
    train: Annotated[tuple[str, ...], Option("training rows", "FILE")]
    val: Annotated[tuple[str, ...], Option("held-out rows", "FILE")] = ()
    reward: Annotated[str | None, Option("your own reward, instead of the task's", "MODULE:FUNCTION")] = None
    environment: Annotated[
        str | None,
        Option("answers the model's turns: `tools`, `command` or your own class", "MODULE:CLASS"),
    ] = None
    cpu: Annotated[bool, Option(f"train on this machine's CPU, on {CPU_RANKS} ranks")] = False
    gpus: Annotated[int, Option(f"GPUs of all nodes (default {PER_NODE})", "N", ge=1, le=999_999)] = PER_NODE
    gpus_per_node: Annotated[int, Option(f"GPUs per node (default {PER_NODE})", "N", ge=1, le=999_999)] = PER_NODE
    gpu: Annotated[
        str,
        Option(
            f"{', '.join(GPUS)} (a100 is a100-80), or GiB of memory (default {REFERENCE})",
            "NAME|GIB",
            flags=("--gpu", "--gpu-memory"),
        ),
    ] = REFERENCE
    lora: Annotated[
        int | None,
        Option(
            f"train adapters of this rank instead of all weights (alone: {LORA_RANK})", "RANK", ge=1, bare=LORA_RANK
        ),
    ] = None
    chat_template: Annotated[Path | None, Option("a Jinja file, instead of the tokenizer's template", "FILE")] = None
    overrides: Annotated[tuple[str, ...], Argument("another value in the file", "section.key=value")] = ()
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
    """Finds the fastest layout on GPUs. Raises ConfigError if none fits."""
    assert machine.gpu is not None
    models = RunModels(arch)
    planned = PlannedMachine(machine.gpu, machine.ranks, machine.per_node)
    layouts = search(config, models, Workload.of(config, models), planned).layouts
    if not layouts:
        raise ConfigError(
            f"{arch.num_parameters() / 1e9:.2f}e9 parameters on {machine.ranks} GPUs of {machine.gpu.usable_gib:g} GiB: no layout"
            " fits; give more --gpus, or another --gpu"
        )
    return layouts[0]


# -- The text of a new config: new_config.yaml.jinja, with a comment for each choice -----------------------------------

COLUMN = 36  # of the comments
TEMPLATE = Path(__file__).with_suffix(".yaml.jinja")


def config_text(
    options: InitOptions,
    arch: Architecture,
    machine: Machine,
    has_template: bool,
    planned: PlannedLayout | None = None,
) -> str:
    """Renders the template. `planned` None: on the CPU, or to plan a layout. `has_template`: a chat template."""
    gpu, parameters, room = machine.gpu, arch.num_parameters(), arch.max_position_embeddings
    max_response = min(2048 if gpu else 256, room // 2)
    max_prompt = min(1024 if gpu else 512, room - max_response)
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["yaml"] = _scalar
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        options=options,
        arch=arch,
        machine=machine,
        gpu=gpu,
        has_template=has_template,
        planned=planned,
        where=f"{machine.nodes} x {machine.per_node} GPUs, {gpu.name}" if gpu else f"{machine.ranks} ranks on a CPU",
        parameters=f"{parameters / 1e9:.1f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.1f} million",
        batch=64 if gpu else 8,  # prompts per step
        group=8 if gpu else 4,  # samples per prompt
        max_prompt=max_prompt,
        max_response=max_response,
        tokens=planned.layout.tokens if planned else max(16384 if gpu else 4096, max_prompt + max_response),
        copies=machine.ranks // (planned.layout.tp * planned.layout.pp) if planned else 0,
        recomputation=FULL_RECOMPUTATION,
        learning_rate=("1.0e-5" if options.lora else "1.0e-6") if gpu else "1.0e-4" if options.lora else "1.0e-5",
        output_dir=Path("outputs") / options.output.stem,
        own_layout=any(text.startswith(("actor.megatron.", "rollout.tensor_model")) for text in options.overrides),
    )
    parts = (line.partition(" ## ") for line in text.splitlines())
    # a comment needs the space before it, also behind a long value
    lines = [f"{key:<{COLUMN - 1}} # {comment}" if mark else key for key, mark, comment in parts]
    template = [f"data.chat_template={_scalar(options.chat_template)}"] if options.chat_template else []
    for override in (*template, *options.overrides):
        _write_value(lines, override)
    return "\n".join(lines) + "\n"


def _write_value(lines: list[str], override: str) -> None:
    """Put `section.key=value` into the lines: over the value that is there and its comment, or at the end of the section.

    Raises ConfigError.
    """
    key, equals, value = override.partition("=")
    names = key.split(".")
    if not equals or not all(names):
        raise ConfigError(f"{shown(override)} is not of the form section.key=value")
    try:
        given = parse_yaml(value)
    except ReadError as error:
        raise ConfigError(f"{shown(override)}: the value is not valid YAML: {error}") from error
    begin, end = 0, len(lines)
    for depth, name in enumerate(names):
        start = f"{'  ' * depth}{name}:"
        place = next((at for at in range(begin, end) if lines[at].startswith(start)), None)
        if place is None:  # with the sections that are missing
            while end > begin and not lines[end - 1].strip():
                end -= 1
            rest = names[depth:]
            lines[end:end] = [f"{'  ' * (depth + more)}{part}:" for more, part in enumerate(rest)]
            lines[end + len(rest) - 1] += f" {value}"
            return
        written = lines[place].partition(" # ")[0].removeprefix(start).strip()
        if depth == len(names) - 1 or written:  # in a mapping on one line: {lr: 1.0e-6}
            line_value = parse_yaml(f"{name}: {written}")
            table = line_value
            for part in names[depth:-1]:
                table = table.setdefault(part, {})
                if not isinstance(table, dict):
                    raise ConfigError(f"{shown(override)}: {shown(part)} is a value, not a section")
            table[names[-1]] = given
            # what the comment says is true of the value that is replaced
            comment = lines[place].partition(" # ")[2] if depth < len(names) - 1 else ""
            lines[place] = f"{start} {_flow(line_value[name])}" + (f"  # {comment}" if comment else "")
            return
        begin = place + 1
        end = next(
            (at for at in range(begin, end) if lines[at][:1] and not lines[at].startswith("  " * (depth + 1))), end
        )


def _flow(value: Any) -> str:
    """Writes a value on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_flow(item)}" for name, item in value.items()) + "}"
    return json.dumps(value)


def _scalar(value: object) -> str:
    """Writes a YAML scalar: plain where that is safe, else in quotes."""
    text = str(value)
    is_plain = text[:1].isalpha() or text[:1] in "/."
    return text if is_plain and all(char.isalnum() or char in "/._-" for char in text) else json.dumps(text)


def write_config(options: InitOptions) -> int:
    """Write the config; returns the exit code. Raises ConfigError, and then nothing was written."""
    output = options.output
    if output.exists():
        raise ConfigError(f"{output} exists; name another file with --output, or remove it")
    find_modules(output)  # the user's reward is called
    try:
        folder = model_folder(options.model, weights=False)
        arch = read_architecture(folder)
    except ValueError as error:
        raise ConfigError(
            f"MODEL {str(options.model)!r}: {error}; name a Hugging Face folder of a supported model"
        ) from error
    machine = _machine(options)
    try:
        data = DataConfig(chat_template=options.chat_template)
        has_template = load_tokenizer(folder, data).chat_template is not None
    except ConfigError as error:
        remedies = "put the tokenizer's files into MODEL", "name another file with --chat-template"
        raise ConfigError(f"{error}\n  (for init, {remedies['data.chat_template' in str(error)]})") from error

    if options.environment:
        find_environment(options.environment)
    text = config_text(options, arch, machine, has_template)
    if options.reward is None and not (get_task(options.task).graders or grades_itself(_config(text))):
        without = f", and {options.environment} gives no rewards" if options.environment else ""
        raise ConfigError(
            f"task {options.task} does not grade answers{without}; name your function with --reward my_module:reward, or an"
            " environment that gives rewards with --environment my_module:Class"
        )
    if options.environment and not has_template:
        raise ConfigError(
            f"--environment {options.environment}: the tokenizer has no chat template, which turns are rendered by; name one"
            " with --chat-template (ChatML with tools: examples/templates/chatml_tools.jinja)"
        )
    if machine.gpu is not None:
        text = config_text(options, arch, machine, has_template, suggest(_config(text), arch, machine))
    validate(_config(text), machine.ranks, dry_run=True, rehearsed=True)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_file(output, text)
    except OSError as error:
        raise ConfigError(f"cannot write --output {output}: {reason_of(error)}; name another file") from error
    gpu = ""  # for a plan on a machine without that GPU
    if machine.gpu is not None:
        gpu = f" --gpu {machine.gpu.name if machine.gpu.name in GPUS else f'{machine.gpu.usable_gib:g}'}"
    print(f"wrote {output}. Read its comments, then:")
    train = f"  grpo-megatron train {shlex.quote(str(output))}"
    print(f"{train} --dry-run{gpu}\n{train}")
    return 0


def _machine(options: InitOptions) -> Machine:
    if options.cpu:
        return Machine(1, CPU_RANKS, None)
    per_node = min(options.gpus, options.gpus_per_node)
    if options.gpus % per_node:
        raise ConfigError(f"--gpus {options.gpus} is no multiple of --gpus-per-node {per_node}")
    try:
        gpu = find_gpu(options.gpu)
    except ValueError as error:
        raise ConfigError(f"--gpu {options.gpu!r}: {error}") from error
    return Machine(options.gpus // per_node, per_node, gpu)


def _config(text: str) -> Config:
    try:
        raw: Any = parse_yaml(text)
    except ReadError as error:  # of an override
        raise ConfigError(str(error)) from error
    return read_section(Config, raw)
