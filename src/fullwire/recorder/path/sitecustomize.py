"""Arm the recorder in every Python of a recorded job: PYTHONPATH names this folder.

Python loads this module at its start. It first runs an existing sitecustomize, as if this one were
absent. Then it arms the recorder, which waits until the process imports torch.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
INSIDE = os.path.join(os.path.dirname(HERE), "inside")


try:
    sys.path[:] = [place for place in sys.path if os.path.abspath(place) != HERE]
    behind = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if behind is not None and behind.loader is not None:
        theirs = importlib.util.module_from_spec(behind)
        sys.modules["sitecustomize"] = theirs
        behind.loader.exec_module(theirs)
finally:  # Python prints the other module's errors, the same as ever
    # Load it by path, because the job's Python may lack the package fullwire.recorder.inside.
    spec = importlib.util.spec_from_file_location(
        "fullwire_inside", os.path.join(INSIDE, "__init__.py"), submodule_search_locations=[INSIDE]
    )
    assert spec is not None
    assert spec.loader is not None
    inside = importlib.util.module_from_spec(spec)
    sys.modules["fullwire_inside"] = inside
    spec.loader.exec_module(inside)
    inside.arm()
