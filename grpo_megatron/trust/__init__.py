"""Trust: two runs or one config, proved from traces.

compare.py finds where two runs part, values.py reads both values there, replay.py runs that step again, and diff.py is the
command. certify.py checks a config; depth.py takes
a model's first layers for it.
"""
