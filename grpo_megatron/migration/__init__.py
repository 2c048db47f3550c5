"""Configs of other trainers in this one's terms.

shell.py         the words of a script's commands, read and never run
trainers.py      a YAML table per trainer, and functions for keys that need one
translation.py   settings -> a config, with a comment for each key that has no equal
"""
