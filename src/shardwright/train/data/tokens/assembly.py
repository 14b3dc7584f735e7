"""Part files put together: the files of a data set, written from their starts, in the order of the parts.

Separators of documents of bytes are put between parts here, and inside them by ``encoding``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from shardwright.train.data.sources.documents import FilePart
from shardwright.train.data.sources.places import DataFile
from shardwright.train.data.tokens.encoding import EncodingJob, PartCounts, separator
from shardwright.train.data.tokens.tokens import ENDS, IDS, TRAINED, Facts, FileDigest, FileFacts

_BLOCK = 1 << 20


class Assembly:
    """The files of tokens under construction: parts are added in order. `places` are the files that they come from."""

    def __init__(self, folder: Path, job: EncodingJob, places: Sequence[DataFile]) -> None:
        self.tokens = self.documents = 0
        self._job = job
        self._places = places
        self._done: list[FileFacts] = []  # of the files before the one that is being added
        self._file = _File()
        self._begun = False  # whether a part was added
        self._trained = self._untrained = self._spelled = 0
        self._files = {IDS: _Hashed(folder / IDS), ENDS: _Hashed(folder / ENDS)}
        if job.masked:
            self._files[TRAINED] = _Hashed(folder / TRAINED)
        self._new_file = False  # no part of the file that is being added has had a document yet
        self._ended = False  # the last document has ended, and its end is not written yet
        self._raw = False  # the last part was of a file of tokens

    def add(self, span: FilePart, part: PartCounts, files: Sequence[Path]) -> None:
        if span.start == 0:
            self._begin_file(span.place)
        self._spelled += part.spelled
        if not part.empty:
            self._join(span.place, part)
            self._copy(part, files)
            self._new_file = False
            self._raw = span.place.kind == ".npy"
        for file in files:
            file.unlink()

    def _begin_file(self, place: DataFile) -> None:
        if self._begun:
            self._end_file()
        self._begun = True
        while self._places[len(self._done)] != place:
            self._end_file()  # a file without a span
        self._new_file = True

    def _end_file(self) -> None:
        if self._ended and not self._new_file:
            self._file.digest.add_ends(np.array([self.tokens - self._file.start]))
        place = self._places[len(self._done)]
        joint = len(separator(self._job, place))
        tokens = self.tokens - self._file.start if self._file.documents else 0
        self._done.append(FileFacts(self._file.documents, tokens, joint, self._file.digest.hexdigest()))
        self._file = _File()
        self._new_file = True

    def _join(self, place: DataFile, part: PartCounts) -> None:
        if not self._ended:
            return
        joint = separator(self._job, place)
        if self._new_file and joint:
            between = self.tokens and not self._raw and self._files[IDS].last != b"\n"
            joint = b"\n" if between else b""
        if part.begins:
            self._files[IDS].write(joint)
            self.tokens += len(joint)
            self._trained += len(joint)
        if not self._new_file:
            self._file.digest.add_ids(joint)
            self._file.digest.add_ends(np.array([self.tokens - self._file.start]))
        self._write_end()

    def _copy(self, part: PartCounts, files: Sequence[Path]) -> None:
        if self._new_file:
            self._file.start = self.tokens
        digest = self._file.digest
        adders = (digest.add_ids, digest.add_trained)
        for name, path, add in zip((IDS, TRAINED), (files[0], files[2]), adders, strict=True):
            if name in self._files:
                with open(path, "rb") as stream:
                    while block := stream.read(_BLOCK):
                        self._files[name].write(block)
                        add(block)
        with open(files[1], "rb") as stream:
            left = part.documents - part.ends  # the last end may still move
            while left:
                ends = np.frombuffer(stream.read(min(left * 8, _BLOCK)), "<i8")
                if not len(ends):
                    raise EOFError(f"{files[1]} lacks the ends of {left:,} documents")
                self._files[ENDS].write((ends + self.tokens).astype(np.int64).tobytes())
                digest.add_ends(ends + (self.tokens - self._file.start))
                left -= len(ends)
        self._ended = part.ends
        self.tokens += part.tokens
        self.documents += part.documents
        self._file.documents += part.documents
        self._trained += part.trained
        self._untrained += part.untrained_documents

    def _write_end(self) -> None:
        self._files[ENDS].write(np.int64(self.tokens).tobytes())
        self._ended = False

    def facts(self) -> Facts:
        """Write what is left. Nothing is added after this."""
        while len(self._done) < len(self._places):
            self._end_file()
        if self._ended:
            self._write_end()
        digests = {name: file.close() for name, file in self._files.items()}
        whole = json.dumps([self._job.dtype, sorted(digests.items())])
        return Facts(
            dtype=self._job.dtype,
            tokens=self.tokens,
            documents=self.documents,
            trained=self._trained,
            untrained_documents=self._untrained,
            spelled=self._spelled,
            masked=self._job.masked,
            fingerprint=hashlib.sha256(whole.encode()).hexdigest(),
            digests=digests,
            files=tuple(self._done),
        )

    def __enter__(self) -> Assembly:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()


class _File:
    """The file whose parts are being added."""

    def __init__(self) -> None:
        self.start = self.documents = 0  # its first token; its documents so far
        self.digest = FileDigest()


class _Hashed:
    """A file that is written from its start, and the digest of it."""

    def __init__(self, path: Path) -> None:
        self._stream: BinaryIO = open(path, "xb")  # noqa: SIM115  # closed by `close`
        self._sha = hashlib.sha256()
        self.last = b""  #: the last byte

    def write(self, content: bytes) -> None:
        if content:
            self._stream.write(content)
            self._sha.update(content)
            self.last = content[-1:]

    def close(self) -> str:
        self._stream.close()
        return self._sha.hexdigest()
