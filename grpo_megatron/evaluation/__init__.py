"""Scripted evaluation: a model folder or checkpoint -> scores with intervals, every completion, and an HTML report.

The tasks are those of training (`data/tasks/`). They are rendered, drawn and graded in the same way.

cli.py options.py       the command line, and evaluation from Python; drawing the samples by the generator of training
settings.py             one evaluation: problems (`data/benchmarks.py`) -> prompts with few-shot examples; what decides its scores
engine.py               a model folder or checkpoint -> the engine with its weights; `generate` uses it, too
ledger.py               completions on disk, so that a killed run continues; one run per output folder
grading.py estimates.py completions -> grades, by the rewards of training; pass@k, avg@n, maj@n, intervals
results.py report.py    results.json, the terminal's tables, the paired difference of two results; the HTML report
"""
