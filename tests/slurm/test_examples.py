"""Dry runs of the 70B examples on this machine: real Megatron modules on the meta device, in seconds and little memory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_megatron.cli import main
from grpo_megatron.models.families import read_architecture
from tests.files import CONFIGS

ROOT = Path(__file__).parents[2]
EXAMPLES = {"llama3_70b": "Llama-3.1-70B", "qwen2_72b": "Qwen2.5-72B-Instruct"}


# The program, and then the peak of its memory. The kernel's ru_maxrss would also count the process that started it.
WITH_PEAK = """
import atexit, runpy
def print_peak():
    print(*(line for line in open("/proc/self/status") if line.startswith("VmHWM")), flush=True)
atexit.register(print_peak)
runpy.run_module("grpo_megatron", run_name="__main__", alter_sys=True)
"""


def test_the_readme_command_needs_seconds_and_under_2_gb() -> None:
    """A layer has q and o of 2 x 8192^2, k and v of 2 x 1024 x 8192, an MLP of 3 x 28672 x 8192, and two norms. Embedding
    and head have 128256 x 8192 each.

    A rank of the first stage at tp 4 has 20 layers (a quarter of each matrix, whole norms) and a quarter of the embedding.
    """
    layer = 2 * 8192**2 + 2 * 1024 * 8192 + 3 * 28672 * 8192
    assert 80 * (layer + 2 * 8192) + 2 * 128256 * 8192 + 8192 == 70_553_706_496
    first = 20 * (layer // 4 + 2 * 8192) + 128256 * 8192 // 4
    command = ["train", "examples/llama3_70b.yaml", "--dry-run", "--world-size", "64"]
    done = subprocess.run([sys.executable, "-c", WITH_PEAK, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text, _, peak = done.stdout.rpartition("VmHWM:")
    assert int(peak.split()[0]) < 2e9 / 1024  # KiB
    assert "70,553,706,496" in text
    assert f"    0     20   {first:,}" in text
    assert "tp 4 x pp 4 x dp 4, sequence parallel, distributed optimizer, bfloat16" in text
    assert "8 engines of tp 8" in text and "64 prompts x 32 = 2,048, about 256 per engine" in text
    assert text.count("NOT FOUND, so") == 3  # weights, tokenizer and prompts: what is not checked is reported


@pytest.mark.parametrize(("example", "original"), EXAMPLES.items())
def test_every_cross_check_passes_on_the_real_architecture(
    example: str, original: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --world-size the plan is for this machine, which must have the tokenizer and the data."""
    monkeypatch.chdir(ROOT)
    folder = ROOT / "examples" / "models" / example
    (tmp_path / "config.json").write_text((CONFIGS / f"{original}.json").read_text())
    assert read_architecture(folder) == read_architecture(tmp_path)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    command = ["train", f"examples/{example}.yaml", "--dry-run"]
    assert main.main([*command, "--world-size", "64"]) == 0
    assert f"{read_architecture(folder).num_parameters():,}" in capsys.readouterr().out
    assert main.main([*command, "--world-size", "60", "rollout.n=1"]) == 2
    errors = capsys.readouterr().err
    assert "does not divide the world size 60" in errors and "rollout.n=1" in errors
    assert main.main(command) == 2
    errors = capsys.readouterr().err
    assert "data/math/train.jsonl" in errors
    assert "no tokenizer in" in errors or example != "llama3_70b"  # the other one lacks a chat template first


def plan_of(example: str, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    gpu = options or ("h100-80",)
    main.main(["train", f"examples/{example}.yaml", "--dry-run", "--world-size", "64", "--gpu", *gpu])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("example", "quantization"), {"llama3_70b": "fp8_per_block", "qwen2_72b": "fp8_per_channel"}.items()
)
def test_the_fp8_examples_plan_fp8(
    example: str, quantization: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FP8 is in the page, the memory and the seconds, and the header's figures are the plan's.

    A middle stage has 20 of 80 layers, whose linear weights are all of its parameters but two norms of 8,192 per layer, and
    Qwen's biases of (8192 + 2 x 1024) / 4 per layer. The first and the last stage leave one layer in bfloat16.
    """
    monkeypatch.chdir(ROOT)
    plan, plain = plan_of(f"{example}_fp8", capsys), plan_of(example, capsys)
    assert "bfloat16, FP8 blockwise in the linear layers but those at both ends" in " ".join(plan.split())
    assert f"8 engines of tp 8, FP8 weights ({quantization})" in plan
    assert "FP8: passes 1.3 x as fast as in bfloat16; decoding reads 1 bytes per weight" in plan and "FP8" not in plain
    stage = int(re.findall(r"^ +1 +20 +([\d,]+)", plan, re.MULTILINE)[0].replace(",", ""))
    linear = stage - 20 * (2 * 8192 + (2560 if example == "qwen2_72b" else 0))
    copies = re.findall(r"^  ~ FP8 copies +- +- +- +(\S+) +(\S+) +(\S+)$", plan, re.MULTILINE)[0]
    assert [float(size) for size in copies] == pytest.approx(
        [ways * linear * 19 / 20 / 2**30 for ways in (1, 1, 2)], abs=0.01
    )

    header = (ROOT / "examples" / f"{example}_fp8.yaml").read_text().partition("\nmodel:")[0]
    totals = re.findall(r"^  together +(.*)$", plan, re.MULTILINE)[0].split()
    written = re.findall(r"^#   (?:rollout|scoring|update) +([\d.]+):", header, re.MULTILINE)
    assert [float(size) for size in written] == pytest.approx([float(size) for size in totals[3:]], abs=0.051)
    tokens = re.findall(r"([\d,]+) tokens of 40 KiB", plan)[0]
    assert f"{tokens} tokens" in header
    seconds = [float(re.findall(r"^  ([\d.]+) = generate", text, re.MULTILINE)[0]) for text in (plan, plain)]
    assert "takes an estimated {:.0f} s, instead of {:.0f} s in bfloat16".format(*seconds) in header


def test_gpus_without_the_fp8_of_a_config_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    needs = "actor.megatron.fp8.recipe=blockwise needs compute capability 9.0, this device has 8.0; leave it out"
    assert f"DOES NOT RUN ON a100-80: {needs}" in plan_of("llama3_70b_fp8", capsys, "a100-80")
    mxfp8 = ("actor.megatron.fp8.recipe=mxfp8", "rollout.quantization=fp8_per_channel")
    assert "DOES NOT RUN" not in plan_of("llama3_70b_fp8", capsys, "178", *mxfp8)  # of unknown capability
    assert main.main(["train", "examples/llama3_70b_fp8.yaml", "--dry-run", "--world-size", "64"]) == 0
    assert "FITS h100-80, h200, h20-96; DOES NOT RUN ON b200, a100-80, a100-40, l40-48\n" in capsys.readouterr().out
    options = ["--dry-run", "--world-size", "64", "rollout.quantization=fp8_per_block"]
    assert main.main(["train", "examples/qwen2_72b_fp8.yaml", *options]) == 2
    assert "multiples of 128; this model's MLP width, 29568 / tp 8 = 3696, is not; set" in capsys.readouterr().err


def test_a_supervised_run_of_70b_has_no_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And none of what belongs to one. Its largest stage needs 8.46 + 16.92 + 12.69 GiB without activations."""
    monkeypatch.chdir(ROOT)
    command = ["train", "examples/llama3_70b_sft.yaml", "--dry-run", "--world-size", "64", "--gpu-memory"]
    assert main.main([*command, "79"]) == 0
    plan = capsys.readouterr().out
    assert "rollout           no engine: nothing is sampled" in plan and "128 rows, read from files" in plan
    assert re.search(r"^ +load +update$", plan, re.MULTILINE)
    assert re.search(r"^  together +37.15 +45.23$", plan, re.MULTILINE)
    for word in ("Weight sync", "engines of", "engine weights", "engine's share", "KV cache", "sync buckets"):
        assert word not in plan
    assert main.main([*command, "38"]) == 2
    assert "- phase update does not fit a device of 38.00 GiB: weights 8.46 + gradients" in capsys.readouterr().out
