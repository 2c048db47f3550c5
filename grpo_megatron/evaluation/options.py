"""The options of `evaluate`, its actions and `generate`. Few imports, so that mistakes and --help come at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from grpo_megatron.config import ENGINE_TEMPERATURES, DeviceName
from grpo_megatron.config.options import Argument, Option, Options


def _tasks(text: str) -> tuple[str, ...]:
    return tuple(task for task in text.split(",") if task)


PROMPTS, SAMPLING, EXECUTION = "model and prompts", "sampling", "execution"
prompting, sampling, execution = (partial(Option, group=group) for group in (PROMPTS, SAMPLING, EXECUTION))

TopP = partial(sampling, metavar="P", gt=0, le=1)
MaxTokens = partial(sampling, metavar="N", ge=1, le=100_000_000)
Workers = partial(Option, "processes that grade (default: one per core)", "N", ge=1, le=1024)
Unsafe = partial(
    Option, "programs of answers run without a sandbox where this machine has none: they can read and change files"
)
CORES = os.cpu_count() or 1


class EngineOptions(Options):
    """The options of `evaluate` and of `generate`: model, layout, numbers and memory of an engine."""

    groups = (PROMPTS, SAMPLING, EXECUTION)
    model: Annotated[Path, prompting("Hugging Face folder, converted checkpoint, or training step", "DIR")]
    tokenizer: Annotated[Path | None, prompting("default: the model's folder", "DIR", place=1)] = None
    hf: Annotated[
        Path | None, prompting("config.json and tokenizer, for a checkpoint without them", "DIR", place=1)
    ] = None
    family: Annotated[str | None, prompting("your own model family (as model.family)", "MODULE:FAMILY", place=1)] = None
    seed: Annotated[int, sampling("of the samples (default 0)", "N", ge=0, place=1)] = 0
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None, sampling("default: float32 for a float32 model, else bfloat16", place=1)
    ] = None
    engine_kwargs: Annotated[Mapping[str, Any], sampling("passed to vllm.LLM", "JSON", place=1)] = Field(
        default_factory=dict
    )
    image_max_pixels: Annotated[
        int | None, prompting("larger images are scaled down (default: the model's limit)", "N", ge=1, place=1)
    ] = None
    image_min_pixels: Annotated[
        int | None, prompting("smaller images are scaled up (default: the model's limit)", "N", ge=1, place=1)
    ] = None
    chat_template_kwargs: Annotated[
        Mapping[str, Any] | None, prompting('values of the template, such as {"enable_thinking": false}', "JSON")
    ] = None
    engine: Annotated[str, execution("vllm, transformers, or module:Class (default: vllm)", "NAME")] = "vllm"
    tp: Annotated[int, execution("ranks per copy of the model (tensor parallel)", "N", ge=1, le=1024)] = 1
    device: Annotated[DeviceName, execution("auto: GPUs if there are any")] = "auto"
    max_num_seqs: Annotated[
        int | None,
        execution(
            "samples at a time, per copy of the model (default: what a GPU holds; CPU: 256)", "N", ge=1, le=1_000_000
        ),
    ] = None
    kv_cache_gib: Annotated[int, execution("cache of the engine on a CPU (default 1)", "N", ge=1, le=4096)] = 1
    gpu_memory_utilization: Annotated[
        float, execution("the engine's share of a GPU (default 0.9)", "X", gt=0, le=1)
    ] = 0.9

    def problems(self) -> Iterator[str]:
        """Yield a temperature that the engine would refuse."""
        low, high = ENGINE_TEMPERATURES
        temperature = getattr(self, "temperature", None)
        if temperature and not low <= temperature <= high:
            yield f"--temperature {temperature:g} is outside {low:g} to {high:g}; set one inside, or 0 (greedy)"


class EvaluateOptions(EngineOptions):
    """The options of `evaluate`, on the command line and in Python."""

    program = "evaluate"
    description = "Scores of a model on benchmarks, or the mean reward on your own rows."
    epilog = """
one greedy sample per problem:
  grpo-megatron evaluate --model HF_DIR --tasks gsm8k,math500 --data DATA
and 16 other samples, for avg, pass@k and maj@16:
  grpo-megatron evaluate --model HF_DIR --tasks math500 --data DATA --samples 16
a training step, on 4 copies of tp 4; a task of one file; your rows and reward:
  grpo-megatron evaluate --model outputs/run/checkpoints/step_000020 \\
      --tasks gsm8k --data DATA --tp 4 --dp 4
  grpo-megatron evaluate --model HF_DIR --tasks aime --file aime25.jsonl
  grpo-megatron evaluate --model HF_DIR --file val.jsonl --reward my:reward
rows {"answer": ..., "completion": ...}; two results; the tasks and files:
  grpo-megatron evaluate grade --task math ROWS.jsonl --output OUT.jsonl
  grpo-megatron evaluate compare A/results.json B/results.json
  grpo-megatron evaluate tasks

DATA holds gsm8k/test.jsonl, math/test.jsonl, ...: `evaluate tasks` lists them.
"""
    tasks: Annotated[
        tuple[str, ...],
        prompting(
            "names, paths of task files (.yaml), or module:function (default: the rows of --file)", "A,B", read=_tasks
        ),
    ] = ()
    data: Annotated[Path | None, prompting("folder with the benchmarks' files", "DIR")] = None
    file: Annotated[
        tuple[str, ...], prompting("the data file of the only task, or of the one named", "[TASK=]PATH", repeated=True)
    ] = ()
    reward: Annotated[str | None, prompting("grades instead of the task's own reward", "MODULE:FUNCTION")] = None
    limit: Annotated[
        int | None, prompting("only the first N problems; scores are then not those of the benchmark", "N", ge=1)
    ] = None
    num_fewshot: Annotated[
        int | None,
        prompting("worked examples from the training file (default: the task's, mostly 0)", "K", ge=0, le=10_000),
    ] = None
    format: Annotated[Literal["auto", "chat", "text"], prompting("auto: chat, or text with worked examples")] = "auto"
    chat_template: Annotated[Path | None, prompting("a Jinja file instead of the tokenizer's own", "FILE")] = None
    system_prompt: Annotated[
        str | None, prompting('instead of the task\'s own; "": none (as data.system_prompt)', "TEXT")
    ] = None
    samples: Annotated[
        int,
        sampling("samples per problem besides the greedy one; 1: only the greedy one", "N", ge=1, le=65_536),
    ] = 1
    no_greedy: Annotated[bool, sampling("without the greedy sample")] = False
    temperature: Annotated[float | None, sampling("default: the task's", "T")] = None
    top_p: Annotated[float | None, TopP("default: the task's")] = None
    max_tokens: Annotated[int | None, MaxTokens("default: the task's")] = None
    output: Annotated[
        Path | None, execution("default: outputs/evaluation/NAME OF THE MODEL FOLDER", "OUT", place=-1)
    ] = None
    against: Annotated[
        Path | None, execution("compare with this evaluation's folder, problem by problem", "BASE", place=-1)
    ] = None
    contamination: Annotated[
        str | None, execution("what is known of the benchmarks in the training data, for card.md", "TEXT", place=-1)
    ] = None
    dp: Annotated[
        int | None, execution("copies of the model (default 1; under torchrun: ranks / tp)", "N", ge=1, le=65_536)
    ] = None
    batch_size: Annotated[int, execution("samples between two writes to the disk", "N", ge=1, le=1_000_000)] = 2048
    workers: Annotated[int, Workers(group=EXECUTION)] = CORES
    unsafe: Annotated[bool, Unsafe(group=EXECUTION)] = False

    @property
    def folder(self) -> Path:
        """The output folder."""
        return self.output or Path("outputs/evaluation") / self.model.resolve().name

    @property
    def files(self) -> dict[str, Path]:
        """Task -> its data file, of --file; "": the file that names no task."""
        parts = (file.partition("=") for file in self.file)
        return {one if path else "": Path(path or one) for one, _, path in parts}

    def problems(self) -> Iterator[str]:
        """Yield also files of no task, and sampling without samples or with equal ones."""
        yield from super().problems()
        for file in self.file:
            if "=" in file and not all(file.partition("=")):
                yield f"--file {file!r} is not of the form TASK=PATH"
        if "" in self.files and (len(self.file) > 1 or len(self.tasks) > 1):
            yield f"--file {self.files['']} names no task; with several, write TASK=PATH"
        if not self.tasks and "" not in self.files:
            yield "nothing to evaluate; set --tasks A,B, or --file val.jsonl with --reward module:function"
        if self.temperature == 0 and self.samples > 1:
            yield (
                f"--samples {self.samples} with --temperature 0: greedy samples are all the same; set a temperature above"
                " 0 (or leave it to the task), or --samples 1"
            )
        if self.against is not None and self.against.resolve() in (own := self.folder.resolve(), own / "results.json"):
            yield f"--against {self.against} is the folder that this evaluation writes to; name that of another one"
        if self.no_greedy and self.samples == 1 and not self.temperature:
            yield "--no-greedy leaves nothing to sample; set --samples 2 or more, or --temperature above 0"


class GenerateOptions(EngineOptions):
    """The options of `generate`, on the command line and in Python."""

    program = "generate"
    description = "Answers of a model to your prompts."
    epilog = """
one greedy answer; the prompt from standard input:
  grpo-megatron generate --model outputs/run/hf --prompt "What is 12 * 12?"
  grpo-megatron generate --model HF_DIR --prompt - < question.txt
answers to the rows of a file, or to its lines:
  grpo-megatron generate --model outputs/run/checkpoints/step_000020 \\
      --file test.jsonl --samples 4 --temperature 1 --output out.jsonl
  grpo-megatron generate --model HF_DIR --file prompts.txt --output out.jsonl
a conversation in the terminal; a question about images:
  grpo-megatron generate --model HF_DIR --chat
  grpo-megatron generate --model HF_DIR --image plot.png --prompt "What is it?"

A model of one of our runs gets the run's prompts: task, chat template, system
prompt and stop texts of its config.
"""
    prompt: Annotated[str | None, prompting("one prompt; -: standard input", "TEXT", exclusive=True)] = None
    file: Annotated[
        Path | None, prompting("rows (.jsonl, .json, .csv), or else lines of text", "FILE", exclusive=True)
    ] = None
    chat: Annotated[bool, prompting("a conversation in the terminal", exclusive=True)] = False
    image: Annotated[
        tuple[Path, ...],
        prompting("of --prompt, or of the first question of --chat; may be repeated", "FILE", repeated=True),
    ] = ()
    task: Annotated[str | None, prompting("the task that renders prompts; default: the run's, else as is", "NAME")] = (
        None
    )
    system_prompt: Annotated[str | None, prompting("default: the run's, or the task's; \"\": none", "TEXT")] = None
    chat_template: Annotated[Path | None, prompting("default: the run's, or the tokenizer's", "FILE")] = None
    format: Annotated[Literal["auto", "chat", "text"], prompting("auto: as the run, else a chat if it can be")] = "auto"
    samples: Annotated[int, sampling("answers per prompt", "N", ge=1)] = 1
    temperature: Annotated[float, sampling("default 0: greedy", "T")] = 0.0
    top_p: Annotated[float, TopP("default 1: all tokens")] = 1.0
    top_k: Annotated[int | None, sampling("default: all tokens", "K", ge=1)] = None
    max_tokens: Annotated[int | None, MaxTokens("of an answer; default: the run's, else 512")] = None
    stop: Annotated[
        tuple[str, ...], sampling("a text that ends an answer; may be repeated", "TEXT", repeated=True)
    ] = ()
    output: Annotated[Path | None, execution("default: standard output", "OUT.jsonl", place=-1)] = None
    as_json: Annotated[bool, execution("JSON lines, for one answer too", flags=("--json",))] = False
    max_length: Annotated[int, execution("tokens of a conversation (--chat)", "N", ge=1)] = 4096

    def problems(self) -> Iterator[str]:
        """Yield also options that do not go together."""
        yield from super().problems()
        if self.samples > 1 and not self.temperature:
            yield f"--samples {self.samples} with --temperature 0: greedy answers are all the same; set --temperature 1"
        if self.image and self.file is not None:
            yield "--image with --file: the rows of a file name their images themselves; leave one of them out"
        if not all(self.stop):
            yield '--stop "": an empty text is found everywhere; leave it out'
        if self.chat:
            for name, value in (("output", self.output), ("json", self.as_json)):
                if value:
                    yield f"--{name} with --chat: a conversation is not written; leave one of them out"
            if self.samples > 1:
                yield f"--samples {self.samples} with --chat: each turn has one answer; leave --samples out"
            if self.tp > 1:
                yield (
                    f"--chat with --tp {self.tp}: a conversation runs in one process; serve the model instead (vllm serve"
                    f" HF_DIR --tensor-parallel-size {self.tp}; vllm chat), or set --tp 1"
                )
        elif self.tp > 1 and self.prompt == "-":
            yield f"--prompt - with --tp {self.tp}: only one process has standard input; write the prompt to a file"
        elif self.tp > 1 and self.output is None:
            yield f"--tp {self.tp} starts {self.tp} ranks, which share the terminal; set --output OUT.jsonl"


class GradeOptions(Options):
    """The options of `evaluate grade`."""

    program, description = "evaluate grade", "Grade completions of a file."
    rows: Annotated[Path, Argument('rows {"answer": bare reference answer, "completion": text}', "ROWS.jsonl")]
    task: Annotated[str, Option("gsm8k or math", "NAME")]
    output: Annotated[Path, Option("a new file", "OUT.jsonl")]
    workers: Annotated[int, Workers()] = CORES
    unsafe: Annotated[bool, Unsafe()] = False


class TasksOptions(Options):
    """`evaluate tasks` has no options."""

    program, description = "evaluate tasks", "Print the built-in tasks."
