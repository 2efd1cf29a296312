"""Find the library whose trainer runs this job, because settings have that library's names."""

from __future__ import annotations

import sys

_FRAMEWORKS = {  # by the module that jobs load; a trainer comes before the library below it
    "torchtitan": "torchtitan",
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "transformers.trainer": "transformers",
    "deepspeed": "deepspeed",
}


def framework_in_use() -> str | None:
    """Return the library whose trainer runs this job, or None if the script has its own loop."""
    for module, name in _FRAMEWORKS.items():
        if module in sys.modules:
            return name
    # Models of transformers load accelerate as well. A job that uses it has made its state.
    state = sys.modules.get("accelerate.state")
    return "accelerate" if state is not None and state.PartialState._shared_state else None
