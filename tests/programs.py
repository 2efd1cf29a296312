"""Programs of collectives: what many ranks do in order, and how hypothesis makes them up."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hypothesis import strategies as st

RANKS = 4
# Over which ranks an operation goes; each is a group of its own, and they overlap.
GROUPS = ((0, 1, 2, 3), (0, 1), (0, 1, 2), (1, 3), (0, 2, 3), (2,))
KINDS = (
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "scatter",
    "send",
    "barrier",
)
SAME_EVERYWHERE = ("all_reduce", "all_reduce_coalesced", "broadcast")
DTYPES = ("float32", "float64", "float16", "bfloat16", "uint8", "int8", "int32", "int64")
REDUCTIONS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")
LAYOUTS = ("dense", "every second", "transposed")
MOST_COUNT = 200_000  # of float32: four of the transport's chunks for every rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One collective, the same for every rank of its group."""

    kind: str
    group: int = 0
    dtype: str = "float32"
    reduce: str = "SUM"
    count: int = 1  # elements
    layout: str = "dense"
    root: int = 0
    is_async: bool = False
    then_wait: bool = False  # for everything in flight
    seed: int = 0


def request(program: list[Operation], backend: str) -> dict[str, Any]:
    """Return a program as ranks are asked for it: with "gloo" first, then with "ours"."""
    return {"backend": backend, "program": [asdict(operation) for operation in program]}


def counts() -> st.SearchStrategy[int]:
    """Give few elements, around powers of two, or many."""
    powers = st.integers(0, 17).map(lambda power: 1 << power)
    around = st.tuples(powers, st.integers(-1, 1)).map(lambda pair: max(0, sum(pair)))
    return st.one_of(st.integers(0, 40), st.integers(0, 5000), around)


def operations() -> st.SearchStrategy[Operation]:
    """Give any operation; most are dense, since that is what people do."""
    return st.builds(
        Operation,
        kind=st.sampled_from(KINDS),
        group=st.integers(0, len(GROUPS) - 1),
        dtype=st.sampled_from(DTYPES),
        reduce=st.sampled_from(REDUCTIONS),
        count=counts(),
        layout=st.sampled_from(("dense", "dense", "dense", *LAYOUTS)),
        root=st.integers(0, RANKS - 1),
        is_async=st.booleans(),
        then_wait=st.sampled_from((False, False, True)),
        seed=st.integers(0, 2**31),
    )


def programs() -> st.SearchStrategy[list[Operation]]:
    """Give a program of up to twelve operations."""
    return st.lists(operations(), min_size=1, max_size=12)
