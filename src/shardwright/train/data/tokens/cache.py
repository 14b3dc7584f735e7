"""A source as tokens on disk, made once: a folder per content, tokenizer and settings, complete or absent.

    tokens = tokenised(source, tokenizer, cache=default_cache(), workers=8)

Processes encode spans of the files, and this one puts the parts together in order. So the tokens do not depend on the
number of processes. A folder gets its name when it is complete. One process per host makes it, the others wait.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

from shardwright.checkpoint import Damaged
from shardwright.common.durable import replace_file, sync_files, sync_folder
from shardwright.common.json_text import strict_json
from shardwright.train.data.sources.documents import DataFiles, places, spans
from shardwright.train.data.sources.places import (
    PYDOC,
    DataFile,
    open_place,
    readable,
    remote_version,
    size_of,
)
from shardwright.train.data.tokens import chat
from shardwright.train.data.tokens.assembly import Assembly
from shardwright.train.data.tokens.encoding import EncodingJob, part_files
from shardwright.train.data.tokens.tokenizers import Tokenizer
from shardwright.train.data.tokens.tokens import Facts, Tokens, dtype_of, open_tokens, write_facts
from shardwright.train.data.tokens.workers import encoded
from shardwright.train.errors import UserError
from shardwright.train.report.progress import patience
from shardwright.train.run.lock import UNSUPPORTED
from shardwright.train.run.writing import writing

FORMAT = 3  #: of the folders and of how tokens are made: older folders are then not used
WORTH_A_PROCESS = 4 << 20  #: bytes of data: fewer do not pay for the start of a process
_RECENT = 2_000_000_000  #: ns: a file that changed so shortly ago could change again without a new time
_BLOCK = 1 << 20


def default_cache() -> Path:
    """Return the folder of the user's caches: XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwright" / "tokens"


def tokenised(
    source: DataFiles,
    tokenizer: Tokenizer,
    *,
    cache: Path | None = None,
    template: str | None = None,
    special_tokens: chat.SpecialTokens = "text",
    workers: int = 0,
    progress: bool = False,
    advanced: Callable[[], None] = lambda: None,
) -> Tokens:
    """Return the tokens of a source, from the cache if they are there, else made and kept there.

    Args:
        source: the files and what to take from them.
        tokenizer: makes the ids. Unless it is the one of bytes, its ``begin`` and ``end`` ids stand around each
            document. Bytes have line feeds between documents, as they always had.
        cache: the folder of all caches. Default: :func:`default_cache`.
        template: chat template of conversations. Default: the tokenizer's own.
        special_tokens: what becomes of special tokens that a text spells.
        workers: processes that encode. 0: one per core that this process may use.
        progress: show a bar on standard error while tokens are made, or words while another process makes them.
        advanced: called from any thread when a part of the work is done, also by the process for which this one waits.

    Raises:
        UserError: the data is missing, damaged or empty, or the cache cannot be written.
    """
    files = places(source)
    template = _template_for(source, tokenizer, template)
    workers = workers or _cores()
    cache = Path(cache or default_cache()).absolute()
    with writing(cache, "data.cache"):
        cache.mkdir(parents=True, exist_ok=True)
    before = [_identity(place) for place in files]
    key = _key(files, source, tokenizer, template, special_tokens, cache, workers, advanced)
    folder = cache / key
    try:
        return open_tokens(folder)
    except Damaged:
        pass  # absent, or to be made again: looked at under the lock
    with _locked(cache, key, progress, advanced) as note:
        try:
            return open_tokens(folder)
        except Damaged:
            job = EncodingJob(
                source, tokenizer, template, dtype_of(tokenizer.vocab_size).name, special_tokens
            )
            _make(folder, files, before, job, workers, progress, note, advanced)
    return open_tokens(folder)


def _template_for(source: DataFiles, tokenizer: Tokenizer, template: str | None) -> str | None:
    if source.kind != "conversations":
        return None
    where = "data.chat_template" if template is not None else "the template beside the tokenizer"
    template = template if template is not None else tokenizer.chat_template
    if template is None:
        raise UserError(
            f"{chat.KEY}: expected a chat template for conversations, found none beside the tokenizer; set "
            "data.chat_template to a file with one"
        )
    chat.check_template(template, where)
    return template


# -- what the name of a folder stands for ------------------------------------------------------------------------------


def _key(
    files: Sequence[DataFile],
    source: DataFiles,
    tokenizer: Tokenizer,
    template: str | None,
    special_tokens: str,
    cache: Path,
    workers: int,
    advanced: Callable[[], None],
) -> str:
    with ThreadPoolExecutor(max(1, workers)) as pool:
        contents = list(pool.map(lambda place: (place.kind, content_digest(place, cache, advanced)), files))
    settings = {
        "format": FORMAT,
        "files": contents,
        "kind": source.kind,
        "keys": [source.text_key, source.messages_key, source.prompt_key, source.completion_key],
        "tokenizer": tokenizer.fingerprint,
        "template": template,
        "special_tokens": special_tokens if tokenizer.reserved else "",
        # A template writes these texts: bos_token, eos_token, ...
        "names": sorted(tokenizer.names.items()) if template is not None else [],
    }
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:40]


def content_digest(place: DataFile, cache: Path, advanced: Callable[[], None] = lambda: None) -> str:
    """SHA-256 of a file. It is remembered in the cache for as long as path, size, time and inode stay the same.

    A remote file is not read twice: where its file system knows a version or a time of it, this is digested instead.
    """
    if place.kind == PYDOC:
        return _digest_of_pydoc()
    if place.remote:
        return remote_version(place) or _digest(place, advanced)
    size_of(place)
    facts = _identity(place)
    note = cache / "digests" / f"{hashlib.sha256(place.path.encode()).hexdigest()[:40]}.json"
    try:
        known = json.loads(note.read_bytes())
        if known["identity"] == facts:
            return str(known["sha256"])
    except (OSError, ValueError, LookupError, TypeError):
        pass  # not read before, or no whole note: read the file
    now = time.time_ns()
    digest = _digest(place, advanced)
    if _identity(place) != facts:
        raise _changes(place)
    if now - facts["mtime_ns"] > _RECENT:
        with writing(cache, "data.cache"):
            note.parent.mkdir(exist_ok=True)
            replace_file(
                note, strict_json({"path": place.path, "identity": facts, "sha256": digest}).encode()
            )
    return digest


def _changes(place: DataFile) -> UserError:
    return UserError(
        f"{place.key}: expected a file that stays as it is, found that {place} changes; wait until it is written"
    )


def _identity(place: DataFile) -> dict[str, int]:
    """Return values that change with the content of a local file."""
    if place.remote or place.kind == PYDOC:
        return {}
    with readable(place, OSError):
        status = os.stat(place.path)
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}


def _digest(place: DataFile, advanced: Callable[[], None]) -> str:
    sha = hashlib.sha256()
    with open_place(place) as stream, readable(place, OSError):
        while block := stream.read(_BLOCK):
            sha.update(block)
            advanced()
    return sha.hexdigest()


def _digest_of_pydoc() -> str:
    from pydoc_data.topics import topics

    return hashlib.sha256(json.dumps(topics).encode()).hexdigest()


# -- one process at a time ---------------------------------------------------------------------------------------------


@contextmanager
def _locked(
    cache: Path, key: str, progress: bool, advanced: Callable[[], None]
) -> Iterator[Callable[[str], None]]:
    """The lock of one folder of the cache. It ends with the process. Yields a function that notes how far it is."""
    with writing(cache, "data.cache"):
        (cache / "locks").mkdir(exist_ok=True)
        descriptor = os.open(cache / "locks" / key, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    who = f"process {os.getpid()} on {socket.gethostname()}"

    def note(text: str) -> None:
        line = f"{who}, {text}\n".encode()
        os.pwrite(descriptor, line, 0)
        os.ftruncate(descriptor, len(line))

    newest = ""

    def others_note() -> str:
        nonlocal newest
        before, newest = newest, os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        if newest != before:
            advanced()
        return f"waiting for tokens: {newest}"

    def say(text: str) -> None:
        if progress:
            print(text, file=sys.stderr, flush=True)

    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with patience(say, others_note):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            # Without locks two processes may make the same tokens; the first one's are used.
            if error.errno not in UNSUPPORTED:
                raise
        with writing(cache, "data.cache"):
            note("begun")
        yield note
    finally:
        os.close(descriptor)


# -- making it ---------------------------------------------------------------------------------------------------------


def _make(
    folder: Path,
    files: Sequence[DataFile],
    before: Sequence[Mapping[str, int]],
    job: EncodingJob,
    workers: int,
    progress: bool,
    note: Callable[[str], None],
    advanced: Callable[[], None],
) -> None:
    """Make a folder, or leave nothing behind. `before`: the identities of the files whose content it is named after."""
    ours = f".{folder.name}.{socket.gethostname()}."
    building = folder.with_name(f"{ours}{os.getpid()}")
    with writing(folder.parent, "data.cache"):
        for rest in folder.parent.glob(f"{glob.escape(ours)}*"):
            if not _other_process(rest.name.removeprefix(ours)):
                shutil.rmtree(rest, ignore_errors=True)  # of a process that was killed
        building.mkdir()
        try:
            facts = _assemble(building, files, job, workers, progress, note, advanced)
            for place, identity in zip(files, before, strict=True):
                if _identity(place) != identity:
                    raise _changes(place)
            write_facts(building, facts)
            sync_files(building)
            if folder.exists():  # and is damaged
                damaged = folder.with_name(f"{ours}damaged")
                os.rename(folder, damaged)
                shutil.rmtree(damaged, ignore_errors=True)
            os.rename(building, folder)
            sync_folder(folder.parent)
        except OSError:
            if not _is_complete(folder):  # else another host has made it meanwhile
                raise
        finally:
            shutil.rmtree(building, ignore_errors=True)


def _assemble(
    building: Path,
    files: Sequence[DataFile],
    job: EncodingJob,
    workers: int,
    progress: bool,
    note: Callable[[str], None],
    advanced: Callable[[], None],
) -> Facts:
    total = sum(1 if place.kind == PYDOC else size_of(place) for place in files)
    # A file system in memory belongs to this process.
    here = total < WORTH_A_PROCESS or any(place.path.startswith("memory:") for place in files)
    parts_folder = building / "parts"
    parts_folder.mkdir()
    todo = (span for place in files for span in spans(place, job.source))
    done, noted = 0, time.monotonic()
    with (
        Assembly(building, job, files) as assembly,
        _bar(progress, total) as draw,
        closing(encoded(job, todo, parts_folder, 1 if here else workers)) as parts,
    ):
        for span, number, part in parts:
            assembly.add(span, part, part_files(parts_folder, number))
            done = min(done + span.nbytes, total)
            draw(done)
            advanced()
            if time.monotonic() - noted > 1:
                noted = time.monotonic()
                note(f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB")
        parts_folder.rmdir()
        if not assembly.tokens:
            names = ", ".join(job.source.paths)
            raise UserError(
                f"{job.source.key}: expected text, found none in {names}; remove it, or correct the file"
            )
        return assembly.facts()


@contextmanager
def _bar(visible: bool, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, if that is a terminal. Yields a function that takes the bytes done."""
    if not (visible and sys.stderr.isatty()):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("making tokens"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)


def _other_process(name: str) -> bool:
    """Return whether a process of this number runs, apart from this one. (Where there are no locks, it may be at
    work.)"""
    if not name.isdigit() or int(name) == os.getpid():
        return False
    try:
        os.kill(int(name), 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # of another user
    return True


def _is_complete(folder: Path) -> bool:
    try:
        open_tokens(folder)
    except Damaged:
        return False
    return True


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
