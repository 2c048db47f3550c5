"""Packs of prefix trees by hand, and what their attention computes. (test_layouts.py: gradients over layouts.)

The bound of a tree, in multiply-adds: P' (P + sum R) for the weights and 2 d H L (P^2 / 2 + sum (P R + R^2 / 2)) for causal
attention, with P' the weights of the layers. The kernel is given masks of whole blocks, of which half a block per query is
above the diagonal: 2 d H L x 64 per token, 0.8 % of Qwen2.5-0.5B's P'.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from grpo_megatron.device import Device
from grpo_megatron.models.forward import pack, packed_lengths
from grpo_megatron.models.layers import modules
from grpo_megatron.models.layers.modules import Branch, TreeParams, tree_attention
from tests import tiny

PROMPT = [5, 6, 7]
PAIRS = [(PROMPT, [1, 2]), (PROMPT, [3]), ([5, 6], [7, 8]), ([5, 9, 9], [4]), ([5, 9, 9, 9], [2])]


def test_a_pack_by_hand() -> None:
    batch = tiny.make_batch(PAIRS, [[[0, 1, 2, 3, 4]]])
    batch.shares_prompts = True
    options: dict[str, Any] = {"temperature": 1.0, "chunk": 8, "device": Device("cpu")}
    built = pack(batch, [1, 0, 2, 3, 4], multiple=8, **options)
    #                                 row 1       0     2     3           4     padding to 16
    assert built.tokens[0].tolist() == [5, 6, 7, 3, 1, 2, 7, 8, 5, 9, 9, 4, 9, 2, 0, 0]
    assert built.position_ids[0].tolist() == [0, 1, 2, 3, 3, 4, 2, 3, 0, 1, 2, 3, 3, 4, 0, 1]
    assert built.rows == [1, 0, 2, 3, 4] and built.lengths == [1, 2, 2, 1, 1]
    assert built.targets.tokens.tolist() == [3, 1, 2, 7, 8, 4, 2]
    assert built.targets.state_indices.tolist() == [2, 2, 4, 1, 6, 10, 12]
    assert isinstance(built.packed, TreeParams) and built.packed.max_seqlen_q == 5
    assert built.packed.branches == [
        Branch(0, 4, 0, 0),
        Branch(4, 6, 0, 3),
        Branch(6, 8, 0, 2),  # its prompt is the beginning of the first one
        Branch(8, 12, 8, 8),  # shares a third of its prompt, which is too little
        Branch(12, 14, 8, 11),  # shares three of four; the rest of the prompt is its own
        Branch(14, 16, 14, 14),
    ]
    assert packed_lengths(batch, [1, 0, 2, 3, 4]) == [4, 2, 2, 4, 2]
    batch.shares_prompts = False
    assert packed_lengths(batch, [1, 0, 2, 3, 4]) == [4, 5, 4, 4, 5]


def test_branches_of_equal_length_stay_in_their_places() -> None:
    """They share kernel calls. Each is compared with attention over its prompt and itself alone."""
    batch = tiny.make_batch([(PROMPT, [1, 2]), (PROMPT, [3, 4]), (PROMPT, [8, 9])], [[[0, 1, 2]]])
    batch.shares_prompts = True
    built = pack(batch, [0, 1, 2], multiple=9, temperature=1.0, chunk=8, device=Device("cpu"))
    assert built.targets.tokens.tolist() == [1, 2, 3, 4, 8, 9]
    assert built.targets.state_indices.tolist() == [2, 3, 2, 5, 2, 7]
    assert isinstance(built.packed, TreeParams)
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, heads, 4) for heads in (4, 2, 2))
    found = tree_attention(q, k, v, built.packed.branches)
    for own in (slice(3, 5), slice(5, 7), slice(7, 9)):
        alone = [torch.cat([x[:3], x[own]]).transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
        expected = F.scaled_dot_product_attention(*alone, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        torch.testing.assert_close(found[own], expected[3:])


@pytest.mark.parametrize("window", [None, 1, 5, 32, 50, 300])
@pytest.mark.parametrize(("before", "size"), [(0, 40), (0, 32), (7, 40), (90, 3)])
def test_a_token_sees_those_of_its_window(before: int, size: int, window: int | None) -> None:
    """Against a mask by hand: key k is seen by query q if 0 <= q - k < window. Blocks of 16 queries, with gradients."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, n, 4, requires_grad=True)
        for heads, n in ((4, size), (2, before + size), (2, before + size))
    )
    distance = torch.arange(before, before + size).unsqueeze(1) - torch.arange(before + size)
    mask = (distance >= 0) & (distance < (window or 1000))
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    with mock.patch.object(modules, "QUERY_BLOCK", 16):
        got = modules.causal_attention(q, k, v, window=window, scale=0.3)
    torch.testing.assert_close(got, want)
    gradients = (torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (got, want))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("prompt", "response"), [(512, 128), (256, 256), (128, 512), (64, 1024)])
def test_multiply_adds_are_within_two_percent_of_the_bound(prompt: int, response: int) -> None:
    """Qwen2.5-0.5B's shape, 8 responses, prompt : response from 4:1 to 1:16."""
    heads, size, layers, weights, n = 14, 64, 24, 358_000_000, 8
    branches = [Branch(0, prompt + response, 0, 0)]
    branches += [
        Branch(e - response, e, 0, prompt) for e in range(prompt + 2 * response, prompt + n * response + 1, response)
    ]
    tokens, pairs = branches[-1].end, 0.0

    def count(q: Any, k: Any, v: Any, *, is_causal: bool = False, **_: Any) -> torch.Tensor:
        nonlocal pairs
        pairs += len(q) * q.shape[2] * k.shape[2] / (2 if is_causal else 1)
        return torch.empty_like(q)

    with mock.patch.object(F, "scaled_dot_product_attention", count):
        q, kv = (torch.empty(tokens, h, 1) for h in (heads, 2))
        assert tree_attention(q, kv, kv, branches).shape == q.shape
    bound = prompt**2 / 2 + n * (prompt * response + response**2 / 2)
    assert tokens == prompt + n * response
    done, least = (weights * tokens + 2 * size * heads * layers * part for part in (pairs, bound))
    assert least < done <= 1.02 * least
