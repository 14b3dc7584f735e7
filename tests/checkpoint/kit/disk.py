"""A model of a disk that loses power: what is left of recorded calls when no fsync has covered the last ones.

Data is on disk after an fsync of its file, a name after an fsync of its folder. Anything else may be there or not, and
a write may be there in part. Renames are atomic. The model lets a later change of a folder survive an earlier one,
which is more than journals of file systems allow; ``ordered`` cuts are as journals allow them.
"""

from __future__ import annotations

import posixpath
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.checkpoint.kit.calls import Call, recorded

ROOT = 0
Tree = dict[str, bytes | None]  #: content by path; None for a folder


class _Names(NamedTuple):
    """Entries of a folder that change in one step: the inode of each name, or None."""

    folder: int
    entries: dict[str, int | None]


class _Data(NamedTuple):
    inode: int
    offset: int
    data: bytes


class _Sync(NamedTuple):
    inode: int


class Disk:
    """The changes that calls make. Inodes are numbers; the root has :data:`ROOT`."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self.changes: list[_Names | _Data | _Sync] = []
        self.folders = {ROOT}
        self._names: dict[int, dict[str, int]] = {ROOT: {}}
        self._count = 0
        for call in calls:
            self.changes.append(self._change(call))

    def _change(self, call: Call) -> _Names | _Data | _Sync:
        if call.kind == "write":
            return _Data(self._inode(call.path), call.offset, call.data)
        if call.kind == "fsync":
            return _Sync(self._inode(call.path))
        folder, name = self._place(call.path)
        if call.kind in ("create", "mkdir"):
            if call.kind == "create" and name in self._names[folder]:
                return _Names(folder, {})  # opened again
            self._count += 1
            if call.kind == "mkdir":
                self.folders.add(self._count)
                self._names[self._count] = {}
            entries: dict[str, int | None] = {name: self._count}
        elif call.kind in ("unlink", "rmdir"):
            entries = {name: None}
        else:
            other_folder, other = self._place(call.other)
            assert other_folder == folder, "a rename within one folder"
            inodes = self._names[folder]
            entries = {other: inodes[name], name: inodes[other] if call.kind == "exchange" else None}
        for key, inode in entries.items():
            if inode is None:
                del self._names[folder][key]
            else:
                self._names[folder][key] = inode
        return _Names(folder, entries)

    def _inode(self, path: str) -> int:
        inode = ROOT
        for step in path.split("/"):
            inode = inode if step == "." else self._names[inode][step]
        return inode

    def _place(self, path: str) -> tuple[int, str]:
        folder, name = posixpath.split(path)
        return self._inode(folder or "."), name

    def pending(self, length: int) -> list[int]:
        """The changes among the first ``length`` that no fsync covers."""
        pending: dict[int, list[int]] = {}
        for number, change in enumerate(self.changes[:length]):
            if isinstance(change, _Sync):
                pending.pop(change.inode, None)
            else:
                pending.setdefault(change[0], []).append(number)
        return sorted(number for numbers in pending.values() for number in numbers)

    def _same(self, one: int, other: int) -> bool:
        return self.changes[one][0] == self.changes[other][0]

    def tree(self, length: int, lost: Iterable[int], torn: dict[int, str] | None = None) -> Tree:
        """The files after the first ``length`` calls without ``lost`` ones. Torn writes are "half" or "zeros"."""
        names: dict[int, dict[str, int]] = {}
        contents: dict[int, bytearray] = {}
        gone = set(lost)
        for number, change in enumerate(self.changes[:length]):
            if number in gone or isinstance(change, _Sync):
                continue
            if isinstance(change, _Names):
                entries = names.setdefault(change.folder, {})
                for name, inode in change.entries.items():
                    if inode is None:
                        entries.pop(name, None)
                    else:
                        entries[name] = inode
                continue
            data = change.data
            kind = (torn or {}).get(number)
            if kind == "half":
                data = data[: len(data) // 2]
            elif kind == "zeros":
                data = bytes(len(data))
            content = contents.setdefault(change.inode, bytearray())
            content.extend(bytes(max(0, change.offset + len(data) - len(content))))
            content[change.offset : change.offset + len(data)] = data
        tree: Tree = {}
        self._collect(ROOT, "", names, contents, tree)
        return tree

    def _collect(
        self,
        inode: int,
        path: str,
        names: dict[int, dict[str, int]],
        contents: dict[int, bytearray],
        tree: Tree,
    ) -> None:
        for name, each in names.get(inode, {}).items():
            whole = posixpath.join(path, name)
            if each in self.folders:
                tree[whole] = None
                self._collect(each, whole, names, contents, tree)
            else:
                tree[whole] = bytes(contents.get(each, b""))

    def cuts(self, length: int, generator: random.Random, subsets: int, ordered: bool) -> Iterator[Tree]:
        """The states that a cut of power after ``length`` calls can leave: all, nothing and each one of the pending
        changes, each write in part, and random subsets. If ``ordered``, a folder's changes survive only with
        those before them.
        """
        pending = self.pending(length)
        if ordered:
            names = [each for each in pending if isinstance(self.changes[each], _Names)]
            for first in range(len(names)):
                yield self.tree(
                    length, [n for n in names if n >= names[first] and self._same(n, names[first])]
                )
            pending = [each for each in pending if each not in names]
        yield self.tree(length, [])
        if not pending:
            return
        yield self.tree(length, pending)
        for one in pending:
            others = [each for each in pending if each != one]
            yield self.tree(length, [one])
            yield self.tree(length, others)
            if isinstance(self.changes[one], _Data):
                for kind in ("half", "zeros"):
                    yield self.tree(length, [], {one: kind})
                    yield self.tree(length, others, {one: kind})
        for _ in range(subsets):
            yield self.tree(
                length,
                [each for each in pending if generator.random() < 0.5],
                {each: generator.choice(("half", "zeros", "")) for each in pending},
            )


def materialise(tree: Tree, root: Path) -> None:
    """Make the files and folders of a tree below an empty folder."""
    for path in sorted(tree):
        content = tree[path]
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)


class Script(NamedTuple):
    """Saves one after another, and what may be loaded from which call on."""

    calls: list[Call]
    done: list[int]  #: the number of calls after each save


def check_every_cut(
    script: Script,
    root: Path,
    check: Callable[[Path, int], None],
    *,
    subsets: int = 12,
    ordered: bool = False,
) -> tuple[int, int]:
    """Call ``check`` with each state that a cut can leave, and how many saves were done. Returns the number of states,
    and of those that differ in more than unfinished saves, which alone are made and loaded."""
    disk = Disk(script.calls)
    generator = random.Random(0)
    states, seen = 0, set()
    for length in range(len(script.calls) + 1):
        done = sum(length >= each for each in script.done)
        for tree in disk.cuts(length, generator, subsets, ordered):
            states += 1
            visible = (done, *sorted((path, data) for path, data in tree.items() if not _is_unfinished(path)))
            if hash(visible) in seen:
                continue
            seen.add(hash(visible))
            place = root / f"{len(seen)}"
            place.mkdir()
            materialise(tree, place)
            try:
                check(place, done)
            except Exception as error:
                raise AssertionError(f"a cut after {_last(script.calls[:length])}: {sorted(tree)}") from error
            shutil.rmtree(place)
    return states, len(seen)


def _is_unfinished(path: str) -> bool:
    return any(step.endswith(".partial") for step in path.split("/"))


def _last(calls: list[Call]) -> str:
    return "; ".join(" ".join(filter(None, (c.kind, c.path, c.other))) for c in calls[-3:])


def record(root: Path, saves: Iterable[Callable[[], Any]]) -> Script:
    root.mkdir(exist_ok=True)
    done = []
    with recorded(root) as calls:
        for save in saves:
            save()
            done.append(len(calls))
    return Script(calls, done)
