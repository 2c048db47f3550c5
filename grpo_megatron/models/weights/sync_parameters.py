"""What the weight sync needs to know of a model: its parameters as SyncParameters, and the parts that an engine reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grpo_megatron.models.architecture import ENGINE_VOCABULARY_MULTIPLE, Architecture
from grpo_megatron.models.families import table_of
from grpo_megatron.models.weights.table import QKV, HeadsNorm, Replicated, Vocabulary, WeightRow, expand_table
from grpo_megatron.parallel.mesh import Grid
from grpo_megatron.sync.plan import EngineTensors, Interval, SyncParameter, SyncTensor


def stages_of_parameters(arch: Architecture, layers: Sequence[int]) -> dict[str, int]:
    """Megatron name -> pipeline stage, for stages with these numbers of layers. `stage_owners` asks the ranks instead."""
    of_layer = [stage for stage, count in enumerate(layers) for _ in range(count)]
    out = {}
    for row in expand_table(table_of(arch), arch):
        if ".layers." in row.megatron:
            out[row.megatron] = of_layer[int(row.megatron.split(".")[2])]
        else:
            out[row.megatron] = 0 if "embedding" in row.megatron else len(layers) - 1
    return out


def sync_parameters(arch: Architecture, grid: Grid, stage_of: Mapping[str, int]) -> list[SyncParameter]:
    """All parameters of the model, in the order of its table, without its constants, which `Constants` sends.

    `stage_of`: Megatron name -> pipeline stage.
    """
    rows = [row for row in expand_table(table_of(arch), arch) if not row.is_constant]
    return [_sync_parameter(row, arch, grid, stage_of[row.megatron]) for row in rows]


def _sync_parameter(row: WeightRow, arch: Architecture, grid: Grid, stage: int) -> SyncParameter:
    axis = row.split_dim or 0
    return SyncParameter(
        name=row.megatron,
        tensors=tuple(SyncTensor(n, s, axis) for n, s in zip(row.hf, row.hf_shapes(arch), strict=True)),
        stage=stage,
        ep_rank=row.ep_rank(arch, grid.ep),
        pieces=tuple(row.pieces(arch, tp_rank, grid.tp) for tp_rank in range(grid.tp)),
    )


def engine_tensors(arch: Architecture, rollout_tp: int, *, reads_shards: bool, rollout_ep: int = 1) -> EngineTensors:
    """The tensors that an engine of `rollout_tp` ranks gets, and the part of each that each rank reads.

    `reads_shards`: the parts that vLLM reads. Linear layers are cut evenly. Key-value heads are shared by several ranks if
    there are more ranks than heads. The vocabulary is padded to a multiple of 64 first, so that the last rank has fewer
    tokens, or none. With `rollout_ep` (1 or `rollout_tp`), a rank reads neighbouring experts whole, and nothing of the
    others. Without `reads_shards`, every rank reads everything.
    """
    tensors: dict[str, SyncTensor] = {}
    spans: dict[str, tuple[Interval, ...]] = {}
    for row in expand_table(table_of(arch), arch):
        for index, (name, shape) in enumerate(zip(row.hf, row.hf_shapes(arch), strict=True)):
            tensor = tensors[name] = SyncTensor(name, shape, row.split_dim or 0)
            if reads_shards:
                cut = _experts_span if row.expert is not None and rollout_ep > 1 else _span
                spans[name] = tuple(cut(row, index, tensor.length, arch, r, rollout_tp) for r in range(rollout_tp))
            else:
                spans[name] = ((0, tensor.length),) * rollout_tp
    return EngineTensors(tensors, spans)


def _span(row: WeightRow, index: int, length: int, arch: Architecture, rank: int, ranks: int) -> Interval:
    if isinstance(row, (Replicated, HeadsNorm)):
        return 0, length
    if isinstance(row, Vocabulary):
        size = -(-length // ENGINE_VOCABULARY_MULTIPLE) * ENGINE_VOCABULARY_MULTIPLE // ranks
        return min(rank * size, length), min((rank + 1) * size, length)
    if isinstance(row, QKV) and index > 0 and arch.num_query_groups < ranks and not arch.post_norms:
        head = rank // (ranks // arch.num_query_groups)
        return head * arch.head_dim, (head + 1) * arch.head_dim
    size = length // ranks
    return rank * size, (rank + 1) * size


def _experts_span(row: WeightRow, index: int, length: int, arch: Architecture, rank: int, ranks: int) -> Interval:
    return (0, length) if row.ep_rank(arch, ranks) == rank else (0, 0)
