"""The models: Megatron-Core underneath, Hugging Face folders outside. A reader of a step needs forward.py and policy.py.

architecture.py   the numbers that describe a decoder, from config.json, and the layouts that it allows
build.py          from an Architecture to a Megatron-Core model, and its output head
forward.py        packs of sequences, and the passes of one rank's shard over a batch
policy.py         the trained model and its updates; references and other frozen models
optimizer.py      DDP, optimizer, learning-rate schedule, tensors that are offloaded to the host
vision.py         the tower of a model that reads images
flops.py          FLOP of a pass, MFU and throughput
engine_cache.py   the KV cache of an engine, and how many sequences it decodes at a time

families/ maps a config.json to a model and its weights, weights/ moves them, layers/ has the modules of a layer, heads/ the
models that score, lora/ the adapters.
"""
