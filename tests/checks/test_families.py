"""What the plan refuses of some families: parts of a run that cannot compute them, each in one line with its remedy."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_megatron.checks import layout as families
from grpo_megatron.checks.layout import family_problems
from grpo_megatron.config import Config
from grpo_megatron.models.families import architecture_of
from grpo_megatron.rollout.vllm import versions
from tests import tiny
from tests.models.test_moe import MODELS
from tests.runs import texts

V3, OLMO = {**tiny.COMMON, **MODELS["deepseek_v3"]}, {**tiny.COMMON, **tiny.FAMILIES["olmo2"]}
FP8 = {"actor": {"megatron": {"fp8": {"recipe": "blockwise"}}}}
CASES: list[tuple[dict[str, Any], dict[str, Any], str | None]] = [
    (V3, {}, None),
    (OLMO, {}, None),
    (V3, FP8, "fp8.recipe=blockwise: FP8 is not supported for latent attention (deepseek_v3)"),
    ({**V3, "kv_lora_rank": 256}, {}, "kernels for kv_lora_rank=512 and qk_rope_head_dim=64 only, and"),
    ({**V3, "kv_lora_rank": 256}, {"rollout": {"engine": "my.module:Engine"}}, None),
    ({**V3, "kv_lora_rank": 256}, {"trainer": {"device": "cuda"}}, None),
    (OLMO, {"actor": {"megatron": {"transformer_impl": "transformer_engine"}}}, "set transformer_impl=auto"),
    (OLMO, {"actor": {"megatron": {"context_parallel_size": 2}}}, "context_parallel_size=2 needs Transformer Engine"),
]


@pytest.mark.parametrize(("model", "changes", "message"), CASES)
def test_what_a_part_of_the_run_cannot_compute(
    model: dict[str, Any], changes: dict[str, Any], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "is_newest", lambda: True)
    problems = _problems(model, changes)
    assert len(problems) == (message is not None)
    assert message is None or message in problems[0]


def _problems(model: dict[str, Any], changes: dict[str, Any]) -> list[str]:
    raw: dict[str, Any] = {"model": {"path": "m"}, "trainer": {"device": "cpu", "output_dir": "o"}}
    raw |= {section: {**raw.get(section, {}), **values} for section, values in changes.items()}
    return texts(family_problems(Config.model_validate(raw), architecture_of(model)))


def test_an_older_vllm_has_no_latent_attention_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.26 raises "MLA is not supported on CPU." while it is built."""
    monkeypatch.setattr(versions, "_installed", lambda *names: "0.26.0")
    [problem] = _problems(V3, {})
    assert "the installed vLLM has no latent attention there, as this model (deepseek_v3) needs" in problem
    assert _problems(V3, {"trainer": {"device": "cuda"}}) == _problems(OLMO, {}) == []
