"""Imported once by the server that workers are forked from, so that a new pool starts in well under a second.

Only what cannot change during a session belongs here, and nothing that starts a thread, because threads do not survive
a fork. The package under test reads the environment when it is used, never when it is imported.
"""

from __future__ import annotations

import gc
import importlib
from contextlib import suppress

import pytest
import torch._dynamo
import torch._functorch.partitioners
import torch._inductor.compile_fx
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor

import shardwright
from tests.support import pool

__all__ = ["pool", "pytest", "torch"]

# What tests and the trainer use, where it is installed.
for name in (
    "hypothesis.strategies",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "psutil",
    "pydantic",
    "rich.progress",
    "shardwright.train.rank.process",
):
    with suppress(ImportError):
        importlib.import_module(name)

# The package imports its names at their first use.
for name in shardwright.__all__:
    getattr(shardwright, name)

# A collection in a worker would otherwise write to every object here, and so copy the whole heap.
gc.collect()
gc.freeze()
