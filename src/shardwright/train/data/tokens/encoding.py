"""A span of a file as tokens, in part files: the work of each process of ``workers``. It does not import torch.

The counts of a part are enough to put parts together without reading their tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from shardwright.train.data.sources.documents import (
    Conversation,
    DataFiles,
    Document,
    FilePart,
    Ids,
    Item,
    read,
)
from shardwright.train.data.sources.places import PYDOC, DataFile
from shardwright.train.data.tokens import chat
from shardwright.train.data.tokens.tokenizers import Bytes, Tokenizer
from shardwright.train.errors import UserError

BATCH = 1 << 18  #: characters that are encoded in one call, about
LARGEST_BATCH = 512  #: documents in one call


class EncodedPiece(NamedTuple):
    """A document as ids, or a part of one."""

    ids: np.ndarray
    trained: np.ndarray | None  #: what is learnt of them; None: all
    first: bool  #: a document begins with them
    last: bool  #: a document ends with them
    spelled: int = 0  #: places where the text spells a reserved token


@dataclass(frozen=True)
class EncodingJob:
    """Settings that are the same for every span of a data set."""

    source: DataFiles
    tokenizer: Tokenizer
    template: str | None  #: chat template; needed for conversations
    dtype: str  #: of the ids in the part files
    special_tokens: chat.SpecialTokens = "text"  #: what becomes of special tokens that a text spells

    @property
    def masked(self) -> bool:
        return self.source.kind != "documents"


class PartCounts(NamedTuple):
    """Counts of the tokens made from a span. The part's files have its number in their names."""

    tokens: int = 0
    documents: int = 0  #: that end in it
    trained: int = 0
    untrained_documents: int = 0
    spelled: int = 0  #: places where a text spells a reserved token
    begins: bool = False  #: a document begins with it; else it goes on with the one before
    ends: bool = False  #: a document ends with it
    empty: bool = True  #: neither a document nor a part of one


def part_files(folder: Path, number: int) -> tuple[Path, Path, Path]:
    """Return the files of a part: ids, ends (int64, relative to the part), and what is learnt (uint8)."""
    return folder / f"{number}.ids", folder / f"{number}.ends", folder / f"{number}.trained"


def encode_span(job: EncodingJob, span: FilePart, folder: Path, number: int) -> PartCounts:
    """Write the tokens of a span to part files. Raises UserError where the data is damaged."""
    files = part_files(folder, number)
    with open(files[0], "wb") as ids, open(files[1], "wb") as ends, open(files[2], "wb") as trained:
        return _write(job, span, ids, ends, trained)


def _write(job: EncodingJob, span: FilePart, ids: BinaryIO, ends: BinaryIO, trained: BinaryIO) -> PartCounts:
    tokens = documents = learnt = untrained = learnt_of_document = spelled = 0
    begins = ended = False
    empty = True
    joint = separator(job, span.place)
    for piece, mask, first, last, of_piece in pieces(job, span):
        spelled += of_piece
        if empty:
            empty, begins = False, first
        elif ended:
            if first and joint:  # the document before is longer by what separates it from this one
                ids.write(joint)
                tokens += len(joint)
                learnt += len(joint)
            ends.write(tokens.to_bytes(8, "little"))
        ids.write(piece.astype(job.dtype).tobytes())
        tokens += len(piece)
        count = len(piece) if mask is None else int(mask.sum())
        learnt += count
        learnt_of_document = count + (0 if first else learnt_of_document)
        if job.masked:
            trained.write(
                (np.ones(len(piece), np.uint8) if mask is None else mask.astype(np.uint8)).tobytes()
            )
        ended = last
        if last:
            documents += 1
            untrained += learnt_of_document == 0
    if ended:
        ends.write(tokens.to_bytes(8, "little"))
    return PartCounts(tokens, documents, learnt, untrained, spelled, begins, ended, empty)


def separator(job: EncodingJob, place: DataFile) -> bytes:
    """Return the bytes between two documents of a file. Only the tokenizer of bytes has no token for the end of one."""
    if job.masked or not isinstance(job.tokenizer, Bytes) or place.kind == ".npy":
        return b""
    return b"\n\n" if place.kind == PYDOC else b"\n"


def pieces(job: EncodingJob, span: FilePart) -> Iterator[EncodedPiece]:
    """Yield the items of a span as ids, in order."""
    for items in _batches(read(span, job.source)):
        if isinstance(items[0], Document):
            yield from _documents(job, [item for item in items if isinstance(item, Document)])
            continue
        for item in items:
            if isinstance(item, Ids):
                yield from _ids(job.tokenizer, item)
            if isinstance(item, Ids | Document):
                continue
            spelled = chat.spelled_places(item, job.tokenizer)
            if isinstance(item, Conversation):
                assert job.template is not None
                encoded = chat.encode_conversation(item, job.template, job.tokenizer, job.special_tokens)
            else:
                encoded = chat.encode_completion(item, job.tokenizer, job.special_tokens)
            yield EncodedPiece(encoded.ids, encoded.trained, True, True, spelled)


def _batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Short documents together, for one call of the tokenizer; other items one by one."""
    batch: list[Item] = []
    length = 0
    for item in items:
        if not isinstance(item, Document):
            yield [item]
            continue
        if batch and (length + len(item.text) > BATCH or len(batch) == LARGEST_BATCH):
            yield batch
            batch, length = [], 0
        batch.append(item)
        length += len(item.text)
    if batch:
        yield batch


def _documents(job: EncodingJob, documents: Sequence[Document]) -> Iterator[EncodedPiece]:
    tokenizer, reserved = job.tokenizer, job.tokenizer.reserved
    whole = [document.text for document in documents if document.first and document.last]
    encoded = iter(tokenizer.encode_batch(whole))
    for document in documents:
        if document.first and document.last:
            ids = next(encoded)
        else:
            ids = tokenizer.encode_part(document.text, document.before, document.after)
        spelled = 0
        if reserved and not reserved.isdisjoint(ids):
            spelled = len(tokenizer.spelled(document.text))
            if job.special_tokens == "text":
                ids = tokenizer.literal.encode_part(document.text, document.before, document.after)
        begin = [tokenizer.begin] if document.first and tokenizer.begin is not None else []
        if begin == list(ids[:1]):
            begin = []
        end = [tokenizer.end] if document.last and tokenizer.end is not None else []
        yield EncodedPiece(_array(ids, begin, end), None, document.first, document.last, spelled)


def _array(ids: Sequence[int], begin: list[int], end: list[int]) -> np.ndarray:
    if isinstance(ids, bytes):
        return np.frombuffer(ids, np.uint8)
    return np.array([*begin, *ids, *end], np.uint32)


def _ids(tokenizer: Tokenizer, item: Ids) -> Iterator[EncodedPiece]:
    """Documents end after the tokenizer's end id. Without one a file is one document."""
    ids, place = item.ids, item.origin.place
    wrong = np.flatnonzero((ids < 0) | (ids >= tokenizer.vocab_size))
    if len(wrong):
        raise UserError(
            f"{place.key}: expected ids from 0 to {tokenizer.vocab_size - 1:,}, the vocabulary of data.tokenizer, "
            f"found {int(ids[wrong[0]]):,} at position {item.origin.number + int(wrong[0]):,} of {place}; set the "
            "tokenizer that made the file"
        )
    stops = [] if tokenizer.end is None else (np.flatnonzero(ids == tokenizer.end) + 1).tolist()
    if not stops or stops[-1] != len(ids):
        stops.append(len(ids))
    start, first = 0, item.first
    for stop in stops:
        ended = tokenizer.end is not None and int(ids[stop - 1]) == tokenizer.end
        last = ended or (item.last and stop == len(ids))
        yield EncodedPiece(ids[start:stop], None, first, last)
        start, first = stop, last
