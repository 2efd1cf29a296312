"""A built-in workload as a Run: one worker, one step, every number modelled."""

from __future__ import annotations

import numpy as np

from fullwire.run.facts import Facts
from fullwire.run.run import Gradients, Provenance, Run, Spans
from fullwire.workloads import Workload


def modelled_run(workload: Workload) -> Run:
    """Lay a workload's step out from time 0: forward, backward, optimizer."""
    device = workload.device
    backward_end_ns = workload.forward_ns + workload.backward_ns
    count = len(workload.gradient_bytes)
    return Run(
        provenance=Provenance(origin="modelled", source=workload.name, basis="modelled"),
        facts=Facts(
            workers=1,
            model=workload.model.title,
            device=device.title,
            batch=workload.batch,
            precision=device.precision,
            efficiency=f"matrix work {device.matrix_efficiency:.0%}, "
            f"memory-bound work {device.memory_efficiency:.0%} of the peak",
        ),
        spans=Spans(
            rank=np.zeros(4, np.int64),
            step=np.zeros(4, np.int64),
            lane=np.array(["host", "compute", "compute", "compute"], object),
            name=np.array(["step", "forward", "backward", "optimizer"], object),
            start_ns=np.array([0, 0, workload.forward_ns, backward_end_ns]),
            end_ns=np.array(
                [workload.step_ns, workload.forward_ns, backward_end_ns, workload.step_ns]
            ),
        ),
        gradients=Gradients(
            rank=np.zeros(count, np.int64),
            step=np.zeros(count, np.int64),
            order=np.arange(count),
            bytes=workload.gradient_bytes,
            ready_ns=workload.forward_ns + workload.gradient_ready_ns,
        ),
    )
