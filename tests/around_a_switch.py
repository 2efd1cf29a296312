"""Transfers that a test lists, played by the event engine around one switch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from fullwire import _native


class Wish(NamedTuple):
    """One transfer as a test writes it; those of a part are in the order of rounds."""

    round: int
    source: int
    target: int
    size: float = 1.0
    add_s: float = 0.0


def play_wishes(
    parts: Sequence[Sequence[Wish]],
    *,
    bytes_per_s: float = 1.0,
    latency_s: float = 0.0,
    chunks: int = 1,
    serial: bool = False,
) -> float:
    """Play parts of wishes; each worker's link carries `bytes_per_s` each way."""
    wishes = [wish for part in parts for wish in part]
    workers = 1 + max((max(wish.source, wish.target) for wish in wishes), default=0)
    pairs = sorted({(wish.source, wish.target) for wish in wishes})
    number = {pair: place for place, pair in enumerate(pairs)}
    columns = []
    for part in parts:
        rounds = [len(list(among)) for _, among in groupby(part, lambda wish: wish.round)]
        columns.append(
            (
                np.ones(len(rounds), np.int64),
                np.cumsum([0, *rounds], dtype=np.int64),
                np.array([number[wish.source, wish.target] for wish in part], np.int32),
                np.array([wish.size for wish in part], np.float64),
                np.array([wish.add_s for wish in part], np.float64),
            )
        )
    links = [link for source, target in pairs for link in (source, workers + target)]
    time_s, transfers = _native.play(
        seats=workers,
        bytes_per_s=np.full(2 * workers, bytes_per_s),
        source=np.array([source for source, _ in pairs], np.int32),
        target=np.array([target for _, target in pairs], np.int32),
        latency_s=np.full(len(pairs), latency_s),
        stands_for=np.ones(len(pairs), np.int64),
        crossings_begin=2 * np.arange(len(pairs) + 1, dtype=np.int64),
        link=np.array(links, np.int32),
        weight=np.ones(len(links), np.int32),
        parts=columns,
        chunks=chunks,
        serial=serial,
        told=None,
    )
    assert transfers == chunks * len(wishes)
    return time_s
