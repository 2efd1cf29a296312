"""One worker that commits steps, without any training: the mesh and the membership alone."""

from __future__ import annotations

import os
import sys
import time

from fullwire.resilience.mesh import Mesh
from fullwire.resilience.place import Place


def main() -> None:
    """Commit steps until the wanted one; tell of each epoch and of the end."""
    wanted, hangs_at = int(sys.argv[1]), int(sys.argv[2])
    place = Place.told()
    assert place is not None
    mesh = Mesh(place)
    step = 0
    while step < wanted:
        epoch = mesh.epoch()
        step = max(step, epoch.base_step)
        print(f"epoch {epoch.epoch} {epoch.members} {step} {time.monotonic()}", flush=True)
        while step < wanted:
            mesh.wait(False)
            if step == hangs_at and os.environ.get("HANGS") == str(mesh.rank):
                print("hangs", flush=True)
                time.sleep(1000)
            time.sleep(0.005)
            mesh.wait(True)
            if not mesh.commit(epoch.epoch, step + 1):
                break
            step += 1
            if step % 20 == 0:
                print(f"step {step} {time.monotonic()}", flush=True)
    print(f"done {step}", flush=True)
    mesh.close()


main()
