"""The algorithms. Importing any module of this package registers every estimator that a config may name."""

from grpo_megatron.algo import returns as returns
