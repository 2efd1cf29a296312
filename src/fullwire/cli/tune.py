"""fullwire tune: try the fixes of a job, keep those that help, write a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullwire.cli.leaving import signals_end_it
from fullwire.cli.options import ClusterOption, Json, print_json
from fullwire.cli.telling import say, tell
from fullwire.errors import UsageError


def tune(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="torchrun, python, mpirun, ...")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="A new folder for the recipe")
    ],
    budget: Annotated[str, typer.Option(metavar="TIME", help="For all recordings")] = "10min",
    trials: Annotated[int | None, typer.Option(min=1, help="Fixes to try at most")] = None,
    steps: Annotated[
        int | None, typer.Option(min=10, help="Steps of each recording [as many as decide]")
    ] = None,
    allow: Annotated[
        str, typer.Option(help="Risk of fixes: exact, numeric (rounds gradients) or semantic")
    ] = "exact",
    lab: Annotated[bool, typer.Option("--lab", help="Record in a lab on this machine")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="With --lab: how many hosts")] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="RATE", help="With --lab: the line rate, 1Gbps")
    ] = None,
    cluster: ClusterOption = None,
    scratch: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Working directory of each trial")
    ] = None,
    json: Json = False,
) -> None:
    """Try the fixes of a job, and keep those that help.

    The recipe holds them, and no script is edited. Each trial records the job with one fix more,
    and ends it after some steps. A fix is kept if it helps by more than noise:

    fullwire tune -o tuned -- torchrun --nproc-per-node=2 train.py
    fullwire tune --lab --workers 2 --rate 1Gbps -o tuned -- python train.py
    fullwire run -r tuned/recipe.toml -- torchrun --nproc-per-node=2 train.py

    A trial ends before the script does. Files that its loop writes are written in each trial;
    --scratch gives it another folder. Ctrl-C keeps the best so far.
    """
    from typing import cast, get_args

    from fullwire.answers.tune import tune as tuned
    from fullwire.clusters import cluster as described
    from fullwire.fixes import Risk
    from fullwire.lab.description import describe
    from fullwire.report.as_data import tuning_object
    from fullwire.report.fixing import print_tuning
    from fullwire.report.page import write_page

    if allow not in get_args(Risk):
        raise UsageError(f"--allow: expected {', '.join(get_args(Risk))}, got {allow}")
    if not lab and any(given is not None for given in (workers, rate, cluster)):
        raise UsageError("--workers, --rate and --cluster describe a lab: expected --lab with them")
    description = None
    if lab:
        description = describe(
            workers=workers,
            rate=[rate] if rate else (),
            cluster=None if cluster is None else described(cluster),
        )
    with signals_end_it():
        found = tuned(
            command,
            output,
            budget=budget,
            trials=trials,
            steps=steps,
            allow=cast("Risk", allow),
            lab=description,
            scratch=scratch,
            say=say,
        )
    if json:
        print_json(tuning_object(found))
    else:
        print_tuning(found)
    page = output / "report.html"  # last: a page that cannot be drawn takes no answer away
    write_page(list(map(str, found.recordings)), page, tuning=found)
    if not json:
        tell(f"written: {page}")
