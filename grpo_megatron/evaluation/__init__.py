"""Scripted evaluation: a model folder or checkpoint -> scores with intervals, every completion, and an HTML report.

The tasks are those of training (`data/tasks/`), rendered in the same way.

cli.py arguments.py        the command line
settings.py run.py         one evaluation: what decides its scores, and drawing the samples on the rollout engine
problems.py prompting.py   a task's files -> problems -> prompts, with few-shot examples; stop texts
weights.py engine.py       a model folder or checkpoint -> the engine's weights; the engine
output_folder.py           one process, and one run, per output folder
ledger.py                  completions on disk, so that a killed run continues
grading.py                 completions -> grades, by the rewards of training
estimates.py voting.py     pass@k, avg@n, maj@n, intervals
results.py table.py        results.json and the terminal's table
report.py page_data.py formulas.py figures.py page/   the HTML report
comparison.py              paired difference of two results, McNemar's test
grading_speed.py           a benchmark: answers graded per second
validation.py              tasks by name on the live engine in training
"""
