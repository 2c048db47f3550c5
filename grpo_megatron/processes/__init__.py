"""Processes that run the user's code and can be killed: rewards, judges, environments and tools are clients.

pool.py        ProcessPool: requests to processes named by keys; hosts that are lost are replaced
host.py        the program that forks one process per key, and ends those that break a limit
process.py     messages as JSON lines, texts about failures, limits that a process sets on itself
family.py      all processes that a process has started; processes that end with their parent
endpoint.py    POST to an HTTP endpoint, with retries and a deadline
"""
