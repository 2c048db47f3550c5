"""Trust: compare.py finds where two runs part, from their traces; diff.py is the command. certify.py checks a config."""
