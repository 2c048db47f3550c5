"""An example of a family of the user's own, named by `model.family: tests.models.seed_oss:FAMILY`: Seed-OSS.

It is a pre-norm decoder like Qwen2, with a head size of its own.
"""

from __future__ import annotations

from typing import Any

from grpo_megatron.models.architecture import Architecture, UnsupportedModel, common_settings
from grpo_megatron.models.families.decoders import ModelFamily
from grpo_megatron.models.weights.table import WeightRow, decoder_table


def architecture_from(config: dict[str, Any]) -> Architecture:
    if config.get("attention_out_bias"):
        raise UnsupportedModel("Seed-OSS with attention_out_bias=true is not supported")
    tied = bool(config.get("tie_word_embeddings"))
    return Architecture(family="seed_oss", tied=tied, qkv_bias=True, **common_settings(config))


def weight_table(arch: Architecture) -> list[WeightRow]:
    return decoder_table(arch)


FAMILY = ModelFamily(architecture_from, weight_table)
NO_TABLE = {"architecture_from": architecture_from}
NO_ARCHITECTURE = ModelFamily(lambda config: config, weight_table)  # type: ignore[arg-type, return-value]
