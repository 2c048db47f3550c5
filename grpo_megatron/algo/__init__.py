"""The algorithms. Importing any module of this package registers every estimator that a config may name.

The loss functions need torch: `losses.py` registers them all when one is looked up.
"""

from grpo_megatron.algo import returns as returns
