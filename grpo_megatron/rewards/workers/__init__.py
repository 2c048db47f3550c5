"""Worker processes that run rewards and can be killed.

pool.py        RewardPool: many items -> results in order; for other packages
process.py     the parent's side of one worker
worker.py      the program of a worker
"""
