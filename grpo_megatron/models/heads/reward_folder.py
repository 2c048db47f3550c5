"""RewardFolder: the Hugging Face folder of a model with a scalar head, for reading and export.

kind      output                                class of transformers            score.weight, score.bias
outcome   one score per sequence                *ForSequenceClassification       [1, h], none
process   the log-odds that a step is right     *ForTokenClassification          [2, h], [2]: wrong, right
value     one value per token                   *ForTokenClassification          [1, h], [1]
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import architecture_of, hf_shapes, read_config
from grpo_megatron.models.weights.hf_folder import SafetensorsFolder
from grpo_megatron.types import WeightBucket

HEAD, HEAD_BIAS = "score.weight", "score.bias"
CLASSIFIER, TOKEN_CLASSIFIER, LANGUAGE_MODEL = "ForSequenceClassification", "ForTokenClassification", "ForCausalLM"
HeadKind = Literal["outcome", "process", "value"]
READABLE: dict[HeadKind, tuple[str, ...]] = {  # besides a language model
    "outcome": (CLASSIFIER,),
    "process": (TOKEN_CLASSIFIER,),
    "value": (TOKEN_CLASSIFIER, CLASSIFIER),
}
CLASSES: dict[HeadKind, str] = {"outcome": CLASSIFIER, "process": TOKEN_CLASSIFIER, "value": TOKEN_CLASSIFIER}
LABELS: dict[HeadKind, tuple[int, ...]] = {"outcome": (1,), "process": (1, 2), "value": (1,)}  # that can be read
WHAT: dict[HeadKind, str] = {
    "outcome": "a reward model: one score per sequence",
    "process": "a process reward model: one score per step",
    "value": "a value model: one value per token",
}


@dataclass(frozen=True)
class RewardFolder:
    """`arch` is marked as tied: its weight table then has no output head. Scores of sequences are read at the last token
    that is not `pad_token_id`. `num_labels` and `has_bias` describe the head in the files."""

    path: Path
    arch: Architecture
    has_head: bool
    pad_token_id: int | None
    kind: HeadKind = "outcome"
    num_labels: int = 1

    @property
    def has_bias(self) -> bool:
        """Tells whether the model has a bias. Token classification without one is read as a bias of 0."""
        return self.kind != "outcome"


def read_reward_folder(path: Path, kind: HeadKind = "outcome") -> RewardFolder:
    """Reads config.json alone. Raises ValueError (or UnsupportedModel) with the reason if it has no such head.

    A `*ForCausalLM` is accepted for every kind. It gets a new head of zeros: every number is 0 until the model is trained.
    A critic may also start as a reward model. Two labels are one number, their difference: softmax(l_0, l_1) =
    sigmoid(l_1 - l_0) for the second. TRL's PRMTrainer writes two labels. A process model with one label, the log-odds itself,
    is read as well; export always writes two, (0, number). Any other head has another meaning and is refused.
    """
    config = read_config(path)
    names = config.get("architectures") or [LANGUAGE_MODEL]
    name = names[0] if isinstance(names, list) and len(names) == 1 else str(names)
    what, _, output = WHAT[kind].partition(": ")
    if not name.endswith((*READABLE[kind], LANGUAGE_MODEL)):
        labels_allowed = " or ".join("one label" if n == 1 else "two labels" for n in LABELS[kind])
        readable: list[HeadKind] = [] if kind == "value" else ["outcome", "process"]
        other = next((k for k in readable if name.endswith(CLASSES[k])), None)
        hint = f" (reward_model.kind={other} reads *{CLASSES[other]})" if other else ""
        classes = " or ".join(f"*{name}" for name in READABLE[kind])
        raise ValueError(
            f"architectures={name!r} cannot be {what}: {output} is {classes} with {labels_allowed}, or"
            f" *{LANGUAGE_MODEL}, which gets a new head{hint}"
        )
    has_head, labels = name.endswith(READABLE[kind]), 1
    if has_head and (labels := _num_labels(config)) not in LABELS[kind]:
        expected = " or ".join(map(str, LABELS[kind]))
        raise ValueError(f"{name} with {labels} labels cannot be {what}: it needs {expected}, not {labels}")
    arch = replace(architecture_of(config), tied=True)
    return RewardFolder(Path(path), arch, has_head, config.get("pad_token_id"), kind, labels)


def _num_labels(config: dict[str, Any]) -> int:
    """Returns the number of labels as transformers reads it: two by default."""
    return len(config["id2label"]) if config.get("id2label") else int(config.get("num_labels") or 2)


def check_reward_weights(folder: RewardFolder) -> None:
    """Raise WeightsError unless the folder has exactly this model's tensors."""
    with SafetensorsFolder(folder.path) as files:
        check_files(files, folder)


def check_files(files: SafetensorsFolder, folder: RewardFolder) -> None:
    """Raise WeightsError unless the opened files are exactly this model's tensors."""
    head: dict[str, tuple[int, ...]] = {}
    if folder.has_head:
        head[HEAD] = (folder.num_labels, folder.arch.hidden_size)
        if folder.has_bias:
            head[HEAD_BIAS] = (folder.num_labels,)
    files.check(hf_shapes(folder.arch) | head, {"lm_head.weight", HEAD_BIAS} if folder.has_bias else {"lm_head.weight"})


def read_head(files: SafetensorsFolder, folder: RewardFolder) -> tuple[Tensor, Tensor]:
    """Reads (weight [1, h], bias [1]) in float32: zeros for a new head, a difference for two labels."""
    weight, bias = torch.zeros(1, folder.arch.hidden_size), torch.zeros(1)
    if folder.has_head:
        weight = _one_number(files.slice(HEAD)[:].float())
        if folder.has_bias and HEAD_BIAS in files.tensors:
            bias = _one_number(files.slice(HEAD_BIAS)[:].float())
    return weight, bias


def _one_number(labels: Tensor) -> Tensor:
    """Returns the head of one label as it is; of two labels, the second minus the first."""
    return labels if len(labels) == 1 else labels[1:] - labels[:1]


def exported_head(folder: RewardFolder, weight: Tensor, bias: Tensor) -> WeightBucket:
    """Returns the head's tensors of the exported folder, of `weight` [h] and `bias` [1] (outcome: [0])."""
    rows, biases = weight.unsqueeze(0), bias
    if folder.kind == "process":
        rows, biases = torch.cat([torch.zeros_like(rows), rows]), torch.cat([torch.zeros_like(bias), bias])
    return [(HEAD, rows)] if folder.kind == "outcome" else [(HEAD, rows), (HEAD_BIAS, biases)]


def exported_config(folder: RewardFolder) -> dict[str, Any]:
    """Returns the config.json of the trained model: the source's, as a classifier of the folder's kind."""
    config = read_config(folder.path)
    families = config.get("architectures") or [_class_name(config["model_type"]) + LANGUAGE_MODEL]
    stem = families[0]
    for name in (CLASSIFIER, TOKEN_CLASSIFIER, LANGUAGE_MODEL):
        stem = stem.removesuffix(name)
    names = ["wrong", "right"] if folder.kind == "process" else ["LABEL_0"]
    labels = {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }
    config.pop("num_labels", None)  # transformers derives it from id2label
    config.pop("token_classification_bias", None)  # the export has a bias
    return {**config, "architectures": [stem + CLASSES[folder.kind]], **labels}


def _class_name(model_type: str) -> str:
    """Returns the form of transformers' class names: qwen3_moe -> Qwen3Moe."""
    return "".join(part.capitalize() for part in model_type.split("_"))
