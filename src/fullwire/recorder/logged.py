"""`fullwire.log`: a job tells its recorder a metric."""

from __future__ import annotations

import sys
from typing import Any

from fullwire.errors import UsageError
from fullwire.units import shown


def log(*, step: int | None = None, **values: Any) -> None:
    """Tell the recorder metrics of this moment; do nothing if the job is not recorded.

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
