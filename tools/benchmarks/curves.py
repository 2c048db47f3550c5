"""`tools.benchmarks curves`: held-out accuracy by distillation, on the policy's and on the teacher's samples, and by GRPO.

One teacher is trained (examples/distillation/teacher.yaml). For each seed of data, model and samples, a student is warmed up
once, and each way of WAYS goes on from there: 16 prompts and 128 responses per step. The teacher samples its responses
to the same prompts once per seed. A run that has finished is not run again, so the command resumes in its folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from tools.benchmarks.workload import machine

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ACCURACY = "val-core/arithmetic/acc/mean@1"
WARM_UP = Path("outputs/quickstart/run/warmup")
GIVEN = [  # the teacher's responses, in the order of the prompts that the other ways read
    *("algorithm.source=file", "actor.loss_agg_mode=token-mean", "data.shuffle=false"),
    *("data.train_files=[teacher.jsonl]", "data.train_batch_size=128"),
]
SFT = ["algorithm.adv_estimator=constant", "actor.loss_mode=sft"]
WITHOUT = ["~teachers", "~distillation"]
WAYS = {  # -> overrides of examples/distillation/student.yaml
    "GRPO, rewards": [*WITHOUT, "algorithm.adv_estimator=grpo"],
    "`kl: sampled`, no reward": [],
    "`kl: reverse`, `top_k: 0`, no reward": ["distillation={kl: reverse, top_k: 0}"],
    "`kl: sampled`, and rewards": ["algorithm.adv_estimator=grpo"],
    "SFT on the teacher's samples": [*GIVEN, *SFT, *WITHOUT],
    "`kl: forward`, `top_k: 0` on the teacher's samples": [
        *(*GIVEN, "actor.loss_mode=sft", "distillation={kl: forward, top_k: 0}"),
    ],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", default="", metavar="WORD", help="the ways with this word in their names")
    parser.add_argument("--folder", type=Path, default=Path("outputs/benchmark/curves"))
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="needs matplotlib")


def curves(args: argparse.Namespace) -> int:
    folder = args.folder.absolute()
    teacher = folder / "teacher" / "outputs/distillation/teacher/hf"
    if not teacher.exists():
        prepare(teacher.parents[3], 0)
        sizes = ("--set", "hidden_size=256", "--set", "intermediate_size=768")
        make_model(teacher.parents[3], "outputs/distillation/untrained", 0, *sizes)
        train(teacher.parents[3], EXAMPLES / "distillation/teacher.yaml")
    accuracies: dict[str, list[dict[int, float]]] = {way: [] for way in WAYS if args.only in way}
    for seed in range(args.seeds):
        place = folder / f"seed-{seed}"
        if not (place / WARM_UP).exists():
            prepare(place, seed)
            make_model(place, "outputs/quickstart/model", seed)
            train(place, EXAMPLES / "quickstart.yaml", "trainer.total_training_steps=0", *seeds(seed))
        if not (place / "teacher.jsonl").exists():
            write_samples(place, teacher, seed, 16 * args.steps)
        for number, (way, overrides) in enumerate(WAYS.items()):
            if way not in accuracies:
                continue
            accuracies[way].append(accuracy_of(place, f"way-{number}", args.steps, teacher, seed, overrides))
    print(f"{machine()}\n{table(accuracies)}")
    if args.plot is not None:
        plot(accuracies, args.plot)
    return 0


def command(place: Path, *arguments: str | Path) -> None:
    """Runs a command of this program in the folder `place`."""
    place.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    subprocess.run([sys.executable, "-m", "grpo_megatron", *arguments], cwd=place, env=environment, check=True)


def prepare(place: Path, seed: int) -> None:
    command(place, "prepare", "arithmetic", "outputs/quickstart/data", "--seed", str(seed), "--force")


def make_model(place: Path, model: str, seed: int, *options: str) -> None:
    tokenizer = ("--preset", "quickstart", "--tokenizer", "outputs/quickstart/data/tokenizer")
    command(place, "prepare", "model", model, *tokenizer, "--seed", str(seed), "--force", *options)


def train(place: Path, config: Path, *overrides: str) -> None:
    command(place, "train", config, *overrides, "trainer.logger=[jsonl]")


def seeds(seed: int) -> list[str]:
    return [f"{section}.seed={seed}" for section in ("data", "rollout", "trainer")]


def write_samples(place: Path, teacher: Path, seed: int, prompts: int) -> None:
    """Writes 8 responses of the teacher to each of the first prompts; those that have no end are left out."""
    rows = (place / "outputs/quickstart/data/train.jsonl").read_text().splitlines(keepends=True)[:prompts]
    (place / "prompts.jsonl").write_text("".join(rows))
    options = (
        "--samples",
        "8",
        "--temperature",
        "1",
        "--max-tokens",
        "32",
        "--seed",
        str(seed),
        "--output",
        "all.jsonl",
    )
    command(place, "generate", "--model", teacher, "--file", "prompts.jsonl", *options)
    lines = [json.loads(line) for line in (place / "all.jsonl").read_text().splitlines()]
    pairs = [
        {"prompt": one["prompt"], "response": one["completion"]} for one in lines if one["finish_reason"] == "stop"
    ]
    (place / "teacher.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def accuracy_of(place: Path, name: str, steps: int, teacher: Path, seed: int, overrides: list[str]) -> dict[int, float]:
    """Number of steps -> accuracy on the held-out problems. Trains, unless the run has finished."""
    run = place / name
    if not (run / "hf").exists():
        shutil.rmtree(run, ignore_errors=True)
        parts = [f"model.path={WARM_UP}", "~sft", f"trainer.total_training_steps={steps}", f"trainer.output_dir={name}"]
        parts += ["rollout.engine=transformers"]  # starts sooner
        parts += [] if "~teachers" in overrides else [f"teachers.worked.path={teacher}"]
        train(place, EXAMPLES / "distillation/student.yaml", *parts, *seeds(seed), *overrides)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {int(line["step"]): line[ACCURACY] for line in lines if ACCURACY in line}


def table(accuracies: dict[str, list[dict[int, float]]]) -> str:
    """Means over the seeds."""
    steps = sorted(next(iter(accuracies.values()))[0])
    lines = ["| | " + " | ".join(map(str, steps)) + " |", "| --- |" + " --- |" * len(steps)]
    for way, runs in accuracies.items():
        means = (statistics.fmean(run[step] for run in runs) for step in steps)
        lines.append(f"| {way} | " + " | ".join(f"{mean:.3f}" for mean in means) + " |")
    return "\n".join(lines)


def plot(accuracies: dict[str, list[dict[int, float]]], target: Path) -> None:
    """Means over the seeds as lines, and the range of the seeds as areas."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for way, runs in accuracies.items():
        steps = sorted(runs[0])
        of_steps = [[run[step] for run in runs] for step in steps]
        [line] = axes.plot(
            steps, [statistics.fmean(values) for values in of_steps], marker="o", markersize=3, label=way
        )
        low, high = ([end(values) for values in of_steps] for end in (min, max))
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    axes.set(xlabel="step", ylabel="accuracy on held-out problems", ylim=(0.3, 1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(target, dpi=110)
