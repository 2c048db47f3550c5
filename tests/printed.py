"""Commands in what a program has printed: found by one function, and executed by another as far as a test can pay for."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any
from unittest import mock

from grpo_megatron.cli.main import main
from tests import worlds

COMMAND = re.compile(
    r"(?:python -m (?:grpo_megatron|vllm[\w.]+)|grpo-megatron|vllm serve|curl) (?:'[^']*'|\\\n|[^`;\n'])+"
)
CHEAP = {"train": ["--dry-run"], "generate": ["--engine", "transformers", "--max-tokens", "2"]}


def printed_commands(text: str) -> list[list[str]]:
    """The words of each command."""
    return [shlex.split(line.replace("\\\n", " ")) for line in COMMAND.findall(text)]


def run_printed(text: str, folder: Path, **filled: str) -> list[str]:
    """Executes each command in `folder`, with placeholders filled in; returns the names. `vllm` and `curl` start nothing.

    vLLM's parser reads the options of its server, and the model of its endpoint the request.
    """
    names, foreign = [], []
    for words in printed_commands(text):
        if "grpo" not in "".join(words[:3]):
            foreign.append(words)
            names.append(words[0])
            continue
        name, *arguments = (filled.get(word, word) for word in words[3 if words[0] == "python" else 1 :])
        with contextlib.chdir(folder), mock.patch.dict(os.environ):  # a run alone has set its rank
            assert main([name, *arguments, *CHEAP.get(name, [])]) == 0, words
        names.append(name)
    if foreign:
        worlds.run(check_foreign, 1, commands=foreign)
    return names


def check_foreign(commands: list[list[str]]) -> None:
    """In a rank, which has imported vLLM: raises SystemExit for an option, ValidationError for a key of a request."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for program, *words in commands:
        if program == "curl":
            models: dict[bool, Any] = {True: ChatCompletionRequest, False: CompletionRequest}
            request = models[words[0].endswith("/chat/completions")].model_validate(json.loads(words[-1]))
            assert not request.model_extra, request.model_extra
        else:
            parser: argparse.ArgumentParser = make_arg_parser(FlexibleArgumentParser())
            parsed = parser.parse_args(words[1:] if program == "vllm" else words[2:])
            assert parsed.model_tag or parsed.model
