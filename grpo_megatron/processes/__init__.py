"""Processes that run the user's code and can be killed: rewards, judges, environments and tools are clients.

pool.py        ProcessPool: requests to processes named by keys; hosts that are lost are replaced
host.py        the program that forks one process per key, and ends those that break a limit
process.py     one process: limits that it sets on itself, its end with its parent, the end of all that it has started
variables.py   the environment of a rank with a GPU
endpoint.py    POST to an HTTP endpoint, with retries and a deadline
"""
