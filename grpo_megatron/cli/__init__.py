"""The command line.

main.py          the table of commands
config_file.py   a YAML file with overrides -> Config
run.py           `train` and `plan`; plan.py: the printed plan
ranks.py         starts the ranks of this machine; preload.py: what they import once; healing.py: again after a loss;
                 nodes.py: on several nodes; keeper.py: ranks that sample, while the others go on
serve_training.py   the ranks of a service (service/)
failures.py      reports why a run failed, once
"""
