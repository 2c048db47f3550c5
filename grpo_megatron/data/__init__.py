"""Data: rows of files -> prompts with answers and rewards, and the order in which the steps see them.

task.py                what a benchmark is: rows, prompt, reward, label, version
task_file.py tasks/    tasks as YAML files; one per benchmark or variant
tasks.py               the task that a name stands for
rows.py                .jsonl and .json files, with all mistakes in one error
rendering.py           a chat or a text -> token ids
prompts.py             files of a task -> prompts, supervised rows, offline groups; the tokenizer
sampler.py             which items a step sees
arithmetic.py          the quickstart's generated data and its tokenizer
"""
