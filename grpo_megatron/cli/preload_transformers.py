"""What the fork server of CPU ranks also imports (see preload.py) for `rollout.engine: transformers`."""

import contextlib

from grpo_megatron.importing import silent_imports

with contextlib.suppress(Exception), silent_imports():
    from grpo_megatron.rollout.transformers_model import import_transformers

    import_transformers()
