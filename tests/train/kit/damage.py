"""Ways in which a checkpoint's files get damaged or are attacked, and small checkpoints to try them on."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.checkpoint import INDEX
from shardwright.checkpoint.format.index import StoredFile, index_text, parse_index
from shardwright.train.run.position import FolderOrUrl, Position
from shardwright.train.run.stored_checkpoint import examine
from shardwright.train.step import loading
from shardwright.train.step.saving import checkpoint

Damage = Callable[[Path, Path], None]
"""Damages the file at the first path. At the second is the file of that name of another step."""


def _missing(file: Path, other: Path) -> None:
    file.unlink()


def _emptied(file: Path, other: Path) -> None:
    os.truncate(file, 0)


def _cut_off(file: Path, other: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def _longer(file: Path, other: Path) -> None:
    with open(file, "ab") as stream:
        stream.write(b"x")


def flipped(file: Path, other: Path, part: float = 0.5) -> None:
    data = bytearray(file.read_bytes())
    data[int(part * (len(data) - 1))] ^= 1
    file.write_bytes(data)


def _flipped_early(file: Path, other: Path) -> None:
    flipped(file, other, 0.2)


def _of_another_step(file: Path, other: Path) -> None:
    shutil.copy(other, file)


def _link_to_another_step(file: Path, other: Path) -> None:
    file.unlink()
    file.symlink_to(other)


def _link_to_the_same(file: Path, other: Path) -> None:
    moved = file.with_name("moved")
    file.rename(moved)
    file.symlink_to(moved)


def _folder(file: Path, other: Path) -> None:
    file.unlink()
    file.mkdir()


def _pipe(file: Path, other: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGES: dict[str, Damage] = {
    "missing": _missing,
    "emptied": _emptied,
    "cut off": _cut_off,
    "longer": _longer,
    "flipped": flipped,
    "flipped early": _flipped_early,
    "of another step": _of_another_step,
    "a link to another step": _link_to_another_step,
    "a link to the same": _link_to_the_same,
    "a folder": _folder,
    "a pipe": _pipe,
}


def sealed_again(folder: Path) -> None:
    """Digests of the files without parts as they are now: what an attacker leaves, who is no accident."""
    index = parse_index((folder / INDEX).read_bytes())
    files = {name: stored_file(folder / name) for name, file in index.files.items() if not file.has_chunks}
    (folder / INDEX).write_text(index_text(replace(index, files={**index.files, **files})))


def stored_file(path: Path) -> StoredFile:
    """A file without parts, as an index describes it."""
    content = path.read_bytes()
    return StoredFile(len(content), hashlib.sha256(content).hexdigest(), False)


class Job:
    """A small model and its optimizer on every rank of the pool, with checkpoints in a folder."""

    def __init__(self, checkpoints: Path) -> None:
        self.checkpoints = checkpoints
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        sw.fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.said: list[str] = []
        self.at(0)

    def at(self, step: int) -> None:
        """As after so many steps: the same weights and moments whenever it is called for that step."""
        with torch.no_grad():
            for number, p in enumerate(self.model.parameters()):
                p.fill_(step + number / 10)
                state = self.optimizer.state[p]
                state["step"] = torch.tensor(float(step))
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = torch.full_like(p.detach(), step + number / 7)

    def save(self, step: int) -> Path:
        self.at(step)
        position = Position(step, 4 * step)
        return checkpoint.save(self.checkpoints, self.model, self.optimizer, position, self.said.append)

    def load(self) -> Position:
        self.said.clear()
        return loading.load_newest(self.checkpoints, self.model, self.optimizer, self.said.append).position

    def is_at(self, step: int) -> bool:
        """Whether this rank's shards are those of that step, all of them."""
        loaded = [value.clone() for value in self._shards()]
        self.at(step)
        return all(torch.equal(one, two) for one, two in zip(loaded, self._shards(), strict=True))

    def _shards(self) -> list[torch.Tensor]:
        values = [v for p in self.model.parameters() for v in (p.detach(), *self.optimizer.state[p].values())]
        return [value.to_local() if isinstance(value, DTensor) else value for value in values]


def on_first_rank(action: Callable[[], None]) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def restored(folder: Path, pristine: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(pristine, folder)


def what_is_missing(folder: FolderOrUrl) -> str | None:
    """The reason why the checkpoint cannot be whole; None if every file has its length. Reads no large file."""
    try:
        examine(folder).checkpoint.check_lengths()
    except ValueError as problem:
        return str(problem)
    return None
