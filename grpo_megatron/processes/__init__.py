"""Processes that run code of the user and can be killed: what reward workers and environment workers have in common.

process.py     a worker: its parent's side (pipes, messages, log, kill) and its own (pipes, messages of exceptions)
family.py      all processes that a worker has started; ends with the parent
endpoint.py    POST to an HTTP endpoint, with retries and a deadline
"""
