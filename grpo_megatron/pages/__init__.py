"""HTML pages: the kit of all pages, and the report of a run.

kit.py page/      one template, stylesheet, set of charts, and sanitiser of texts
run_folder.py     what the files of a run say about it
panels.py         which metrics are drawn together, and how to read them
run_page.py       the report of one run or two
"""
