"""The built-in tools. Importing this package registers them."""

from grpo_megatron.environments.tools import calculator, python, remote, search

__all__ = ["calculator", "python", "remote", "search"]
