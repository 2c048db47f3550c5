"""Data: rows of files -> prompts with answers and rewards, and the order in which the steps see them.

rows.py                    the rows of files in any format, by number, and their fields
task.py tasks/             what a benchmark is: rows, prompt, reward, label, version; one YAML file each
folders.py                 task folders of Harbor and Terminal-Bench, and rows of SWE
tokenizer.py               a tokenizer, its end tokens and chat template; the tokens between the model's turns
prompts.py                 files of a task -> prompts, made when they are read
responses.py               the same for rows with responses
sampler.py                 which items a step sees; of several sources, or by their pass rates
stream.py, curriculum.py   rows of the user's iterator; batches mixed from pieces on a schedule
benchmarks.py              the problems of tasks, for validation and evaluation
images.py                  images of rows: files or bytes -> pixels and places
curate.py curate_options.py   the command `curate`: responses -> pass rates, filtered rows, supervised rows, preferences
"""
