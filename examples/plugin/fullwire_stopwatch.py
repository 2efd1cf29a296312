"""A format of your own: `# stopwatch`, then the seconds of a step on each line."""

import math

import numpy as np

from fullwire import DamagedInput
from fullwire.importers import CERTAIN, UNLIKE, Format
from fullwire.run.facts import Facts
from fullwire.run.run import Provenance, Run, Spans


def seconds_in(path):
    """Return the seconds that a file lists; a damaged line is refused with its number."""
    times_s = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        if line.startswith("#"):
            continue
        try:
            time_s = float(line)
        except ValueError:
            time_s = math.nan
        if not 0 <= time_s < math.inf:
            problem = f"expected the seconds of a step, got {line[:60]!r}"
            raise DamagedInput(path, problem, line=number)
        times_s.append(time_s)
    if not times_s:
        raise DamagedInput(path, "expected the seconds of one step or more, got none")
    return times_s


def read(files, options):
    """Make a run of one rank whose steps take the seconds that the file lists."""
    end_ns = np.rint(np.cumsum(seconds_in(files[0])) * 1e9).astype(int)
    steps, text = np.arange(len(end_ns)), np.full((2, len(end_ns)), [["host"], ["step"]], object)
    times = {"start_ns": np.concatenate([[0], end_ns[:-1]]), "end_ns": end_ns}
    spans = Spans(rank=0 * steps, step=steps, lane=text[0], name=text[1], **times)
    source = Provenance(origin="imported", source=str(files[0]))
    return Run(provenance=source, facts=Facts(workers=1), spans=spans)


FORMAT = Format(
    key="stopwatch",
    label="stopwatch files",
    looks_like=lambda beginning: CERTAIN if beginning.startswith(b"# stopwatch") else UNLIKE,
    read=read,
)
