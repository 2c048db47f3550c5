"""Files and folders that are complete or absent, also after a kill or a power failure; manifests and locks of folders.

They are written under a hidden name beside their target, synced to the disk, and renamed, which is atomic.

    file    .NAME.XXXXXXXX.partial   removed when writing fails; only a kill leaves it behind
    folder  .NAME.partial            the same; the next writer of the same target replaces it
            .NAME.replaced           the target's old content, between the two renames of a replacement
            .NAME.removed            a folder that is being deleted

Where healing has started the ranks on several nodes, they belong to an epoch (cli/nodes.py), and write only in the newest.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import errno
import fcntl
import hashlib
import itertools
import json
import logging
import os
import platform
import re
import resource
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_megatron.storage import StorageError
from grpo_megatron.untrusted import ReadError, check_regular, read_json, read_text, reason_of, visible_line

PARTIAL, REPLACED, REMOVED = ".partial", ".replaced", ".removed"


EPOCH = "GRPO_MEGATRON_EPOCH"  # set for ranks of an epoch: the path of its file
EPOCH_NAME = re.compile(r"epoch_(\d{6})\.json")


def newest_epoch(folder: Path) -> int:
    """Returns the number of the newest epoch in a folder; 0: none. The list of an opened folder is never a cached one (NFS)."""
    with contextlib.suppress(FileNotFoundError):
        return max((int(match[1]) for name in os.listdir(folder) if (match := EPOCH_NAME.fullmatch(name))), default=0)
    return 0


def check_epoch() -> None:
    """Raises StorageError in a rank of an older epoch than the newest: others have gone on without it."""
    if (file := os.environ.get(EPOCH)) and file != str(newest := epoch_file(Path(file).parent)):
        raise StorageError(f"{newest} has replaced the epoch of this rank, which writes nothing any more")


def epoch_file(folder: Path, number: int | None = None) -> Path:
    """Names the file of an epoch; None: of the newest."""
    return folder / f"epoch_{newest_epoch(folder) if number is None else number:06d}.json"


def write_file(path: Path, content: str | Iterable[str]) -> None:
    """Write or replace a text file (UTF-8) in an existing folder. Raises OSError; an old file then stays as it was."""
    check_epoch()
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{PARTIAL}")
    try:
        with partial.open("x", encoding="utf-8") as file:
            file.writelines([content] if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def partial_of(target: Path) -> Path:
    """Name the folder that is written before it becomes `target`.

    That of an older epoch is removed at the start of a newer one: then no rank of the older one can rename it any more.
    """
    epoch = Path(os.environ.get(EPOCH, "")).stem
    return target.with_name(f".{target.name}{epoch and f'.{epoch}'}{PARTIAL}")


def is_partial(folder: Path) -> bool:
    """Tell whether `folder` has the name of one that is still being written, or that a kill has left behind."""
    return folder.name.startswith(".") and folder.name.endswith(PARTIAL)


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Make an empty folder that becomes `target`, or replaces it, when the block ends; an error removes it.

    Parent folders are created. Raises StorageError when another process is writing the same target, and OSError.
    """
    partial = partial_of(target)
    partial.mkdir(parents=True, exist_ok=True)
    with _opened(partial) as lock:
        if not try_lock(lock):
            raise StorageError(f"{partial} is being written by another process; wait for it")
        try:
            for path in partial.iterdir():
                _remove(path)
            yield partial
            publish_folder(partial, target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def publish_folder(partial: Path, target: Path) -> None:
    """Rename the complete folder `partial` to `target` in the same parent folder, in place of an existing one.

    A kill between the two renames of a replacement leaves no target, but both folders. Raises OSError, StorageError.
    """
    for path in partial.rglob("*"):
        sync_path(path)
    sync_path(partial)
    old = target.with_name(f".{target.name}{REPLACED}")
    check_epoch()
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    sync_path(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Delete a folder so that its name never stands for a part of it, also after a kill. Raises OSError."""
    removed = folder.with_name(f".{folder.name}{REMOVED}")
    shutil.rmtree(removed, ignore_errors=True)
    folder.rename(removed)
    sync_path(folder.parent)
    shutil.rmtree(removed, ignore_errors=True)


def clear_leftovers(parent: Path) -> None:
    """Delete what a kill has left in `parent`, while nobody writes there. A replaced folder without successor returns."""
    for path in parent.glob(f".*{REPLACED}"):
        target = path.with_name(path.name[1:].removesuffix(REPLACED))
        if not target.exists():
            path.rename(target)
    for ending in (PARTIAL, REPLACED, REMOVED):
        for path in parent.glob(f".*{ending}"):
            with contextlib.suppress(OSError):
                _remove(path)


def sync_path(path: Path) -> None:
    """Call fsync for a file, or of a folder's list of names."""
    with _opened(path) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def _opened(path: Path, flags: int = 0) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Take the lock (flock) of an open file. False while another process has it. Raises OSError for other reasons."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True


def open_lock(path: Path) -> int:
    """Open a lock's file, which is made where there is none. Raises StorageError for a folder, FIFO or device."""
    try:
        check_regular(path)
    except ReadError as error:
        raise StorageError(f"{path} {error}; remove it") from error
    except FileNotFoundError:
        pass
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


# -- Free space of a file system, asked before hours of work depend on it. Quotas are not seen -------------------------


def check_space(folder: Path, needed: int, what: str) -> None:
    """Raise StorageError when the file system of `folder` has less than `needed` bytes for `what`.

    `folder` and its parents may be missing.
    """
    free = _free(folder)
    if free < needed:
        raise StorageError(
            f"no space left: {what} takes {_gib(needed)}, the file system of {folder} has {_gib(free)} free"
        )


def describe_space(folder: Path) -> str:
    """Describe the free space, for errors of libraries that do not say that the disk is full."""
    try:
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        limited = "" if limit == resource.RLIM_INFINITY else f", and a file may have {_gib(limit)} (raise ulimit -f)"
        return f"{folder} has {_gib(_free(folder))} free{limited}"
    except OSError as error:
        return str(error)


def _free(folder: Path) -> int:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g} GiB" if count >= 1 << 27 else f"{count:,} bytes"


# -- manifest.json: size and sha256 of every file of a folder. It is written last, and compared before a folder is used

MANIFEST_FILE = "manifest.json"
MANIFEST_VERSION = 1
READ_BYTES = 1 << 20


def sha256_of(path: Path) -> str:
    """Hash a file's content: sha256 in hexadecimal digits. Raises OSError."""
    sha = hashlib.sha256()
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            sha.update(buffer[:count])
    return sha.hexdigest()


def write_manifest(folder: Path, kind: str, known: Mapping[str, str]) -> None:
    """Write the manifest of every file of `folder`. Files that are not in `known` (relative path -> sha256) are hashed."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST_FILE):
        name = path.relative_to(folder).as_posix()
        files[name] = {"size": path.stat().st_size, "sha256": known.get(name) or sha256_of(path)}
    content = {"version": MANIFEST_VERSION, "kind": kind, "files": files}
    write_file(folder / MANIFEST_FILE, json.dumps(content, indent=2) + "\n")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read file -> {size, sha256}, or None when there is no manifest. Raises StorageError when it cannot be read."""
    path = folder / MANIFEST_FILE
    if not path.exists():
        return None
    try:
        content = read_json(path)
        return {name: _checked_entry(name, entry) for name, entry in content["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise StorageError(f"{path}: not a readable manifest ({type(error).__name__}: {error})") from error


def _checked_entry(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"it names {name!r}, outside its folder")
    return {"size": int(entry["size"]), "sha256": str(entry["sha256"])}


def check_sizes(folder: Path) -> dict[str, Any] | None:
    """Read the manifest, and compare the presence and size of every file. Raises StorageError with all differences."""
    files = read_manifest(folder)
    if files is None:
        return None
    problems = []
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"missing {name}")
        elif path.stat().st_size != entry["size"]:
            problems.append(f"{name} has {path.stat().st_size} bytes, expected {entry['size']}")
    weights = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.suffix in (".safetensors", ".distcp"))
    problems += [f"{name} is not in the manifest" for name in sorted(weights) if name not in files]
    if problems:
        raise _differs(folder, problems)
    return files


def _differs(folder: Path, problems: list[str]) -> StorageError:
    return StorageError("\n  ".join([f"{folder} is not what its {MANIFEST_FILE} says:", *problems]))


class Verification:
    """A comparison of the hash of every file, in a thread while the caller works. Call `finish` before publishing a result."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.problems = folder, list[str]()
        files = check_sizes(folder)
        self.exists, self._files = files is not None, files or {}
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        if self.exists:
            self._thread.start()

    def _run(self) -> None:
        for name, entry in self._files.items():
            if self._stop:
                return
            try:
                if sha256_of(self.folder / name) != entry["sha256"]:
                    self.problems.append(f"{name}: sha256 differs, its content has changed since it was written")
            except OSError as error:
                self.problems.append(f"{name}: {reason_of(error)}")

    def finish(self) -> bool:
        """Wait for the thread. False when there is no manifest. Raises StorageError that names every changed file."""
        if self.exists:
            self._thread.join()
        if self.problems:
            raise _differs(self.folder, self.problems)
        return self.exists

    def stop(self) -> None:
        """End the thread early: its result is not needed."""
        self._stop = True


# -- One run at a time writes into a folder ----------------------------------------------------------------------------
# The lock is flock(2) on a file in the folder. The kernel releases it when its holder ends, however that happens. A network
# file system may need a while to notice that the holder's machine has died, so a lock of the same Slurm job, which has been
# requeued, is waited for. A file system without locks is used without one, with a warning.

LOCK_FILE = ".lock"
MAX_SIGNATURE = 4096  # bytes
SAME_JOB_S = 180.0  # a server of NFS releases the locks of a dead machine after 90 s
JOB = "SLURM_JOB_ID"


class FolderLock:
    """A lock from construction to `close`; a context manager. Raises StorageError while another process has it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_FILE
        self._descriptor = open_lock(self.path)
        try:
            self._take(time.monotonic() + SAME_JOB_S)
            self._sign()
        except BaseException:
            os.close(self._descriptor)
            raise

    def is_in_place(self) -> bool:
        """Tell whether the folder and the lock's file are still there, neither deleted nor replaced."""
        try:
            there = os.stat(self.path)
        except OSError:
            return False
        here = os.fstat(self._descriptor)
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _take(self, deadline: float) -> None:
        try:
            while not try_lock(self._descriptor, shared=EPOCH in os.environ):  # with a stopped rank of an older epoch
                holder = _signature(self.path)
                if not _is_of_this_job(holder) or time.monotonic() > deadline:
                    who = holder or "another process"
                    raise StorageError(f"it is in use by {who}; wait for its end, stop it, or use another folder")
                time.sleep(1)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            text = "%s: this file system has no locks; start no second run in this folder"
            logging.getLogger(__name__).warning(text, self.path)

    def _sign(self) -> None:
        since = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        text = f"process {os.getpid()} on {platform.node()} since {since}{_job_suffix()}\n"
        with contextlib.suppress(OSError):  # a full disk: the name of the holder is a help, no part of the lock
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, text.encode(), 0)


def _signature(path: Path) -> str:
    with contextlib.suppress(OSError, ReadError):
        return visible_line(read_text(path, MAX_SIGNATURE))
    return ""


def _job_suffix() -> str:
    return f" (Slurm job {os.environ[JOB]})" if JOB in os.environ else ""


def _is_of_this_job(holder: str) -> bool:
    return JOB in os.environ and holder.endswith(_job_suffix())


# -- Private folders of a launcher, among the temporary files -----------------------------------------------------------
# Each is locked. One that a killed launcher has left is removed at the next start: only this user's, and only after MIN_AGE_S.

PREFIX = "grpo_megatron-"
MEMORY_FOLDER = Path("/dev/shm")  # Linux: a file system in memory
MIN_AGE_S = 60.0  # a younger one may be between its creation and its lock


@contextlib.contextmanager
def private_folder(root: Path | None = None) -> Iterator[Path]:
    """Make a temporary folder that only this user can read; it is locked until the block ends, and then removed.

    `root`: the folder that it is made in; None: the system's for temporary files.
    """
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
    try:
        with _opened(folder) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield folder
    finally:
        with contextlib.suppress(OSError):
            remove_tree(folder)


@contextlib.contextmanager
def shared_folder(name: str, fill: Callable[[Path], None]) -> Iterator[Path]:
    """Open the temporary folder of that name. The first of those who have it open fills it, the last one removes it.

    Each has a shared lock on it, which ends with its process. Raises OSError, and what `fill` raises.
    """
    folder = Path(tempfile.gettempdir(), f"{PREFIX}{name}")
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
        try:
            lock = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        try:
            if os.fstat(lock).st_uid != os.geteuid():
                raise PermissionError(f"{folder} is another user's")
            fcntl.flock(lock, fcntl.LOCK_SH)
            try:
                if not (folder / "filled").exists():
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if os.fstat(lock).st_nlink and not (folder / "filled").exists():
                    for path in folder.iterdir():  # of one that was killed
                        _remove(path)
                    fill(folder)
                    (folder / "filled").touch()
                fcntl.flock(lock, fcntl.LOCK_SH)  # it is free for a moment
                if os.fstat(lock).st_nlink:  # else its last user has removed it
                    yield folder
                    return
            finally:
                if os.fstat(lock).st_nlink and try_lock(lock):
                    remove_tree(folder)
        finally:
            os.close(lock)


def remove_tree(folder: Path) -> None:
    """Delete a folder that a hostile program has filled, which has ended. Raises OSError.

    `shutil.rmtree` recurses, and fails on a thousand nested folders. Here each folder is made writable and moved to the top, so
    that no path grows. Links are not followed.
    """
    name, number, pending = uuid.uuid4().hex, itertools.count(), [folder]
    while pending:
        current = pending.pop()
        for entry in list(os.scandir(current)):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)
                pending.append(folder / f"{name}{next(number)}")
                os.rename(entry.path, pending[-1])
            else:
                os.unlink(entry.path)
        if current != folder:
            current.rmdir()
    folder.rmdir()


def folder_until_exit() -> Path:
    """Make a folder as `private_folder` until this process ends. A killed process leaves it to `remove_leftovers`."""
    opened = contextlib.ExitStack()
    atexit.register(opened.close)
    return opened.enter_context(private_folder())


def remove_leftovers() -> None:
    """Remove what killed runs of this user have left. Errors are ignored: another process may clean up, too."""
    for folder in (found for root in (Path(tempfile.gettempdir()), MEMORY_FOLDER) for found in root.glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime <= MIN_AGE_S:
                continue
            with _opened(folder, os.O_DIRECTORY | os.O_NOFOLLOW) as lock:
                if try_lock(lock):
                    remove_tree(folder)
