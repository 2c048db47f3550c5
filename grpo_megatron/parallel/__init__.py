"""Ranks and their messages.

mesh.py        the grid of ranks and its groups
exchange.py    samples: rollout layout -> training layout
control.py     rendezvous and host collectives of thousands of ranks
bridge.py      messages between ranks that train and ranks that sample
heartbeat.py   phases of all ranks, and the end of a run that stalls
"""
