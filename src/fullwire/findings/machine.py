"""The parts of a machine that Fullwire can use: `fullwire doctor` looks at each of them.

One class is one row. Its fields are the values that were seen, `is_ok` is the rule, `means` the use
that Fullwire makes of the part, and `how` the remedy where it is not ok.
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

from fullwire.findings.finding import Finding

State: TypeAlias = Literal["ok", "limited", "missing"]

_FEW_DESCRIPTORS, _MANY_DESCRIPTORS, _FEW_THREADS = 1024, 65536, 512
_LITTLE_SPACE, _LITTLE_SHARED = 2**30, 2**27  # Docker gives /dev/shm 64 MiB
_LITTLE_MEMORY = 2**31
_FAST_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv")  # Read without the kernel.
_MOST_PARANOID = 2  # kernel.perf_event_paranoid, from which on perf may not look at a job


class Part(Finding):
    """One part of a machine. A kind that is never ok says so by its `otherwise` alone."""

    name: ClassVar[str]
    means: ClassVar[str]
    how: ClassVar[str] = ""
    otherwise: ClassVar[State] = "limited"  # Its state where it is not ok.

    @property
    def is_ok(self) -> bool:
        """Say whether Fullwire can use the part as it is."""
        return False

    @property
    def state(self) -> State:
        """Return the state of the part."""
        return "ok" if self.is_ok else self.otherwise


class Ok(Part):
    """A part of which the look itself found that it works."""

    @property
    def is_ok(self) -> bool:
        """Say that it works."""
        return True


class Missing(Part):
    """A part that is missing, unless its kind says otherwise."""

    otherwise = "missing"


class Present(Missing):
    """A part that is here, or is missing."""

    is_here: bool

    @property
    def is_ok(self) -> bool:
        """Say whether it is here."""
        return self.is_here


class NativeModule(Ok):
    """The compiled part of Fullwire."""

    name = "native module"
    means = "captures, replays on described clusters and the transport need it"
    template = "{file}"

    file: str


class NoNativeModule(Missing):
    """The compiled part of Fullwire does not load."""

    name, means = NativeModule.name, NativeModule.means
    template = "{why}"
    how = (
        "install a wheel for this Python and this processor: pip install --force-reinstall fullwire"
    )

    why: str


class Privileges(Ok):
    """The user of this process and its capabilities."""

    name = "privileges"
    means = "no command needs root; the rows below say what a right would add"
    template = (
        "{is_root:root|user {user}}{is_mapped:? of a user namespace}, "
        "{capabilities:or no capability of a network}"
    )

    user: int
    is_root: bool
    is_mapped: bool  # Root of a user namespace is not root of the machine.
    capabilities: tuple[str, ...]


class LabWorks(Ok):
    """Clusters can be made in this machine."""

    name = "lab"
    means = "fullwire lab, study and bench transport make a cluster inside this machine"
    template = "namespaces, veth, tbf, netem"


class LabWithoutLatency(Part):
    """Clusters can be made in this machine, without latency and loss."""

    name, means = LabWorks.name, LabWorks.means
    template = "namespaces, veth, tbf; {why}"
    how = "modprobe sch_netem, if the kernel has it; else do without latency and loss"

    why: str


class NoLab(Missing):
    """Clusters cannot be made in this machine."""

    name, means = LabWorks.name, LabWorks.means
    template = "{why}"
    how = "{remedy}"

    why: str
    remedy: str


class Captures(Ok):
    """This process may capture packets."""

    name = "packets"
    means = "record --packets keeps the headers of the job's packets"
    template = "packet sockets open"


class NoRightToCapture(Missing):
    """This process may not capture packets."""

    name, means = Captures.name, Captures.means
    template = "no right to capture (CAP_NET_RAW)"
    how = "{remedy}"

    remedy: str


class NoPacketSockets(Missing):
    """The kernel cannot capture packets."""

    name, means = Captures.name, Captures.means
    template = "no packet sockets: {why}"
    how = "use a kernel with CONFIG_PACKET"

    why: str


class Counters(Part):
    """The files and sockets that the sampler reads beside a job."""

    name = "samples"
    means = "a recording tells how busy the host and each connection were"
    template = "{is_ok:processors, memory, TCP connections|not here: {missing:list}}"
    how = "use a kernel of its own: some sandboxes (gVisor) leave these out"

    missing: tuple[str, ...]

    @property
    def is_ok(self) -> bool:
        """Say whether all of them are here."""
        return not self.missing


class RunDelay(Present):
    """The time that a thread waits for a processor, which the kernel counts."""

    name = "run delay"
    means = "tells a rank that waits for a processor from one that computes"
    template = "{is_here:|no }/proc/self/schedstat"
    how = "use a kernel with CONFIG_SCHED_INFO"


class OtherProcesses(Part):
    """The right to look into another process."""

    name = "other processes"
    means = "whether a debugger or a profiler may look into a job that runs already"
    template = "kernel.yama.ptrace_scope={scope}"
    how = "sysctl -w kernel.yama.ptrace_scope=0, or be root"

    scope: str
    may_trace: bool

    @property
    def is_ok(self) -> bool:
        """Say whether other processes of the user are open to this one."""
        return self.scope == "0" or self.may_trace


class PerfEvents(Part):
    """The right to count events of the processor."""

    name = "perf_event"
    means = "for perf beside a job; Fullwire itself counts no such events"
    template = "kernel.perf_event_paranoid={paranoid}"
    how = f"sysctl -w kernel.perf_event_paranoid={_MOST_PARANOID}"

    paranoid: int
    is_admin: bool

    @property
    def is_ok(self) -> bool:
        """Say whether perf may look at a job."""
        return self.paranoid <= _MOST_PARANOID or self.is_admin


class NoPerfEvents(Missing):
    """The kernel counts no events of the processor."""

    name, means = PerfEvents.name, PerfEvents.means
    template = "not in this kernel"
    how = "nothing, without perf"


class ClockSource(Part):
    """The clock that every recorded event reads."""

    name = "clock"
    means = "every recorded event reads the clock, so a slow one slows the job"
    template = "{source:or the kernel does not tell its clock source}"
    how = "boot with clocksource=tsc, if the processor's is stable"

    source: str

    @property
    def is_ok(self) -> bool:
        """Say whether a program reads it without the kernel."""
        return self.source.startswith(_FAST_CLOCKS)


class TimeOfDay(Part):
    """The time of day on this host."""

    name = "time of day"
    means = "hosts are brought to one clock by their collectives; without any, by this"
    template = "{is_ok:synchronized, off by at most {off_s:time}|nothing synchronizes it}"
    how = "run chrony or systemd-timesyncd on every host"

    off_s: float | None  # None: nothing synchronizes it

    @property
    def is_ok(self) -> bool:
        """Say whether something synchronizes it."""
        return self.off_s is not None


class Card(Finding):
    """A network card and its rate."""

    template = "{device} {is_known:{rate_bps:rate}|?}"

    device: str
    rate_bps: float | None

    @property
    def is_known(self) -> bool:
        """Say whether the kernel tells its rate."""
        return self.rate_bps is not None


class NetworkCards(Part):
    """The network cards, without virtual interfaces."""

    name = "network cards"
    means = "explain compares what was sent with the line rate of the card"
    template = "{cards:or none; only virtual interfaces}"
    how = "name the rate: explain --line-rate 10Gbps"

    cards: tuple[Card, ...]

    @property
    def is_ok(self) -> bool:
        """Say whether there are cards, and the rate of each is known."""
        return bool(self.cards) and all(card.is_known for card in self.cards)


class RdmaPort(Finding):
    """A port of an RDMA adapter, with its rate as the kernel names it."""

    template = "{port} {rate}"

    port: str
    rate: str


class RdmaPorts(Missing):
    """The ports of RDMA adapters."""

    name = "RDMA"
    means = "record counts what RDMA ports send"
    template = "{ports:or no adapter}"
    how = "if there is such a card: load its driver, as mlx5_ib"

    ports: tuple[RdmaPort, ...]

    @property
    def is_ok(self) -> bool:
        """Say whether there is one."""
        return bool(self.ports)


class OpenFiles(Part):
    """The files and sockets that a process may open: at first, and if it asks for more."""

    name = "file descriptors"
    means = "a rank of the transport needs up to 8 for each other rank"
    template = "{soft:or no limit}, at most {hard:or no limit}"
    how = "ulimit -n {higher}"

    soft: int | None  # None: no limit
    hard: int | None

    @property
    def is_ok(self) -> bool:
        """Say whether they are enough for some hundred ranks."""
        return self.soft is None or self.soft >= _FEW_DESCRIPTORS

    @property
    def higher(self) -> int:
        """Return the limit to ask for."""
        return _MANY_DESCRIPTORS if self.hard in (self.soft, None) else self.hard


class Threads(Part):
    """The threads that a user or a container may have, and which limit says so."""

    name = "threads"
    means = "torch starts dozens of threads a rank"
    template = "{most:,} ({limit})"
    how = "raise {limit}: ulimit -u, docker run --pids-limit or sysctl"

    most: int
    limit: str

    @property
    def is_ok(self) -> bool:
        """Say whether they are enough for a few ranks."""
        return self.most >= _FEW_THREADS


class ThreadsWithoutLimit(Ok):
    """Nothing limits the number of threads."""

    name, means = Threads.name, Threads.means
    template = "no limit"


class Memory(Part):
    """The memory that programs can still take."""

    name = "memory"
    means = "a rank of torch takes 0.4 GB before its model"
    template = "{available_bytes:bytes} available"
    how = "end other programs, or use fewer --workers"

    available_bytes: int

    @property
    def is_ok(self) -> bool:
        """Say whether it is enough for a few ranks."""
        return self.available_bytes >= _LITTLE_MEMORY


class SharedMemory(Part):
    """The memory that processes share as files."""

    name = "/dev/shm"
    means = "data loaders and NCCL exchange data through it"
    template = "{free_bytes:bytes} free of {total_bytes:bytes}"
    how = "docker run --shm-size=8g, or --ipc=host"

    free_bytes: int
    total_bytes: int

    @property
    def is_ok(self) -> bool:
        """Say whether it has more room than containers get unasked."""
        return self.free_bytes >= _LITTLE_SHARED


class NoSharedMemory(Missing):
    """Processes cannot share memory as files."""

    name, means = SharedMemory.name, SharedMemory.means
    template = "{why}"
    how = "mount -t tmpfs tmpfs /dev/shm"

    why: str


class FreeSpace(Part):
    """The room for files in the folder of this process."""

    name = "free space"
    means = "record writes its run there, some 10 MB for 1,000 steps of a rank"
    template = "{free_bytes:bytes} in {folder}"
    how = "name another place: record -o"

    free_bytes: int
    folder: str

    @property
    def is_ok(self) -> bool:
        """Say whether there is room for runs."""
        return self.free_bytes >= _LITTLE_SPACE


class ReadOnlySpace(Missing):
    """The folder of this process takes no files."""

    name, means, how = FreeSpace.name, FreeSpace.means, FreeSpace.how
    template = "{free_bytes:bytes} in {folder}, which is read-only"

    free_bytes: int
    folder: str


class Torch(Part):
    """Torch in the Python of Fullwire, and its backends."""

    name = "torch"
    means = "recorded jobs bring their own; study, bench and the transport use this one"
    template = "{version}, backends {backends:or none}"
    how = "install torch 2.6 or newer with torch.distributed"

    version: str
    backends: tuple[str, ...]

    @property
    def is_ok(self) -> bool:
        """Say whether it has the backends of jobs on processors."""
        return {"gloo", "fullwire"} <= set(self.backends)


class NoTorch(Missing):
    """Torch is not in the Python of Fullwire."""

    name, means = Torch.name, Torch.means
    template = "not in Fullwire's Python"
    how = "pip install 'fullwire[torch]', or install Fullwire into the job's environment"


class TorchIsSlow(Part):
    """Torch did not load in time."""

    name, means = Torch.name, Torch.means
    template = "it did not load within {limit_s:.0f} s"
    how = "make `python -c 'import torch'` work first"

    limit_s: float


class TorchFails(Part):
    """Torch does not load."""

    name, means, how = Torch.name, Torch.means, TorchIsSlow.how
    template = "{last_line:or it ended without a word}"

    last_line: str


class Congestion(Part):
    """The congestion control of TCP."""

    name = "congestion control"
    means = "the transport sends with it; BBR costs it processor time on fast links"
    template = "{control:or the kernel does not tell it}"
    how = "sysctl -w net.ipv4.tcp_allowed_congestion_control='reno cubic'"

    control: str

    @property
    def is_ok(self) -> bool:
        """Say whether it sends without pacing."""
        return not self.control.startswith("bbr")


class Gpus(Part):
    """The GPUs of the machine, and how many of them torch can use."""

    name = "GPUs"
    means = "their use and memory are sampled beside a job"
    template = "{gpus:list}"
    how = "torch sees {usable}: take one for this driver, or set CUDA_VISIBLE_DEVICES"

    gpus: tuple[str, ...]
    usable: int

    @property
    def is_ok(self) -> bool:
        """Say whether torch can use all of them."""
        return self.usable >= len(self.gpus)


class GpusWithoutTorch(Part):
    """The GPUs of a machine whose torch is missing or does not load."""

    name, means, template = Gpus.name, Gpus.means, Gpus.template
    how = "install torch to train on them"

    gpus: tuple[str, ...]


class NoGpus(Missing):
    """No GPU of NVIDIA is to be seen."""

    name, means = Gpus.name, Gpus.means
    template = "no GPU with a driver of NVIDIA"
    how = "without one, all is well: jobs on processors are recorded"


class Nccl(Ok):
    """The NCCL of torch."""

    name = "NCCL"
    means = "collectives between GPUs; --packets and NCCL logs tell more of them"
    template = "{version}"

    version: str


class NoNccl(Missing):
    """Torch has no NCCL that it can use."""

    name, means = Nccl.name, Nccl.means
    template = "torch has none that it can use here"
    how = "for GPUs: install a torch that was built for CUDA"


class Package(Finding):
    """A package with its version."""

    template = "{package} {version}"

    package: str
    version: str


class Extra(Missing):
    """Packages that Fullwire can do without."""

    needs: ClassVar[tuple[str, ...]]

    packages: tuple[Package, ...]
    absent: str = ""

    @property
    def is_ok(self) -> bool:
        """Say whether all of them are installed."""
        return not self.absent


class Pictures(Extra):
    """The packages that draw pictures."""

    name = "pictures"
    means = "--plot and study draw with them"
    template = "{is_ok:{packages:list}|{absent} is not installed}"
    how = "pip install 'fullwire[pictures]'"
    needs = ("altair", "vl-convert-python")


class Ray(Extra):
    """The package that shares work among machines."""

    name = "Ray"
    means = "--on ray shares imports and searches among machines"
    template = Pictures.template
    how = "pip install 'fullwire[ray]'"
    needs = ("ray",)


class Encryption(Present):
    """The library that encrypts."""

    name = "encryption"
    means = "FULLWIRE_ENCRYPT=1 encrypts what ranks send each other"
    template = "{is_here:OpenSSL 3|no libcrypto.so.3}"
    how = "sudo apt install libssl3"
