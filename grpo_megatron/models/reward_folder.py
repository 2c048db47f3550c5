"""RewardFolder: the Hugging Face folder of a reward model, for reading and export. Of weight files only headers are read.

Two kinds are accepted. transformers' `*ForSequenceClassification` with one label is a decoder and `score.weight` [1, h]. A
`*ForCausalLM` loses its output head and gets a new score head of zeros: every score is 0 until the model is trained. Any
other head (token classification, process rewards, several labels) has another meaning and is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import architecture_of, hf_shapes, read_config
from grpo_megatron.models.weights import SafetensorsFolder

HEAD = "score.weight"
CLASSIFIER, LANGUAGE_MODEL = "ForSequenceClassification", "ForCausalLM"


@dataclass(frozen=True)
class RewardFolder:
    """`arch` is marked as tied: its weight table then has no output head. Scores are read at the last token that is not
    `pad_token_id`."""

    path: Path
    arch: Architecture
    has_head: bool
    pad_token_id: int | None


def read_reward_folder(path: Path) -> RewardFolder:
    """From config.json alone. Raises ValueError (or UnsupportedModel) with the reason if it is no reward model."""
    config = read_config(path)
    names = config.get("architectures") or [LANGUAGE_MODEL]
    name = names[0] if isinstance(names, list) and len(names) == 1 else str(names)
    if not name.endswith((CLASSIFIER, LANGUAGE_MODEL)):
        raise ValueError(
            f"architectures={name!r} cannot be a reward model: one score per sequence is *{CLASSIFIER} with one label,"
            f" or *{LANGUAGE_MODEL}, which gets a new head"
        )
    has_head = name.endswith(CLASSIFIER)
    if has_head and (labels := _num_labels(config)) != 1:
        raise ValueError(f"{name} with {labels} labels cannot be a reward model: it needs one score, not {labels}")
    arch = replace(architecture_of(config), tied=True)
    return RewardFolder(Path(path), arch, has_head, config.get("pad_token_id"))


def _num_labels(config: dict[str, Any]) -> int:
    """As transformers reads it: two by default."""
    return len(config["id2label"]) if config.get("id2label") else int(config.get("num_labels") or 2)


def check_reward_weights(folder: RewardFolder) -> None:
    """Raise WeightsError unless the folder holds exactly this model's tensors."""
    with SafetensorsFolder(folder.path) as files:
        check_files(files, folder)


def check_files(files: SafetensorsFolder, folder: RewardFolder) -> None:
    head = {HEAD: (1, folder.arch.hidden_size)} if folder.has_head else {}
    files.check(hf_shapes(folder.arch) | head, {"lm_head.weight"})


def exported_config(path: Path) -> dict[str, Any]:
    """The config.json of the trained model: that of the source, as a classifier with one label."""
    config = read_config(path)
    families = config.get("architectures") or [_class_name(config["model_type"]) + LANGUAGE_MODEL]
    stem = families[0].removesuffix(CLASSIFIER).removesuffix(LANGUAGE_MODEL)
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    config.pop("num_labels", None)  # transformers derives it from id2label
    return {**config, "architectures": [stem + CLASSIFIER], **labels}


def _class_name(model_type: str) -> str:
    """qwen3_moe -> Qwen3Moe, the form of transformers' class names."""
    return "".join(part.capitalize() for part in model_type.split("_"))
