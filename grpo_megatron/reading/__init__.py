"""Careful reading of files that users write: a bounded size, regular files only, and messages of bounded length.

bounds.py      what a message may show of a value, and the limits on paths and integers
regular.py     bytes and lines of a regular file
json_text.py   JSON
yaml_text.py   YAML: plain data, without duplicate keys

All raise `ReadError`. Its message is a predicate ("is a FIFO, not a regular file"); the caller puts the file's name
first. Standard library and PyYAML only.
"""


class ReadError(ValueError):
    """The content of a file cannot be used."""
