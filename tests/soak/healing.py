"""Seeded losses of ranks under `trainer.healing` on one machine. Every run must end as the undisturbed one. Prints a table.

    python -m tests.soak.healing [--losses N] [--seed N] [--kinds dense,roles] [--folder DIR]

A run has four losses, each after the one before. Some come while the ranks start again.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from grpo_megatron.report.console import format_table
from grpo_megatron.storage.files import MEMORY_FOLDER
from grpo_megatron.storage.run_files import read_events
from tests import tiny
from tests.models.test_moe import QWEN3
from tests.soak.soak import make_workspace, run_command, soak_settings
from tests.stored import TIMES, rows_without

STEPS, LOSSES_OF_RUN, STALL_S = 12, 4, 8.0
LAYOUT = (*TIMES, "global_seqlen/", "sync/")  # metrics that depend on the number of ranks
EXACT = {"vocab_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 8}
MAX_GROWTH = 1.1  # of the launcher's memory, from the first loss to the last


class Kind(NamedTuple):
    """A kind of run: its model, its config, and whether healing may change its layout."""

    model: dict[str, Any]
    sections: dict[str, dict[str, Any]]
    ranks: int = 2
    layouts: str = "same"


TIED = {"family": "qwen2-tied", "num_hidden_layers": 2, "vocab_size": 80, "std": 0.05}
EXACT_MODEL = {"family": "qwen2", **EXACT}
GAE = {"adv_estimator": "gae", "lam": 0.9}
ROLES = {"placement": "separate", "num_ranks": 2}
KINDS = {
    "dense": Kind(EXACT_MODEL, {"model": {"exact": True}}, layouts="auto"),
    "moe": Kind(
        {"family": "qwen3", **QWEN3, "num_hidden_layers": 2, "vocab_size": 80},
        {"actor": {"megatron": {"expert_model_parallel_size": 2}}, "rollout": {"engine": "vllm"}},
    ),
    "lora": Kind(TIED, {"actor": {"lora": {"rank": 4, "alpha": 8.0}}}),
    "critic": Kind(
        TIED,
        {"algorithm": GAE, "critic": {"lam": 0.5, "ppo_mini_batch_size": 6, "optim": {"lr": 1e-3}}},
    ),
    "roles": Kind(EXACT_MODEL, {"model": {"exact": True}, "rollout": ROLES}, 3, "auto"),
}
FIRST_RANK = ("save: rename",)  # points that only rank 0 reaches
POINTS = (
    *("update_weights", "gen", "reward", "old_log_prob", "update_actor", "log", "mirror"),
    *("save_checkpoint", "save: files", *FIRST_RANK),
)
WHILE_HEALING = ("join", "build")  # and before the first step
TRAINING_POINTS = (
    *("send_weights", "wait_samples", "old_log_prob", "update_actor", "log", "mirror"),
    *("save_checkpoint", "save: files", *FIRST_RANK),
)
SAMPLING_POINTS = ("wait_weights", "gen", "reward")
ACTIONS = {"kill rank": 5, "stop rank": 2, "kill all ranks": 1, "stop all ranks": 1, "cut network": 1}  # weights


def draw_losses(rng: random.Random, kind: str, count: int, folder: Path) -> list[dict[str, Any]]:
    """Draws losses of one run; each waits for the one before."""
    losses: list[dict[str, Any]] = []
    for number in range(count):
        rank, size = rng.randrange(KINDS[kind].ranks), KINDS[kind].ranks
        if number and rng.random() < 0.25:
            point, rank = rng.choice(WHILE_HEALING), 0 if kind == "roles" else rank
        elif kind == "roles":
            point = rng.choice(TRAINING_POINTS if rank == 0 else SAMPLING_POINTS)
            rank = rank and size * (size - 1) - 1  # the last rank, in any number of ranks
        else:
            point = rng.choice(POINTS)
        rank = 0 if point in FIRST_RANK else rank
        (action,) = rng.choices([*ACTIONS], [*ACTIONS.values()])
        is_once = point in (*WHILE_HEALING, *FIRST_RANK) or point.startswith("save")
        count_of = 1 if is_once else rng.randint(1, 2)
        loss = {
            "point": point,
            "count": count_of,
            "rank": rank,
            "action": action,
            "once": str(folder / f"loss_{number}"),
        }
        losses.append(loss | ({"after": losses[-1]["once"]} if losses else {}))
    return losses


def settings(root: Path, output: Path, name: str, *, healing: bool, steps: int = STEPS) -> dict[str, Any]:
    """The config of a run of a kind, whose model is in `root`."""
    kind = KINDS[name]
    raw = soak_settings(root, output, steps, engine="transformers")
    del raw["algorithm"]  # dynamic sampling
    raw["trainer"] |= {"n_gpus_per_node": kind.ranks, "test_freq": -1, "stall_timeout_s": STALL_S}
    for section, values in kind.sections.items():
        raw.setdefault(section, {}).update(values)
    if healing:
        raw["trainer"]["healing"] = {"layouts": kind.layouts, "spares": 0 if kind.layouts == "auto" else 8}
    return raw


def make_inputs(root: Path, name: str) -> Path:
    """Writes the data, and the model of a kind."""
    make_workspace(root)
    for file in (root / "model").glob("*.safetensors"):
        file.unlink()
    model = dict(KINDS[name].model)
    tiny.make_model(root / "model", model.pop("family"), **model)
    return root


class Healed(NamedTuple):
    """A disturbed run: seconds from each loss to the next sample, whether it was the last one before that, and problems."""

    seconds: list[tuple[float, bool]]
    problems: list[str]


def heal_run(
    root: Path, folder: Path, name: str, losses: list[dict[str, Any]], expected: Path, *, steps: int = STEPS
) -> Healed:
    """Runs one with losses, and compares it with the undisturbed run in `expected`."""
    output = folder / "healed"
    raw = settings(root, output, name, healing=True, steps=steps)
    code, out, err, survivors = run_command(raw, folder, SOAK_FAULT=json.dumps(losses))
    problems = [] if code == 0 else [f"exit code {code}: {out[-1500:]}\n{err[-1500:]}"]
    problems += [f"processes {survivors} have outlived it"] if survivors else []
    problems += [f"loss {n} has not happened" for n, loss in enumerate(losses) if not Path(loss["once"]).exists()]
    if mirrors := [path for path in out.split() if path.startswith(f"{MEMORY_FOLDER}/") and Path(path).exists()]:
        problems.append(f"{mirrors} are left")
    rows, wanted = rows_without(output, LAYOUT), rows_without(expected, LAYOUT)
    if rows != wanted:
        steps_of = [row["step"] for row in rows]
        problems.append(f"the metrics differ; steps {steps_of}")
    weights = "hf/model.safetensors" if name != "lora" else "hf/adapter_model.safetensors"  # whose header has no order
    if not problems:
        healed_weights, wanted_weights = (load_file(folder / weights) for folder in (output, expected))
        is_equal = healed_weights.keys() == wanted_weights.keys()
        if not is_equal or any(not torch.equal(healed_weights[key], wanted_weights[key]) for key in wanted_weights):
            problems.append("the weights differ")
    happened = [json.loads(Path(loss["once"]).read_text()) for loss in losses if Path(loss["once"]).exists()]
    if happened and happened[-1]["rss_kib"] > MAX_GROWTH * happened[0]["rss_kib"]:
        problems.append(f"the launcher's memory has grown: {[one['rss_kib'] for one in happened]} KiB")
    healed = [event["time"] for event in read_events(output) if event["kind"] == "healed"]
    times, seconds = [one["time"] for one in happened], []
    for time, next_loss in zip(times, [*times[1:], float("inf")], strict=True):
        if after := [moment for moment in healed if moment > time]:
            seconds.append((after[0] - time, after[0] < next_loss))
    return Healed(seconds, problems)


def summary(rows: Iterable[tuple[str, dict[str, Any], tuple[float, bool]]]) -> str:
    """Returns the table of seconds, by what happened; losses before the recovery of another one count in a row of their own."""
    groups: dict[str, list[float]] = {}
    for _, loss, (seconds, is_alone) in rows:
        name = loss["action"] if is_alone else "another loss before the first sample"
        groups.setdefault(name, []).append(seconds)
        groups.setdefault("all", []).append(seconds)
    header = ["loss", "number", "median s", "worst s"]
    table = [[name, str(len(s)), f"{statistics.median(s):.1f}", f"{max(s):.1f}"] for name, s in sorted(groups.items())]
    return format_table(table, header)


def main(note: Callable[[str], object] = lambda text: print(text, flush=True)) -> int:
    parser = argparse.ArgumentParser("soak.healing")
    parser.add_argument("--losses", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    names, rng, problems, rows = args.kinds.split(","), random.Random(args.seed), [], []
    with tempfile.TemporaryDirectory(prefix="healing-") as temporary:
        folder = args.folder or Path(temporary)
        for name in names:
            root, expected = make_inputs(folder / name / "inputs", name), folder / name / "undisturbed"
            raw = settings(root, expected, name, healing=False)
            code, _, err, _ = run_command(raw, folder / name / "undisturbed-command")
            if code:
                problems.append(f"{name}: the undisturbed run has failed with exit code {code}:\n{err}")
                continue
            for number in range(-(-args.losses // (len(names) * LOSSES_OF_RUN))):
                run = folder / name / f"run_{number}"
                run.mkdir()
                losses = draw_losses(rng, name, LOSSES_OF_RUN, run)
                healed = heal_run(root, run, name, losses, expected)
                for loss, (seconds, is_alone) in zip(losses, healed.seconds, strict=False):
                    rows.append((name, loss, (seconds, is_alone)))
                    what = f"{loss['action']} in {loss['point']} #{loss['count']} of rank {loss['rank']}"
                    note(f"{name}: {what}: {seconds:.1f} s{'' if is_alone else ', with the next one'}")
                for problem in healed.problems:
                    note(f"{name}, run {number}: PROBLEM {problem}")
                problems += [f"{name}, run {number}: {problem}" for problem in healed.problems]
    note(f"\n{summary(rows)}\n")
    note("\n".join(problems) or "every run has ended as the undisturbed one, bit for bit")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
