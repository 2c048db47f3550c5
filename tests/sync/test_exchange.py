"""The exchange over more than 200 layouts, many ranks in one process: every byte right, and no byte too many.

Expected bytes are counted from the layouts themselves (`_floors`), not from the plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from grpo_megatron.parallel.mesh import Grid, RankError
from grpo_megatron.sync.digest import group_view
from grpo_megatron.sync.exchange import Exchange, Pool, Transport, in_background
from grpo_megatron.sync.plan import SyncPlan
from tests.sync import simulation
from tests.sync.simulation import FAMILIES, Ranks, architecture, floor_of, same_bits

SIZES = [
    (tp, pp, replicas) for tp in (1, 2, 4, 8) for pp in (1, 2, 4) for replicas in (1, 2, 4) if tp * pp * replicas <= 16
]
UNEVEN = {1: [4], 2: [1, 3], 4: [2, 1, 0, 1]}
EVEN = {1: [4], 2: [2, 2], 4: [1, 1, 1, 1]}


Layout = tuple[str, Grid, tuple[int, ...], int]  # family, layout, layers of each stage, rollout ep


def _layouts() -> Iterator[Layout]:
    """Every family meets every kind of layout; which of them, rotates."""
    families = itertools.cycle(FAMILIES)
    for number, (tp, pp, replicas) in enumerate(SIZES):
        world_size = tp * pp * replicas
        for rollout_tp, ranks_per_node in itertools.product((1, 2, 4, 8), (2, 4, 8)):
            if world_size % rollout_tp or ranks_per_node > max(2, world_size):
                continue
            family = next(families)
            experts = {"qwen3-moe": 8, "mixtral": 4}.get(family)
            ep = replicas if experts and experts % replicas == 0 else 1
            sizes = (EVEN if number % 2 else UNEVEN)[pp]
            yield family, Grid(world_size, tp, pp, ep, rollout_tp, ranks_per_node), tuple(sizes), 1
    next(families)


def _with_whole_experts() -> Iterator[Layout]:
    """Engines whose ranks have whole experts: with fewer, as many and more of them than the training layout's ranks."""
    families = itertools.cycle([("qwen3-moe", 8), ("mixtral", 4), ("deepseek-v3", 4)])
    for number, (tp, pp, replicas) in enumerate(SIZES):
        world_size = tp * pp * replicas
        if world_size > 8 and number % 2:
            continue
        family, experts = next(families)
        for rollout_tp in (2, 4, 8):
            if world_size % rollout_tp == experts % rollout_tp == 0:
                ep = replicas if experts % replicas == 0 and number % 2 else 1
                grid = Grid(world_size, tp, pp, ep, rollout_tp, (2, 4, 8)[number % 3])
                yield family, grid, tuple((EVEN if number % 2 else UNEVEN)[pp]), rollout_tp


def _in_roles() -> Iterator[Layout]:
    """The last ranks sample, the others train."""
    families = itertools.cycle(["llama", "qwen2-tied", "qwen3-moe", "deepseek-v3"])
    for tp, pp, replicas in SIZES[:: len(SIZES) // 6]:
        for drawing, rollout_tp, ranks_per_node in ((1, 1, 8), (4, 2, 2), (6, 2, 4), (8, 4, 4)):
            family, sizes = next(families), tuple(UNEVEN[pp])
            ep = replicas if family == "qwen3-moe" else 1
            yield family, Grid(tp * pp * replicas + drawing, tp, pp, ep, rollout_tp, ranks_per_node, drawing), sizes, 1
        next(families)


LAYOUTS = [*_layouts(), *_with_whole_experts(), *_in_roles()]


def _name(layout: Layout) -> str:
    family, grid, sizes, rollout_ep = layout
    ep, engine_ep = (f" EP{size}" if size > 1 else "" for size in (grid.ep, rollout_ep))
    stages = "+".join(map(str, sizes))
    return (
        f"{family} TP{grid.tp} PP{stages} x{grid.replicas}{ep} to TP{grid.rollout_tp}{engine_ep},"
        f" nodes of {grid.ranks_per_node}{f', {grid.num_rollout_ranks} only draw' if grid.num_rollout_ranks else ''}"
    )


def budget_of(number: int) -> int:
    """Elements. Mostly few rounds; every tenth layout has a budget that every tensor exceeds."""
    return 1 << (14 if number % 10 == 0 else 17 if number % 3 == 0 else 22)


def in_the_soak(number: int) -> list[pytest.MarkDecorator]:
    """Mixtral's experts are those of Qwen3-MoE under other names. Of the others every fifth one."""
    return [pytest.mark.soak] if number % 5 or _name(LAYOUTS[number]).startswith("mixtral") else []


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=in_the_soak(n), id=_name(LAYOUTS[n])) for n in range(len(LAYOUTS))]
)
def test_every_engine_gets_its_part_with_the_fewest_bytes(number: int) -> None:
    family, grid, sizes, rollout_ep = LAYOUTS[number]
    world = simulation.world(architecture(family), grid, list(sizes), budget=budget_of(number), rollout_ep=rollout_ep)
    ranks = Ranks(world, is_staged=number % 4 > 1)
    given = ranks.sync()
    for rank in range(grid.first_rollout_rank, grid.world_size):
        assert given[rank].keys() == world.weights.keys()
        for name, complete in world.weights.items():
            span = world.span(name, rank)
            assert same_bits(given[rank][name].narrow(*span), complete.narrow(*span)), (rank, name)
            if not span[2]:
                assert given[rank][name].untyped_storage().nbytes() == complete.itemsize, name
        for names in world.engine.units(grid.engine_rank(rank)).values():  # experts arrive as one tensor
            assert group_view([given[rank][name] for name in names]) is not None, names[0]
    floor = floor_of(world.plan.parameters, world.plan.spans, grid)
    assert [transport.received.total() for transport in ranks.transports] == floor.ranks.tolist()
    over_borders = [0] * grid.num_nodes
    for rank, transport in enumerate(ranks.transports):
        elsewhere = (n for peer, n in transport.received.items() if grid.node(peer) != grid.node(rank))
        over_borders[grid.node(rank)] += sum(elsewhere)
    assert over_borders == floor.nodes.tolist()
    if grid.num_rollout_ranks:  # a byte leaves the ranks that train once, however many nodes sample
        left = sum(of.received[peer] for of in ranks.transports for peer in range(grid.num_training))
        assert left == sum(map(world.plan.numel, world.plan.slices))
    bound = 2 * world.rounds.count * (grid.world_size - 1)
    assert all(transport.operations <= bound for transport in ranks.transports)


def test_local_slices_are_windows_on_the_parameters() -> None:
    """Where the layouts agree. The shard of rank 1 is one buffer, so that there is room around nearly all parameters."""
    grid = Grid(2, tp=2, rollout_tp=2, ranks_per_node=2)
    world = simulation.world(architecture("llama-groups", vocab_size=128), grid, [4], budget=1 << 22)
    shard, pool = world.shard(1), Pool(torch.bfloat16, torch.device("cpu"))
    transport = Transport(simulation.Queues(Ranks(world), 1).post, pool)
    stream = Exchange(world.rank_plan(1), shard.__getitem__, transport, pool).stream()
    address = next(iter(shard.values())).untyped_storage().data_ptr()
    windows = {name for bucket in stream for name, tensor in bucket if tensor.untyped_storage().data_ptr() == address}
    in_slices = {name for name in world.weights if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")}
    at_an_end = {"model.embed_tokens.weight", "lm_head.weight"}
    assert world.weights.keys() - in_slices - at_an_end <= windows


def test_a_thread_hands_on_rounds_and_its_error() -> None:
    def rounds() -> Iterator[int]:
        yield from range(3)
        raise RankError("lost the connection to training rank 0")

    arrived = in_background(rounds())
    assert [next(arrived) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RankError, match="training rank 0"):
        next(arrived)


def test_the_pool_gives_no_memory_that_a_tensor_refers_to() -> None:
    pool = Pool(torch.bfloat16, torch.device("cpu"))
    first = pool.empty((256, 256))
    address, view = first.data_ptr(), first[3:5].t()
    del first
    assert pool.empty((256, 256)).data_ptr() != address
    del view
    assert address in [tensor.data_ptr() for tensor in [pool.empty((256, 256)) for _ in range(2)]]


@pytest.mark.parametrize("layout", LAYOUTS[::20], ids=_name)
def test_the_floor_is_what_counting_row_by_row_gives(layout: Layout) -> None:
    family, grid, sizes, rollout_ep = layout
    plan, _, _ = simulation.planned(architecture(family), grid, list(sizes), 1 << 22, rollout_ep)
    floor = floor_of(plan.parameters, plan.spans, grid)
    assert (floor.ranks.tolist(), floor.nodes.tolist()) == _floors(plan)


def _floors(plan: SyncPlan) -> tuple[list[int], list[int]]:
    """Elements that each rank, and each node, needs and does not have, row by row."""
    grid = plan.grid
    ranks, nodes = [0] * grid.world_size, [0] * grid.num_nodes
    for number, tensor in enumerate(plan.tensors):
        parameter = plan.parameters[plan.owner[number]]
        index = parameter.tensors.index(tensor)
        width = tensor.numel // tensor.length
        has, needs = ([torch.zeros(tensor.length, dtype=torch.bool) for _ in ranks] for _ in range(2))
        for tp_rank, shards in enumerate(parameter.shards):
            for rank in (r for stage in parameter.stages for r in grid.ranks(tp_rank, stage, parameter.ep_rank)):
                for shard in shards:
                    if shard.tensor == index:
                        has[rank][shard.start : shard.stop] = True
        for rank in range(grid.first_rollout_rank, grid.world_size):
            start, stop = plan.spans[tensor.name][grid.engine_rank(rank)]
            needs[rank][start:stop] = True
            ranks[rank] += int((needs[rank] & ~has[rank]).sum()) * width
        for node in range(grid.num_nodes):
            of_node = [rank for rank in range(grid.world_size) if grid.node(rank) == node]
            needed = torch.stack([needs[rank] for rank in of_node]).any(dim=0)
            nodes[node] += int((needed & ~torch.stack([has[rank] for rank in of_node]).any(dim=0)).sum()) * width
    return ranks, nodes
