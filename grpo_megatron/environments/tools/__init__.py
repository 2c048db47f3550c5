"""The built-in tools. Importing this package registers them."""

from grpo_megatron.environments.tools import calculator, python, search

__all__ = ["calculator", "python", "remote", "search"]
