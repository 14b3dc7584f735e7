"""Collectives over bytes, division and compression of gradients, streams and events. This package knows no units."""

from typing import TYPE_CHECKING

from shardwright.common.doors import door

if TYPE_CHECKING:
    from shardwright.engine.comm.block_codecs import MXFP8, BlockCodec, BlockwiseFP8, is_block_codec
    from shardwright.engine.comm.codecs import Cast, Codec, Int8Blocks
    from shardwright.engine.comm.coding import BlockCoding, RowCoding
    from shardwright.engine.comm.collectives import Communicator, Pending, neighbours, separate, widened
    from shardwright.engine.comm.custom import with_gathers, with_scatters
    from shardwright.engine.comm.division import Division, plan_division
    from shardwright.engine.comm.gradient_hooks import Compressed, GradientHook, PowerSGD, Site
    from shardwright.engine.comm.groups import make_group, make_mesh
    from shardwright.engine.comm.host_flag import HostFlag
    from shardwright.engine.comm.meeting import Meeting, Unreached, new_failure
    from shardwright.engine.comm.memory import RegisteredMemory, SymmetricMemory
    from shardwright.engine.comm.notes import DTENSOR, hears_dtensor, noted
    from shardwright.engine.comm.rounds import LEFT
    from shardwright.engine.comm.streams import (
        DeviceStreams,
        HostStreams,
        Streams,
        streams_for,
        use_streams,
        watched,
    )

__all__, __getattr__, __dir__ = door(__spec__)
