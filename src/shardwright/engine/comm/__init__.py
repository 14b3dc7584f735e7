"""Collectives over bytes, division and compression of gradients, streams and events. This package knows no units."""

from typing import TYPE_CHECKING

from shardwright.common.doors import door

if TYPE_CHECKING:
    from shardwright.engine.comm.block_codecs import (
        MXFP8 as MXFP8,
        BlockCodec as BlockCodec,
        BlockwiseFP8 as BlockwiseFP8,
        is_block_codec as is_block_codec,
    )
    from shardwright.engine.comm.codecs import Cast as Cast, Codec as Codec, Int8Blocks as Int8Blocks
    from shardwright.engine.comm.coding import BlockCoding as BlockCoding, RowCoding as RowCoding
    from shardwright.engine.comm.collectives import (
        Communicator as Communicator,
        Pending as Pending,
        neighbours as neighbours,
        separate as separate,
        widened as widened,
    )
    from shardwright.engine.comm.custom import with_gathers as with_gathers, with_scatters as with_scatters
    from shardwright.engine.comm.division import Division as Division, plan_division as plan_division
    from shardwright.engine.comm.gradient_hooks import (
        Compressed as Compressed,
        GradientHook as GradientHook,
        PowerSGD as PowerSGD,
        Site as Site,
    )
    from shardwright.engine.comm.groups import make_group as make_group, make_mesh as make_mesh
    from shardwright.engine.comm.host_flag import HostFlag as HostFlag
    from shardwright.engine.comm.meeting import (
        Meeting as Meeting,
        Unreached as Unreached,
        new_failure as new_failure,
    )
    from shardwright.engine.comm.memory import (
        RegisteredMemory as RegisteredMemory,
        SymmetricMemory as SymmetricMemory,
    )
    from shardwright.engine.comm.rounds import LEFT as LEFT
    from shardwright.engine.comm.streams import (
        DeviceStreams as DeviceStreams,
        HostStreams as HostStreams,
        Streams as Streams,
        streams_for as streams_for,
        use_streams as use_streams,
    )

# For other rooms of the package.
if TYPE_CHECKING:
    from shardwright.engine.comm.notes import DTENSOR, hears_dtensor, noted
    from shardwright.engine.comm.page_locks import lock_pages
    from shardwright.engine.comm.streams import watched

if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = door(__spec__)
