"""Steps of GRPO in the shape of Qwen2.5-0.5B."""

from tests.gpu.building import QWEN_HALF_B as SHAPE  # noqa: F401
from tests.gpu.speed import model, test_step_time  # noqa: F401
