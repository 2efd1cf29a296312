"""Leave torch's compiler out of each Python process whose PYTHONPATH names this folder."""

import importlib.util
import os

spec = importlib.util.spec_from_file_location(
    "tests_uncompiled", os.path.join(os.path.dirname(__file__), "..", "uncompiled.py")
)
assert spec is not None
assert spec.loader is not None
uncompiled = importlib.util.module_from_spec(spec)
spec.loader.exec_module(uncompiled)
uncompiled.leave_out()
