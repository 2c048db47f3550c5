"""vLLM's model runner in float32."""

from tests.gpu.runner_checks import *  # noqa: F403

DTYPE = "float32"
