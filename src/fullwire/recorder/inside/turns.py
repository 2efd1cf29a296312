"""Turns: probe steps in which the ranks of one machine compute one after another.

In other probe steps all ranks compute at once. They share the machine's memory, and perhaps its
processors, so each takes longer than one worker would. In a turn the others sleep.

A step has two turns of each rank: its passes until the last gradient is ready, and the rest of the
step after the sums. A rank waits until the ranks before it have had theirs. After its own it waits
for those behind it, so all ranks begin their sums, and their next step, together.

The ranks of a machine share a file in the recording's folder. Each of them writes its own places in
it, and counts its turns there. The first of them also announces the next step with turns. It does
so one step ahead: the sums of the step between end on no rank before the announcement.

Nothing may harm the job. A rank that waits too long ends the turns of all ranks for good. So does
one that issues another collective in its turn, because the others have to join it.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist

from .journal import Journal, Note, machine_here

# Steps, counted from 0, that are no other probes. With two to four kinds of steps that take turns,
# the first three are of two or three kinds.
STEPS = (6, 11, 16, 31, 46)
_LONGEST_S = 10.0  # that the turns of a step may add to it
_MOST_RANKS = 1024
_PATIENCE, AT_LEAST_S = 4.0, 1.0  # times as long as the turns of all should take; seconds
_POLL_S = 2e-3  # more often, the others would slow down the rank whose turn it is
_OVER, _ANNOUNCED, _FIRST_RANK = 0, 1, 2  # places in the file; then each rank has two
_COUNT, _STEP = 0, 1  # a rank's: 1 and the turns that it has had, and the steps that it has taken


_State: TypeAlias = Literal["before", "in passes", "in the sums", "after the sums"]
_IN_A_TURN = ("in passes", "after the sums")


class Turns:
    """Lets the ranks of one machine compute one after another in a few steps."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._places = memoryview(array.array("q", [1]))  # over, until the ranks share a file
        self._rank = -1
        self._members: Sequence[int] = ()  # the ranks of this machine
        self._ended_s = self._step_s = 0.0  # when the last step ended, and how long it was
        self._state: _State = "before"
        self.is_on = False

    def step_ended(self, steps: int, *, is_kept_apart: bool) -> None:
        """Note a step with turns that ends, and decide whether step number `steps` has turns."""
        if self.is_on:
            is_whole = self._state == "after the sums" and is_kept_apart
            self._end("before")
            is_whole = is_whole and not self._is_over
            self._journal.note(Note.TURNS, int(is_whole), time.monotonic_ns(), 0)
            if not is_whole:
                self.stop()
        now_s = time.monotonic()
        self._step_s, self._ended_s = now_s - self._ended_s, now_s
        self.is_on = False
        if steps <= STEPS[-1] and self._joined(steps):
            self.is_on = steps in STEPS and self._places[_ANNOUNCED] == steps
            if steps + 1 in STEPS and self._rank == self._members[0]:
                self._announce(steps + 1)

    def passes_begin(self) -> None:
        """Wait for this rank's turn to compute the passes of a step."""
        if self._state == "before":
            self._begin("in passes")
        elif self._state == "after the sums":  # these passes belong to the turn before
            self.stop()

    def passes_end(self) -> None:
        """End this rank's turn, and wait for those of the others."""
        if self._state == "in passes":
            self._end("in the sums")

    def sums_end(self) -> None:
        """Wait for this rank's turn to do the rest of the step."""
        if self._state == "in the sums":
            self._begin("after the sums")

    def optimizer_begins(self, *, is_leading: bool) -> None:
        """Check that this is the one optimizer of the step, after sums that could wait."""
        if self._state != "after the sums" or not is_leading:
            self.stop()

    def interrupted(self) -> None:
        """Say that this rank issues a collective that the others have to join."""
        if self._state in _IN_A_TURN:
            self.stop()

    def stop(self) -> None:
        """End the turns of all ranks, in this step and in those to come."""
        self._places[_OVER] = 1

    @property
    def _is_over(self) -> bool:
        return bool(self._places[_OVER])

    def _joined(self, steps: int) -> bool:
        """Say whether this rank takes part in turns, and tell the others its number of steps."""
        if self._rank < 0:
            self._join()
        if self._is_over:
            return False
        self._places[self._place(self._rank, _STEP)] = steps
        if not self._members and steps + 2 >= STEPS[0]:  # all ranks have ended their first step
            ranks = range(dist.get_world_size())
            self._members = [rank for rank in ranks if self._places[self._place(rank, _COUNT)]]
        return len(self._members) > 1

    def _join(self) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            return
        self._rank, world = dist.get_rank(), dist.get_world_size()
        if not 1 < world <= _MOST_RANKS or torch.cuda.is_initialized():
            return  # devices have their own memory
        try:
            path = Path(self._journal.directory) / f"turns.{machine_here()}"
            self._places = _shared(path, self._rank)
        except (OSError, ValueError):  # as on a full disk: there are no turns
            return
        self._places[self._place(self._rank, _COUNT)] = 1

    @staticmethod
    def _place(rank: int, which: int) -> int:
        return _FIRST_RANK + 2 * rank + which

    def _announce(self, step: int) -> None:
        """Announce the next step with turns if it does not take too long.

        A rank that joined the job late has taken fewer steps than the others.
        """
        taken = [self._places[self._place(rank, _STEP)] for rank in self._members]
        if max(taken) - min(taken) <= 1 and len(self._members[1:]) * self._step_s <= _LONGEST_S:
            self._places[_ANNOUNCED] = step

    def _begin(self, state: _State) -> None:
        place = self._members.index(self._rank)
        self._wait_for(self._members[:place], self._places[self._place(self._rank, _COUNT)] + 1)
        self._state = state

    def _end(self, state: _State) -> None:
        """Count a turn that ends, and wait until all others have had as many."""
        if self._state in _IN_A_TURN:
            own = self._place(self._rank, _COUNT)
            self._places[own] += 1
            self._wait_for(self._members, self._places[own])
        self._state = state

    def _wait_for(self, ranks: Sequence[int], count: int) -> None:
        """Wait until these ranks have counted so far, but not for long."""
        began_ns, began_s = time.monotonic_ns(), time.monotonic()
        until_s = began_s + AT_LEAST_S + _PATIENCE * len(self._members) * self._step_s
        places = [self._place(rank, _COUNT) for rank in ranks]
        while not self._is_over and any(self._places[place] < count for place in places):
            if time.monotonic() > until_s:
                self.stop()
            time.sleep(_POLL_S)
        self._journal.note(Note.TURN, 0, began_ns, time.monotonic_ns() - began_ns)


def _shared(path: Path, rank: int) -> memoryview[int]:
    """Map a file of whole numbers, which are 0 at first, into the memory of each rank."""
    building = path.with_name(f"{path.name}.{rank}")
    building.write_bytes(bytes(8 * (_FIRST_RANK + 2 * _MOST_RANKS)))
    with contextlib.suppress(FileExistsError):  # another rank was first
        os.link(building, path)
    building.unlink()
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
