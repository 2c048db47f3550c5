"""The options of `generate`. Nothing else is imported here, so that mistakes and --help come at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from grpo_megatron.evaluation.options import (
    EngineOptions,
    MaxTokens,
    TopP,
    execution,
    prompting,
    sampling,
)


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
    tp: Annotated[int, execution("ranks (tensor parallel)", "N", ge=1, le=1024)] = 1
    max_num_seqs: Annotated[
        int | None, execution("answers at a time (default: what a GPU holds; CPU: 256)", "N", ge=1, le=1_000_000)
    ] = None
    max_length: Annotated[int, execution("tokens of a conversation (--chat)", "N", ge=1)] = 4096

    def problems(self) -> Iterator[str]:
        """Also options that do not go together."""
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
