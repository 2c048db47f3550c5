"""Files that are complete or absent, and folders whose content can be verified. Standard library and untrusted.py only.

files.py      write a file or a folder under a temporary name beside its target, then rename it; manifests of folders; one run at
              a time writes into a folder; what a killed process tree leaves behind
run_files.py  names of checkpoints and rollout files, events of a run
pieces.py     pieces of states in the memory of several nodes: a server, and its requests
hub.py        models and data of the Hugging Face Hub, by id
"""

from __future__ import annotations


class StorageError(ValueError):
    """Stored files are damaged, or another process is writing them. The message names every file."""

    tells_what_to_do = True  # the command line prints it without a traceback
