"""Older import path of :class:`Damaged`."""

from shardwright.checkpoint.format.digests import Damaged as Damaged
