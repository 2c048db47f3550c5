"""Shapes in annotations are checked in this process: a wrong one fails at the call."""

from __future__ import annotations

import pytest
import torch

from grpo_megatron.models.forward import target_share, unpack


def test_a_wrong_shape_fails_at_the_call() -> None:
    pytest.importorskip("jaxtyping", reason="jaxtyping is not installed: shapes are not checked")
    pytest.importorskip("beartype", reason="beartype is not installed: shapes are not checked")
    assert unpack(torch.ones(3), [1, 2], 2).tolist() == [[1, 0], [1, 1]]
    with pytest.raises(Exception, match=r"Float\[Tensor"):
        unpack(torch.ones(3, 1), [1, 2], 2)
    with pytest.raises(Exception, match=r"Int\[Tensor"):
        target_share(torch.ones(3), torch.arange(3))
