"""Plans without GPUs.

gpus.py        the GPUs that a plan accepts by name, and the shares of their peaks that are reached
parameters.py  parameters per pipeline stage, activations of a pass, in bytes
phases.py      bytes of a rank in each phase of a run, on the device and on the host
cost.py        seconds of a step
layout.py      layouts: the keys that a search may change, the valid ones, why others are refused
search.py      which layouts fit, the nearest ones, the fastest ones
traffic.py     bytes that cross the borders of nodes
"""
