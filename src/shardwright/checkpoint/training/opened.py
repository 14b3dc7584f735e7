"""``open_checkpoint``: what a checkpoint holds, before anything is read into a model, and single tensors of it.

stored = sw.open_checkpoint("step-100")
assert stored.value("extra")["step"] == 100
extra = sw.load_checkpoint(stored, model, optimizer)  # the one that was looked at, or an error
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.checkpoint.format.index import Path as Keys
from shardwright.checkpoint.format.nested import ignore, nested
from shardwright.checkpoint.load import collective_load
from shardwright.checkpoint.load.checkpoints import Checkpoint, StoredForm, read_description
from shardwright.checkpoint.training.generators import GENERATORS, stored_by
from shardwright.collective import RankGroup


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint whose description was read and is sound. Its files may be damaged: :meth:`verify` compares them.

    Attributes:
        path: the folder or URL.
        fingerprint: SHA-256 of the description; equal on ranks that have opened the same checkpoint.
    """

    path: str
    fingerprint: str
    _opened: Checkpoint = field(repr=False)
    _group: dist.ProcessGroup | None = field(default=None, repr=False)

    @property
    def has_digests(self) -> bool:
        """Whether bytes can be compared; False for a folder of ``torch.distributed.checkpoint``."""
        return self._opened.has_digests

    @property
    def tensors(self) -> dict[str, StoredForm]:
        """Each tensor by its name: ``model.layers.0.weight``, ``optimizer.state.layers.0.weight.exp_avg``."""
        return self._opened.tensors

    @property
    def values(self) -> dict[str, Any]:
        """Each plain value by its name. The largest part of a state without tensors is one value, such as ``extra``.
        Values of ``torch.distributed.checkpoint`` are pickled, so they are not read: None."""
        return self._opened.values

    @cached_property
    def entries(self) -> dict[Keys, Any]:
        """The saved state taken apart: by the keys of each entry a :class:`StoredForm`, or a value as in ``values``.
        In a path an integer key of a dict is a tuple of one, and the place in a list an integer."""
        return {
            path: self.tensors.get(name, self.values.get(name)) for name, path in self._opened.keys.items()
        }

    def value(self, part: str) -> Any:
        """The plain values below one key of the saved state, nested as they were saved; None if there are none."""
        paths = {keys: each for keys, each in self.entries.items() if not isinstance(each, StoredForm)}
        return nested(paths).get(part) if self.has_digests and paths and () not in paths else None

    def pickled_values(self, parts: Container[str], *, weights_only: bool = True) -> dict[Keys, Any]:
        """The values of a folder by torch's writer, by their keys, below these first keys. Not collective.

        Raises:
            Damaged: a value is damaged, or none that ``torch.load(weights_only=True)`` reads. With
                ``weights_only=False`` a value may run any code.
        """
        return {} if self.has_digests else self._opened.values_below(parts, weights_only)

    @property
    def files(self) -> dict[str, int]:
        """The bytes of each file but the description; of torch's folders the least there can be."""
        return self._opened.files()

    @property
    def ranks(self) -> int | None:
        """Number of ranks that have saved it; None for torch's folders."""
        return self._opened.ranks

    @property
    def about(self) -> Mapping[str, str]:
        """The versions of libraries that wrote it, and the notes of the save."""
        return self._opened.about

    def check_lengths(self) -> None:
        """Compare the lengths of all files. Not collective. Raises :class:`Damaged` for the first that differs."""
        self._opened.check_lengths()

    def verify(self, progress: Callable[[int], None] = ignore) -> None:
        """Compare all files with their digests, each rank a share; of torch's folders the lengths. Collective.

        Raises:
            Damaged: on every rank. The message names the first file that differs.
            OSError, ValueError: the ranks have opened different checkpoints, or this one was replaced.
        """
        collective_load.verify_together(self._opened, RankGroup(self._group), progress)

    def generators(self) -> tuple[int, dict[str, Tensor]]:
        """The number of ranks that have stored random generators, and states for :func:`set_generator_states`.

        They are this rank's at the stored number of ranks, else the first rank's. Collective. Raises as :meth:`read`.
        """
        saved, key = stored_by(self.tensors, RankGroup(self._group))
        start = f"{GENERATORS}.{key}."
        forms = {name: form for name, form in self.tensors.items() if name.startswith(start)}
        states = {name: torch.empty(form.shape, dtype=form.dtype) for name, form in forms.items()}
        if states:
            self.read(states)
        return saved, {name.removeprefix(start): state for name, state in states.items()}

    def read(self, tensors: Mapping[str, Tensor], progress: Callable[[int], None] = ignore) -> None:
        """Read single tensors, by name, in place. Collective. Digests are not compared: call :meth:`verify` before.

        Args:
            tensors: each has the stored shape, and may be sharded in any way. Values are converted to its dtype.
            progress: gets the number of bytes as they are read.

        Raises:
            Damaged: on every rank, if a file cannot be read.
            ValueError: on every rank, if a name is not in the checkpoint, or a tensor has another shape.
        """
        collective_load.read_tensors(self._opened, tensors, RankGroup(self._group), progress)


def open_checkpoint(
    path: str | os.PathLike[str], *, links: bool = False, process_group: dist.ProcessGroup | None = None
) -> StoredCheckpoint:
    """Read what describes a checkpoint: a folder or URL by :func:`save_checkpoint`, or a folder by torch's writer.

    Not collective: each rank reads the description alone. Nothing in the checkpoint is called.

    Args:
        path: the folder or URL.
        links: files of torch's writer may be behind links, as model hubs keep them.
        process_group: of the ranks that will call :meth:`StoredCheckpoint.verify` and :meth:`StoredCheckpoint.read`.
            Default: all ranks; without a process group this process.

    Raises:
        FileNotFoundError: there is no folder, or behind a URL no whole checkpoint.
        Damaged: the folder holds no checkpoint, or its description contradicts itself.
        UnknownVersion: a later version of shardwright has saved it.
        OSError: the store behind a URL does not answer.
    """
    opened = read_description(path, links=links)
    place = opened.place
    return StoredCheckpoint(str(place), opened.fingerprint, opened, process_group)
