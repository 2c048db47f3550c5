"""Scripted evaluation: a model folder or checkpoint -> scores with intervals, every completion, one page to look at.

task.py tasks/*.yaml       what a benchmark asks, when it stops, who grades it: data, versioned, hashed
problems.py prompting.py   rows -> problems -> prompts, with few-shot examples
settings.py run.py         one evaluation: what decides its numbers, and drawing them on the training engine
ledger.py                  completions on disk, so that a killed run continues
estimates.py voting.py     pass@k, avg@n, maj@n, bootstrap intervals
results.py table.py        results.json and the terminal's table
report.py page_data.py formulas.py figures.py page/   the HTML report
comparison.py              paired difference of two results, McNemar's test
validation.py              the same tasks on the live engine in training
"""
