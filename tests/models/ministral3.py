"""An example of a family of the user's own, named by `model.family: tests.models.ministral3:FAMILY`: the text of Ministral 3.

Llama's layers with a head size of its own and YaRN. Behind the length that YaRN stretches, queries grow with their position.
Megatron-Core has no such factor, so the model ends there: a run with longer sequences is refused.
"""

from __future__ import annotations

from typing import Any

from grpo_megatron.models.architecture import Architecture, UnsupportedModel, common_settings
from grpo_megatron.models.families.decoders import ModelFamily
from grpo_megatron.models.weights.table import WeightRow, decoder_table


def architecture_from(config: dict[str, Any]) -> Architecture:
    if config.get("sliding_window"):
        raise UnsupportedModel(f"Ministral 3 with sliding_window={config['sliding_window']} is not supported")
    settings = common_settings(config)
    settings["max_position_embeddings"] = config["rope_parameters"]["original_max_position_embeddings"]
    return Architecture(family="ministral3", tied=bool(config.get("tie_word_embeddings")), **settings)


def weight_table(arch: Architecture) -> list[WeightRow]:
    return decoder_table(arch)


FAMILY = ModelFamily(architecture_from, weight_table)
# For tests: the settings of a tiny one.
CONFIG: dict[str, Any] = {"model_type": "ministral3", "head_dim": 64}
CONFIG["rope_parameters"] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 1024,
}
CONFIG["rope_parameters"]["llama_4_scaling_beta"] = 0.1
NO_TABLE = {"architecture_from": architecture_from}
NO_ARCHITECTURE = ModelFamily(lambda config: config, weight_table)  # type: ignore[arg-type, return-value]
