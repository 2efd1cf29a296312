"""Is the network the bottleneck of your training, and what would fix it?

    import fullwire as fw

    run = fw.read("job.run")                       # or "vgg16@v100", or another tool's trace
    table = fw.whatif(run, bandwidth="10Gbps,100Gbps", workers=64)
    table["scaling_factor"]
    fw.explain("job.run").verdict.sentence         # of a recorded job of several workers

Text carries its unit; bare numbers are bits per second, bytes and seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullwire import workloads as workloads
    from fullwire.answers.cluster_fit import fit_cluster as fit_cluster
    from fullwire.answers.codecs import codecs as codecs
    from fullwire.answers.collective import collective as collective
    from fullwire.answers.compare import Comparison as Comparison
    from fullwire.answers.compare import compare as compare
    from fullwire.answers.doctor import Checkup as Checkup
    from fullwire.answers.doctor import doctor as doctor
    from fullwire.answers.explain import Explanation as Explanation
    from fullwire.answers.explain import explain as explain
    from fullwire.answers.fixing import apply_fixes as apply_fixes
    from fullwire.answers.fixing import run_recipe as run_recipe
    from fullwire.answers.joining import join as join
    from fullwire.answers.opening import write as write
    from fullwire.answers.plan import plan as plan
    from fullwire.answers.traffic import flows as flows
    from fullwire.answers.traffic import jobs_in as jobs_in
    from fullwire.answers.trials import Tuning as Tuning
    from fullwire.answers.tune import tune as tune
    from fullwire.answers.watch import watch as watch
    from fullwire.answers.watch import watching as watching
    from fullwire.answers.watched import Watched as Watched
    from fullwire.answers.whatif import WhatIf as WhatIf
    from fullwire.answers.whatif import replay as replay
    from fullwire.answers.whatif import whatif as whatif
    from fullwire.clusters import cluster as cluster
    from fullwire.compression.hook import compress as compress
    from fullwire.errors import DamagedInput as DamagedInput
    from fullwire.errors import FullwireError as FullwireError
    from fullwire.errors import UsageError as UsageError
    from fullwire.importers import read as read
    from fullwire.recorder import log as log
    from fullwire.recorder.record import record as record
    from fullwire.report.chrome import export as export
    from fullwire.report.page import write_page as write_page
    from fullwire.resilience.elastic import elastic as elastic
    from fullwire.resilience.job import Job as Job
    from fullwire.resilience.workers import run_workers as run_workers
    from fullwire.run.run import Run as Run
    from fullwire.studies.papers import Study as Study
    from fullwire.studies.papers import study as study
    from fullwire.transport.wire import wire as wire

from fullwire.version import __version__ as __version__

# Loaded when first asked for, so that `import fullwire` costs nothing.
_PLACES = {
    "Checkup": "fullwire.answers.doctor:Checkup",
    "Comparison": "fullwire.answers.compare:Comparison",
    "DamagedInput": "fullwire.errors:DamagedInput",
    "Explanation": "fullwire.answers.explain:Explanation",
    "FullwireError": "fullwire.errors:FullwireError",
    "Job": "fullwire.resilience.job:Job",
    "Run": "fullwire.run.run:Run",
    "Study": "fullwire.studies.papers:Study",
    "Tuning": "fullwire.answers.trials:Tuning",
    "UsageError": "fullwire.errors:UsageError",
    "Watched": "fullwire.answers.watched:Watched",
    "WhatIf": "fullwire.answers.whatif:WhatIf",
    "apply_fixes": "fullwire.answers.fixing:apply_fixes",
    "cluster": "fullwire.clusters:cluster",
    "codecs": "fullwire.answers.codecs:codecs",
    "collective": "fullwire.answers.collective:collective",
    "compare": "fullwire.answers.compare:compare",
    "compress": "fullwire.compression.hook:compress",
    "doctor": "fullwire.answers.doctor:doctor",
    "elastic": "fullwire.resilience.elastic:elastic",
    "explain": "fullwire.answers.explain:explain",
    "export": "fullwire.report.chrome:export",
    "fit_cluster": "fullwire.answers.cluster_fit:fit_cluster",
    "flows": "fullwire.answers.traffic:flows",
    "jobs_in": "fullwire.answers.traffic:jobs_in",
    "join": "fullwire.answers.joining:join",
    "log": "fullwire.recorder:log",
    "plan": "fullwire.answers.plan:plan",
    "read": "fullwire.importers:read",
    "record": "fullwire.recorder.record:record",
    "replay": "fullwire.answers.whatif:replay",
    "run_recipe": "fullwire.answers.fixing:run_recipe",
    "run_workers": "fullwire.resilience.workers:run_workers",
    "study": "fullwire.studies.papers:study",
    "tune": "fullwire.answers.tune:tune",
    "watch": "fullwire.answers.watch:watch",
    "watching": "fullwire.answers.watch:watching",
    "whatif": "fullwire.answers.whatif:whatif",
    "wire": "fullwire.transport.wire:wire",
    "workloads": "fullwire.workloads:",
    "write": "fullwire.answers.opening:write",
    "write_page": "fullwire.report.page:write_page",
}
__all__ = sorted([*_PLACES, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'fullwire' has no attribute {name!r}")
    module, _, attribute = _PLACES[name].partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded


def __dir__() -> list[str]:
    return list(__all__)
