"""Data: rows of files -> prompts with answers and rewards, and the order in which the steps see them.

task.py                what a benchmark is: rows, prompt, reward, label, version
task_file.py tasks/    tasks as YAML files; one per benchmark or variant
row_format.py          how a row of such a task is read
tasks.py               the task that a name stands for
rows.py row_file.py    the rows of a file in any format: all of them, or by number
row_set.py             several files under one numbering
survey.py cache.py     one pass over all rows before the run, shared by all processes
rendering.py           a chat or a text -> token ids
prompts.py             files of a task -> prompts, made when they are read
written_groups.py      the same for rows with responses
sampler.py mixture.py  which items a step sees; of several sources
arithmetic.py          the quickstart's generated data and its tokenizer
"""
