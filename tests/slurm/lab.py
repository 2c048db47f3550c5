"""A real Slurm of N nodes on this machine, in one scratch folder: Debian's daemons, nothing under /etc.

Every node and the controller have a network, a host name, a mount table and a /dev/shm of their own (Linux namespaces), so that
names, addresses and equal ports behave as on a cluster. Root only. GPUs are device nodes without a device. Slurm's
time limits are far above what a busy machine needs.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

HANG_S = 600.0  # ends a test that hangs; never reached on a machine that is only slow
PACKAGES = ("slurm-wlm", "munge", "iproute2")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "unshare")
CTL, CTL_ADDRESS = "ctl", "10.77.0.254"
CONF = """\
ClusterName=lab
SlurmctldHost={ctl}({ctl_address})
SlurmctldPort=16810
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={lab}/munge/munge.socket
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={lab}/state
SlurmctldPidFile={lab}/run/slurmctld.pid
SlurmctldLogFile={lab}/log/slurmctld.log
SlurmdPidFile={lab}/run/slurmd.%n.pid
SlurmdLogFile={lab}/log/slurmd.%n.log
SlurmdSpoolDir={lab}/spool/%n
PlugStackConfig={lab}/plugstack.conf
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0,bf_interval=1
SlurmdParameters=config_overrides
JobRequeue=1
ReturnToService=1
KillWait=60
MessageTimeout=60
TCPTimeout=60
BatchStartTimeout=300
UnkillableStepTimeout=300
MinJobAge=3000
SlurmctldTimeout=300
SlurmdTimeout=300
InactiveLimit=0
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
{nodes}
PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP GraceTime=600
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
"""


def missing() -> str | None:
    """Returns the reason why no Slurm can run here, or None. Installs Debian's packages if it can."""
    if os.geteuid() != 0:
        return "a Slurm in namespaces needs root"
    if not _has_programs():
        if shutil.which("apt-get") is None:
            return f"no Slurm here, and no apt-get to install {' '.join(PACKAGES)}"
        command = ["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for attempt in (["true"], ["apt-get", "update"]):
            try:
                subprocess.run(attempt, env=environment, capture_output=True, timeout=120)
                subprocess.run(command, env=environment, capture_output=True, timeout=240)
            except subprocess.TimeoutExpired:
                break
            if _has_programs():
                break
    if not _has_programs():
        return f"no Slurm here, and apt-get could not install {' '.join(PACKAGES)}"
    command = ["unshare", "--net", "--uts", "--mount", "ip", "link", "set", "lo", "up"]
    probe = subprocess.run(command, capture_output=True)
    return None if probe.returncode == 0 else f"no namespaces here: {probe.stderr.decode().strip()}"


def _has_programs() -> bool:
    return all(shutil.which(program, path=_PATH) for program in PROGRAMS)


_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class Lab:
    """`with Lab(folder, 4) as lab:` starts a Slurm of four nodes and ends all its processes afterwards."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.folder = folder
        self.nodes = {f"node{n}": f"10.77.0.{n}" for n in range(1, num_nodes + 1)}
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._allocations: list[subprocess.Popen[bytes]] = []
        self._env = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}

    # -- life ----------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Lab:
        try:
            self._write()
            self._make_network()
            munge = self.folder / "munge"
            names = ("key", "socket", "pid", "log", "seed")
            files = [f"--{n}{'' if n == 'socket' else '-file'}={munge / f'munge.{n}'}" for n in names]
            subprocess.run(["munged", "--force", *files, "--num-threads=2"], env=self._env, check=True, timeout=HANG_S)
            self._inside(CTL, "slurmctld", "-c")
            for node in self.nodes:
                self.start_node(node)
            self.until(lambda: self.slurm("sinfo", "-h", "-t", "idle", "-o", "%D") == str(len(self.nodes)))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        if CTL in self._holders:
            self.slurm("scancel", "--full", "-u", "root")
            self.until(lambda: not self.slurm("squeue", "-h"), 90, required=False)
        pids = [int(file.read_text()) for file in [*self.folder.glob("run/*.pid"), *self.folder.glob("munge/*.pid")]]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in pids:
                if Path(f"/proc/{pid}").exists():
                    os.kill(pid, number)
            self.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10, required=False)
        for allocation in self._allocations:
            subprocess.run(["pkill", "-KILL", "-s", str(allocation.pid)])  # salloc's session, of several groups
            allocation.wait()
        for holder in self._holders.values():
            holder.kill()
            holder.wait()

    def start_node(self, node: str) -> None:
        self._inside(node, "slurmd", "-c", "-N", node)

    def link(self, node: str, state: str) -> None:
        """Sets the node's connection to all others "up" or "down"; files are still shared."""
        self._inside(CTL, "ip", "link", "set", f"v-{node}", state)

    def _write(self) -> None:
        for name in ("run", "log", "state", "spool", "munge", "dev", *(f"spool/{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True, mode=0o700 if name == "state" else 0o755)
        key = self.folder / "munge" / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        (self.folder / "plugstack.conf").touch()
        for index in range(8):
            os.mknod(self.folder / "dev" / f"nvidia{index}", 0o20666, os.makedev(1, 3))  # /dev/null
        names = ",".join(self.nodes)
        gpus = f"AutoDetect=off\nNodeName={names} Name=gpu File={self.folder}/dev/nvidia[0-7]\n"
        (self.folder / "gres.conf").write_text(gpus)
        hosts = {"localhost": "127.0.0.1", CTL: CTL_ADDRESS, **self.nodes}
        (self.folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in hosts.items()))
        lines = [
            f"NodeName={node} NodeHostname={node} NodeAddr={address} Port={16810 + n} CPUs=192 RealMemory=2000000"
            f" Gres=gpu:8 State=UNKNOWN Weight={n}"  # the first nodes that are idle
            for n, (node, address) in enumerate(self.nodes.items(), 1)
        ]
        conf = CONF.format(lab=self.folder, ctl=CTL, ctl_address=CTL_ADDRESS, nodes="\n".join(lines))
        (self.folder / "slurm.conf").write_text(conf)

    def _make_network(self) -> None:
        for name in (CTL, *self.nodes):
            setup = (
                f"hostname {name}; mount --bind {self.folder}/hosts /etc/hosts; mount -t tmpfs shm /dev/shm;"
                " ip link set lo up; echo ready; exec sleep infinity"
            )
            command = ["unshare", "--net", "--uts", "--mount", "--propagation", "private", "sh", "-c", setup]
            holder = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=self._env)
            self._holders[name] = holder
            assert holder.stdout is not None and holder.stdout.readline() == b"ready\n"
        self._inside(CTL, "ip", "link", "add", "br0", "type", "bridge")
        self._inside(CTL, "ip", "address", "add", f"{CTL_ADDRESS}/24", "dev", "br0")
        self._inside(CTL, "ip", "link", "set", "br0", "up")
        for node, address in self.nodes.items():
            peer = ["peer", "name", "eth0", "netns", str(self._holders[node].pid)]
            self._inside(CTL, "ip", "link", "add", f"v-{node}", "type", "veth", *peer)
            self._inside(CTL, "ip", "link", "set", f"v-{node}", "master", "br0", "up")
            self._inside(node, "ip", "address", "add", f"{address}/24", "dev", "eth0")
            self._inside(node, "ip", "link", "set", "eth0", "up")

    # -- use -----------------------------------------------------------------------------------------------------------

    def _enter(self, name: str) -> list[str]:
        return ["nsenter", "-t", str(self._holders[name].pid), "--net", "--uts", "--mount", f"--wdns={os.getcwd()}"]

    def _inside(self, name: str, *command: str, check: bool = True, env: dict[str, str] | None = None) -> str:
        """Run a command on a node or on the controller; returns its output."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = (*self._enter(name), *command)
        done = subprocess.run(command, env={**self._env, **(env or {})}, timeout=HANG_S, **pipes)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout.strip()

    def slurm(self, *command: str) -> str:
        return self._inside(CTL, *command, check=False)

    def start(self, command: str) -> None:
        """Starts a line of shell on the controller's host, and does not wait for it."""
        subprocess.Popen([*self._enter(CTL), "sh", "-c", command], env=self._env, stdin=subprocess.DEVNULL)

    def submit(self, *arguments: str, **variables: str) -> str:
        """Call sbatch; returns the job's id."""
        output = self._inside(CTL, "sbatch", *arguments, env=variables)
        match = re.search(r"Submitted batch job (\d+)", output)
        assert match, output
        return match[1]

    def allocate(self, log: Path, *arguments: str, **variables: str) -> str:
        """Start salloc with a command on the controller's host, which has no node's processes; returns the job's id."""
        with log.open("w") as out:
            command = [*self._enter(CTL), "salloc", *arguments]
            environment = {**self._env, **variables}
            pipes = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            self._allocations.append(subprocess.Popen(command, env=environment, start_new_session=True, **pipes))
        self.until(lambda: "Granted job allocation" in log.read_text())
        match = re.search(r"Granted job allocation (\d+)", log.read_text())
        assert match
        return match[1]

    def job(self, job: str) -> dict[str, str]:
        """Returns what scontrol shows of a job: JobState, Restarts, ExitCode, Reason, ExcNodeList, ..."""
        fields = self.slurm("scontrol", "-o", "show", "job", job).split(" ")
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def nodes_of(self, job: str) -> list[str]:
        return self.slurm("scontrol", "show", "hostnames", self.job(job)["NodeList"]).split()

    def restart_now(self, job: str) -> None:
        """Start a requeued job after two seconds instead of Slurm's two minutes. After one second Slurm may still refuse it.

        A start time that passes does not wake the scheduler, which may then wait for a minute; a change of the job does.
        """
        self.until(lambda: self.job(job)["JobState"] == "PENDING")
        self.slurm("scontrol", "update", f"jobid={job}", "StartTime=now+2")
        time.sleep(2)
        self.slurm("scontrol", "update", f"jobid={job}", "StartTime=now")

    def ranks(self, job: str, pattern: str = "grpo_megatron") -> list[int]:
        """Process ids of a job's ranks, in the order of the ranks. Another lab of this machine may have the same job id."""
        variables = {"SLURM_JOB_ID": job, "SLURM_CONF": self._env["SLURM_CONF"]}
        pids = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                items = (process / "environ").read_text().split("\0")
                environment = dict(item.split("=", 1) for item in items if "=" in item)
                words = (process / "cmdline").read_text().split("\0")
            except (OSError, UnicodeDecodeError):
                continue
            if variables.items() <= environment.items() and environment.get("RANK") and pattern in words:
                pids[int(environment["RANK"])] = int(process.name)
        return [pids[rank] for rank in sorted(pids)]

    @staticmethod
    def until(condition: Callable[[], object], timeout_s: float = HANG_S, required: bool = True) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                assert not required, "it did not happen in time"
                return
            time.sleep(0.1)
