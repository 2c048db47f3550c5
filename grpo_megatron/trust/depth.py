"""A model's first layers, for a layout that the complete model does not fit: the gradient's invariance needs no depth."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.checks.models import ModelFolders, with_hub_models
from grpo_megatron.config import Config
from grpo_megatron.config.problems import ProblemList
from grpo_megatron.models.families import architecture_of, read_config
from grpo_megatron.models.weights.hf_folder import INDEX_FILE, SafetensorsFolder
from grpo_megatron.planning.layout import world_problems
from grpo_megatron.planning.parameters import RunModels
from grpo_megatron.planning.phases import memory_phases, phase_problems

COPIED = (".json", ".jinja", ".model", ".txt", ".py")
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def fitting_depth(config: Config, num_ranks: int, others: Sequence[tuple[Config, int]], device: float) -> int | None:
    """Return how many of the model's first layers fit a device of `device` bytes; None: all of them, or no layer.

    `num_ranks` train. The layouts of `others`, (config, ranks), must divide the layers, too.
    """
    config = with_hub_models(config, weights=False)
    folders = ModelFolders.read(config, ProblemList())
    if folders.arch is None or not folders.are_complete:
        return None
    raw, models = read_config(config.model.path), folders.models(config)

    def fits(count: int) -> bool:
        arch = architecture_of(first_layers(raw, count), config.model.family)
        if any(next(iter(world_problems(*layout, arch)), None) for layout in ((config, num_ranks), *others)):
            return False
        shallow = RunModels(arch, models.reward_archs, models.critic, models.has_head, models.teachers)
        return not any(
            phase_problems(config, arch, memory_phases(config, arch, num_ranks, *shallow.stages(config)), device)
        )

    depth = models.arch.num_layers
    return None if fits(depth) else next((count for count in range(depth - 1, 0, -1) if fits(count)), None)


def first_layers(raw: dict[str, Any], count: int) -> dict[str, Any]:
    """Return a config.json with the first layers alone. A list that has an entry for each layer is cut."""
    if "text_config" in raw:
        return {**raw, "text_config": first_layers(raw["text_config"], count)}
    depth = raw["num_hidden_layers"]
    short = {key: value[:count] for key, value in raw.items() if isinstance(value, list) and len(value) == depth}
    return {**raw, **short, "num_hidden_layers": count}


def write_first_layers(source: Path, count: int, target: Path) -> None:
    """Write a Hugging Face folder with the first layers of another one. Raises WeightsError, OSError."""
    from safetensors.torch import save_file

    target.mkdir()
    for path in source.iterdir():
        if path.suffix in COPIED and path.name != INDEX_FILE:
            shutil.copyfile(path, target / path.name)
    (target / "config.json").write_text(json.dumps(first_layers(read_config(source), count), indent=1))
    with SafetensorsFolder(source) as stored:
        layers = {name: LAYER.search(one.name) for name, one in stored.tensors.items()}
        names = [name for name, layer in layers.items() if layer is None or int(layer[1]) < count]
        save_file(
            {stored.tensors[n].name: stored.read(n) for n in names}, target / "model.safetensors", {"format": "pt"}
        )
