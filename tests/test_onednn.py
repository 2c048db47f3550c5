"""onednn.py: products and gradients of linear layers as before, up to rounding, and the same for numbers of rows."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import warnings
import torch
from unittest import mock
from grpo_megatron import onednn

warnings.simplefilter("error")
torch.manual_seed(0)
torch.set_num_threads(1)
layer = torch.nn.Linear(384, 200)
x = torch.randn(50, 384, requires_grad=True)

def pass_through(x):
    y = layer(x)
    return (y, *torch.autograd.grad(y.square().sum(), (x, layer.weight, layer.bias)))

before = pass_through(x)
small, wide = torch.randn(3, 5) @ torch.randn(5, 7), torch.randn(2, 300).half().float() @ torch.randn(300, 300)
onednn.use_onednn()
onednn.use_onednn()
with mock.patch.object(onednn, "_linear", wraps=onednn._linear) as product:
    after = pass_through(x)
    assert product.call_count == 3, product.call_count  # forward, and both gradients
    for expected, found in zip(before, after, strict=True):
        assert (expected - found).abs().max() <= 1e-5 * expected.abs().max()
    product.reset_mock()
    assert (torch.randn(3, 5) @ torch.randn(5, 7)).shape == small.shape
    assert torch.mm(torch.randn(3, 0), torch.randn(0, 4)).eq(0).all()
    assert torch.mm(torch.ones(2, 300, dtype=torch.float64), torch.ones(300, 300, dtype=torch.float64)).eq(300).all()
    half = torch.addmm(torch.ones(200), torch.ones(4, 384), torch.ones(384, 200), beta=0.5)
    assert half.eq(384.5).all()
    every_second = torch.ones(600, 600)[::2, ::2]
    assert torch.mm(torch.ones(4, 300), every_second).eq(300).all()
    assert torch.mm(torch.ones(4, 1).expand(4, 300), torch.ones(300, 300)).eq(300).all()
    assert product.call_count == 0, product.call_args
    with torch.inference_mode():
        whole = layer(x)
        counts = (2, 3, 4, 7, 33) if torch.__version__ >= "2.13" else (16, 20, 33)  # an older oneDNN has other kernels
        for count in counts:
            assert torch.equal(layer(x[:count]), whole[:count]), count
    assert product.call_count == 1 + len(counts)
"""


def test_products_by_onednn() -> None:
    """In a process of its own: the kernels stay replaced."""
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
