"""Record a command, which runs unchanged, as a Run.

A recorder works inside the command's processes, and a sampler of the host runs beside them.

    record.py      the whole: run the command, or each of its parts, and make the Run
    launch.py      the command, in an environment that makes each of its Pythons load the recorder
    path/          the folder that this environment puts on PYTHONPATH: one sitecustomize.py
    inside/        the recorder itself, which runs in the job: standard library and torch only
    sampler.py     the process that samples the host, before it leaves the rest to native code
    journals.py    the files that the processes wrote, read as far as they are whole
    samples.py     the files that the samplers wrote, read in the same way, and their tables
    steps.py       notes of one process -> its steps
    hosts.py       facts of the hosts, and the differences between the clocks of machines
    assemble.py    journals and samples -> Run
"""

from __future__ import annotations

import sys
from typing import Any

from fullwire.errors import UsageError
from fullwire.units import shown


def log(*, step: int | None = None, **values: Any) -> None:
    """Tell the recorder metrics of this moment. It has no effect in an unrecorded job.

    - `step`: the job's own count of steps. Without it, the recorder counts optimizer steps.
    - `values`: the metrics by name, each a number.

        fw.log(loss=loss.item(), step=step)
    """
    for name, value in values.items():
        try:
            float(value)
        except (TypeError, ValueError, RuntimeError):
            raise UsageError(f"log: expected a number for {name}, got {shown(value)}") from None
    take = getattr(sys.modules.get("fullwire_inside"), "take_metrics", None)
    if take is not None:
        take(values, step)
