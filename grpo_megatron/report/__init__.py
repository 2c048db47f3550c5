"""The numbers of a run, where they go, and the pages and texts made of them.

metrics.py: what ranks record, its reduction, sinks. console.py, loggers.py: sinks of a terminal and of trackers; progress.py: the
phase and the time left. step.py: the report of a step. run_folder.py: the state of a run from its files; trace_file.py: a
trace. kit.py, page/: HTML pages, and the report of one run or two. watch.py: the commands `watch` and `report`.
"""
