"""Tensor subclasses that define their own all-gather: the protocol of ``fsdp_pre_all_gather``.

Such a tensor has ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` (float8 weights, quantised bases). The first
returns the tensors to send, the second makes the full parameter from the received ones. The parameter has separate
memory, outside the unit's slab. The protocol is torch's (torch.distributed.fsdp, 2.13), with both signatures.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from itertools import repeat
from operator import contains
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwright.engine.layout import TensorSpec
from shardwright.engine.memory import Owner, Slab, resize
from shardwright.engine.tensors.ranks import Ranks


def is_extended(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has the protocol. Raises if it has only one of the two methods."""
    pre, post = hasattr(tensor, "fsdp_pre_all_gather"), hasattr(tensor, "fsdp_post_all_gather")
    if pre != post:
        there, lacking = ("pre", "post") if pre else ("post", "pre")
        raise ValueError(
            f"{type(tensor).__name__} defines fsdp_{there}_all_gather but not fsdp_{lacking}_all_gather. Define "
            "both, or neither."
        )
    return pre


_PRE = "fsdp_pre_all_gather"


def is_attached(tensor: torch.Tensor) -> bool:
    """Return whether this object has the protocol and its class does not."""
    return _PRE in tensor.__dict__ and not hasattr(type(tensor), _PRE)


def any_attached(attributes: list[dict[str, Any]]) -> bool:
    """Return whether any of these objects has the protocol among its attributes."""
    return any(attributes) and any(map(contains, attributes, repeat(_PRE)))


class Extension:
    """The tensors that one extended parameter sends and receives in each gather of its unit."""

    def __init__(
        self,
        spec: TensorSpec,
        ranks: Ranks,
        module: nn.Module,
        policy: MixedPrecisionPolicy,
        owner: Owner,
    ) -> None:
        self._spec = spec
        self._mesh = ranks.shard_mesh(spec.name)
        self._module = weakref.ref(module)  # it holds the unit, which holds this
        self._policy = policy
        self._owner = owner
        self._metadata: Any = None
        self._sizes: list[torch.Size] = []
        self._kinds: list[tuple[int, torch.dtype]] = []
        self._slabs: list[Slab] = []
        self._outputs: list[torch.Tensor] = []
        self._received: list[torch.Tensor] = []  #: the same memory as bytes, while it is received
        self._inner: list[tuple[torch.UntypedStorage, int]] = []
        self._full: torch.Tensor | None = None

    def begin(self, local: Any, compared: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Call ``fsdp_pre_all_gather`` of ``local``. Returns bytes to receive into and bytes to send.

        ``compared``: whether the ranks compare sizes before the gather, so that all of them refuse unequal ones.
        """
        if not hasattr(local, _PRE):
            raise RuntimeError(
                f"The local tensor of parameter {self._spec.name!r} no longer has the attached {_PRE}: it was "
                "deleted, or load_state_dict(assign=True) replaced the tensor. Attach it to parameter._local_tensor "
                "again, or call fully_shard on a new model."
            )
        takes = len(inspect.signature(local.fsdp_pre_all_gather).parameters)
        if takes == 1:
            inputs, self._metadata = local.fsdp_pre_all_gather(self._mesh)
        elif takes == 5:
            inputs, self._metadata = local.fsdp_pre_all_gather(
                self._mesh, torch.Size(self._spec.shape), self._spec.stride, self._module(), self._policy
            )
        else:
            raise ValueError(
                f"{type(local).__name__}.fsdp_pre_all_gather has {takes} arguments, expected (mesh) or (mesh, "
                "outer_size, outer_stride, module, mp_policy)"
            )
        if not compared:
            self._check_rows(local, inputs)
        self._sizes = [t.size() for t in inputs]
        self._make_outputs([(t.numel(), t.dtype) for t in inputs], local.device)
        for slab in self._slabs:
            slab.lease()
        return list(self._received), [t.contiguous().view(-1).view(torch.uint8) for t in inputs]

    def _check_rows(self, local: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
        rows, n = self._spec.shape[0], self._mesh.size()
        padded = -(-rows // n)
        if any(t.ndim and t.size(0) != padded for t in inputs) and local.size(0) != padded:
            raise ValueError(
                f"Parameter {self._spec.name!r} of shape {tuple(self._spec.shape)} is sharded unevenly over {n} ranks, "
                f"so {type(local).__name__}.fsdp_pre_all_gather must return {padded} rows, padded, on every rank; got "
                f"{[tuple(t.size()) for t in inputs]}"
            )

    @torch.inference_mode(False)
    def _make_outputs(self, kinds: list[tuple[int, torch.dtype]], device: torch.device) -> None:
        """Make one storage object per received tensor. It stays while sizes stay, because saved tensors refer to it."""
        if kinds == self._kinds:
            return
        n = self._mesh.size()
        self._kinds, self._slabs, self._outputs, self._received, self._full = kinds, [], [], [], None
        for numel, dtype in kinds:
            slab = Slab(n * numel * dtype.itemsize, device, "parameters", self._owner)
            slab.lease()
            self._slabs.append(slab)
            self._outputs.append(slab.view(dtype, 0, (n * numel,)))
            with slab.landing():
                self._received.append(slab.landing_view(torch.uint8, 0, (slab.nbytes,)))

    @torch.no_grad()
    def finish(self, local: Any, shown: nn.Parameter) -> torch.Tensor | None:
        """Fill ``shown`` after the gather, or return the tensor for a new full parameter."""
        for slab in self._slabs:
            slab.reveal()
        outputs = tuple(t.view(-1, *size[1:]) for t, size in zip(self._outputs, self._sizes, strict=True))
        metadata, self._metadata = self._metadata, None
        if self._full is not None:
            for storage, nbytes in self._inner:
                if storage.nbytes() != nbytes:
                    resize(storage, nbytes)
            local.fsdp_post_all_gather(outputs, metadata, self._spec.compute_dtype, out=shown)
            return None
        full, inner = local.fsdp_post_all_gather(outputs, metadata, self._spec.compute_dtype)
        self._inner = [(s, s.nbytes()) for s in (t.untyped_storage() for t in inner)]
        self._full = full
        if tuple(full.size()) != self._spec.shape:  # the last ranks' padding
            full = torch.as_strided(full, self._spec.shape, self._spec.stride, 0)
        return full  # type: ignore[no-any-return]

    def release(self) -> None:
        for slab in self._slabs:
            slab.release()
        for storage, _ in self._inner:
            if storage.nbytes():
                resize(storage, 0)
