"""Bytes over node borders: by hand for 70B, and against the bytes that real ranks send.

Llama-3.1-70B, tp 4 x pp 4 x dp 4 on 8 nodes of 8, 2,048 samples of 4,096 tokens, h 8192, bfloat16. A stage has 16 ranks,
two nodes. A group of 4 data-parallel ranks is on both.

    pipeline    three borders between stages; forward and backward, and one pass of the reference:
                3 x 3 x 2,048 x 4,096 x 8,192 x 2 bytes
    gradients   a ring enters each of the 2 nodes once, with 3/4 of 4 + 2 bytes per parameter: 2 x 3/4 x 6 x (sum over
                stages and tp ranks of what a rank holds)
    samples     4 x (1,024 + 2 x 3,072) bytes, to 16 ranks of a replica, 7/8 of them on other nodes
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from grpo_megatron.checks.models import read_models
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.cli.plan import NodeMemory
from grpo_megatron.config import Config
from grpo_megatron.models.families import read_architecture
from grpo_megatron.planning.cost import Workload
from grpo_megatron.planning.parameters import RunModels, memory_of_stages
from grpo_megatron.planning.traffic import (
    border_traffic,
    expert_lines,
    kept_by_syncs,
    planned_for,
    staged_bytes,
    staging_shortages,
    weight_sync_lines,
)
from tests import tiny, worlds
from tests.models import policies
from tests.planning import published

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [20, 32, 24, 28]  # tokens of each sample


def sizes(config: Config, models: RunModels, world_size: int) -> dict[str, float]:
    work = Workload.of(config, models)
    return {item.name: item.size for item in border_traffic(config, models, work, world_size)}


@pytest.fixture
def config_70b(monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(ROOT)
    return load_config("examples/llama3_70b.yaml")


def test_70b_by_hand(config_70b: Config) -> None:
    models = read_models(config_70b)
    found = sizes(config_70b, models, 64)
    assert set(found) == {"weight sync", "gradients", "pipeline", "samples"}
    hidden = 2048 * 4096 * 8192 * 2
    assert found["pipeline"] == 3 * 3 * hidden
    assert found["samples"] == 2048 * 4 * (1024 + 2 * 3072) * 16 * 7 / 8
    of_ranks = 4 * sum(stage.total for stage in models.stages(config_70b)[0])
    assert found["gradients"] == pytest.approx(2 * 3 / 4 * 6 * of_ranks)
    # Each node has one of four stages: about three quarters of 141.1 GB enter it.
    assert found["weight sync"] == pytest.approx(8 * 141.1e9 * 3 / 4, rel=0.02)


def test_the_plan_of_a_run_with_lora_counts_adapters(config_70b: Config) -> None:
    """Rank 32: r (inputs + outputs) of q and o, k and v, gate, up and down, in 80 layers, bfloat16."""
    factors = 2 * 80 * 32 * (2 * (8192 + 8192) + 2 * (8192 + 1024) + 3 * (8192 + 28672))
    config = load_config("examples/llama3_70b.yaml", ["actor.lora.rank=32"])
    models = read_models(config)
    assert sizes(config, models, 64)["weight sync"] == pytest.approx(8 * factors * 3 / 4, rel=0.02)
    lines, whole = (dict(list(weight_sync_lines(c, models.arch, 64))[:2]) for c in (config, config_70b))
    assert whole["into a rank"].endswith(" of 141.1 GB") and "first" not in whole
    assert lines["first"] == f"the base weights: {whole['into a rank']} into a rank; then adapters"
    assert lines["into a rank"].endswith(" of 828.4 MB")
    stages = memory_of_stages(config, 64, *models.stages(config))
    kept = NodeMemory.of(config, models, 64, stages, 8).parts["weights kept by syncs"]
    assert f"{kept / 1e9:.2f} GB" in whole["into a rank"] and kept_by_syncs(config_70b, models.arch, 64) == 0


def test_70b_crosses_to_ranks_that_sample(config_70b: Config) -> None:
    """4 + 4 nodes, TP8 x PP4, engines of TP8. A rank of the first stage has an eighth of 20 layers of 1.711 GB and of 2.101.

    It sends this once. With a lag of 2 it keeps it three times on the host, and each rank that samples receives 141.1 / 8.
    """
    arch = read_models(config_70b).arch
    rank, node = (20 * 1.711 + 2.101) / 8, 20 * 1.711 + 2.101
    roles = {"placement": "separate", "num_nodes": 4, "tensor_model_parallel_size": 8}

    def lines(lag: int, **values: int) -> tuple[Config, dict[str, str], str]:
        config = config_70b.with_values({f"rollout.{k}": v for k, v in {**roles, "lag": lag, **values}.items()})
        rows = list(weight_sync_lines(config, arch, 32))
        return config, dict(rows), " ".join(text for _, text in rows)

    direct, rows, text = lines(1)
    left = planned_for(direct, arch, 32).out_of_training.max()
    assert left / 1e9 == pytest.approx(node, rel=1e-3) and staged_bytes(direct, arch, 32) == (0, 0)
    assert f"at most {left / 1e9:.4g} GB out of a node that trains" in text
    assert 0.35 < float(rows["seconds"].split()[0]) < 0.5 and "nothing on the host" in text  # 141.1 / 8 / 50 = 0.353
    more, _, _ = lines(1, num_nodes=12)
    assert planned_for(more, arch, 32).out_of_training.max() == left
    staged, rows, text = lines(2)
    on_host, engine = staged_bytes(staged, arch, 32)
    assert on_host / 1e9 == pytest.approx(3 * rank, rel=1e-3) and engine / 1e9 == pytest.approx(141.1 / 8, rel=1e-3)
    assert rows["seconds"].startswith(f"training stops for {rank / 25:.2g}: ")
    assert "18 in the background" in text  # 141.1 / 8 at 1 GB/s
    [problem] = staging_shortages(staged, arch, 32, 120e9)  # 8 x 13.6 = 109 on a node that trains
    assert problem.startswith("rollout.lag=2 has copies of the weights on the host: 8 ranks x 17.64 GB = 141.1 GB")
    assert not list(staging_shortages(direct, arch, 32, 1.0))
    models = read_models(config_70b)
    nodes = NodeMemory.of(staged, models, 32, memory_of_stages(staged, 32, *models.stages(staged)), 8)
    assert nodes.parts["weights on their way"] == on_host and "rollout.lag=1" in nodes.remedies
    assert NodeMemory.of_rollout(staged, models, 32).parts["weights on their way"] == engine


def test_whole_experts_are_advised_where_parts_are_narrow() -> None:
    """Qwen3-235B: 128 experts of 1,536 rows. 192 rows of each over 8 ranks, 384 over 4; 48 ranks do not divide 128."""
    arch = published.architecture("Qwen3-235B-A22B")
    for tp, ep, advice in ((8, 1, "192 of the 1,536 rows"), (8, 8, None), (4, 1, None), (48, 1, None), (1, 1, None)):
        config = Config.model_validate(
            {"model": {"path": "x"}, "rollout": {"tensor_model_parallel_size": tp, "expert_parallel_size": ep}}
        )
        lines = [text for _, text in expert_lines(config, arch)]
        assert len(lines) == (advice is not None), (tp, ep)
        assert advice is None or (advice in lines[0] and "expert_parallel_size=8 gives it 16 whole ones" in lines[0])
    dense = published.architecture("Llama-3.1-70B")
    config = Config.model_validate({"model": {"path": "x"}, "rollout": {"tensor_model_parallel_size": 128}})
    assert not list(expert_lines(config, dense))


def test_one_node_has_no_borders(config_70b: Config) -> None:
    assert sizes(config_70b, read_models(config_70b), 8 * 2)  # two nodes
    one = load_config("examples/llama3_70b.yaml", ["trainer.n_gpus_per_node=16"])
    assert sizes(one, read_models(one), 16) == {}


def test_groups_over_nodes_are_counted() -> None:
    """tp 16 over two nodes: a ring enters both, with 15/16 of a hidden state, 4 times per layer. ep 16: half is elsewhere."""
    dense = RunModels(dataclasses.replace(published.architecture("Llama-3.1-70B"), num_layers=2))
    config = Config.model_validate(
        {"model": {"path": "x"}, "actor": {"megatron": {"tensor_model_parallel_size": 16}, "use_kl_loss": False}}
    )
    work = Workload.of(config, dense)
    hidden = work.samples * (config.data.max_prompt_length + config.data.max_response_length) * 8192 * 2
    found = {item.name: item.size for item in border_traffic(config, dense, work, 16)}
    assert "engines" not in found
    assert found["tensor"] == 4 * 2 * 2 * 15 / 16 * hidden * (1 + 2)
    engine = config.rollout.model_copy(update={"tensor_model_parallel_size": 16})
    wide = border_traffic(config.model_copy(update={"rollout": engine}), dense, work, 16)
    assert next(item.size for item in wide if item.name == "engines") == 4 * 2 * 2 * 15 / 16 * hidden
    sparse = RunModels(dataclasses.replace(published.architecture("Qwen3-30B-A3B"), num_layers=2))
    config = Config.model_validate(
        {"model": {"path": "x"}, "actor": {"megatron": {"expert_model_parallel_size": 16}, "use_kl_loss": False}}
    )
    work = Workload.of(config, sparse)
    found = {item.name: item.size for item in border_traffic(config, sparse, work, 16)}
    assert found["experts"] == pytest.approx(2 * 8 * 2 / 2 * hidden / 4 * (1 + 1))  # h 2048


def sent(folder: Path, lengths: list[int]) -> int:
    """Bytes of the floating-point messages that this rank sends during `policy.update`, at pp 2 on 2 ranks."""
    policy = policies.build(folder, policies.LAYOUTS["PP2"], ppo_max_token_len_per_gpu=64)
    pairs = [([1] * 4, [3] * (length - 4)) for length in lengths]
    batch = tiny.make_batch(pairs, [[[index] for index in range(len(pairs))]])
    count, send = 0, dist.ProcessGroup.send

    def counting(self: Any, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        nonlocal count  # messages about shapes are integers
        count += sum(tensor.nbytes for tensor in tensors if torch.is_floating_point(tensor))
        return send(self, tensors, *args, **kwargs)

    dist.ProcessGroup.send = counting  # type: ignore[assignment,method-assign]
    policy.update(batch, policies.loss)
    dist.ProcessGroup.send = send  # type: ignore[method-assign]
    return count


@pytest.mark.slow
def test_the_pipelines_bytes_are_what_real_ranks_send(tmp_path: Path) -> None:
    """pp 2 in float32. Stage 0 sends the 64 hidden states of each token, and stage 1 as many gradients back."""
    folder = tiny.make_model(tmp_path / "model", "qwen2")
    ranks = worlds.run(sent, 2, folder=folder, lengths=LENGTHS)
    arch = read_architecture(folder)
    config = Config.model_validate(
        {
            "model": {"path": str(folder), "dtype": "float32"},
            "data": {"train_batch_size": 2, "max_prompt_length": 4, "max_response_length": 22},
            "actor": {"megatron": {"pipeline_model_parallel_size": 2}, "use_kl_loss": False},
            "rollout": {"n": 2},
            "trainer": {"n_gpus_per_node": 1, "nnodes": 2},
        }
    )
    assert sum(LENGTHS) == 4 * 26
    assert ranks == [sum(LENGTHS) * arch.hidden_size * 4] * 2
    assert sizes(config, RunModels(arch), 2)["pipeline"] == sum(ranks)
