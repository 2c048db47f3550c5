"""Context parallelism's arithmetic: each token on one rank, equal causal work per rank, and results on every rank.

Two real ranks on the CPU compute a per-token function of their own tokens. The values that they gather, and the gradients
that they sum, equal those of one rank with the whole pack. (The attention itself needs a GPU and Transformer Engine.)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.algo.distillation import LEAST_LOGPROB
from grpo_megatron.device import Device
from grpo_megatron.models.forward import local_tokens, pack, target_share
from grpo_megatron.types import TeacherScores
from tests import tiny
from tests.worlds import ranks


@given(st.sampled_from([1, 2, 3, 4, 8]), st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_each_token_is_on_one_rank(cp: int, chunks: list[int]) -> None:
    lengths = [2 * cp * n for n in chunks]
    total = sum(lengths)
    parts = [local_tokens(lengths, cp, rank) for rank in range(cp)]
    assert all(len(part) == total // cp for part in parts)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(total))


@pytest.mark.parametrize("cp", [2, 4])
def test_ranks_have_equal_causal_work(cp: int) -> None:
    """The token at position i of its sequence attends to i + 1 tokens. The sums over the ranks' tokens are equal, exactly."""
    lengths = [8 * cp, 2 * cp, 64 * cp]
    positions = torch.cat([torch.arange(n) for n in lengths])
    work = [int((positions[local_tokens(lengths, cp, rank)] + 1).sum()) for rank in range(cp)]
    assert len(set(work)) == 1 and sum(work) == sum(n * (n + 1) // 2 for n in lengths)


def test_the_cut_is_the_one_in_the_header() -> None:
    assert local_tokens([8, 4], 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert local_tokens([8, 4], 2, 1).tolist() == [2, 3, 4, 5, 9, 10]


def test_a_length_that_cannot_be_cut_is_an_internal_error() -> None:
    with pytest.raises(AssertionError, match="6 cannot be cut in 2 x cp 2"):
        local_tokens([6], 2, 0)


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("rows", [[0, 1, 2], [3], []])
def test_a_pack_is_cut_as_a_whole(cp: int, rows: list[int]) -> None:
    """Tokens, position ids and targets of all ranks together are those of the uncut pack."""
    pairs = tiny.make_sequences(4)
    batch = tiny.make_batch(pairs, [[rows]])
    settings: dict[str, Any] = {"temperature": 1.0, "chunk": 7, "device": Device("cpu")}
    whole = pack(batch, rows, multiple=1, **settings)
    parts = [pack(batch, rows, multiple=8 * cp, cp=cp, cp_rank=rank, **settings) for rank in range(cp)]
    targets = torch.full((len(whole.targets.tokens),), -1)
    for part in parts:
        assert part.share is not None and part.share.num_targets == len(targets) and part.lengths == whole.lengths
        targets[part.share.target_indices] = part.targets.tokens
        cuts = part.packed.cu_seqlens_q
        assert cuts is part.packed.cu_seqlens_q_padded and int(cuts[-1]) == cp * part.tokens.numel()
        assert int(cuts[-1]) % (8 * cp) == 0 and bool(((cuts[1:] - cuts[:-1]) % (2 * cp) == 0).all())
        # The hidden states of the targets belong to the same tokens, at the same positions, as in the uncut pack.
        local, uncut = part.targets.state_indices, whole.targets.state_indices[part.share.target_indices]
        assert torch.equal(part.tokens[0][local], whole.tokens[0][uncut])
        assert torch.equal(part.position_ids[0][local], whole.position_ids[0][uncut])
    assert torch.equal(targets, whole.targets.tokens)


@pytest.mark.parametrize("name", ["top", "states"])
def test_teachers_distributions_are_cut_as_the_targets(name: str) -> None:
    """Two teachers, and a row without one between their rows; a rank's targets have the distributions of the uncut pack."""
    pairs, rows = tiny.make_sequences(4), [0, 2, 3, 1]
    batch, size = tiny.make_batch(pairs, [[rows]]), 3
    generator, index = torch.Generator().manual_seed(0), [0, 1, -1, 0]
    parts = [torch.rand(len(response), size, generator=generator) for _, response in pairs]
    given: dict[str, Any] = {name: [part if index[row] >= 0 else None for row, part in enumerate(parts)]}
    zeros = torch.zeros(batch.loss_mask.shape)
    batch.teacher = TeacherScores(index, zeros, zeros, heads=[torch.ones(5, size)] * 2, kl="forward", **given)

    def of_targets(**layout: Any) -> tuple[torch.Tensor, Any]:
        one = pack(batch, rows, multiple=16, temperature=1.0, chunk=7, device=Device("cpu"), **layout)
        assert one.targets.soft is not None
        if name == "top":
            assert one.targets.soft.top is not None
            return one.targets.soft.top, one.share
        states = torch.zeros(len(one.targets.tokens), size)
        for run in one.targets.soft.states:
            states[run.start : run.end] = run.states
        return states, one.share

    whole, _ = of_targets()
    unknown = torch.tensor([-1.0, LEAST_LOGPROB, 0.0]) if name == "top" else torch.zeros(size)
    assert torch.equal(whole, torch.cat([parts[0], unknown.expand(len(parts[2]), -1), parts[3], parts[1]]))
    for rank in range(2):
        local, share = of_targets(cp=2, cp_rank=rank)
        assert torch.equal(local, whole[share.target_indices])


def test_without_context_parallelism_there_is_no_share() -> None:
    batch = tiny.make_batch(tiny.make_sequences(3), [[[0, 1]]])
    one = pack(batch, [0, 1], multiple=4, temperature=1.0, chunk=7, device=Device("cpu"))
    assert one.share is None and one.packed.cu_seqlens_q_padded is None and one.tokens.numel() % 4 == 0


@ranks(2)
def shared() -> tuple[torch.Tensor, torch.Tensor]:
    """For y_i = w * x_i and the loss sum(c_i y_i^2): all ranks' y, and the gradient of w, summed over ranks as by DDP."""
    import torch.distributed as dist

    from grpo_megatron.models.forward import gather_targets
    from grpo_megatron.parallel.mesh import build_mesh

    mesh = build_mesh(Device("cpu"), tp=1, pp=1, cp=2, rollout_tp=1)
    assert (mesh.dp, mesh.dp_rank, mesh.cp, mesh.cp_rank) == (1, 0, 2, mesh.rank)
    assert mesh.is_replica_reporter == (mesh.rank == 0) and mesh.stage_rank(0) == mesh.rank
    x, c = torch.arange(1.0, 13.0), torch.linspace(-1, 1, 5)
    w = torch.tensor(0.5, requires_grad=True)
    own = local_tokens([8, 4], 2, mesh.cp_rank)
    share = target_share(torch.tensor([1, 2, 6, 8, 9]), own)
    y = gather_targets((w * x[own])[share.state_indices], share, dist.group.WORLD)
    (c * y**2).sum().backward()
    assert w.grad is not None
    dist.all_reduce(w.grad)
    return y.detach(), w.grad


def test_values_are_gathered_and_gradients_add_up() -> None:
    x, c, w = torch.arange(1.0, 13.0)[[1, 2, 6, 8, 9]], torch.linspace(-1, 1, 5), torch.tensor(0.5, requires_grad=True)
    (c * (w * x) ** 2).sum().backward()
    for y, grad in shared():
        assert torch.equal(y, 0.5 * x)
        torch.testing.assert_close(grad, w.grad)
