"""``open_checkpoint``: what a checkpoint holds, before anything is read into a model, and single tensors of it.

stored = sw.open_checkpoint("step-100")
assert stored.value("extra")["step"] == 100
extra = sw.load_checkpoint(stored, model, optimizer)  # the one that was looked at, or an error
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardwright.checkpoint.format.index import Keys
from shardwright.checkpoint.format.nested import nested
from shardwright.checkpoint.load.checkpoints import Checkpoint, StoredForm, checkpoint_at
from shardwright.checkpoint.load.collective_load import (
    check_same_description,
    identity_of,
    read_tensors,
    verify_together,
)
from shardwright.checkpoint.load.fit import check_shapes
from shardwright.checkpoint.storage.threads import ignore
from shardwright.checkpoint.training.generators import GENERATORS, stored_by
from shardwright.checkpoint.training.section_to_load import new_target, targets_below
from shardwright.engine import RankGroup


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint whose description was read and is sound. Its files may be damaged: :meth:`verify` compares them.

    Attributes:
        opened: the same, for the package.
    """

    opened: Checkpoint
    _group: dist.ProcessGroup | None = None

    @property
    def path(self) -> str:
        """The folder or URL."""
        return str(self.opened.place)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the description; equal on ranks that have opened the same checkpoint."""
        return self.opened.fingerprint

    @property
    def has_digests(self) -> bool:
        """Whether bytes can be compared; False for a folder of ``torch.distributed.checkpoint``."""
        return self.opened.has_digests

    @property
    def tensors(self) -> Mapping[str, StoredForm]:
        """Each tensor by its name: ``model.layers.0.weight``, ``optimizer.state.layers.0.weight.exp_avg``."""
        return self.opened.tensors

    @property
    def values(self) -> Mapping[str, Any]:
        """Each plain value by its name. The largest dict or list without tensors is one value, such as ``extra``.
        Values of ``torch.distributed.checkpoint`` are pickled, so they are not read: None."""
        return self.opened.values

    @property
    def files(self) -> Mapping[str, int]:
        """The bytes of each file but the description; of torch's folders the least there can be."""
        return self.opened.sizes()

    @property
    def ranks(self) -> int | None:
        """Number of ranks that have saved it; None for torch's folders."""
        return self.opened.ranks

    @property
    def about(self) -> Mapping[str, str]:
        """The versions of libraries that wrote it, and the notes of the save."""
        return self.opened.about

    @property
    def description(self) -> str:
        """The name of the file that describes it."""
        return self.opened.description_file.name

    @property
    def version(self) -> int | None:
        """The version of its format; None for torch's folders."""
        return self.opened.version

    def __repr__(self) -> str:
        return f"StoredCheckpoint({self.path!r}, ranks={self.ranks}, about={self.about})"

    @cached_property
    def entries(self) -> dict[Keys, Any]:
        """The saved state taken apart: by the keys of each entry a :class:`StoredForm`, or a value as in ``values``.
        In a path an integer key of a dict is a tuple of one, and the place in a list an integer."""
        return {
            path: self.tensors.get(name, self.values.get(name)) for name, path in self.opened.keys.items()
        }

    @cached_property
    def _values(self) -> Any:
        paths = {path: each for path, each in self.entries.items() if not isinstance(each, StoredForm)}
        return nested(paths) if not self.opened.has_pickled_values and () not in paths else None

    def value(self, *keys: str) -> Any:
        """Return the plain values below these keys of the saved state, nested as they were saved; None if there are
        none."""
        content = self._values
        for key in keys:
            content = content.get(key) if isinstance(content, Mapping) else None
        return content

    def state(self, *keys: str, own: Any = None) -> Any:
        """Read the state below these keys, nested as it was saved: tensors and copies of values. Collective.

        Values of ``torch.distributed.checkpoint`` are None.

        Args:
            keys: from the outermost one, such as ``"extra", "metrics"``.
            own: a state of the same form, such as the present one. Where it has a tensor of the stored shape, sharded
                or not, values are read into that. Other tensors are made whole on the host.

        Returns:
            None: there is nothing below these keys.

        Raises:
            Damaged, ValueError: as :meth:`read`.
        """
        found = {path[len(keys) :]: each for path, each in self.entries.items() if path[: len(keys)] == keys}
        if not found:
            return copy.deepcopy(self.value(*keys))
        targets = {
            path: self._target(each, own, path) if isinstance(each, StoredForm) else copy.deepcopy(each)
            for path, each in found.items()
        }
        tensors = {form.name: targets[path] for path, form in found.items() if isinstance(form, StoredForm)}
        if tensors:
            self.read(tensors)
        return nested(targets)

    def _target(self, form: StoredForm, own: Any, path: Keys) -> Tensor:
        """Return a tensor to read into: the one at this place of ``own``, if it has the stored shape, or a new one."""
        for step in path:
            try:
                own = own[step[0] if isinstance(step, tuple) else step]
            except (LookupError, TypeError):
                own = None
        fits = isinstance(own, Tensor) and tuple(own.shape) == form.shape
        return own.detach() if fits else new_target(self.opened, form)

    def pickled_values(self, keys: Container[str], *, weights_only: bool = True) -> dict[Keys, Any]:
        """Return the values of a folder by torch's writer, by their keys, below these first ``keys``. Not collective.

        Raises:
            Damaged: a value is damaged, or none that ``torch.load(weights_only=True)`` reads. With
                ``weights_only=False`` a value may run any code.
        """
        return self.opened.values_below(keys, weights_only) if self.opened.has_pickled_values else {}

    def check_model(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ValueError unless the model has tensors of these names and shapes. Not collective."""
        check_shapes(self.opened, "model", shapes)

    def check_lengths(self) -> None:
        """Compare the lengths of all files. Not collective. Raises :class:`Damaged` for the first that differs."""
        self.opened.check_lengths()

    def verify(self, progress: Callable[[int], None] = ignore) -> None:
        """Compare all files with their digests, each rank a share; of torch's folders the lengths. Collective.

        Raises:
            Damaged: on every rank. The message names the first file that differs.
            OSError, ValueError: the ranks have opened different checkpoints, or this one was replaced.
        """
        ranks = RankGroup(self._group)
        check_same_description(ranks.all_gather(identity_of(self.opened)), ranks)
        verify_together(self.opened, ranks, progress)

    def generators(self) -> tuple[int, dict[str, Tensor]]:
        """Return the number of ranks that have stored random generators, and states for :func:`set_generator_states`.

        They are this rank's at the stored number of ranks, else the first rank's. Collective. Raises as :meth:`read`.
        """
        saved, key = stored_by(self.tensors, RankGroup(self._group))
        start = f"{GENERATORS}.{key}"
        states = targets_below(self.opened, start, {})
        if states:
            self.read({f"{start}.{name}": state for name, state in states.items()})
        return saved, states

    def read(self, tensors: Mapping[str, Tensor], progress: Callable[[int], None] = ignore) -> None:
        """Read single tensors, by name, in place. Collective. Digests are not compared: call :meth:`verify` before.

        Args:
            tensors: each has the stored shape, and may be sharded in any way. Values are converted to its dtype.
            progress: gets the number of bytes as they are read.

        Raises:
            Damaged: on every rank, if a file cannot be read.
            ValueError: on every rank, if a name is not in the checkpoint, or a tensor has another shape.
        """
        read_tensors(self.opened, tensors, RankGroup(self._group), progress)


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
    return StoredCheckpoint(checkpoint_at(path, links=links), process_group)
