"""HTML pages: the kit of all pages, and the report of a run.

kit.py page/      one template, stylesheet, set of charts and sanitiser; the panels of metrics; the report of one run or two
run_folder.py     what the files of a run say about it
"""
