"""The rules for fragments of the parameters: a job and a prediction of it refuse the same ones."""

from __future__ import annotations


def round_problem(fragments: int, every: int) -> str | None:
    """Say why steps between sums cannot be divided among fragments; None if they can."""
    if every % fragments == 0:
        return None
    return f"expected a divisor of sync_every={every}, got {fragments}"


def parameters_problem(fragments: int, parameters: int) -> str | None:
    """Say why parameters cannot be divided into fragments; None if they can."""
    if fragments <= parameters:
        return None
    return f"expected at most {parameters}, one for each parameter to train, got {fragments}"


def nearest(fragments: int, every: int, parameters: int) -> int:
    """Return the number of fragments nearest to this one that both rules allow."""
    allowed = [
        count
        for count in range(1, min(every, parameters) + 1)
        if round_problem(count, every) is None
    ]
    return min(allowed, key=lambda count: (abs(count - fragments), count))
