"""fullwire fixes lists the fixes; apply and run start a job with some of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fullwire.cli.options import Json, print_json, with_options
from fullwire.cli.telling import say
from fullwire.errors import UsageError

Command = Annotated[
    list[str], typer.Argument(metavar="-- COMMAND...", help="torchrun, python, mpirun, ...")
]


def fixes(json: Json = False) -> None:
    """List the fixes: the risk of each, and its setting.

    A fix with a setting is applied to an unchanged script:

    fullwire apply buckets:50 -- torchrun --nproc-per-node=2 train.py
    """
    from fullwire.fixes import fix_kinds
    from fullwire.report.fixing import print_fix_kinds

    kinds = list(fix_kinds().values())
    if json:
        print_json(
            {
                "fixes": [
                    {
                        "fix": kind.key,
                        "label": kind.label,
                        "risk": kind.risk,
                        "setting": kind.setting or None,
                        "example": kind.example or None,
                        "needs": kind.needs or None,
                        "answers": list(kind.addresses),
                    }
                    for kind in kinds
                ]
            }
        )
    else:
        print_fix_kinds(kinds)


def apply(
    fixes: Annotated[
        str,
        typer.Argument(
            metavar="FIX:SETTING[,...]", help="As fullwire fixes lists them: buckets:50"
        ),
    ],
    command: Command,
    steps: Annotated[
        int | None, typer.Option(min=1, help="End the job after so many steps, as for a trial")
    ] = None,
    within: Annotated[
        str | None, typer.Option(metavar="TIME", help="End the job after this time: 300s")
    ] = None,
    max_error: Annotated[
        float | None,
        typer.Option(
            metavar="ERROR",
            help="Compression that loses more gives way to float32",
        ),
    ] = None,
) -> None:
    """Run a job with fixes, without a change to its script.

    Put it before the command that you run anyway. Output and exit status are the job's. At the end
    a line says what became of each fix:

    fullwire apply transport:fullwire -- torchrun --nproc-per-node=2 train.py
    fullwire apply compression:bf16 -- torchrun --nproc-per-node=2 train.py
    fullwire apply compression:int8 --max-error 1e-3 -- python train.py
    fullwire apply buckets:50,threads:1 -- torchrun --nproc-per-node=2 train.py
    fullwire apply environment:GLOO_SOCKET_IFNAME=eth1 -- python train.py

    Inside a recording it shows what a fix gains:

    fullwire record -o fixed.run -- fullwire apply buckets:50 -- torchrun train.py
    fullwire compare job.run fixed.run
    """
    from fullwire.answers.fixing import apply_fixes, split_fixes

    chosen = split_fixes(fixes)
    raise typer.Exit(
        apply_fixes(chosen, command, steps=steps, within=within, max_error=max_error, say=say)
    )


class Elastic:
    """The options of a job whose workers may be lost."""

    workers: Annotated[
        int | None, typer.Option("--workers", help="Start so many workers, which may be lost")
    ] = None
    least: Annotated[
        int, typer.Option("--min", help="End the job with fewer workers: exit status 4")
    ] = 1
    respawn: Annotated[bool, typer.Option("--respawn", help="Replace lost workers")] = False
    detect: Annotated[
        str, typer.Option(metavar="TIME", help="Silence after which a worker counts as lost")
    ] = "2s"
    balance: Annotated[
        bool, typer.Option("--balance", help="Faster workers get more samples of each batch")
    ] = False
    evict_slow: Annotated[
        bool, typer.Option("--evict-slow", help="A worker that stays slow leaves the job")
    ] = False
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write checkpoints; go on from the last one there"),
    ] = None
    every: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Between two checkpoints  [default: the time that costs the job least]",
        ),
    ] = None
    keep: Annotated[int, typer.Option(help="How many checkpoints stay")] = 3
    whole: Annotated[
        bool, typer.Option("--whole", help="One file a checkpoint, not one for each worker")
    ] = False


@with_options(Elastic)
def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND...", help="torchrun, python, mpirun, ..."),
    ] = None,
    *,
    recipe: Annotated[
        Path | None,
        typer.Option("--recipe", "-r", metavar="FILE.toml", help="The fixes to apply"),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Take fixes, or trials, from rank 0's host")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Refuse another command, world size or version, and a fix that cannot be applied",
        ),
    ] = False,
    export: Annotated[
        str | None, typer.Option(metavar="WAY", help="Print it by hand: env, python or torchrun")
    ] = None,
    **elastic: Any,
) -> None:
    """Run a job by a recipe, or in workers that may be lost.

    The script stays as it is with a recipe. The command stands around a launcher, or inside it,
    once a rank. Output and exit status are the job's:

    fullwire run --recipe recipe.toml -- torchrun --nproc-per-node=2 train.py
    fullwire lab run --workers 2 -- fullwire run -r recipe.toml -- python train.py
    fullwire run -r recipe.toml --export python

    On several hosts, the file lies on the host of rank 0. The others have --follow:

    fullwire run --follow -- torchrun --nnodes=2 --node-rank=1 train.py

    With --workers, a script with fullwire.elastic goes on when workers end or come:

    fullwire run --workers 4 --min 2 --respawn -- python train.py

    Without --workers and --recipe, each process of a launcher has one worker:

    torchrun --nproc-per-node 4 --no-python fullwire run -- python train.py
    """
    if not command and export is None:
        raise UsageError("run: expected a command after --, like: -- torchrun train.py")
    if not (recipe or export or follow or strict):
        from fullwire.resilience.workers import run_workers
        from fullwire.units import seconds

        every, detect = elastic.pop("every"), elastic.pop("detect")
        every_s = None if every is None else seconds(every)
        words = command or []
        raise typer.Exit(run_workers(words, detect_s=seconds(detect), every_s=every_s, **elastic))
    given = [name for name, value in elastic.items() if value != getattr(Elastic, name)]
    if given:
        option = {"least": "min", "evict_slow": "evict-slow"}.get(given[0], given[0])
        raise UsageError(
            f"run: expected --{option} without --recipe, --follow, --export and --strict, got both"
        )
    if follow == (recipe is not None) or (follow and (strict or export)):
        raise UsageError("run: expected one of --recipe FILE.toml, --follow and --workers N")
    if export is not None:
        from fullwire.answers.fixing import exported

        print(exported(recipe or "", export, say=say))
        return
    from fullwire.answers.fixing import run_recipe

    raise typer.Exit(run_recipe(recipe, command or [], strict=strict, say=say))
