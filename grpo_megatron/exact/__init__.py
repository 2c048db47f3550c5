"""`model.exact`: policy and engine compute the same bits, in every layout.

rowwise.py     the expressions, each written once
self_test.py   the facts of a machine that they rest on
layers.py      Megatron-Core's layers with them; gradients.py: sums of gradients in one order
vllm.py        vLLM's layers with them
limits.py      what is not covered
"""
