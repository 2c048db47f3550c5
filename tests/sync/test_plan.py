"""Plans alone: balance and memory over the layouts of test_exchange.py, and Llama-70B on 512 ranks."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter, defaultdict

import numpy as np
import pytest

from grpo_megatron.models.architecture import Architecture
from grpo_megatron.parallel.mesh import Grid
from grpo_megatron.sync.exchange import RankPlan
from grpo_megatron.sync.plan import NETWORK, NODE
from tests.sync import simulation
from tests.sync.simulation import architecture, floor_of
from tests.sync.test_exchange import LAYOUTS, budget_of

LARGEST_IMBALANCE = 1.25
MIB = 1 << 20


def test_no_rank_sends_much_more_than_others_that_hold_the_same() -> None:
    """Over the network, where a node's readers take turns, and within a node. And the message buffers fit the budget, unless a
    single slice alone exceeds it."""
    num_compared = 0
    for number, (family, grid, sizes, rollout_ep) in enumerate(LAYOUTS):
        budget = budget_of(number)
        plan, _, traffic = simulation.planned(architecture(family), grid, list(sizes), budget, rollout_ep)
        groups: dict[tuple[int, int, int], list[float]] = defaultdict(list)
        for rank, sent in enumerate(traffic.sent[NETWORK].sum(axis=1)):
            stage, replica = rank // (grid.tp * grid.replicas), rank // grid.tp % grid.replicas
            groups[stage, rank % grid.tp, replica % grid.ep].append(sent)
        for alike in groups.values():
            assert max(alike) <= LARGEST_IMBALANCE * np.mean(alike), (LAYOUTS[number], alike)
            num_compared += len(alike) > 1 and sum(alike) > 0
        for routes in plan.routes:
            rotation = [routes.transfers(number) for number in range(routes.period)]
            first = Counter(t.target for transfers in rotation for t in transfers if t.phase == NETWORK)
            relayed = {t.target for t in rotation[0] if grid.node(t.source) == grid.node(t.target)}
            for node in {grid.node(rank) for rank in first}:
                readers = [rank for rank in (*relayed, *first) if grid.node(rank) == node]
                assert len({first[rank] for rank in readers}) == 1, (LAYOUTS[number], first)
            within = Counter(t.source for transfers in rotation for t in transfers if t.phase == NODE)
            holders = itertools.groupby(routes.holders, grid.node)
            assert all(len({within[rank] for rank in ranks}) == 1 for _, ranks in holders), (LAYOUTS[number], within)
        if max(map(plan.numel, plan.slices)) <= budget:
            assert traffic.buffers().max() <= budget, LAYOUTS[number]
    assert num_compared > 200


def test_the_second_copy_of_tied_embeddings_is_a_holder() -> None:
    """Stages on a node each: no rank receives a slice of the embedding, which the last stage has as its head."""
    grid = Grid(6, tp=2, pp=3, rollout_tp=2, ranks_per_node=2)
    for family, receiving in (("qwen2-tied", {2, 3}), ("qwen2", {2, 3, 4, 5})):
        plan, rounds, _ = simulation.planned(architecture(family, vocab_size=128), grid, [2, 1, 1], 1 << 14)
        made = [RankPlan(plan, rounds, rank) for rank in range(6)]
        received, sent = (
            [{plan.tensors[plan.slices[number].tensor].name for number in numbers} for numbers in of_ranks]
            for of_ranks in ([rank.received for rank in made], [rank.sent for rank in made])
        )
        assert {rank for rank in range(6) if "model.embed_tokens.weight" in received[rank]} == receiving
        assert ("model.embed_tokens.weight" in sent[4]) == (family == "qwen2-tied")


def llama_70b() -> Architecture:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
    return architecture("llama", **sizes, num_attention_heads=64, num_key_value_heads=8)


def test_70b_on_512_ranks() -> None:
    """TP8 x PP4 x DP16 to TP4 on nodes of 8: bytes are the floors, and the planner's memory is far below 2 GB.

    A rank needs a quarter of 141.1 GB, 35.28. It holds an eighth of its own stage, of which its engine reads all or nothing.
    The largest stage has 20 layers of 1.711 GB and the embedding's 2.101: an eighth of it is 4.54, and 35.28 - 4.54 = 30.74.
    """
    arch, grid = llama_70b(), Grid(512, tp=8, pp=4, rollout_tp=4, ranks_per_node=8)
    tracemalloc.start()
    plan, rounds, traffic = simulation.planned(arch, grid, [20] * 4, 512 * MIB // 2)
    RankPlan(plan, rounds, rank=77)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2e9
    floor = floor_of(plan.parameters, plan.spans, grid)
    received = {phase: traffic.received[phase].sum(axis=1) for phase in (NETWORK, NODE)}
    assert (received[NETWORK] + received[NODE]).tolist() == floor.ranks.tolist()
    assert received[NETWORK].reshape(64, 8).sum(axis=1).tolist() == floor.nodes.tolist()
    gigabytes = 2 * floor.ranks / 1e9
    assert (round(gigabytes.min(), 2), round(gigabytes.max(), 2)) == (30.74, 35.28)
    sent = traffic.sent[NETWORK].sum(axis=1).reshape(4, 16, 8)  # [stages, replicas, tensor-parallel ranks]
    assert (sent.max(axis=1) <= 1.01 * sent.mean(axis=1)).all()
    assert traffic.buffers().max() * 2 <= 512 * MIB


STAGES = [  # one node per stage, and several; a node with two stages; a stage without layers; a single node; experts
    ("llama", Grid(8, tp=2, pp=4, rollout_tp=2, ranks_per_node=2), [1, 1, 1, 1]),
    ("llama", Grid(16, tp=2, pp=4, rollout_tp=1, ranks_per_node=2), [1, 1, 1, 1]),
    ("qwen2", Grid(8, tp=1, pp=4, rollout_tp=2, ranks_per_node=4), [1, 1, 1, 1]),
    ("llama-tied", Grid(8, tp=2, pp=4, rollout_tp=2, ranks_per_node=2), [2, 1, 0, 1]),
    ("llama", Grid(4, pp=4, rollout_tp=1, ranks_per_node=4), [1, 1, 1, 1]),
    ("qwen3-moe", Grid(16, tp=2, pp=2, ep=4, rollout_tp=2, ranks_per_node=4), [2, 2]),
]


@pytest.mark.parametrize(("family", "grid", "sizes"), STAGES)
def test_a_rank_receives_stage_by_stage_and_every_module_at_once(family: str, grid: Grid, sizes: list[int]) -> None:
    plan, rounds, _ = simulation.planned(architecture(family), grid, sizes, 1 << 13)
    assert rounds.per_stage > 1
    for offset in set(plan.offsets):
        numbers = [number for k in range(rounds.count) for number in rounds.slices_of(offset, k)]
        assert sorted(numbers) == list(range(len(plan.slices)))
        owners = [plan.parameters[plan.owner[plan.slices[number].tensor]] for number in numbers]
        for received in ([p.stage for p in owners], [p.module for p in owners]):
            assert len(list(itertools.groupby(received))) == len(set(received))
    for k in range(rounds.count):
        sending = [rounds.stage(offset, k) for offset in set(plan.offsets)]
        assert len(sending) == len(set(sending)), "ranks of two offsets receive from one stage"


def test_a_rank_knows_every_peer_of_its_messages() -> None:
    """Connections are made before the first sync: one that only one side knows would wait for ever."""
    grid = Grid(16, tp=2, pp=2, rollout_tp=1, ranks_per_node=4)
    plan, rounds, _ = simulation.planned(architecture("llama"), grid, [2, 2], 1 << 14)
    made = {rank: RankPlan(plan, rounds, rank) for rank in range(16)}
    sent = {(rank, target) for rank, plan in made.items() for target in plan.peers()[0]}
    assert sent == {(source, rank) for rank, plan in made.items() for source in plan.peers()[1]}
    messages = {
        (rank, m.peer) for rank, plan in made.items() for r in plan.rounds for ms in r.sends.values() for m in ms
    }
    assert sent == messages and len(sent) > 16


def test_all_stages_send_all_the_time() -> None:
    """Llama-70B, TP8 x PP4 on 16 nodes, in 512 MiB: each node's link carries what it must, and waits for no other one.

    In every round the slowest link counts. If the stages sent in turn, each to all nodes, that would be 12 nodes for the 4
    of a stage, so 3 times as much. All stages have 20 layers; the embeddings make up for the rest.
    """
    grid = Grid(128, tp=8, pp=4, rollout_tp=8, ranks_per_node=8)
    plan, _, traffic = simulation.planned(llama_70b(), grid, [20] * 4, 512 * MIB // 2)
    floor = floor_of(plan.parameters, plan.spans, grid)
    by_node = [side[NETWORK].reshape(16, 8, -1).sum(axis=1) for side in (traffic.sent, traffic.received)]
    critical = np.maximum(*by_node).max(axis=0).sum()
    assert critical <= 1.1 * floor.nodes.max(), critical / floor.nodes.max()
    assert traffic.buffers().max() * 2 <= 512 * MIB
