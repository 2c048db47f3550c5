"""Processes that run code of the user and can be killed: what reward workers and environment workers have in common.

process.py     the parent's side: pipes, messages, log, kill
program.py     the worker's side: pipes of the protocol, limits, messages of exceptions
family.py      all processes that a worker has started
"""
