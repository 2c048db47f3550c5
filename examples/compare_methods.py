"""Trains every method on the quickstart's task with the same budget, and writes one table and one picture.

    python examples/compare_methods.py [--only grpo rloo ...] [--steps 30] [--seeds 0 1 2] [--output outputs/methods]

First prepares the quickstart's data and warmed-up model if they do not exist. Then runs `python -m grpo_megatron train`
with the config of each method in examples/methods/, from the same weights; a seed is one order of prompts for all methods. A
run that was made before is not made again. Writes `table.md`, with means over the seeds, and `curves.png`. One to two minutes
per run on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from matplotlib.figure import Figure

from grpo_megatron.config.methods import methods

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = {name: one.example for name, one in methods().items() if one.example.startswith("methods/")}
QUICKSTART = Path("outputs/quickstart")
ACCURACY = "val-core/arithmetic/acc/mean@1"
WORKED = "val-aux/arithmetic/worked/mean"
PANELS = {  # the picture's panels: title -> methods
    "estimators": ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo"),
    "more estimators": ("grpo", "ppo", "gpg", "grpo_passk", "grpo_process", "iterative_grpo"),
    "losses": ("grpo", "gspo", "gspo_token", "gmpo", "cispo", "sapo"),
    "masks and weights": ("grpo", "dppo_tv", "ipo", "kpop", "vespo", "fipo", "maxrl", "lite_ppo"),
    "sampling": ("grpo", "dapo", "dupo", "replay", "partial_rollouts"),
    "unified view": ("grpo", "sft", "rft", "online_rft", "dpo", "dpo_from_file", "chord_phi", "chord_mu"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(EXAMPLES)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="METHOD", help=", ".join(names))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--output", type=Path, default=Path("outputs/methods"))
    options = parser.parse_args()
    prepare(options.seeds[0])
    runs = [(name, seed) for name in options.only for seed in options.seeds]
    for number, (name, seed) in enumerate(runs, 1):
        print(f"[{number}/{len(runs)}] {name}, seed {seed}", flush=True)
        run(name, options.output / f"{name}-{seed}", options.steps, seed)
    folders = {name: [options.output / f"{name}-{seed}" for seed in options.seeds] for name in options.only}
    curves = {name: mean_curve(of_method) for name, of_method in folders.items()}
    table = make_table(curves, folders)
    (options.output / "table.md").write_text(table)
    plot(curves, options.output / "curves.png")
    print(f"\n{table}\n{options.output / 'table.md'}\n{options.output / 'curves.png'}")


def prepare(seed: int) -> None:
    """Create the data, the random model and the warmed-up model, unless `make quickstart` has done so."""
    data, model = QUICKSTART / "data", QUICKSTART / "model"
    tool = [sys.executable, "-m", "grpo_megatron", "prepare"]
    if not (data / "written.jsonl").exists():
        subprocess.run([*tool, "arithmetic", str(data), "--seed", str(seed), "--force"], check=True)
        size = ["--preset", "quickstart", "--tokenizer", str(data / "tokenizer"), "--std", "0.05"]
        subprocess.run([*tool, "model", *size, str(model), "--seed", str(seed), "--force"], check=True)
    if not (QUICKSTART / "run" / "warmup").exists():
        train(ROOT / "examples" / "quickstart.yaml", "trainer.total_training_steps=0", "trainer.save_hf_at_end=false")


def run(name: str, folder: Path, steps: int, seed: int) -> None:
    """Train one method, unless a run of it has finished."""
    if read_curve(folder).get(steps) is not None:
        return
    train(
        ROOT / "examples" / EXAMPLES[name],
        f"method={name}",
        f"trainer.total_training_steps={steps}",
        f"trainer.output_dir={folder}",
        "trainer.resume_mode=disable",
        "trainer.logger=[jsonl]",
        *(f"{section}.seed={seed}" for section in ("data", "rollout", "trainer")),
    )


def train(config: Path, *overrides: str) -> None:
    subprocess.run([sys.executable, "-m", "grpo_megatron", "train", str(config), *overrides], check=True)


def read_rows(folder: Path) -> list[dict[str, float]]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def read_curve(folder: Path) -> dict[int, float]:
    """Number of finished steps -> accuracy on the held-out problems."""
    return {int(row["step"]): row[ACCURACY] for row in read_rows(folder) if ACCURACY in row}


def mean_curve(folders: list[Path]) -> dict[int, float]:
    """Averages the curves of a method's seeds, at the steps that all of them have."""
    curves = [read_curve(folder) for folder in folders]
    return {step: sum(curve[step] for curve in curves) / len(curves) for step in set.intersection(*map(set, curves))}


def make_table(curves: dict[str, dict[int, float]], folders: dict[str, list[Path]]) -> str:
    """Markdown table: accuracy over the steps, the share of worked answers at the end, the median seconds per step."""
    steps = sorted({step for curve in curves.values() for step in curve})
    lines = [
        "| method | " + " | ".join(f"step {step}" for step in steps) + " | worked | s/step |",
        "| --- " * (len(steps) + 3) + "|",
    ]
    for name, curve in curves.items():
        rows = [row for folder in folders[name] for row in read_rows(folder)]
        worked = [row[WORKED] for row in rows if WORKED in row]
        seconds = sorted(row["timing_s/step"] for row in rows if "timing_s/step" in row)
        cells = [f"{curve[step]:.2f}" if step in curve else "" for step in steps]
        last = [read_curve(folder)[steps[-1]] for folder in folders[name] if steps[-1] in read_curve(folder)]
        cells[-1] += f" ({min(last):.2f} to {max(last):.2f})" if len(last) > 1 else ""
        cells += [f"{worked[-1]:.2f}" if worked else "", f"{seconds[len(seconds) // 2]:.2f}" if seconds else ""]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(curves: dict[str, dict[int, float]], target: Path) -> None:
    """Accuracy over steps, one panel per entry of PANELS, GRPO in black in each."""
    panels = {title: [name for name in names if curves.get(name)] for title, names in PANELS.items()}
    panels = {title: names for title, names in panels.items() if names}
    if not panels:
        return
    figure = Figure(figsize=(4.2 * len(panels), 4.2), layout="constrained")
    for place, (title, names) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(1, len(panels), place)
        for name in names:
            curve = sorted(curves[name].items())
            style = {"color": "black", "linewidth": 2.5} if name == "grpo" else {"linewidth": 1.5}
            axes.plot([s for s, _ in curve], [a for _, a in curve], marker="o", markersize=3, label=name, **style)
        axes.set(title=title, xlabel="step", ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="lower right")
        if place == 1:
            axes.set_ylabel("accuracy on held-out problems")
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
