"""Programs for the tool `python` that want out. ATTEMPTS run one after the other in one start, BOMBS in one each.

An attempt that succeeds does as little harm as it can: this is run as root, too.
"""

from __future__ import annotations

import json

# An attempt is refused if it raises OSError, ValueError (of setrlimit), or AssertionError where it finds nothing.
PRELUDE = '''
import ctypes, fcntl, glob, mmap, multiprocessing, os, resource, shutil, signal, socket, stat, subprocess, sys, sysconfig, time
from multiprocessing.shared_memory import SharedMemory
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    """A system call of x86-64 by its number, as a C program would make it."""
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def machine_code(code):
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(code)
    result = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))()
    if result < 0:
        raise OSError(-result, os.strerror(-result))
def content(path):
    try:
        return open(path, 'rb').read()
    except OSError:
        return b''
def leave(path):
    open(path, 'w').close()
    os.unlink(path)
CALLER, SECRET, HOME = %r
'''

ATTEMPTS = {
    # the caller's memory and secrets
    "write into the caller's memory": "open(f'/proc/{CALLER}/mem', 'r+b')",
    "write into the parent's memory": "open(f'/proc/{os.getppid()}/mem', 'r+b')",
    "write into a process in C": "call(311, CALLER, b'\\0' * 16, 1, b'\\0' * 16, 1, 0)",
    "read a process in C": "call(310, CALLER, b'\\0' * 16, 1, b'\\0' * 16, 1, 0)",
    "trace the caller": "call(101, 16, CALLER, 0, 0)",
    "trace itself": "call(101, 0, 0, 0, 0)",
    "seize the parent": "call(101, 0x4206, os.getppid(), 0, 0)",
    "read keys of all processes": (
        "assert any(b'hostile-key' in content(path) for path in glob.glob('/proc/[0-9]*/environ'))"
    ),
    "read a command line": "open(f'/proc/{CALLER}/cmdline').read()",
    "the root of process 1": "os.listdir('/proc/1/root')",
    "the folder of the caller": "os.listdir(f'/proc/{CALLER}/cwd')",
    "the files of the caller": "os.listdir(f'/proc/{CALLER}/fd')",
    "take a descriptor of the caller": "call(438, call(434, CALLER, 0), 0, 0)",
    # signals
    "kill the caller": "os.kill(CALLER, 0)",
    "kill all": "os.kill(-1, 0)",
    "kill a thread of the caller": "call(234, CALLER, CALLER, 0)",
    "queue a signal": "call(129, CALLER, 0, b'\\0' * 8 + b'\\xff' * 4 + b'\\0' * 116)",
    "signal by a descriptor": "signal.pidfd_send_signal(os.pidfd_open(CALLER), 0)",
    "own a file for the caller": "fcntl.fcntl(1, fcntl.F_SETOWN, CALLER)",
    "own it by a structure": "fcntl.fcntl(1, 15, b'\\1\\0\\0\\0' + CALLER.to_bytes(4, 'little'))",
    "choose its signal": "fcntl.fcntl(os.pipe()[0], 10, signal.SIGKILL)",
    "be told of a folder by a signal": "fcntl.fcntl(os.open('.', os.O_RDONLY), fcntl.F_NOTIFY, 2)",
    "lock a shared file": "fcntl.flock(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_EX)",
    "lease a file": "fcntl.fcntl(os.open('lease', os.O_CREAT), fcntl.F_SETLEASE, fcntl.F_WRLCK)",
    "outlive the caller": "assert libc.prctl(1, 0, 0, 0, 0) == 0",
    # the caller's limits and priorities
    "limit the caller": "resource.prlimit(CALLER, resource.RLIMIT_NOFILE)",
    "limit the parent": "resource.prlimit(os.getppid(), resource.RLIMIT_CORE, (0, 0))",
    "move the caller to one core": "os.sched_setaffinity(CALLER, {0})",
    "move the parent to one core": "os.sched_setaffinity(os.getppid(), {0})",
    "let the caller die first": "open(f'/proc/{CALLER}/oom_score_adj', 'w').write('1000')",
    "be nice for the caller": "os.setpriority(os.PRIO_PROCESS, CALLER, 19)",
    "schedule the caller": "os.sched_setscheduler(CALLER, os.SCHED_IDLE, os.sched_param(0))",
    "slow the caller's disk": "call(251, 1, CALLER, 3 << 13)",
    "raise a hard limit": "resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 16, 1 << 16))",
    # processes and programs
    "fork": "os.fork() or os._exit(0)",
    "fork in C": "libc.vfork() >= 0 or call(57)",
    "clone": "call(56, 17, 0, 0, 0, 0) or os._exit(0)",
    "clone by a structure": "call(435, b'\\0' * 64, 64) or os._exit(0)",
    "spawn": "os.posix_spawn('/usr/bin/env', ['env'], {})",
    "subprocess": "subprocess.run([sys.executable, '-c', ''])",
    "multiprocessing": "multiprocessing.get_context('fork').Process(target=print).start()",
    # the system
    "join a namespace": "call(308, os.open('/proc/1/ns/mnt', os.O_RDONLY), 0)",
    "mount": "call(165, b'none', b'.', b'tmpfs', 0, 0)",
    "mount by a descriptor": "call(430, b'tmpfs', 0)",
    "become root": "os.setuid(0)",
    "change groups": "os.setgroups([0])",
    "a device": "os.mknod('disk', stat.S_IFBLK | 0o600, os.makedev(254, 0))",
    "the machine's name": "socket.sethostname(socket.gethostname())",
    "the clock": "time.clock_settime(time.CLOCK_REALTIME, time.time())",
    "the kernel's settings": "open('/proc/sys/kernel/core_pattern', 'r+')",
    "cgroups": "os.mkdir('/sys/fs/cgroup/hostile') or os.rmdir('/sys/fs/cgroup/hostile')",
    # the kernel's less used doors
    "io_uring": "call(425, 8, b'\\0' * 120)",
    "read a keyring": "call(250, 0, -3, 1)",
    "add a key": "call(248, b'user', b'k', b'v', 1, -3)",
    "bpf": "call(321, 0, b'\\0' * 72, 72)",
    "page faults": "call(323, 1)",
    "perf events": "call(298, b'\\0' * 128, 0, -1, -1, 0)",
    "a file in memory": "os.memfd_create('m')",
    "another personality": "call(135, 0x40000)",
    "compare processes": "call(312, CALLER, CALLER, 0, 0, 0)",
    "a filter of its own": "call(317, 2, 0, b'\\0\\0\\5\\0')",
    "calls of 32 bit": "machine_code(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')",  # mov eax, 20 (getpid); int 0x80; ret
    "calls of x32": "call(0x40000000 + 39)",
    "a file by its handle": "call(303, -100, b'.', b'\\x80' + b'\\0' * 150, b'\\0' * 8, 0)",
    "watch folders": "call(254, call(294, 0), b'/usr', 2)",
    "splice": "call(278, os.pipe()[1], b'\\0' * 16, 1, 0)",
    # network, shared memory
    "TCP": "socket.socket()",
    "UDP": "socket.socket(type=socket.SOCK_DGRAM)",
    "unix socket": "socket.socket(socket.AF_UNIX)",
    "socket pair": "socket.socketpair()",
    "abstract socket": "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).bind('\\0hostile')",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "shared memory": "SharedMemory('hostile', create=True, size=16)",
    "a file in /dev/shm": "leave('/dev/shm/hostile')",
    "System V memory": "call(29, 7, 4096, 0o1666)",
    "System V semaphores": "call(64, 7, 1, 0o1666)",
    "System V messages": "call(68, 7, 0o1666)",
    "POSIX messages": "call(240, b'hostile', 0o102, 0o600, 0) and call(241, b'hostile')",
    # files
    "read the user's file": "open(SECRET).read()",
    "read it by a link": "os.symlink(SECRET, 'soft') or open('soft').read()",
    "take it by a hard link": "os.link(SECRET, 'hard')",
    "write to it": "open(SECRET, 'a')",
    "truncate it": "os.truncate(SECRET, 0)",
    "open it for all": "os.chmod(SECRET, 0o777)",
    "date it": "os.utime(SECRET, (0, 0))",
    "mark it": "os.setxattr(SECRET, 'user.hostile', b'')",
    "rename it": "os.rename(SECRET, SECRET + '2') or os.rename(SECRET + '2', SECRET)",
    "remove it": "os.unlink(SECRET)",
    "a file beside it": "leave(SECRET + '3')",
    "the user's home": "assert [e for e in os.scandir(HOME) if e.is_file()]",
    "the root folder by ..": "open('../' * 20 + 'etc/passwd')",
    "passwords": "open('/etc/shadow').read()",
    "write into site-packages": "leave(os.path.join(sysconfig.get_paths()['purelib'], 'hostile'))",
    "replace a module": "open(os.__file__, 'a')",
    "forbid a module": "os.chmod(os.__file__, os.stat(os.__file__).st_mode)",
    "forbid it when it is open": "os.fchmod(os.open(os.__file__, os.O_RDONLY), os.stat(os.__file__).st_mode)",
    "write into /usr": "leave('/usr/lib/hostile')",
    "leave a file": "leave('/var/tmp/hostile')",
    "type into the terminal": "fcntl.ioctl(0, 0x5412, b'x')",
    "open the terminal": "os.open('/dev/tty', os.O_RDWR)",
    # the last ones: with them, others would fail for other reasons
    "new user namespace": "call(272, 0x10000000)",
    "new mount namespace": "call(272, 0x20000)",
    "new process in a namespace": "call(56, 0x10000000 | 17, 0, 0, 0, 0) or os._exit(0)",
    "another program": "os.execv('/usr/bin/env', ['env'])",
    "chroot": "os.chroot('.')",
}


def all_attempts(caller: int, secret: str, home: str) -> str:
    """Writes a program that prints a line of JSON for each attempt: its name, and what became of it."""
    loop = """
import json
for name, code in json.loads(%r).items():
    try:
        exec(code)
        outcome = "done"
    except (OSError, AssertionError, ValueError):
        outcome = "refused"
    except BaseException as error:
        outcome = repr(error)
    print(json.dumps([name, outcome]), flush=True)
"""
    return PRELUDE % ((caller, secret, home),) + loop % json.dumps(ATTEMPTS)


BOMBS = {  # name -> (program, a part of what is said; "" for a program that ends well)
    "memory": ("x = bytearray(1 << 32)", "MemoryError"),
    "threads": (
        # Thread.start would wait for ever for a thread that has no memory for its first line
        "import _thread, os, threading, time; threading.stack_size(32768)\n"
        "try:\n while True: _thread.start_new_thread(time.sleep, (99,))\n"
        "except RuntimeError as error: print(error, flush=True); os._exit(1)",
        "can't start new thread",
    ),
    "time": ("while True: pass", "has not ended after 2 s"),
    "deaf": (
        "import signal, time\nfor n in {*range(1, 32)} - {9, 19}: signal.signal(n, signal.SIG_IGN)\ntime.sleep(99)",
        "has not ended after 2 s",
    ),
    "a thread that stays": (
        "import threading, time; threading.Thread(target=time.sleep, args=(99,)).start()",
        "has not ended after 2 s",
    ),
    "output": ("while True: print('x' * 1000)", "has printed more than"),
    "one large file": ("open('a', 'wb').write(b'x' * (1 << 25))", "File too large"),
    "many files": ("for n in range(999): open(str(n), 'wb').write(b'x' * (1 << 24))", "No space left"),
    "files without a name": (
        "import os\nfor n in range(50): f = os.open('a', 577); os.write(f, b'x' * (1 << 24)); os.unlink('a')\n"
        "import time; time.sleep(99)",
        "No space left",
    ),
    "a sparse file": ("open('a', 'wb').truncate(1 << 40)", "File too large"),
    "open files": ("[open('/dev/null') for _ in range(100)]", "Too many open files"),
    "recursion in C": ("import ctypes; ctypes.string_at(0)", "signal SIGSEGV"),
    "no Python": ("\0", "null bytes"),
    "nested code": ("(" * 100000, "the program has ended"),
    "nested folders": (
        "import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d'); open('f', 'w').close()\nprint('done')",
        "",
    ),
    "locked folders": (
        "import os; os.mkdir('d', 0o300); os.chdir('d'); open('f', 'w').close(); os.mkdir('e', 0); os.umask(0o777)\n"
        "os.mkdir('g'); print('done')",
        "done",
    ),
    "links": (
        "import os; os.symlink('/', 'root'); os.symlink('..', b'\\xff'); os.symlink('loop', 'loop')\nprint('done')",
        "",
    ),
}

FULL = "the program has written more than 64 MiB"
ON_DISK = {"many files": FULL, "files without a name": FULL, "nested folders": "nested its folders too deeply"}  # there
