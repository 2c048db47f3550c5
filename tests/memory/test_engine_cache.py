"""How many sequences an engine's cache holds. vLLM's own count of blocks: tests/rollout/checks.py.

Llama-3.1-8B in bfloat16 on 80 GiB, share 0.6, tp 1: 32 layers x 2 x 8 heads x 128 x 2 bytes = 131,072 bytes per token.

    weights     8,030,261,248 x 2                                              = 16,060,522,496
    workspace   8,192 tokens x 2 x (4 x 4,096 + 3 x 14,336) + 256 x 128,256 x 12 =  1,367,080,960
    cache       0.6 x 80 x 2^30 - both                                         = 34,112,004,096

so 16,265 blocks of 16 tokens = 260,240 tokens; a sequence of 4,096 has 256 blocks, and 63 sequences fit.
"""

from __future__ import annotations

from typing import Any

import pytest

from grpo_megatron.config import Config
from grpo_megatron.memory.phases import GIB, EngineCache, engine_cache, engine_weights, kv_token_bytes
from grpo_megatron.models.families import architecture_of
from tests import tiny
from tests.memory.test_phases import P, arch_8b
from tests.models.test_moe import MODELS
from tests.planning import published


def cache_of(device: float = 80 * GIB, **rollout: Any) -> EngineCache:
    config = Config.model_validate({"model": {"path": "x"}, "rollout": rollout})
    return engine_cache(config, arch_8b(), 2, device)


def test_by_hand() -> None:
    found = cache_of()
    assert found.weights == 2 * P == 16_060_522_496
    assert found.workspace == 8192 * 2 * (4 * 4096 + 3 * 14336) + 256 * 128256 * 12 == 1_367_080_960
    assert found.cache == pytest.approx(34_112_004_096, abs=1)
    assert (found.token_bytes, found.tokens) == (131_072, 260_240)
    assert found.sequences(4096) == 63
    assert found.sequences(4097) == 16_265 // 257


def test_heads_are_divided_until_each_rank_has_one() -> None:
    arch = arch_8b()
    assert [kv_token_bytes(arch, tp, 2) // 1024 for tp in (1, 2, 8, 16)] == [128, 64, 16, 16]


def test_latents_are_on_every_rank() -> None:
    arch = architecture_of({**tiny.COMMON, **MODELS["deepseek_v3"]})
    assert arch.latent is not None
    size = arch.num_layers * (arch.latent.kv_rank + arch.latent.rope_dim) * 2
    assert kv_token_bytes(arch, 1, 2) == kv_token_bytes(arch, 4, 2) == size


def test_options_of_the_engine() -> None:
    assert cache_of(engine_kwargs={"kv_cache_memory_bytes": 5 * GIB}).cache == 5 * GIB
    assert cache_of(engine_kwargs={"kv_cache_dtype": "fp8"}).token_bytes == 65_536
    blocks = cache_of(engine_kwargs={"block_size": 128, "kv_cache_memory_bytes": 131_072 * 128 * 3 + 1})
    assert (blocks.tokens, blocks.sequences(129), blocks.sequences(128)) == (384, 1, 3)


def test_a_quantised_engine_has_one_byte_per_weight_but_at_the_ends() -> None:
    config = Config.model_validate({"model": {"path": "x"}, "rollout": {"quantization": "fp8_per_block"}})
    ends = 2 * 128_256 * 4096
    assert engine_weights(config, arch_8b(), 2) == P - ends + 2 * ends


def test_weights_that_leave_nothing() -> None:
    found = cache_of(device=16 * GIB)
    assert found.cache < 0 and found.tokens == found.sequences(1) == 0
    assert published.architecture("Llama-3.1-8B").num_parameters() == P
