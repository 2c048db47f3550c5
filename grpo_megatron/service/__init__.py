"""The trainer as a service: the public `tinker` client trains on the ranks of this program (docs/service.md).

http.py      the paths, keys and limits, on rank 0
server.py    sessions, order, futures; commands for the ranks (cli/serve_training.py runs them)
store.py     the files of sessions, models, samplers and requests, from which a restart goes on
wire.py      the protocol's messages
work.py      one request on all ranks: passes, optimizer steps, samples, checkpoints
slots.py     the states of many models, of which one is in the policy
losses.py    the protocol's losses

Rank 0 alone reads requests. It sends each, checked and in order, to all ranks, which compute it together. A training request
is on disk before its sender hears of it, and is computed again after a restart: the same state gives the same bits.
"""
