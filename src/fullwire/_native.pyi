from collections.abc import Sequence

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
def sample(
    file: int,
    links: str,
    mark: str,
    interfaces: Sequence[int],
    rdma_directories: Sequence[str],
    watched: int,
) -> None: ...

class PacketScan:
    def feed(self, piece: NDArray[np.uint8]) -> None: ...
    def finish(self) -> None: ...
    def damage(self) -> str: ...
    def shift(self) -> int: ...
    def counts(self) -> dict[str, int]: ...
    def endpoints(self) -> list[tuple[bytes, int, int, int, int, int]]: ...
    def totals(self) -> dict[str, NDArray[np.int64]]: ...
    def bins(self) -> dict[str, NDArray[np.int64]]: ...
