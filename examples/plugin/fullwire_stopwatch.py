"""A format of your own: `# stopwatch`, then the seconds of a step on each line."""

import numpy as np

from fullwire.importers import CERTAIN, UNLIKE, Format
from fullwire.run.facts import Facts
from fullwire.run.run import Provenance, Run, Spans


def read(files, options):
    """Make a run of one rank whose steps take the seconds that the file lists."""
    end_ns = np.rint(np.cumsum(np.loadtxt(files[0], ndmin=1)) * 1e9).astype(int)
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
