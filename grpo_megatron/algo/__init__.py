"""The mathematics on plain tables and `[B, R]` tensors; no process group.

Frames: advantages.py (with DAPO's penalty and DUPO), losses.py. Families: grpo.py (Dr.GRPO, GSPO, GMPO, CISPO, SAPO, GDPO,
MaxRL), masked.py (DPPO, IPO, IcePop, KPop, VESPO, FIPO, DRO), selection.py (80/20, Clip-Cov, KL-Cov), reinforce.py (RLOO,
OPO, GPG, ReMax, REINFORCE++), ppo.py, preference.py (SFT, RFT, DPO), chord.py, reward_models.py. For all: kl.py,
distillation.py, corrections.py, plan.py (with the aggregations). direct.py: advantages and losses without a run.
methods.yaml: the named blocks of config/methods.py.
"""
