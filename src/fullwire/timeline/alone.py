"""T1, the step of one worker, as far as a job of several workers tells it, and how sure that is.

All answers take it from here: it is the computing, the input and the host's part of the account.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from weakref import WeakKeyDictionary

import numpy as np

from fullwire.run.placement import sums_on_processors
from fullwire.run.processors import share_of_others
from fullwire.run.run import Run, Spans
from fullwire.run.usual import Alone, marks_of_steps
from fullwire.timeline.account import Account, Part, account
from fullwire.timeline.contention import CrowdingSource
from fullwire.timeline.transfers import world

# The error of one run's T1, below and above, as shares of it. With probe steps it is three times
# the worst error of the 8 fitted cells of validation/contention.py (2 or 4 ranks, two processors).
# 23 of the 24 judged cells were within the interval.
_OFF: Mapping[CrowdingSource, tuple[float, float]] = {
    "probe steps": (0.15, 0.15),
    "run delay": (0.40, 0.30),  # Work beside memory traffic is slower too.
    "none": (0.40, 0.10),  # On processors; devices compute beside communication nearly as alone.
}
# Where ranks computed in turns, twice the worst error of the 8 fitted cells: 6.3 %.
_OFF_IN_TURNS = (0.12, 0.12)
_OFF_ON_DEVICES = (0.10, 0.05)
REPEATS = 0.02  # A job that is started again repeats within this.
_FOUND: WeakKeyDictionary[Run, Alone] = WeakKeyDictionary()


def alone(run: Run, usual: Account) -> Alone:
    """Return T1 by the account of a run's usual steps.

    Where steps are of several kinds, it is the mean of theirs, each kind at its share.
    """
    if kinds := usual.by_kind():
        of_kinds = tuple(_alone(run, kind) for kind in kinds)
        shares = [kind.share for kind in usual.kinds.kinds]
        time_s, low_s, high_s = np.dot(shares, [each[:3] for each in of_kinds]).tolist()
        besides = [(each.input_s, each.host_s, each.by_ranks_s) for each in of_kinds]
        besides_s = np.dot(shares, besides).tolist()
        found = Alone(time_s, low_s, high_s, of_kinds, usual.crowding.is_told, *besides_s)
    else:
        found = _alone(run, usual)
    _FOUND[run] = found
    return found


def is_recorded_alone(run: Run) -> bool:
    """Say whether the run is a recording of one worker. Its step is T1, with sums to itself.

    A simulation, or a trace that holds one of several ranks, has no measured T1.
    """
    return run.facts.workers == 1 and run.provenance.origin == run.provenance.basis == "measured"


def _alone(run: Run, usual: Account) -> Alone:
    alone_s = usual.step_s if is_recorded_alone(run) else usual.alone_s
    parts, crowding = usual.parts_s, usual.crowding
    low_s, high_s = _between_s(run, usual, alone_s)
    return Alone(
        alone_s,
        low_s,
        high_s,
        tells_contention=crowding.is_told,
        input_s=parts[Part.INPUT.key],
        host_s=parts[Part.HOST.key] if crowding.host_s is None else crowding.host_s,
        by_ranks_s=min(crowding.by_ranks_s, max(usual.step_s - alone_s, 0.0)),
    )


def _between_s(run: Run, usual: Account, alone_s: float) -> tuple[float, float]:
    crowding, facts = usual.crowding, run.facts
    if world(run) == 1:
        below, above = REPEATS, REPEATS
    elif facts.alone_less_share is not None and facts.alone_more_share is not None:
        # A simulation has its T1 from another run, and is no surer of it than that run.
        below, above = facts.alone_less_share, facts.alone_more_share
    elif crowding.source in ("kernels", "the plan", "the simulation") or not (
        crowding.is_told or sums_on_processors(run)
    ):
        # Kernels that never ran alone may be slowed twice as much as the others, or not at all.
        open_share = (1 - crowding.compared) * usual.crowded_s / alone_s if alone_s else 0.0
        below, above = (math.hypot(off, open_share) for off in _OFF_ON_DEVICES)
        below = math.hypot(below, usual.untold_crowding_s / alone_s) if alone_s else below
    else:
        return _between_on_processors_s(run, usual)
    return alone_s * max(1 - below, 0.0), alone_s * (1 + above)


def _between_on_processors_s(run: Run, usual: Account) -> tuple[float, float]:
    """Return the range of T1 where the job's sums, and perhaps other programs, share processors.

    Chance in probe steps concerns computing alone. So do other programs: one worker beside them may
    wait for a processor, or find one free. It still runs as long as in a probe step, within the
    error of T1 itself.
    """
    crowding = usual.crowding
    below, above = _OFF_IN_TURNS if crowding.is_by_turns else _OFF[crowding.source]
    computing_s = min(usual.parts_s[Part.COMPUTE.key], usual.alone_s)
    rest_s = usual.alone_s - computing_s  # input, and the host's part
    by_chance = 2 * crowding.scatter / max(crowding.probes, 1) ** 0.5
    low, high = max(1 - math.hypot(below, by_chance), 0.0), 1 + math.hypot(above, by_chance)
    low *= crowding.ran
    ran_s = 0.0
    if crowding.source == "probe steps":
        left = 1 - share_of_others(run)
        low, high = low * left, high / left
        ran_s = min((time_s for _, time_s in run.facts.probe_compute_s or ()), default=0.0)
    ran_s = (1 - below) * min(ran_s, computing_s)
    low_s = max(low * computing_s, ran_s) + (1 - below) * rest_s
    # One worker beside the same programs does no more than each rank did in its step.
    most_s = (1 + above) * max(usual.step_s, usual.alone_s)
    return low_s, min(high * computing_s + (1 + above) * rest_s, most_s)


def alone_by_account(run: Run, parts: Iterable[Spans] | None = None) -> Alone | None:
    """Return T1 by the run's own account; None for a run of one worker, or one without steps.

    One worker's step is its own T1. Where the run has only some of its spans, `parts` are all of
    them. An account that was drawn up before is not drawn up again: line rates do not change its
    T1.
    """
    if (run.facts.workers or 1) < 2 or not len(marks_of_steps(run)):
        return None
    if run not in _FOUND:
        alone(run, account(run, {}, parts))
    return _FOUND[run]


def beside_computing_s(run: Run) -> tuple[float, float]:
    """Return the input's and the host's part of one worker's recorded step; 0 where none is."""
    is_recorded = run.facts.workers == 1 and run.provenance.basis != "modelled"
    if not is_recorded or not len(marks_of_steps(run)):
        return 0.0, 0.0
    parts = account(run, {}).parts_s
    return parts[Part.INPUT.key], parts[Part.HOST.key]
