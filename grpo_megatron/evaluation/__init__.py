"""Scripted evaluation, and answers to prompts: a model folder or checkpoint -> samples -> scores, an HTML report, JSON lines.

ask.py                   the engine of a folder, and `ask`: prompts and sampling settings -> samples
options.py               the command lines
settings.py evaluate.py  one evaluation: what decides its scores; the command, which samples into the ledger
ledger.py                completions on disk, so that a killed run continues; one run per output folder
grading.py estimates.py  completions -> grades, by the rewards of training; pass@k, avg@n, maj@n, intervals
results.py page.py card.py   results.json and the terminal's tables; the HTML report; a model card
comparison.py            the paired difference of two results
generate_settings.py generate.py   answers to prompts, to a file, or in a conversation
"""
