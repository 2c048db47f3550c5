"""vLLM's model runner in bfloat16."""

from tests.gpu.runner_checks import *  # noqa: F403

DTYPE = "bfloat16"
