"""LoRA (arXiv:2106.09685): low-rank adapters beside frozen weights, W = W0 + s B A. All of it uses the rows of table.py.

table.py         the adapted weights; names, shapes and cuts of their factors: a row of the weight table for each
merge.py         W from W0, A and B, with the same bits for any part of the weight
merge_kernel.py  the same on CUDA, by Triton
layers.py        modules with factors: forward passes, gradients, initial values, checkpoints
peft_folder.py   the factors in a PEFT folder
sync.py          the factors in a weight sync
"""
