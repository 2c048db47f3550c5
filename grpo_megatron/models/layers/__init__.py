"""The layers of a model.

spec.py          layer specs, fused kernels, and the TransformerConfig
modules.py       modules that replace Megatron-Core's: norms, attention over packs and trees, latent attention
precision.py     FP8: hardware, settings, padding
routes.py        replay of the experts that an earlier pass has chosen
head.py          log-probabilities and entropies of targets, vocabulary-parallel
divergence.py    the same with the divergence from a teacher's distribution; a teacher's best ids
head_kernel.py   Triton's kernels of the output head
"""
