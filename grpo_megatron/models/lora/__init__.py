"""LoRA (arXiv:2106.09685): low-rank adapters beside frozen weights, W = W0 + s B A.

    table.py    which weights have adapters, their factors' names, shapes and cuts: a row of the weight table for each
    merge.py    W from W0, A and B, with the same bits for any part of the weight
    layers.py   modules with factors: the forward passes, the gradients, the initial values
    state.py    the factors in a checkpoint
    folder.py   the factors in a PEFT folder

Everything that reads or writes factors (training, checkpoints, files, weight sync) goes through the rows of `lora_rows`.
"""
