from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

_Part = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.uint8]]

def play_collective(
    workers: int,
    parts: Sequence[_Part],
    size_classes: Sequence[tuple[float, float]],
    bytes_per_s: float,
    latency_s: float,
    chunks: int,
    serial: bool,
) -> tuple[float, int]: ...

_Staged = tuple[
    NDArray[np.int64],
    NDArray[np.float64],
    NDArray[np.float64],
    NDArray[np.int64],
    NDArray[np.int32],
]

def play_fabric(
    seats: int,
    bytes_per_s: NDArray[np.float64],
    source: NDArray[np.int32],
    target: NDArray[np.int32],
    latency_s: NDArray[np.float64],
    stands_for: NDArray[np.int64],
    crossings_begin: NDArray[np.int64],
    link: NDArray[np.int32],
    weight: NDArray[np.int32],
    parts: Sequence[_Staged],
    chunks: int,
    serial: bool,
    told: Callable[[int], object] | None,
) -> tuple[float, int]: ...
def fold(
    seats: int,
    source: NDArray[np.int32],
    target: NDArray[np.int32],
    crossings_begin: NDArray[np.int64],
    link: NDArray[np.int32],
    connections: NDArray[np.int32],
    links: NDArray[np.int32],
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]: ...
def sample(
    file: int,
    links: str,
    mark: str,
    interfaces: Sequence[int],
    rdma_directories: Sequence[str],
    watched: int,
) -> None: ...

_Column = NDArray[np.int64] | NDArray[np.int32] | NDArray[np.uint8]

class KinetoScanner:
    def __init__(self, most_value_bytes: int) -> None: ...
    def feed(self, chunk: bytes) -> None: ...
    @property
    def is_whole(self) -> bool: ...
    @property
    def damage(self) -> str: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def events(self) -> int: ...
    @property
    def unusable(self) -> int: ...
    def header(self) -> list[tuple[bytes, bytes]]: ...
    def names(self) -> list[bytes]: ...
    def work(self) -> dict[str, _Column]: ...
    def launches(self) -> dict[str, _Column]: ...
    def operators(self) -> dict[str, _Column]: ...
    def marks(self) -> dict[str, _Column]: ...
    def notes(self) -> dict[str, _Column]: ...

class PacketCapture:
    def __init__(self, file: int, sockets: Sequence[tuple[str, int]]) -> None: ...
    def run(self, watched: int) -> None: ...

class PacketScan:
    def feed(self, piece: NDArray[np.uint8] | memoryview) -> None: ...
    def read(self, file: int, threads: int, enough_bytes: int) -> int: ...
    def finish(self) -> None: ...
    def damage(self) -> str: ...
    def shift(self) -> int: ...
    def counts(self) -> dict[str, int]: ...
    def endpoints(self) -> list[tuple[bytes, int, int, int, int, int]]: ...
    def totals(self) -> dict[str, NDArray[np.int64]]: ...
    def bins(self) -> dict[str, NDArray[np.int64]]: ...
    def gloo_traffic(self) -> dict[str, NDArray[np.int64]]: ...
    def passages(self) -> dict[str, NDArray[np.int64]]: ...
    def endings(self) -> dict[str, NDArray[np.int64]]: ...

class TransportProgram:
    def __init__(
        self,
        blocks: int,
        sends: Sequence[tuple[int, int, int, int, int]],
        receives: Sequence[tuple[int, int, int, bool, bool, bool, int, int]],
        signals: bool,
    ) -> None: ...

class TransportTask:
    @property
    def is_done(self) -> bool: ...
    @property
    def problem(self) -> str | None: ...
    @property
    def sender(self) -> int: ...
    @property
    def ended_ns(self) -> int: ...
    @property
    def times(self) -> tuple[int, int, int, int, int, int]: ...

class TransportEngine:
    def __init__(
        self,
        rank: int,
        sockets: Sequence[int],
        names: Sequence[str],
        group: str,
        silence_s: float,
        spin_us: int,
    ) -> None: ...
    def collective(
        self,
        description: str,
        program: TransportProgram,
        source: Sequence[tuple[int, int]],
        work: Sequence[tuple[int, int]],
        reduction: int | None,
        number: int,
        divide_by: int,
        timeout_s: float,
        soon: bool,
    ) -> TransportTask: ...
    def transfer(
        self,
        description: str,
        sends: bool,
        rank: int,
        tag: int,
        block: tuple[int, int],
        timeout_s: float,
    ) -> TransportTask: ...
    def wait(self, task: TransportTask, timeout_s: float) -> bool: ...
    def wait_for_any(self) -> bool: ...
    def count_from_here(self) -> None: ...
    def abort(self, reason: str) -> None: ...
    def close(self) -> None: ...
    @property
    def problem(self) -> str: ...
    @property
    def malformed(self) -> int: ...
