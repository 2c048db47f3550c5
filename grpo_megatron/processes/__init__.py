"""Processes that run the user's code and can be killed: rewards, judges, environments and tools are clients.

pool.py, host.py   ProcessPool: requests to processes named by keys; the program that forks one process per key
process.py         limits of a process, and its end with all that it has started
variables.py       the environment of a rank with a GPU
endpoint.py        POST to an HTTP endpoint, with retries and a deadline
"""
