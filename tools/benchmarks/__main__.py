"""Benchmarks of conversion, grading, the weight sync, rollouts and training passes, beside what they are compared with.

    python -m tools.benchmarks convert [--gigabytes 2] [--repeats 5] [--cold] [--folder DIR]
    python -m tools.benchmarks grade --data DIR [--problems 200]
    python -m tools.benchmarks sync [--engine | --network | --preset llama-70b | --plan MODEL_FOLDER] [--delta]
    python -m tools.benchmarks overlap [--milliseconds 4] [--workers 1]
    python -m tools.benchmarks passes [--workload "26 M"]
    python -m tools.benchmarks head [--hidden 3584] [--vocabulary 152064]
    python -m tools.benchmarks tower [--pixels 1000000]
    python -m tools.benchmarks lora [--workload 26M] [--rank 32]
    python -m tools.benchmarks routes [--steps 3] [--pages DIR]
    python -m tools.benchmarks waiting [--steps 12]
    python -m tools.benchmarks roles [--steps 12] [--decode 0.025] [--update 0.8]
    python -m tools.benchmarks sandboxes [--count 1000]
    python -m tools.benchmarks endpoint [--count 128]
    python -m tools.benchmarks saving [--steps 5] [--folder DIR]
    python -m tools.benchmarks mirror [--workload 26M] [--steps 5]
    python -m tools.benchmarks scale [--ranks 64 512 4096] [--samples 65536]
    python -m tools.benchmarks trace [--workload 0.4M] [--steps 4] [--prompts N]
    python -m tools.benchmarks start [--ranks 2] [--engine transformers] [--cold] [--against CHECKOUT]
    python -m tools.benchmarks step [--workload 0.4M] [--rounds 3] [--plain] [--trl-vllm]
    python -m tools.benchmarks curves [--seeds 5] [--steps 30] [--folder DIR] [--plot FILE.png]
    python -m tools.benchmarks hour [--parts abcdefg] [--minutes 50] [--folder DIR] [--work DIR]
    python -m tools.benchmarks rollout | update | transformers | exact | distill | service [--workload 0.4M] [--repeats 5]

convert: a random Llama of that size, Hugging Face -> Megatron -> Hugging Face. Compared with `cp` of the same files, and
with `cp` followed by `sha256sum` of the copy, since the converter hashes what it writes. All take turns; the medians are
printed. A time ends when the command returns (the converter's files are on the disk by then, those of cp are not), and
again when `sync` returns. Everything runs in one process, so Python's start is not counted. mbridge too, if installed.

grade: answers graded per second on one core, of DIR/gsm8k/test.jsonl and DIR/math/test.jsonl, the latter beside math-verify.

sync: a random Llama of 0.56 GB on four ranks, synced by the plan and, in turn, as it was before, with every tensor whole on
every rank. --engine: into vLLM. --network: between two network namespaces (root). --delta: syncs that send changes beside full
ones, also with --network. --preset, --plan: large layouts, only planned.

overlap: rewards graded while the engine generates, beside rewards graded afterwards; in a step and in a validation. passes: the
training part of a step with and without passes that it can do without. head: bytes per token that the output head reads and
writes, by torch and by the fused kernels; on a GPU also seconds.

tower: an image through the vision tower of Qwen2.5-VL, beside transformers' own forward pass.

lora: step time, memory and sync bytes of LoRA, merged and split, beside training of all weights, on two ranks. routes: engine
against trainer on experts in bfloat16, with the engine's routes beside without.

waiting: two ranks with responses of very different lengths: steps that wait for all beside partial rollouts, and requests
of one rank beside requests that ranks share. roles: steps of ranks that train and sample in turn beside ranks of two roles.

sandboxes: a step's task folders in local sandboxes: start, memory while idle, a command, the verifier, the sweep.
endpoint: an agent that speaks OpenAI's API beside the same environment as a class, four turns.

saving: checkpoints that are written while training goes on, beside checkpoints that the run waits for. scale: the host side of
a step of 65,536 samples in worlds of 64, 512 and 4,096 ranks, simulated in this process.

trace: what a step's trace costs beside the step, in the same run. mirror: what a step waits for the state in memory.

start: from the command to the first sampled token on the CPU, and where the time goes; beside another checkout.

step: whole steps beside TRL's GRPOTrainer, which is installed into an environment of its own.

curves: accuracy over the steps by distillation, SFT on the teacher's samples, and GRPO, on the quickstart's task.

hour: an hour on one H100, in seven parts that resume; on a CPU its toy sizes.

rollout: an engine's `generate` beside bare `vllm.LLM.generate`. update: the policy's update beside Megatron-Core's forward and
backward of the same packs. transformers: the same beside a training step of transformers. exact: log-probabilities, update and
rollout with `model.exact` beside without. distill: a teacher's scores beside one forward pass of it, and updates with them.
service: training steps of the public `tinker` client through `serve-training`, beside the policy's update in this process.
Each on one rank.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout that is not installed

COMMANDS = {  # name -> module, its functions that add arguments and that measure, help
    "convert": ("convert", "add_convert_arguments", "convert", "checkpoint conversion against cp"),
    "grade": ("convert", "add_grade_arguments", "grade_answers", "grading, beside plain math-verify"),
    "sync": ("sync", "add_arguments", "sync", "the weight sync, old and new"),
    "overlap": ("rollouts", "add_overlap_arguments", "overlap", "rewards graded during and after generation"),
    "waiting": ("rollouts", "add_waiting_arguments", "waiting", "partial rollouts, and requests that ranks share"),
    "sandboxes": ("sandboxes", "add_arguments", "sandboxes", "task folders in local sandboxes"),
    "endpoint": (
        "endpoint",
        "add_arguments",
        "endpoint",
        "an agent of OpenAI's API, beside the same environment as a class",
    ),
    "passes": ("training", "add_passes_arguments", "passes", "training with and without passes that can be left out"),
    "head": ("training", "add_head_arguments", "measure_head", "the output head by torch and by fused kernels"),
    "tower": ("training", "add_tower_arguments", "measure_tower", "the vision tower, beside transformers'"),
    "saving": ("training", "add_saving_arguments", "saving", "checkpoints while training goes on"),
    "lora": ("runs", "add_lora_arguments", "lora", "LoRA, merged and split, beside training of all weights"),
    "routes": ("runs", "add_routes_arguments", "routes", "a mixture of experts with and without route replay"),
    "roles": ("runs", "add_roles_arguments", "roles", "ranks of two roles, beside ranks that train and sample in turn"),
    "mirror": ("mirror", "add_arguments", "measure_mirror", "the state in memory, for healing, beside the step"),
    "scale": ("scale", "add_arguments", "scale", "the host side of a step with thousands of ranks"),
    "trace": ("trace", "add_arguments", "measure_trace", "the trace of a step, beside the step"),
    "start": ("start", "add_arguments", "start", "the start of a run, up to the first sampled token"),
    "curves": ("curves", "add_arguments", "curves", "distillation beside SFT on the teacher's samples, and GRPO"),
    "hour": ("hour", "add_arguments", "hour", "an hour on one H100, beside published numbers"),
    "step": ("step", "add_arguments", "step", "whole steps, beside TRL"),
    "rollout": ("rank", "add_arguments", "measure_rollout", "engines beside bare vllm.LLM.generate"),
    "exact": (
        "rank",
        "add_arguments",
        "measure_exact",
        "log-probabilities, update and rollout, with and without model.exact",
    ),
    "distill": ("rank", "add_arguments", "measure_distill", "teachers' scores, and updates with them"),
    "service": ("rank", "add_arguments", "measure_service", "steps through serve-training, beside the policy's update"),
    "update": ("rank", "add_arguments", "measure_update", "the policy's update beside plain Megatron-Core"),
    "transformers": (
        "rank",
        "add_arguments",
        "measure_transformers",
        "the policy's update beside a step of transformers",
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Run one benchmark; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, add, measure, text) in COMMANDS.items():
        functions = vars(importlib.import_module(f"tools.benchmarks.{module}"))
        command = commands.add_parser(name, help=text)
        functions[add](command)
        command.set_defaults(run=functions[measure])
    args = parser.parse_args(arguments)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
