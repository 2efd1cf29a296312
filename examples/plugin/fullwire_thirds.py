"""A codec of your own: the bytes on the wire and the cost of packing, for predictions."""

from fullwire.compression.codec import Codec, Cost

CODEC = Codec(
    key="thirds",
    label="gradients in a third of their bytes",
    ratio=3,
    combining="sum",
    on_processor=Cost(encode_bps=8e9, decode_bps=8e9, source="an example, not measured"),
    words="Each value has a third of its bytes.",
)
