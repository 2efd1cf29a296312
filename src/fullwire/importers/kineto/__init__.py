"""Traces of the PyTorch profiler (Kineto): CUDA, ROCm or CPU only, one rank or thousands."""

from fullwire.importers.kineto.assemble import read_kineto, traces_in
from fullwire.importers.kineto.fleet import import_kineto
from fullwire.importers.kineto.scan import looks_like

__all__ = ["import_kineto", "looks_like", "read_kineto", "traces_in"]
