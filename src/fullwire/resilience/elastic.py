"""The job of a script in a training that goes on when workers are lost or come."""

from __future__ import annotations

from typing import Any

from fullwire.resilience.job import Job
from fullwire.resilience.launched import take_seat
from fullwire.resilience.mesh import Mesh
from fullwire.resilience.place import Place
from fullwire.resilience.rounds import Outer


def elastic(
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    sync_every: int = 1,
    fragments: int = 1,
    outer_rate: float | None = None,
    outer_momentum: float | None = None,
) -> Job:
    """Make a training job that outlives its workers.

    Start it with `fullwire run --workers 8 --min 4 -- python train.py`. Workers of torchrun, Slurm
    or Kubernetes find each other too. Without a launcher the job has this process alone.

    - `model`, `optimizer`: as in a plain loop. All workers begin with the first one's parameters.
      Of a model sharded with FSDP2, one function in their place: `build(mesh)` returns the model,
      `fully_shard(..., mesh=mesh)` applied, its optimizer, and its scheduler if there is one. Each
      change of the workers builds anew; the loop takes `job.model` and `job.optimizer`.
    - `scheduler`: the script steps it. A worker that joins receives its state.
    - `sync_every`: the workers add up once in so many steps, as DiLoCo does. Meanwhile each takes
      its own. Such a round counts for all workers or for none.
    - `fragments`: the parameters travel in so many parts, each once in `sync_every` steps and while
      the workers compute, as in Streaming DiLoCo. So parameters differ until the loop ends.
    - `outer_rate`, `outer_momentum`: of the optimizer that takes a round's mean change (SGD with
      Nesterov's momentum), 0.7 and 0.9 unless you give others. With 1 and 0, parameters become
      their mean, as in local SGD. They go with `sync_every` above 1.

        job = fw.elastic(model, optimizer)
        for inputs, labels in job.batches(dataset, batch_size=48):
            with job.step():
                loss = criterion(job.model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    """
    take_seat()
    place = Place.told()
    # Checked before workers meet.
    outer = Outer(sync_every, fragments, outer_rate, outer_momentum)
    if optimizer is None:
        # FSDP2 takes a while to load.
        from fullwire.resilience.sharded import ShardedJob, check

        check(model, place, outer.every)
        return ShardedJob(model, None if place is None else Mesh(place))
    mesh = None if place is None else Mesh(place)
    return Job(model, optimizer, scheduler, mesh, outer if outer.every > 1 else None)
