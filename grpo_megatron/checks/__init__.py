"""Checks before a run starts. Every problem is reported at once, with its key and the remedy; exit code 2.

validate.py      the table of checks, and what they read
inputs.py        tokenizer and rows
components.py    names of functions, tasks and environments
layout.py        ranks, lengths, batches, adapters; routes and experts
methods.py       algorithms that go together
models.py        model folders
machine.py       output folder, packages, devices
reward_call.py   reward functions and the environment, called on a real row
resume.py        a config beside its checkpoint's, and inputs beside their recorded digests
"""
