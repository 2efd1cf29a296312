"""The parallelism that the messages of a traced job serve.

A description of their group tells it. Messages of a group without one are told apart by operation
and size: a layer's sums under tensor parallelism have the values of all tokens of a microbatch,
and messages of context parallelism have those of keys.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fullwire.clusters.cluster import Floats
from fullwire.run.run import SIZE_UNKNOWN, Collectives
from fullwire.simulation.described_groups import kind_of_messages

TRANSFERS = ("send", "recv", "sendrecv")
_SMALL_BYTES = 1024  # sums of a loss or of norms
_SUMS = ("allreduce", "reducescatter", "allgather")  # of activations; gathers where they are split
_VALUE_BYTES = (1, 2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedMessages:
    """The messages of some steps, with what tells their kinds."""

    table: Collectives
    steps: tuple[int, ...]
    descriptions: Mapping[str, str]  # of groups, by name
    activation: int = (
        0  # values of all tokens that a rank has of a microbatch; 0 before it is known
    )
    tp: int = 1
    keys: frozenset[int] = frozenset()  # values of messages of keys, under context parallelism

    def by_kind(self) -> dict[str, tuple[tuple[str, float, float], ...]]:
        """Return the messages of all steps by kind, with the time of the rank that waited least."""
        table = self.table
        least: dict[tuple[str, str, str, int, int], tuple[str, float, float]] = {}
        is_chosen = np.isin(table.step, self.steps) & (table.bytes >= _SMALL_BYTES)
        for row in np.flatnonzero(is_chosen).tolist():
            kind = self.kind(row)
            spent_s = float(table.end_ns[row] - table.issue_ns[row]) * 1e-9
            step, sequence, op = int(table.step[row]), int(table.sequence[row]), str(table.op[row])
            key = (kind, str(table.group[row]), op, step, sequence)
            message = (op, float(table.bytes[row]), spent_s)
            if key not in least or spent_s < least[key][2]:
                least[key] = message
        kinds: dict[str, list[tuple[str, float, float]]] = defaultdict(list)
        for (kind, *_), message in least.items():
            kinds[kind].append(message)
        return {kind: tuple(kinds.get(kind, ())) for kind in ("tp", "dp", "pp", "cp")}

    def described(self, group: str) -> str:
        """Return the parallelism that a group's description names; empty if it is open.

        NCCL's collectives bear the name of their group, which may be a number, with members or
        ranks behind it: `7`, `7 [0, 1]`, `7 0>1`.
        """
        return kind_of_messages(self.descriptions.get(group.partition(" ")[0], group))

    def kind(self, row: int) -> str:
        """Return the parallelism that a message serves."""
        if kind := self.described(str(self.table.group[row])):
            return kind
        if self.table.op[row] in TRANSFERS:
            return "pp"
        size_bytes = int(self.table.bytes[row])
        if self.tp > 1 and size_bytes in _sizes_bytes([self.activation]):
            return "tp"
        if size_bytes in _sizes_bytes(self.keys):
            return "cp"
        # Gradients are summed, and never exchanged: that is the work of experts or heads.
        return "" if self.table.op[row] == "alltoall" else "dp"

    @property
    def are_whole(self) -> bool:
        """Return whether there are messages, and the size of each is told."""
        mine = np.isin(self.table.step, self.steps)
        return bool(mine.any()) and SIZE_UNKNOWN not in set(self.table.dtype[mine].tolist())

    def activations_of_step(self) -> float:
        """Return how many collectives of a step have the values of all tokens of a microbatch."""
        sizes_bytes = _sizes_bytes([self.activation]) - _sizes_bytes(self.keys)
        is_wanted = self._is_open("tp", _SUMS) & np.isin(self.table.bytes, sorted(sizes_bytes))
        return self._most_in_a_step(is_wanted, np.ones(len(self.table)))

    def gradient_bytes_of_step(self) -> float:
        """Return the bytes of a step's sums that are of no activations and of no keys."""
        others_bytes = _sizes_bytes([self.activation, *self.keys])
        is_wanted = self._is_open("dp", ("allreduce", "reducescatter"))
        is_wanted &= ~np.isin(self.table.bytes, sorted(others_bytes))
        return self._most_in_a_step(is_wanted, self.table.bytes.astype(np.float64))

    def exchanges_of_step(self) -> float:
        """Return how many all-to-alls of a step belong to groups that nobody describes."""
        return self._most_in_a_step(self._is_open("", ("alltoall",)), np.ones(len(self.table)))

    def _is_open(self, kind: str, ops: Sequence[str]) -> NDArray[np.bool_]:
        """Say which messages may be of a kind: these operations of its groups, or of unnamed."""
        table = self.table
        names = [name for name in set(table.group.tolist()) if self.described(name) in ("", kind)]
        is_chosen = np.isin(table.step, self.steps) & (table.bytes >= _SMALL_BYTES)
        return np.asarray(is_chosen & np.isin(table.group, names) & np.isin(table.op, ops))

    def _most_in_a_step(self, is_wanted: NDArray[np.bool_], amount: Floats) -> float:
        """Return the mean amount of a step, of the rank with most."""
        _, place = np.unique(self.table.rank[is_wanted], return_inverse=True)
        return float(np.bincount(place, amount[is_wanted]).max(initial=0)) / len(self.steps)


def _sizes_bytes(values: Iterable[int]) -> set[int]:
    return {value * size for value in values for size in _VALUE_BYTES}
