"""A worker's step without any waiting for other workers, and how it changes with its own work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fullwire.collectives.cost import Floats
from fullwire.run.run import Whole
from fullwire.simulation.between_passes import Meeting
from fullwire.simulation.groups import Others

_COMPUTES_THROUGHOUT = 0.75  # of a step alone: with as much processor time a rank never rests
_BESIDE_A_CALL_NS = 200_000  # of other processors, at most: measured with Gloo, 120 calls at once


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Step:
    """A worker's step without any waiting for other workers."""

    step_ns: int
    forward_ns: int  # from the start of the step to the start of the backward pass
    backward_ns: int
    ready_ns: Whole  # after the backward pass began
    earlier_share: float = 0.0  # of the backward pass: passes before the last, without sums
    bytes: Whole
    meetings: tuple[Meeting, ...] = ()
    is_estimated: bool  # taken from a run of several workers: its own waiting is left out
    waiting_ns: int = 0  # for the slowest rank, in a step of several workers
    lasting_share: float = 1.0  # of it: waiting for one rank that is late in all steps
    others: Others = field(default_factory=Others)
    packing_ns: int = 0  # of a hook, in a step of several workers
    shards: int = 1  # of the model; one in so many workers sum the same gradients
    sent_share: float = 1.0  # of the bytes of gradients; a hook that casts sends half of them
    sends_nothing: bool = False  # of its gradients: none between two sums, or all stay local
    sums_amidst: bool = False  # as `no_sync` in all steps of a round but one leaves it
    input_ns: int = 0  # of it, before computing: waiting for data
    host_ns: int = 0  # of it: the host's part, beside computing
    crowded_ns: int = 0  # of it: contention, computing that the job's own communication slows down
    crowded_by_ranks_ns: int = 0  # of that: as ranks of one machine slow each other without sums
    processor_ns: int = 0  # of a processor's time that a rank's own work takes; 0 where unknown
    shared_by: float = 0.0  # the ranks on each processor whose turns are in it, if any are
    measured_ns: int | None = None  # in the run, with the workers that it had
    measured_off: tuple[float, float] = (0.0, 0.0)  # shares of it: it may be less and more by them
    count: int = 1  # of the steps that it stands for
    deviation: float = 0.0  # of them from it, as a share of it
    alone_off: tuple[float, float] = (0.0, 0.0)  # shares of T1: it may be less and more by them
    # The time of each rank in each step, alone.
    spread: Floats = field(default_factory=lambda: np.zeros(0))

    @property
    def alone_ns(self) -> int:
        """Return T1: the step of one worker, without contention."""
        return self.step_ns - self.crowded_ns

    @property
    def _unsent_ns(self) -> int:
        """Return the step of the ranks that its machine has, if they sent nothing."""
        return self.alone_ns + self.crowded_by_ranks_ns

    @property
    def sends_no_buckets(self) -> bool:
        """Say whether other collectives go in place of buckets, as shards of parameters do."""
        return self.sends_nothing or self.others.sum_gradients

    def without_waits(self) -> Step:
        """Return a step of shards whose passes have no waits for them: both are as much shorter."""
        passes_ns = self.forward_ns + self.backward_ns
        if passes_ns <= self.step_ns:
            return self
        forward_ns = self.forward_ns * self.step_ns // passes_ns
        backward_ns = self.step_ns - forward_ns
        ready_ns = self.ready_ns * backward_ns // max(self.backward_ns, 1)
        return replace(self, forward_ns=forward_ns, backward_ns=backward_ns, ready_ns=ready_ns)

    @property
    def sums_only_gradients(self) -> bool:
        """Say whether the script sums gradients itself, and little else.

        Sums of many more bytes are of other tensors too, such as activations or statistics. A run
        does not tell which are which, and buckets of gradients replace those of gradients alone.
        """
        return self.others.are_gradients and not self.others.are_of_more

    @property
    def own_s(self) -> float:
        """Return a rank's own processor time in a step: at most that of its threads, alone.

        Kernel work for messages is charged to the thread that it interrupts, and computing beside
        messages takes longer. Both are in the recorded time and neither is the rank's own.
        """
        threads = max(1, round(self.processor_ns / max(self.step_ns, 1)))
        return 1e-9 * min(self.processor_ns, threads * self._unsent_ns)

    def by_turns_s(self, ranks: Floats | float) -> Floats:
        """Return how much longer a step is if so many ranks compute on each processor by turns."""
        return np.maximum(self.own_s * np.asarray(ranks) - self._unsent_ns * 1e-9, 0.0)

    def with_own_work(self, times: float) -> Step:
        """Return the step with a worker's own work so many times as long.

        Work that is longer than was known was taken for rests beside collectives.
        """
        step_ns = round(self.step_ns * times)
        rest_ns = max(self.others.rest_ns - max(step_ns - self.step_ns, 0), 0)
        return replace(
            self,
            step_ns=step_ns,
            forward_ns=round(self.forward_ns * times),
            backward_ns=round(self.backward_ns * times),
            ready_ns=np.round(self.ready_ns * times).astype(np.int64),
            meetings=self.meetings_after(times),
            others=replace(self.others.slower(times), rest_ns=rest_ns),
        )

    def meetings_after(self, times: float) -> tuple[Meeting, ...]:
        """Return its meetings, each after so many times as long."""
        return tuple(each._replace(after_ns=round(each.after_ns * times)) for each in self.meetings)

    def summed_once(self) -> Step:
        """Return the step with the sums of its last pass alone."""
        counts = (each.gradients for each in self.meetings)
        first = max((count for count in counts if count < len(self.bytes)), default=0)
        return replace(
            self,
            others=self.others.of_the_last_pass(),
            bytes=self.bytes[first:],
            ready_ns=self.ready_ns[first:],
            meetings=(),
        )

    @property
    def parts_of_host_ns(self) -> tuple[int, int]:
        """Return its host's part before and after computing: after, as far as there is room."""
        after_ns = max(self.step_ns - self.forward_ns - self.backward_ns, 0)
        after_ns = min(self.host_ns, after_ns)
        return min(self.host_ns - after_ns, self.forward_ns - self.input_ns), after_ns

    @property
    def computing_ns(self) -> int:
        """Return its passes, without the wait for data and the host's part before them."""
        before_ns, _ = self.parts_of_host_ns
        return self.forward_ns + self.backward_ns - self.input_ns - before_ns

    def with_parts(self, input_s: float, host_s: float) -> Step:
        """Return the step with what its account tells of waiting for data and of the host."""
        input_ns = min(round(input_s * 1e9), self.forward_ns, self.alone_ns)
        host_ns = min(round(host_s * 1e9), self.alone_ns - input_ns)
        return replace(self, input_ns=input_ns, host_ns=host_ns)

    def on_processors_of_its_own(self, crowd: float) -> Step:
        """Return the step on unshared processors, if sharing them made it long."""
        if crowd <= 1 or self.processor_ns * crowd < _COMPUTES_THROUGHOUT * self.step_ns:
            return replace(self, shared_by=crowd)
        return self.with_own_work(min(self.processor_ns / self.step_ns, 1.0))

    def with_alone(self, alone_ns: int, *, waits: bool = True) -> Step:
        """Return the step with T1 by the account.

        Ranks that take turns in being late have less in common than each rank's own time. If
        their sums let them wait for each other (`waits`), they wait for the rest.
        """
        if self.step_ns <= 0:  # waiting fills the step that ranks have in common
            return self
        rest_ns = max(self.step_ns - alone_ns, 0) if waits else 0
        own = self.with_own_work(alone_ns / self.step_ns)
        return replace(own, waiting_ns=self.waiting_ns + rest_ns)

    def with_lateness_as_contention(self, taken: float) -> Step:
        """Return the step with what ranks are late by turns as contention, not as waiting.

        On processors of which so large a share is taken, messages delay one rank and then another.
        A rank that is late in all steps has another cause.
        """
        by_turns_ns = round(taken * (1 - self.lasting_share) * self.waiting_ns)
        return replace(
            self,
            step_ns=self.step_ns + by_turns_ns,
            crowded_ns=self.crowded_ns + by_turns_ns,
            waiting_ns=self.waiting_ns - by_turns_ns,
        )

    @property
    def crowded_by_messages_s(self) -> float:
        """Return its contention by messages: without what ranks that only compute cost each other.

        These take turns on processors, and share the memory of their machine.
        """
        by_messages_ns = self.crowded_ns - self.crowded_by_ranks_ns
        return max(by_messages_ns * 1e-9 - float(self.by_turns_s(self.shared_by)), 0.0)

    def with_calls(self, times: float) -> Step:
        """Return the step with calls of collectives that each take so many times as long."""
        sooner_ns = self._sooner_by_calls_ns(1 - times)
        return replace(
            self,
            step_ns=self.step_ns - sooner_ns,
            processor_ns=max(self.processor_ns - sooner_ns, 0),
            others=replace(self.others, calling_ns=round(self.others.calling_ns * times)),
        )

    def _sooner_by_calls_ns(self, spared: float) -> int:
        """Return how much sooner the step ends if a share of its calls is spared."""
        after_ns = max(self.step_ns - self.forward_ns - self.backward_ns, 0)
        return min(round(self.others.calling_ns * spared), after_ns)

    def with_joined(self, places: Sequence[int]) -> Step:
        """Return the step with some of its collectives joined, which saves the calls for each."""
        spared = (len(places) - 1) / max(len(self.others.op) - 1, 1)
        sooner_ns = self._sooner_by_calls_ns(spared)
        beside_ns = 0
        if self.others.calling_ns == 0:  # the script begins all calls, and then waits
            # A thread works no longer than the step. Other threads do the rest, for the calls too.
            beside_ns = round(max(self.processor_ns - self.step_ns, 0) * spared)
            beside_ns = min(beside_ns, (len(places) - 1) * _BESIDE_A_CALL_NS)
        return replace(
            self,
            others=self.others.joined(places),
            step_ns=self.step_ns - sooner_ns,
            processor_ns=max(self.processor_ns - sooner_ns - beside_ns, 0),
        )
