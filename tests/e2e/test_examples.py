"""The examples as a user runs them, but shorter: the command line, real data, and the files that a run leaves."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from grpo_megatron.cli.main import main
from grpo_megatron.config import Config
from grpo_megatron.report.console import request_command, serve_command
from tests import worlds
from tests.evaluation.serving import argv_of, ask, served
from tests.files import CONFIGS, DATA, QWEN_SMALL
from tests.listeners import is_loopback, listeners
from tests.printed import run_printed
from tests.stored import metric_rows

ROOT = Path(__file__).parents[2]
MODEL = "outputs/gsm8k/model"


def watched_command(*arguments: str, cwd: Path, timeout: float = 1100) -> tuple[str, set[str]]:
    """Run `python ARGUMENTS`; returns its output, and the addresses on which its processes listened, seen twice a second."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    addresses: set[str] = set()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            addresses.update(address for address, _ in listeners(process.pid))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        ended.set()
        watcher.join()
        process.kill()
    assert process.returncode == 0, out[-3000:] + err[-3000:]
    assert "Warning" not in err, err  # of libraries: the user cannot act on it
    return out, addresses


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, set[str]]:
    """12 warm-up and 3 GRPO steps of the real quickstart, from an empty folder: (the folder, what was printed, addresses)."""
    folder = tmp_path_factory.mktemp("quickstart")
    printed, addresses = watched_command(
        *("-m", "grpo_megatron", "quickstart", "--seed", "1"),
        "sft.steps=12",
        "sft.optim.lr_warmup_steps=2",
        "sft.optim.lr_wsd_decay_steps=4",
        "data.val_max_samples=16",
        "data.train_batch_size=8",
        "rollout.n=4",
        "rollout.val_kwargs.temperature=0",
        "trainer.num_logged_samples=8",
        "trainer.total_training_steps=3",
        "rollout.engine_options.kv_cache_gib=0.1",
        "trainer.test_freq=2",
        cwd=folder,
    )
    return folder, printed, addresses


@pytest.mark.slow
@pytest.mark.both_stacks
def test_quickstart_in_short(quickstart: tuple[Path, str, set[str]]) -> None:
    """Every file that the quickstart promises, and a model that transformers loads.

    Its processes listen on the loopback interface (gloo), and on nothing else.
    """
    folder, printed, addresses = quickstart
    out = folder / "outputs/quickstart/run"
    assert addresses and all(map(is_loopback, addresses)), addresses
    assert "before" in printed and "arithmetic/acc/mean@1" in printed
    for name in ("metrics.jsonl", "tensorboard", "config.yaml", "hf", "checkpoints/step_000003"):
        assert (out / name).exists(), name
    assert "--- prompt" in (out / "samples" / "step_000002.txt").read_text()
    recorded = yaml.safe_load((out / "config.yaml").read_text())
    assert recorded["sft"]["steps"] == 12
    assert [recorded[section]["seed"] for section in ("data", "rollout", "trainer")] == [1, 1, 1]
    steps = metric_rows(out)
    assert [row["step"] for row in steps] == [0, 1, 2, 3]
    assert steps[0]["training/rollout_logp_diff_mean"] < 1e-6
    assert {"timing_s/gen", "timing_s/update_actor", "perf/throughput", "critic/zero_variance_ratio"} <= steps[1].keys()

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(out / "hf", dtype=torch.float32)
    text = AutoTokenizer.from_pretrained(out / "hf")("Tom has 2 apples", return_tensors="pt")
    assert model(text["input_ids"]).logits.isfinite().all()


def logged_answers(folder: Path) -> list[tuple[str, str, bool]]:
    """The trainer's own answers at the last, greedy validation: prompt, answer, and whether it has ended by itself."""
    text = (folder / "outputs/quickstart/run/samples/step_000003.txt").read_text()
    pattern = r"--- prompt\n(.*?)\n--- response \((\d+) tokens.*?\)\n(.*?)\n--- reference"
    found = re.findall(pattern, text, re.DOTALL)
    assert len(found) == 8
    return [(prompt, answer, int(tokens) < 32) for prompt, tokens, answer in found]


@pytest.mark.slow
def test_the_printed_commands_run(quickstart: tuple[Path, str, set[str]], tmp_path: Path) -> None:
    """And what runs on more GPUs, with adapters, would print."""
    folder, printed, _ = quickstart
    lora, rollout = {"rank": 20, "alpha": 20}, {"tensor_model_parallel_size": 2, "expert_parallel_size": 2}
    values = {"model": {"path": "base"}, "actor": {"lora": lora}, "rollout": rollout}
    (tmp_path / "adapter_config.json").touch()
    printed += (
        f"\n{serve_command(tmp_path, config := Config.model_validate(values))}\n{request_command(tmp_path, config)}"
    )
    names = run_printed(printed, folder, TEXT="1 + 1 =")
    assert names == ["vllm", "curl", "generate", "vllm", "curl"] and "/v1/chat/completions" in printed


@pytest.mark.soak
def test_the_printed_command_serves_the_trainers_answers(
    quickstart: tuple[Path, str, set[str]], tmp_path: Path
) -> None:
    """`vllm serve`, in an environment of requirements/install.sh."""
    folder, printed, _ = quickstart
    answers = logged_answers(folder)
    [line] = re.findall(r"^to serve it: (.*)$", printed, re.MULTILINE)
    with served(line, folder, tmp_path / "server.log") as client:
        for prompt, expected, has_ended in answers:
            answer = ask(client, model="outputs/quickstart/run/hf", prompt=prompt, max_tokens=32, temperature=0)
            assert (answer["text"], answer["finish_reason"]) == (expected, "stop" if has_ended else "length")


@pytest.mark.soak
def test_the_printed_command_asks_the_trained_model(quickstart: tuple[Path, str, set[str]]) -> None:
    folder, printed, _ = quickstart
    (prompt, expected, _), *_ = logged_answers(folder)
    [line] = re.findall(r"^to ask it: +(.*) TEXT$", printed, re.MULTILINE)
    assert watched_command(*argv_of(line)[1:], prompt, cwd=folder)[0] == expected + "\n"


@pytest.mark.soak
def test_the_notebook_of_the_documentation(quickstart: tuple[Path, str, set[str]]) -> None:
    """The code of docs/python.md, word for word, in one process as in a notebook."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
    assert len(blocks) == 4
    ((entropies, accuracy, refused),) = worlds.run(notebook, 1, folder=quickstart[0], code="\n".join(blocks))
    assert len(entropies) == 2 and all(value > 3 for value in entropies)  # a random model: the most is log 80 = 4.4
    assert accuracy["pass@1 (greedy)"]["problems"] == 8
    assert "trainer.n_gpus_per_node=2 = 2 ranks, and a Trainer is one of them" in refused


def notebook(folder: Path, code: str) -> tuple[list[float], dict[str, Any], str]:
    """In a rank: run the code; what it has printed the last of; and the refusal of a config for two ranks."""
    os.chdir(folder)
    names: dict[str, Any] = {}
    exec(code, names)
    entropies = [row["actor/entropy"] for row in names["rows"] if "actor/entropy" in row]
    try:
        names["Trainer"](names["load_config"]("outputs/quickstart/quickstart.yaml"))
    except ValueError as error:
        refused = str(error)
    return entropies, names["result"]["tasks"]["arithmetic"]["scores"]["accuracy"], refused


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model that the header's first command writes, smaller, and rows enough for two steps.

    The model has a real tokenizer and random weights. The tokenizer's folder has tokenizer.json alone.
    """
    root = tmp_path_factory.mktemp("gsm8k")
    (root / "examples").symlink_to(ROOT / "examples")
    (root / "gsm8k").mkdir()
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    values = {"QWEN2_CONFIG_JSON": CONFIGS / "Qwen2.5-0.5B.json", MODEL: root / MODEL}
    values["QWEN2_TOKENIZER_FOLDER"] = QWEN_SMALL.parent
    words = header_commands()[0].removeprefix("python -m grpo_megatron prepare ")
    sizes = [argument for key, value in small.items() for argument in ("--set", f"{key}={value}")]
    assert main(["prepare", *(str(values.get(word, word)) for word in shlex.split(words)), *sizes]) == 0
    for name in ("train", "test"):  # few rows, because every rank tokenises all of them
        lines = (DATA / "gsm8k" / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (root / "gsm8k" / f"{name}.jsonl").write_text("".join(lines[:64]))
    return root


def header_commands() -> list[str]:
    """The two commands in the header of the example, one line each."""
    header = (ROOT / "examples/gsm8k_cpu.yaml").read_text().replace("\\\n#", "")
    return re.findall(r"^#   (python -m grpo_megatron .*)$", header, re.MULTILINE)


def verl_file(source: Path, target: Path) -> Path:
    """What verl's examples/data_preprocess/gsm8k.py writes: its columns, its instruction, its types."""
    pa = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
    import pyarrow.parquet as pq

    instruction = 'Let\'s think step by step and output the final answer after "####".'
    table = []
    for index, row in enumerate(map(json.loads, source.read_text().splitlines())):
        question, answer = row["question"], row["answer"]
        table.append(
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": f"{question} {instruction}"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": answer.rpartition("#### ")[2].replace(",", "")},
                "extra_info": {"split": "train", "index": index, "answer": answer, "question": question},
            }
        )
    pq.write_table(pa.Table.from_pylist(table), target)
    return target


@pytest.mark.soak
def test_gsm8k_end_to_end(gsm8k: Path, tmp_path: Path) -> None:
    """Real problems, real chat template, real answers, a random model: every phase runs and every metric is logged.

    The command is the second one of the example's header, shortened by overrides at its end, in the folder of the first.
    Two sources: the rows as they are published, and in a Parquet file of verl's form. PP2; tests/e2e/test_recipes.py has
    runs with DP2, tests/slurm/test_jobs.py one with TP2 x PP2.
    """
    verl = verl_file(gsm8k / "gsm8k" / "train.jsonl", tmp_path / "train.parquet")
    shorter = [
        "data.train_files=[]",
        f"data.sources=[{{name: verl, files: {verl}, task: verl, weight: 1}},"
        " {name: published, files: gsm8k/train.jsonl, weight: 3}]",
        "data.val_max_samples=2",
        "data.max_prompt_length=256",
        "data.max_response_length=12",  # every token is sampled from a real vocabulary, of 152,000 entries
        "data.train_batch_size=4",
        "actor.ppo_mini_batch_size=2",
        "rollout.n=2",
        "rollout.engine=transformers",  # starts in a third of vLLM's time, which the quickstart has
        "trainer.total_training_steps=1",
        "trainer.save_hf_at_end=false",
        "actor.megatron.pipeline_model_parallel_size=2",
    ]
    _, command = header_commands()
    watched_command(*shlex.split(command.replace("GSM8K/", "gsm8k/"))[1:], *shorter, cwd=gsm8k)
    first, last = metric_rows(gsm8k / "outputs/gsm8k/run")
    for row in (first,):
        assert row["training/rollout_logp_diff_mean"] < 1e-6
        assert row["prompt_length/mean"] > 60  # chat template and a real question
        assert row["actor/grad_norm"] >= 0 and "actor/kl_loss" in row and "timing_s/ref" in row
        for source, share in (("verl", 1), ("published", 3)):  # of 4 prompts, with 2 samples each
            assert row[f"data/source/{source}/samples"] == 2 * share
            assert row[f"reward/source/{source}/mean"] == 0.0 and row[f"response_length/source/{source}/mean"] > 0
    assert first["actor/kl_loss"] < 1e-6  # the reference is the model that the policy starts from
    assert "val-core/gsm8k/acc/mean@1" in last
