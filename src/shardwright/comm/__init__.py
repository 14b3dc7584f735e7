"""Collectives over bytes, division and compression of gradients, streams and events. This package knows no units."""

from shardwright.comm.block_codecs import MXFP8, BlockCodec, BlockwiseFP8, is_block_codec
from shardwright.comm.codecs import Cast, Codec, Int8Blocks
from shardwright.comm.coding import BlockCoding, RowCoding
from shardwright.comm.collectives import Communicator, Pending, neighbours, separate, widened
from shardwright.comm.custom import with_gathers, with_scatters
from shardwright.comm.division import Division, plan_division
from shardwright.comm.gradient_hooks import Compressed, GradientHook, PowerSGD, Site
from shardwright.comm.groups import make_group, make_mesh
from shardwright.comm.host_flag import HostFlag
from shardwright.comm.meeting import Meeting, Unreached, new_failure
from shardwright.comm.memory import RegisteredMemory, SymmetricMemory
from shardwright.comm.rounds import LEFT
from shardwright.comm.streams import DeviceStreams, HostStreams, Streams, streams_for, use_streams

__all__ = [
    "LEFT",
    "MXFP8",
    "BlockCodec",
    "BlockCoding",
    "BlockwiseFP8",
    "Cast",
    "Codec",
    "Communicator",
    "Compressed",
    "DeviceStreams",
    "Division",
    "GradientHook",
    "HostFlag",
    "HostStreams",
    "Int8Blocks",
    "Meeting",
    "Pending",
    "PowerSGD",
    "RegisteredMemory",
    "RowCoding",
    "Site",
    "Streams",
    "SymmetricMemory",
    "Unreached",
    "is_block_codec",
    "make_group",
    "make_mesh",
    "neighbours",
    "new_failure",
    "plan_division",
    "separate",
    "streams_for",
    "use_streams",
    "widened",
    "with_gathers",
    "with_scatters",
]
