"""The exported model, served by the command that its run prints, gives the trainer's own greedy answers.

A short quickstart is trained, which validates greedily. Its last sample file has the trainer's answers.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_examples import ROOT, watched_command

START_S = 600.0  # ends a test that hangs; a busy machine needs two minutes


def command(*arguments: str) -> str:
    """Run `python ARGUMENTS` from the project's root. Returns its output."""
    return watched_command(*arguments, cwd=ROOT)[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(output folder, what the run has printed)."""
    root = tmp_path_factory.mktemp("served")
    command("tools/prepare_data.py", "arithmetic", str(root / "data"), "--seed", "1")
    tokenizer = ["--tokenizer", str(root / "data/tokenizer")]
    command("tools/prepare_data.py", "model", "--preset", "quickstart", str(root / "model"), *tokenizer)
    files = {"data.train_files": "train", "data.val_files": "val", "sft.train_files": "sft"}
    printed = command(
        *("-m", "grpo_megatron", "train", "examples/quickstart.yaml", f"model.path={root}/model"),
        *(f"{key}=[{root}/data/{name}.jsonl]" for key, name in files.items()),
        *("sft.steps=60", "sft.optim.lr_warmup_steps=2", "sft.optim.lr_wsd_decay_steps=4", "trainer.test_freq=1"),
        *("trainer.total_training_steps=1", "data.val_max_samples=32", "rollout.val_kwargs.temperature=0"),
        *("trainer.num_logged_samples=8", "rollout.engine_options.kv_cache_gib=0.1", f"trainer.output_dir={root}/run"),
    )
    return root / "run", printed


@contextmanager
def served(line: str, log: Path) -> Iterator[str]:
    """The address of the server that the command starts on a free port of the loopback interface."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program, *arguments = shlex.split(line)
    argv = [sys.executable if program == "python" else program, *arguments, "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as file:
        server = subprocess.Popen(argv, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_until_ready(server, address)
            yield address
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _wait_until_ready(server: subprocess.Popen[bytes], address: str) -> None:
    for _ in range(int(START_S)):
        assert server.poll() is None, "the server has ended"
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:
            with pytest.raises(subprocess.TimeoutExpired):
                server.wait(timeout=1)
    raise AssertionError("the server did not start")


def ask(address: str, **request: Any) -> dict[str, Any]:
    body = json.dumps(request).encode()
    question = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(question, timeout=120) as response:
        answer: dict[str, Any] = json.loads(response.read())["choices"][0]
    return answer


@pytest.mark.soak
def test_the_printed_command_serves_the_trainers_answers(trained: tuple[Path, str], tmp_path: Path) -> None:
    output, printed = trained
    [line] = re.findall(r"^to serve it: (.*)$", printed, re.MULTILINE)
    assert f"{output}/hf --dtype float32 --max-model-len " in line
    text = (output / "samples" / "step_000001.txt").read_text()
    answers = re.findall(r"--- prompt\n(.*?)\n--- response \(\d+ tokens.*?\)\n(.*?)\n--- reference", text, re.DOTALL)
    assert len(answers) == 8
    with served(line, tmp_path / "server.log") as address:
        for prompt, expected in answers:
            answer = ask(address, model=f"{output}/hf", prompt=prompt, max_tokens=60, temperature=0)
            assert (answer["text"], answer["finish_reason"]) == (expected, "stop")
    [asked] = re.findall(r"^to ask it: +(.*) --prompt TEXT$", printed, re.MULTILINE)
    assert command(*shlex.split(asked)[1:], "--prompt", answers[0][0]) == answers[0][1] + "\n"
