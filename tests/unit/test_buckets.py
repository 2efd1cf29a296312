"""How gradients become messages: PyTorch's, Horovod's and the paper's rules."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullwire.errors import UsageError
from fullwire.simulation.buckets import BucketPolicy, bucket_policy

MIB = 2**20
MS = 1_000_000


def grouped(policy: str, *gradients: tuple[float, float]) -> list[tuple[float, float]]:
    """Return (MiB, ready in ms) of each message, for gradients of (ready in ms, MiB)."""
    ready = np.array([round(at * MS) for at, _ in gradients])
    sizes = np.array([round(mib * MIB) for _, mib in gradients])
    buckets = bucket_policy(policy).group(ready, sizes)
    return [
        (size / MIB, at / MS)
        for size, at in zip(buckets.bytes.tolist(), buckets.ready_ns.tolist(), strict=True)
    ]


def test_without_buckets_every_gradient_is_a_message() -> None:
    assert grouped("none", (1, 3), (2, 4)) == [(3, 1), (4, 2)]


def test_ddp_closes_its_first_bucket_at_1_mib_and_the_others_at_25() -> None:
    messages = grouped("ddp", (1, 0.5), (2, 0.6), (3, 20), (4, 4), (5, 2), (6, 1))
    assert [at for _, at in messages] == [2, 5, 6]
    assert [size for size, _ in messages] == pytest.approx([1.1, 26, 1])


def test_a_ddp_bucket_size_that_is_given_holds_for_the_first_bucket_too() -> None:
    assert grouped("ddp:25MiB", (1, 0.5), (2, 0.5), (3, 24), (4, 1)) == [(25, 3), (1, 4)]


def test_a_gradient_that_overfills_a_ddp_bucket_stays_in_it() -> None:
    assert grouped("ddp:25MiB", (1, 1), (2, 400), (3, 1)) == [(401, 2), (1, 3)]


def test_the_papers_rule_closes_a_message_after_5_ms_of_waiting() -> None:
    assert grouped("paper", (2, 1), (5, 1), (7, 1), (12, 1)) == [(2, 5), (2, 12)]


def test_the_papers_rule_closes_a_message_at_64_mib() -> None:
    assert grouped("paper", (1, 60), (2, 4), (3, 1)) == [(64, 2), (1, 3)]


def test_the_papers_limits_can_be_others() -> None:
    assert grouped("2MiB/1ms", (0.5, 1), (0.6, 1), (2, 0.5)) == [(2, 0.6), (0.5, 2)]


def test_horovod_sends_at_its_ticks() -> None:
    assert grouped("horovod:64MiB/5ms", (1, 1), (5, 2), (6, 3)) == [(3, 5), (3, 10)]


def test_horovod_never_overfills_a_buffer_except_with_one_gradient() -> None:
    messages = grouped("horovod:4MiB/5ms", (1, 3), (2, 2), (3, 2), (4, 9))
    assert messages == [(3, 5), (4, 5), (9, 5)]


@pytest.mark.parametrize(
    "text", ["none", "ddp", "ddp:50MiB", "paper", "25MiB/5ms", "horovod:64MiB/5ms"]
)
def test_a_policy_prints_as_it_is_read(text: str) -> None:
    assert str(bucket_policy(text)) == text


@pytest.mark.parametrize(
    "text", ["", "25MiB", "ddp:", "ddp:25", "horovod:5ms", "25MiB/5", "x:1MiB/1ms"]
)
def test_an_unreadable_policy_is_refused_with_what_was_expected(text: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        bucket_policy(text)


policies = st.sampled_from(
    ["none", "ddp", "ddp:1MiB", "paper", "1MiB/1ms", "horovod:1MiB/2ms", "horovod:64MiB/5ms"]
).map(bucket_policy)
steps = st.lists(
    st.tuples(st.integers(0, 10 * MS), st.integers(1, 40 * MIB)), min_size=1, max_size=60
)


@given(policies, steps)
def test_bytes_are_conserved_and_nothing_leaves_before_it_is_ready(
    policy: BucketPolicy, step: list[tuple[int, int]]
) -> None:
    ready = np.cumsum([wait for wait, _ in step])
    sizes = np.array([size for _, size in step])
    buckets = policy.group(ready, sizes)
    last = np.cumsum(buckets.gradient_count) - 1
    assert last[-1] == len(step) - 1
    assert buckets.bytes.tolist() == np.diff(np.cumsum(sizes)[last], prepend=0).tolist()
    assert (buckets.ready_ns >= ready[last]).all()
    assert (np.diff(buckets.ready_ns) >= 0).all()
