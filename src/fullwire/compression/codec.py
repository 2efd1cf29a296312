"""Codecs by name, such as `fp16`: the bytes that each leaves, and its cost where it runs."""

from __future__ import annotations

from dataclasses import dataclass

from fullwire.compression.compressor import Combining, Compressor
from fullwire.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """How fast one kind of device packs and unpacks, in bits of the uncompressed side a second."""

    encode_bps: float
    decode_bps: float
    source: str  # "measured on ..." or "assumed, not measured: ..."
    is_measured: bool = True
    work_per_byte: float = 1.0  # of sending and adding a compressed byte, relative to a float32's


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """A compressor that people name; an unknown cost is None, and predictions say so."""

    key: str
    label: str  # "gradients as float16"
    ratio: float
    combining: Combining = "sum"
    on_processor: Cost | None = None
    on_gpu: Cost | None = None

    def compressor(self, *, on_gpu: bool) -> Compressor:
        """Return the figures for gradients that are packed on a processor or on a GPU."""
        where = "a GPU" if on_gpu else "a processor"
        cost = self.on_gpu if on_gpu else self.on_processor
        if cost is None:
            return Compressor(
                ratio=self.ratio,
                combining=self.combining,
                name=self.key,
                caveat=f"its cost on {where} is unknown and counts as nothing",
            )
        return Compressor(
            ratio=self.ratio,
            encode_bps=cost.encode_bps,
            decode_bps=cost.decode_bps,
            combining=self.combining,
            work_per_byte=cost.work_per_byte,
            name=self.key,
            caveat="" if cost.is_measured else f"its cost on {where} is {cost.source}",
        )


CODECS = Registry(Codec, "fullwire.compression.codecs", name="CODEC", group="fullwire.compressors")
