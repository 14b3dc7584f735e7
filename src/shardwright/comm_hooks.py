"""Other ways for gradients and weights to cross the network.

For ``FSDPModule.set_gradient_comm_hook`` and ``FSDPModule.set_all_gather_codec``.
"""

from shardwright.engine.comm import (
    MXFP8,
    BlockCodec,
    BlockwiseFP8,
    Cast,
    Codec,
    Compressed,
    GradientHook,
    Int8Blocks,
    PowerSGD,
    Site,
)

__all__ = [
    "MXFP8",
    "BlockCodec",
    "BlockwiseFP8",
    "Cast",
    "Codec",
    "Compressed",
    "GradientHook",
    "Int8Blocks",
    "PowerSGD",
    "Site",
]
