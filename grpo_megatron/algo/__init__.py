"""The algorithms. Importing any module of this package registers every name that a config may use."""

from grpo_megatron.algo import gae as gae
from grpo_megatron.algo import returns as returns
from grpo_megatron.algo import score_losses as score_losses
from grpo_megatron.algo import selection as selection
from grpo_megatron.algo import sequence_losses as sequence_losses
