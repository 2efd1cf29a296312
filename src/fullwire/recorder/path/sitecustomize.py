"""Loaded by every Python of a recorded job at its start, because PYTHONPATH names this folder.

It steps aside first: an existing sitecustomize runs as if this one were not there. Then it arms the
recorder, which does nothing until the process imports torch.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
INSIDE = os.path.join(os.path.dirname(HERE), "inside")


def _run_the_one_behind() -> None:
    sys.path[:] = [place for place in sys.path if os.path.abspath(place) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _arm_the_recorder() -> None:
    # By its place and not as fullwire.recorder.inside: the job's Python need not have fullwire.
    spec = importlib.util.spec_from_file_location(
        "fullwire_inside", os.path.join(INSIDE, "__init__.py"), submodule_search_locations=[INSIDE]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fullwire_inside"] = module
    spec.loader.exec_module(module)
    module.arm()


try:
    _run_the_one_behind()
finally:  # what it raises is Python's to print, as it would be without us
    _arm_the_recorder()
