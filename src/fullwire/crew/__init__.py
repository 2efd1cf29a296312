"""Who does work that comes in tasks: this process, several of this machine, or a Ray cluster.

    with crew("ray") as those:
        for result in those.each(function, tasks):

A crew does one function for each task and gives the results in the order of the tasks, so an answer
does not depend on who worked for it. Tasks do not need each other, and may be done twice: what one
leaves on disk appears whole, in the same place, with the same content. The function is a module's
own, or `functools.partial` of one; it, tasks and results are pickled on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol, TypeVar

HERE = "here"

Task = TypeVar("Task")
Result = TypeVar("Result")


class Crew(Protocol):
    """Whoever does the work."""

    def each(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[Result]:
        """Do all tasks, and give what they return, in their order."""
        ...


class Alone:
    """This process, one task after the other."""

    def each(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[Result]:
        """Do all tasks, and give what they return, in their order."""
        return map(function, tasks)


ALONE = Alone()


def crew(
    on: str = HERE, *, processes: int = 1, shared: Sequence[Path] = ()
) -> AbstractContextManager[Crew]:
    """Gather those who work `on` this machine, in so many processes, or on Ray.

    `on` is "here", "ray" (the cluster that RAY_ADDRESS names, or else one that is started on this
    machine) or a cluster's address. Files and folders that are `shared` are there on every node.
    """
    if on != HERE:
        from fullwire.crew.on_ray import on_ray  # here: it is an extra

        return on_ray(on, shared)
    if processes == 1:
        return nullcontext(ALONE)
    from fullwire.crew.pool import Pool

    return Pool(processes)
