"""Families: RoPE scaling equals transformers', parameter counts are the published ones, refusals are one line.

In these sequences of 640 tokens, half the RoPE factor changes logprobs by more than 1e-3 (asserted below), so the bound of
1e-5 finds a wrong factor. Parameter counts are of real models, from tests/data/hf_configs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_megatron.models.architecture import UnsupportedModel
from grpo_megatron.models.families import FAMILIES, architecture_of, hf_shapes, read_architecture, table_of
from grpo_megatron.models.weights.table import expand_table
from tests import tiny, vision
from tests.files import published_config
from tests.models import ministral3
from tests.models.policies import build
from tests.models.test_moe import MODELS
from tests.worlds import ranks

LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}
# With theta 5e5 and original length 8192, only wavelengths above 2048 are interpolated: this needs long sequences.
LLAMA3 = {**tiny.LLAMA3_ROPE, "rope_theta": 5e5, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}
STEEP_YARN = {**YARN, "attention_factor": 1.5, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}
OWN = "tests.models.ministral3:FAMILY"  # a family that only the config names
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {  # model -> (tiny family, changes)
    **{name: (name, {}) for name in ("llama2", "mistral", "qwen2", "qwen3", "seed_oss")},
    **{name: ("llama2", MODELS[name]) for name in ("qwen3_moe", "mixtral")},
    OWN: ("llama2", ministral3.CONFIG),
}
LONG = [([7 * i * i % 101 for i in range(600)], list(range(40))), ([3 * i % 101 for i in range(640)], [5, 50])]


def _scaled(root: Path, name: str, rope: dict[str, Any]) -> Path:
    family, changes = SETTINGS[name]
    settings = {**changes, "num_hidden_layers": 2, "max_position_embeddings": 16384}
    if name == "mixtral":  # transformers' YaRN takes its null for the size of a head
        settings["head_dim"] = tiny.COMMON["hidden_size"] // tiny.COMMON["num_attention_heads"]
    if rope:
        settings["rope_parameters"] = rope
    return tiny.make_model(
        root / f"{name.partition(':')[0]}-{rope.get('rope_type')}-{len(rope)}", family, std=0.1, **settings
    )


@ranks(1)
def logprobs(folders: list[Path], families: list[str | None]) -> list[torch.Tensor]:
    """Log-probabilities of LONG under each model. `families`: `model.family` for each."""
    batch = tiny.make_batch(LONG, [[list(range(len(LONG)))]])
    return [build(f, family=family).logprobs(batch) for f, family in zip(folders, families, strict=True)]


@pytest.mark.slow
def test_rope_scaling_equals_transformers(tmp_path: Path) -> None:
    """Linear scaling for every family, llama3 and YaRN for some. Half the factor must give other logprobs."""
    cases: list[tuple[str, dict[str, Any]]] = [(name, LINEAR) for name in SETTINGS if name != OWN] + [
        ("llama2", LLAMA3),
        ("qwen3", LLAMA3),
    ]
    cases += [("llama2", YARN), ("qwen2", STEEP_YARN), ("mixtral", YARN), (OWN, ministral3.CONFIG["rope_parameters"])]
    folders = [_scaled(tmp_path, name, rope) for name, rope in cases]
    own = [name if name == OWN else None for name, _ in cases]
    [results] = logprobs(folders=folders, families=own)
    for (name, rope), folder, got in zip(cases, folders, results, strict=True):
        halved = _with_rope(folder, {**rope, "factor": rope["factor"] / 2})
        for i, want in enumerate(tiny.transformers_logprobs(folder, LONG)):
            assert (got[i, : len(want)] - want).abs().max() <= 1e-5, f"{name} {rope['rope_type']}"
        wrong = tiny.transformers_logprobs(halved, LONG[:1])[0]
        assert (wrong - got[0, : len(wrong)]).abs().max() > 1e-3, f"{name}: half the factor changes nothing here"


@pytest.mark.slow
def test_windows_equal_transformers(tmp_path: Path) -> None:
    """In all layers, as Mistral and Qwen have them. With a larger window the numbers are others."""
    qwen = {"use_sliding_window": True, "sliding_window": 200, "max_window_layers": 0}
    cases: list[tuple[str, dict[str, Any]]] = [("mistral", {"sliding_window": 100}), ("qwen2", qwen)]
    settings = {"num_hidden_layers": 2, "max_position_embeddings": 1024, "std": 0.1}
    folders = [tiny.make_model(tmp_path / name, name, **{**settings, **changes}) for name, changes in cases]
    [results] = logprobs(folders=folders, families=[None] * len(cases))
    for folder, got in zip(folders, results, strict=True):
        assert read_architecture(folder).window_of(1) in (100, 200)
        for i, want in enumerate(tiny.transformers_logprobs(folder, LONG)):
            assert (got[i, : len(want)] - want).abs().max() <= 1e-5, folder.name
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "sliding_window": 1000}))
        without = tiny.transformers_logprobs(folder, LONG[:1])[0]
        assert (without - got[0, : len(without)]).abs().max() > 1e-3, folder.name


def _with_rope(folder: Path, rope: dict[str, Any]) -> Path:
    """The same weights under another scaling."""
    other = folder.with_name(f"{folder.name}-{rope['rope_type']}-{rope.get('factor')}")
    other.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    (other / "model.safetensors").symlink_to(folder / "model.safetensors")
    return other


COUNTS = {
    "DeepSeek-V3": 671_026_419_200,  # without the layer that predicts a further token
    "GLM-4.5-Air": 106_852_251_264,  # likewise
    "gemma-3-1b-it": 999_885_952,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.2-1B": 1_235_814_400,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-VL-8B-Instruct": 8_767_123_696,
    "Qwen3-VL-30B-A3B-Instruct": 31_070_754_032,
    "Qwen3.5-27B": 26_895_998_464,  # the decoder
    "Qwen3.5-35B-A3B": 34_660_610_688,
    "Qwen3-Next-80B-A3B-Instruct": 79_674_391_296,  # without the layers that predict a further token
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    """By the formula, by the shapes of Hugging Face tensors, and by Megatron's shapes without padding."""
    arch = architecture_of(published_config(name))
    assert arch.num_parameters() == COUNTS[name]
    assert sum(torch.Size(shape).numel() for shape in hf_shapes(arch).values()) == COUNTS[name]
    rows = list(expand_table(table_of(arch), arch))
    padding = (arch.padded_vocab_size(1) - arch.vocab_size) * arch.hidden_size * (1 if arch.tied else 2)
    assert sum(torch.Size(row.local_shape(arch, 1)).numel() for row in rows) - padding == COUNTS[name]


def _refused(config: dict[str, Any], message: str, family: str | None = None) -> None:
    with pytest.raises(UnsupportedModel) as error:
        architecture_of(config, family)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen2", {"hidden_size": "128"}, "cannot be used: hidden_size='128' ("),
    ("llama", {"num_attention_heads": 0, "head_dim": None}, "cannot be used: num_attention_heads=0 ("),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings=None"),
    ("qwen2", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE scaling 'dynamic'"),
    ("llama", {"rope_scaling": {**tiny.LLAMA3_ROPE, "high_freq_factor": 8.0}}, "llama3 RoPE scaling with high_freq"),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "config.json has no 'factor'"),
    ("qwen3", {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ("qwen3", {"attention_bias": True}, "attention_bias=true"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, "in some layers only (layer_"),
    (
        "mistral",
        {"sliding_window": 8, "layer_types": ["chunked_attention"] * 4},
        "each of the 4 layers must have sliding",
    ),
    ("mistral", {"sliding_window": 8, "layer_types": ["sliding_attention"]}, "each of the 4 layers must have sliding"),
    ("mistral", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2: layers without experts"),
    ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok=1 and probabilities scaled to sum to 1"),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok=9: it has 4 experts"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax': vLLM would route"),
    ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob=False is not supported"),
    ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05 is not supported (supported: 1e-06)"),
    ("deepseek_v3", {"first_k_dense_replace": 4}, "first_k_dense_replace=4 of 4 layers"),
    ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 0.7}}, "needs mscale and mscale_all_dim, or neither"),
    ("deepseek_v3", {"rope_parameters": LINEAR}, "latent attention with llama3 or linear RoPE scaling"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2: latent attention has a key head for each of"),
    ("deepseek_v3", {"kv_lora_rank": 0}, "latent.kv_rank=0, not a positive integer"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
    ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported"),
    ("gemma3_text", {"rope_scaling": YARN}, "RoPE scaling 'yarn' of its layers with full attention is not supported"),
    ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_scalar=0, not a number from 0.001 to 1e+09"),
    ("glm4_moe", {"routed_scaling_factor": -1.0}, "routed_scaling_factor=-1, num_experts_per_tok=6: the first must be"),
    ("gpt_oss", {"layer_types": [{}] * 4}, "each of the 4 layers must have sliding_attention or full_attention"),
    ("gpt_oss", {"rope_parameters": "yarn"}, "config.json gives rope_parameters='yarn', not an object"),
    ("glm4_moe", {"rope_parameters": LINEAR}, "RoPE scaling 'linear' of a share of each head"),
    (
        "gpt_oss",
        {"layer_types": ["full_attention", "sliding_attention"] * 2},
        "vLLM has sliding windows in every other",
    ),
    ("gpt_oss", {"swiglu_alpha": 1.0}, "gpt-oss with swiglu_alpha=1.0 is not supported (supported: 1.702)"),
    ("qwen3_next", {"layer_types": ["linear_attention", *["full_attention"] * 3]}, "every n-th layer must have full"),
    ("qwen3_next", {"linear_num_value_heads": 6}, "6 value heads to 4 key heads of its gated delta nets"),
    ("qwen3_next", {"linear_conv_kernel_dim": 0}, "delta.kernel=0, not a positive integer"),
    ("deepseek_v2", {"topk_group": 1}, "a token cannot select num_experts_per_tok=4 of them"),
    ("deepseek_v2", {"topk_method": "greedy"}, "topk_method=greedy and n_group=4: vLLM would limit the groups"),
]


@pytest.mark.parametrize(("family", "changes", "message"), REFUSALS)
def test_what_cannot_be_expressed_is_refused_in_one_line(family: str, changes: dict[str, Any], message: str) -> None:
    base = {**tiny.COMMON, **MODELS.get(family, {}), "model_type": family}
    if family in FAMILIES:
        architecture_of(base)  # without the changes it is supported
    _refused({**base, **changes}, message)


def test_a_family_of_the_users_own_is_found_by_its_name() -> None:
    """And not by model_type. Every way to name none is one line that says what to write."""
    config = {**tiny.COMMON, **ministral3.CONFIG}
    arch = architecture_of(config, OWN)
    assert arch.family == OWN and arch.max_position_embeddings == 1024
    assert sum(torch.Size(shape).numel() for shape in hf_shapes(arch).values()) == arch.num_parameters()
    _refused(config, "model_type='ministral3' is not supported (supported: ")
    for family, message in (
        ("tests.models.ministral3:FAMILIES", "module 'tests.models.ministral3' has no attribute 'FAMILIES'"),
        ("tests.models.no_such:FAMILY", "cannot import module 'tests.models.no_such'"),
        ("tests.models.ministral3:NO_TABLE", "has no function architecture_from and no weight_table; name a"),
        ("tests.models.ministral3:NO_ARCHITECTURE", "architecture_from returned a dict, not a"),
        ("ministral3", "model_type='ministral3' is not supported"),
    ):
        _refused(config, message, family)
    _refused({**config, "sliding_window": 8}, "Ministral 3 with sliding_window=8", OWN)


@pytest.mark.parametrize("family", ["mistral", "mixtral", "olmo2", "glm4_moe", "gpt_oss", "qwen3_next"])
def test_keys_that_are_left_out_have_transformers_defaults(family: str) -> None:
    from transformers import AutoConfig

    left_out = ("rope_parameters", "sliding_window", "norm_topk_prob") if family != "gpt_oss" else ("sliding_window",)
    given = {**tiny.COMMON, **MODELS.get(family, {}), "model_type": family, "max_position_embeddings": 4096}
    given = {key: value for key, value in given.items() if key not in left_out or "glm" in family}
    assert architecture_of(given) == architecture_of(AutoConfig.for_model(**given).to_dict())


@pytest.mark.parametrize(("family", "epsilon"), [("qwen2_vl", 1e-5), ("qwen2_5_vl", 1e-5), ("qwen3_vl", 1e-6)])
def test_a_vision_model_without_its_epsilon_has_that_of_transformers(family: str, epsilon: float) -> None:
    config = vision.make_config(family).to_dict()
    texts = config.get("text_config", config)
    del texts["rms_norm_eps"]
    assert (
        architecture_of(config).norm_eps == epsilon == type(vision.make_config(family).get_text_config())().rms_norm_eps
    )


def test_transformers_5_writes_num_local_experts_for_every_family() -> None:
    hub = {**tiny.COMMON, **MODELS["qwen3_moe"]}
    saved = {("num_local_experts" if key == "num_experts" else key): value for key, value in hub.items()}
    assert architecture_of(saved) == architecture_of(hub)
