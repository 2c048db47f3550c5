"""Files that are complete or absent, and folders whose content can be verified. Standard library only.

atomic.py    write a file or a folder under a temporary name beside its target, then rename it
manifest.py  size and sha256 of every file of a folder
lock.py      one run at a time writes into a folder
space.py     free space of a file system
step_folders.py  names of checkpoints, and the config that each was written with
leftovers.py what a killed process tree leaves in /tmp and /dev/shm
"""

from __future__ import annotations


class StorageError(ValueError):
    """Stored files are damaged, or another process is writing them. The message names every file."""
