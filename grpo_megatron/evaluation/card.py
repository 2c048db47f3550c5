"""card.md of an evaluation: its scores as the metadata of a Hugging Face model card (`model-index`), and as a table.

card.json has the metadata alone. The format is that of huggingface_hub's ModelCardData.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from grpo_megatron.evaluation.results import MEAN_REWARD, limited, sampling_text, score_label, score_text
from grpo_megatron.storage.files import write_file
from grpo_megatron.untrusted import visible_line

CONTAMINATION = "not examined: problems of these benchmarks may be in the training data"


def write_card(folder: Path, result: dict[str, Any], contamination: str | None) -> None:
    """Write card.md and card.json into the folder. `contamination`: what is known of it, one line."""
    path = Path(result["model"]["path"]).resolve()
    name = visible_line(path.parent.name if path.name == "hf" else path.name)  # RUN/hf is the model of a run
    data = ModelCardData(
        model_name=name, eval_results=[one for task in result["tasks"].items() for one in _entries(*task)]
    )
    about = [
        f"# Evaluation of {name}",
        _table(result["tasks"]),
        "Percent, with 95 % intervals over problems; mean rewards as they are.",
        f"Contamination: {visible_line(contamination or CONTAMINATION)}.",
        "Made by `grpo-megatron evaluate`: "
        + ", ".join(f"{key} {value}" for key, value in result["versions"].items())
        + ".",
    ]
    write_file(folder / "card.md", f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(about) + "\n")
    write_file(folder / "card.json", json.dumps(data.to_dict(), indent=1) + "\n")


def _entries(name: str, task: dict[str, Any]) -> list[EvalResult]:
    keys = ("num_problems", "num_in_file", "num_fewshot", "format", "max_tokens")
    arguments = {key: task[key] for key in keys if key in task}  # an older result lacks the second
    arguments |= {key: task[key] for key in ("samples", "temperature", "top_p") if task["samples"]}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=name,
            dataset_name=visible_line(task["title"]),
            dataset_revision=f"sha256:{task['data_sha256'][:16]}",
            dataset_args=arguments,
            metric_type=measure,
            metric_name=f"{score_label(name, label)} {measure}",
            metric_value=round(of["value"] * (1 if measure.startswith(MEAN_REWARD) else 100), 4),
        )
        for label, scores in task["scores"].items()
        for measure, of in scores.items()
    ]


def _table(tasks: dict[str, Any]) -> str:
    rows = [
        "| benchmark | problems | measure | score | 95 % interval | sampling |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, task in tasks.items():
        sampling = f"{task['num_fewshot']}-shot {task['format']}, up to {task['max_tokens']} tokens"
        sampling = "; ".join(filter(None, (sampling, sampling_text(task))))
        for label, scores in task["scores"].items():
            for measure, of in scores.items():
                value, low, high = (score_text(measure, of[key]) for key in ("value", "low", "high"))
                count = limited(task) or str(task["num_problems"])
                rows.append(
                    f"| {score_label(name, label)} | {count} | {measure} | {value} | {low} to {high} | {sampling} |"
                )
    return "\n".join(rows)
