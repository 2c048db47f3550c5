"""All HTML pages: the report of a run (`run_page.py`), and the kit that the evaluation's page shares with it (`kit.py`)."""
