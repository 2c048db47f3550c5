"""Scripted evaluation: a model folder or checkpoint -> scores with intervals, every completion, and an HTML report.

The tasks are those of training (`data/tasks/`), rendered in the same way.

cli.py options.py             the command line, and evaluation from Python
settings.py run.py            one evaluation: what decides its scores, and drawing the samples on the rollout engine
prompting.py                  problems (`data/benchmarks.py`) -> prompts with few-shot examples, or trajectories
engine.py                     a model folder or checkpoint -> the engine with its weights
ledger.py                     completions on disk, so that a killed run continues; one run per output folder
grading.py estimates.py       completions -> grades, by the rewards of training; pass@k, avg@n, maj@n, intervals
results.py                    results.json and the terminal's table
report.py                     the HTML report
comparison.py                 paired difference of two results, McNemar's test
"""
