"""fullwire cluster: clusters as people buy them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullwire.cli.options import ClusterOption, Force, Json, print_json
from fullwire.cli.telling import tell

app = typer.Typer(
    help="Show described clusters: yours, and those built in.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("show")
def show(
    cluster: Annotated[str, typer.Argument(metavar="FILE|NAME", help="ours.toml, dgx-h100")],
    nodes: Annotated[int | None, typer.Option(min=1, help="As many nodes as these")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png|svg|html", help="Draw it.")] = None,
    toml: Annotated[bool, typer.Option("--toml", help="Print it as a file to start from.")] = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Draw a cluster and list its links.

    --toml prints a file to start a description of your own cluster from:

    fullwire cluster show dgx-h100 --toml > ours.toml
    fullwire cluster show dgx-h100 --nodes 64 --plot cluster.png
    """
    from fullwire.clusters import cluster as described
    from fullwire.clusters.description import as_toml
    from fullwire.report.as_data import cluster_object
    from fullwire.report.cluster import print_cluster

    if plot is not None:
        from fullwire.report.charts import check_plot_path

        check_plot_path(plot, replace=force)
    known = described(cluster, nodes)
    if plot is not None:
        from fullwire.report.cluster_picture import plot_cluster

        plot_cluster(known, plot)
        tell(f"drawn: {plot}")
    if json:
        print_json(cluster_object(known))
    elif toml:
        typer.echo(as_toml(known), nl=False)
    else:
        print_cluster(known)


@app.command("fit")
def fit(
    tables: Annotated[
        list[Path],
        typer.Argument(
            metavar="TABLE...", help="Output of nccl-tests, OSU, bench transport --json, or CSV"
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE.toml", help="The fitted cluster.")
    ],
    cluster: ClusterOption = None,
    devices_per_node: Annotated[
        int | None, typer.Option(min=1, help="Where no description says it: 8")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png|svg|html", help="Draw tables and fit.")
    ] = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Fit the unknown figures of a cluster to measured tables.

    fullwire cluster fit nccl_8.log nccl_16.log --cluster ours.toml -o fitted.toml
    fullwire cluster fit nccl_64.log --devices-per-node 8 -o fitted.toml
    """
    from fullwire.answers.cluster_fit import fit_cluster
    from fullwire.clusters.description import as_toml
    from fullwire.outputs import refuse_existing, written
    from fullwire.report.as_data import cluster_fit_object
    from fullwire.report.cluster import plot_cluster_fit, print_cluster_fit

    refuse_existing(output, force)
    if plot is not None:
        from fullwire.report.charts import check_plot_path

        check_plot_path(plot, replace=force)
    found = fit_cluster(
        tables, cluster=cluster, devices_per_node=devices_per_node, name=output.stem
    )
    with written(output) as beside:
        beside.write_text(as_toml(found.cluster), encoding="utf-8")
    tell(f"written: {output}")
    if plot is not None:
        plot_cluster_fit(found, plot)
        tell(f"drawn: {plot}")
    if json:
        print_json(cluster_fit_object(found))
    else:
        print_cluster_fit(found)


@app.command("list")
def list_(json: Json = False) -> None:
    """List the built-in clusters, and the source of their figures."""
    from fullwire.clusters import cluster as described
    from fullwire.clusters import names
    from fullwire.report.as_data import cluster_object
    from fullwire.report.cluster import print_clusters

    built_in = [described(name) for name in names()]
    if json:
        print_json({"clusters": [cluster_object(known) for known in built_in]})
    else:
        print_clusters(built_in)
