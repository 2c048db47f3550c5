"""The packages of a wheel: grpo_megatron with its rooms, and examples/ and slurm/ as data inside it."""

from setuptools import find_packages, setup

DATA = {"grpo_megatron.examples": "examples", "grpo_megatron.slurm": "slurm"}

setup(
    packages=[*find_packages(include=["grpo_megatron*"]), *DATA],
    package_dir=DATA,
)
