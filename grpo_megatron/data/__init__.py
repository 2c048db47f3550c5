"""Data: rows of files -> prompts with answers and rewards, and the order in which the steps see them.

task.py tasks.py tasks/    what a benchmark is: rows, prompt, reward, label, version; one YAML file each
rows.py                    the rows of files in any format, by number
rendering.py tokenizer.py  a chat or a text -> token ids
conversation.py            the tokens between the model's turns
prompts.py                 files of a task -> prompts, made when they are read
written.py scored.py       the same for rows with responses
sampler.py pass_rates.py   which items a step sees; of several sources, or by their pass rates
arithmetic.py tool_tasks.py    generated data and tokenizers: the quickstart's and the reward models', the agents'
"""
