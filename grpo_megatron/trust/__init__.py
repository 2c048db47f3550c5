"""Trust: compare.py finds where two runs part, replay.py runs that step again; diff.py is the command. certify.py checks runs."""
