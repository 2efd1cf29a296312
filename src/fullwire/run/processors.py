"""The processor time of a run's ranks, and of other work on the same processors."""

from __future__ import annotations

import numpy as np

from fullwire.run.facts import Pairs
from fullwire.run.kinds import usual_step_s
from fullwire.run.placement import ranks_per_processor
from fullwire.run.run import Run

# Kernel work for a communicating thread's own second, itself included: some runs on no thread.
KERNEL_FACTOR = 1.28
_MOST_SAMPLES = 20_000  # used: later ones add little
_MOST_OF_OTHERS = 0.8  # of the processors: the rest was enough for the run


def own_work_s(run: Run) -> float:
    """Return the processor time of a rank in a step, beside the threads that communicate.

    A rank has no more time than its processors. The recorded work is a mean of all steps, and the
    usual step leaves disturbed ones out. A virtual machine may get a fraction of its processors for
    a second. The kernel counts all of that second as work.

    It is 0 where the two cannot be told apart. With our backend the waiting thread does the work,
    except for DDP's buckets. The threads of other backends poll.
    """
    backend = run.facts.backend
    if backend == "gloo" or (backend == "fullwire" and run.facts.buckets is not None):
        own_s = _usual_s(run.facts.processor_s) - _usual_s(run.facts.communication_processor_s)
        crowd, step_s = ranks_per_processor(run), usual_step_s(run)
        return max(min(own_s, step_s / crowd) if crowd and step_s else own_s, 0.0)
    return 0.0


def least_step_s(run: Run) -> float:
    """Return the shortest step in which the recorded processors can do the job's own work.

    The work may move to other processes of the job, such as loaders of data. It is 0 where the own
    work is unknown.
    """
    own_s = own_work_s(run)
    if not own_s:
        return 0.0
    return ranks_per_processor(run) * (own_s + _usual_s(run.facts.children_processor_s))


def share_of_others(run: Run) -> float:
    """Return the share of the processors that other work took in the steps of a run.

    The ranks' child processes, such as loaders of data, are the job's own.
    """
    if run.facts.processor_s is None:
        return 0.0
    steps = run.spans.rows((run.spans.lane == "host") & (run.spans.name == "step"))
    used = used_share(run)
    if used is None:
        return 0.0
    communicating_s = _usual_s(run.facts.communication_processor_s)
    own_s = _usual_s(run.facts.processor_s) + _usual_s(run.facts.children_processor_s)
    work_s = own_s + (KERNEL_FACTOR - 1) * communicating_s
    step_s = float((steps.end_ns - steps.start_ns).mean()) * 1e-9
    own_share = work_s * ranks_per_processor(run) / max(step_s, 1e-9)
    return min(max(used - own_share, 0.0), _MOST_OF_OTHERS)


def used_share(run: Run) -> float | None:
    """Return the used share of all processors in the steps; None where samples are missing."""
    steps, hosts = (
        run.spans.rows((run.spans.lane == "host") & (run.spans.name == "step")),
        run.hosts,
    )
    if not len(steps) or not len(hosts):
        return None
    is_within = (hosts.time_ns > steps.start_ns.min()) & (hosts.time_ns < steps.end_ns.max())
    rows = hosts.rows(np.flatnonzero(is_within)[:_MOST_SAMPLES])
    rows = rows.rows(np.array([str(name).startswith("cpu") for name in rows.device], bool))
    return float(rows.utilization.mean()) if len(rows) else None


def _usual_s(per_rank: Pairs | None) -> float:
    if not per_rank:
        return 0.0
    return float(np.mean([used_s for _, used_s in per_rank]))
