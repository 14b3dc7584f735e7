"""The ranks check that they run the same job: each states its configuration and data, and all get one answer.

It goes through the store at which the ranks meet, before any process group exists: a rank that could not start would
keep the others waiting in one. Nothing here knows the meaning of the configuration.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import shardwright
from shardwright.checkpoint import Damaged
from shardwright.engine import RankGroup, ranks_in_words
from shardwright.train.config.schema import flat, toml_value
from shardwright.train.config.shapes.foreign import FILES_OF_PATH
from shardwright.train.errors import UserError
from shardwright.train.parallel.rank_facts import collective_timeout
from shardwright.train.rank.hosts import host_key
from shardwright.train.report.progress import patience

PATIENCE = timedelta(minutes=1)
"""At least so long ranks wait for each other at the start, whatever SHARDWRIGHT_TIMEOUT says of later waits: hosts take
unequal time to load programs and text."""
SECONDS_TO_REPORT = 2.0
"""Seconds in which a rank waits for the first one to report the same mistake."""
SECONDS_TO_ANSWER = 3.0
"""Seconds after which a store that a rank asks at its end is taken for lost."""
SECONDS_OF_A_SIGN = 1.0
"""Seconds between two signs of progress of a rank that is at work on the start, at least."""
SECONDS_TO_JOIN = 5.0
"""Seconds from the first mistake of a rank to the verdict, in which other ranks may state theirs."""

SIGNS = "start/signs"
"""The key that counts signs of progress of all ranks. Ranks wait for the others as long as it grows."""
PATHS = ("source", "validation_source", "tokenizer", "chat_template", "cache")
"""Keys of `[data]` that name files of a host."""
VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Environment variables that change collectives or results."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Statement:
    """The facts with which a rank starts, by key, or the mistake for which it cannot start."""

    facts: Mapping[str, str]
    mistake: str | None = None


def facts_of(
    values: dict[str, Any], fingerprints: Mapping[str, str], resume: str | None, device: str
) -> dict[str, str]:
    """Return the facts that must be equal on all ranks, of the configuration's `values`, which change.

    Paths of data, and of a model with files, may differ by host: the `fingerprints` of their content count, each under
    its name in messages.
    """
    if FILES_OF_PATH in fingerprints:
        del values["model"]["path"]
    data = values["data"]
    for key in PATHS:
        del data[key]
    for source in (*data["sources"], *data["validation_sources"]):
        del source["path"]
    facts = {key: "none" if value is None else toml_value(value) for key, value in flat(values)}
    return {
        **facts,
        **{name: f"sha256 {each[:12]}" if len(each) == 64 else each for name, each in fingerprints.items()},
        "--resume": "not given" if resume is None else resume or "the newest run",
        "the device": device,
        "the version of shardwright": shardwright.__version__,
        "the version of torch": torch.__version__,
        "the version of Python": ".".join(platform.python_version_tuple()[:2]),
        "the code of shardwright": f"sha256 {_code()}",
        **{f"the variable {name}": os.environ.get(name, "not set") for name in VARIABLES},
    }


@functools.cache
def _code() -> str:
    """Return the digest of this package's files: hosts may have other code with the same version."""
    folder, digest = Path(shardwright.__file__).parent, hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def signs_of_progress(store: dist.Store) -> Callable[[], None]:
    """Return a function that a rank at work calls after each part of it, from any thread: the others then wait
    longer."""
    last = 0.0

    def sign() -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_OF_A_SIGN:
            last = time.monotonic()
            store.add(SIGNS, 1)

    return sign


def first_of_host(store: dist.Store, rank: int, work: Callable[[], Result]) -> Result:
    """Run `work` on every rank, on the first rank of each host before the others. Called by every rank.

    `work` leaves a result on the host's disk, so that it is quick for the others. If the first rank makes a mistake,
    the others do not begin: each raises the same UserError.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    host = f"host/{host_key()}"
    if local:
        if mistake := _wait_for_first(store, host):
            raise UserError(mistake)
        return work()
    store.set(f"{host}/begun", str(rank))
    mistake = ""
    try:
        return work()
    except (UserError, OSError, Damaged) as error:
        mistake = str(error)
        raise
    finally:
        store.set(host, mistake)


def _wait_for_first(store: dist.Store, host: str) -> str:
    """Return the mistake of the first rank of this host; empty if it made none. If no rank says that it is the first,
    this one does not wait for it. A verdict on the ranks ends the wait, too."""
    deadline = time.monotonic() + PATIENCE.total_seconds()
    while not store.check([host]):
        if store.check(["start/verdict"]):
            return store.get("start/verdict").decode()
        if time.monotonic() > deadline and not store.check([f"{host}/begun"]):
            return ""
        time.sleep(0.05)
    return store.get(host).decode()


def run_on_first(store: dist.Store, key: str, work: Callable[[], None]) -> None:
    """Run long `work` on the first rank, and return on all when it is done. Called by every rank of the process group.

    If it raises, all ranks raise. The others wait at `store`, where no rank has set `key` before: as long as there are
    signs of progress, and then a while. A collective would end the wait by its timeout, however well the work goes.
    """
    ranks, timeout = RankGroup(), max(collective_timeout(), PATIENCE)

    def act() -> None:
        if not ranks.is_first:
            return _wait_for(store, key, timeout)
        sign = signs_of_progress(store)
        with patience(lambda text: sign(), str):
            try:
                work()
            finally:
                store.set(key, "")

    ranks.run_on_all(act)


def agree_on_start(store: dist.Store, rank: int, size: int, statement: Statement, timeout: timedelta) -> None:
    """Return if all ranks state the same. Called by every rank. The wait for a rank that does not answer ends after
    `timeout` without a sign of progress of any rank.

    Raises UserError, the same one on every rank, which names the ranks and the first key that differs. It passes if
    ranks have not answered: they may have been killed.
    """
    timeout = max(timeout, PATIENCE)
    store.set(f"start/{rank}", json.dumps([statement.facts, statement.mistake]))
    if statement.mistake is not None:
        store.set("start/mistake", "")
    if rank == 0:
        statements = _statements(store, size, timeout)
        if None in statements and not any(each and each.mistake is not None for each in statements):
            store.set("start/passes", "")
        store.set("start/verdict", _verdict(statements))
    # The first rank gives up after `timeout`; its answer needs a moment.
    _wait_for(store, "start/verdict", timeout + PATIENCE)
    verdict = store.get("start/verdict").decode()
    if verdict:
        raise UserError(verdict, passes=store.check(["start/passes"]))


def _wait_for(store: dist.Store, key: str, timeout: timedelta) -> None:
    """Return when a key is set. Raises DistStoreError after `timeout` without it and without progress."""
    while True:
        signs = store.add(SIGNS, 0)
        try:
            store.wait([key], timeout)
            return
        except dist.DistStoreError:
            if store.add(SIGNS, 0) == signs:
                raise


def _statements(store: dist.Store, size: int, timeout: timedelta) -> list[Statement | None]:
    """Return the statements of all ranks, None for those that have not come in time. Each sign of progress extends the
    time. A mistake of one rank shortens the wait for the others: they may be at work that has become useless."""
    keys = [f"start/{rank}" for rank in range(size)]
    deadline = time.monotonic() + timeout.total_seconds()
    signs, shortened = store.add(SIGNS, 0), False
    while not store.check(keys) and time.monotonic() < deadline:
        if not shortened and store.check(["start/mistake"]):
            shortened, deadline = True, min(deadline, time.monotonic() + SECONDS_TO_JOIN)
        elif not shortened and (newest := store.add(SIGNS, 0)) != signs:
            signs, deadline = newest, time.monotonic() + timeout.total_seconds()
        time.sleep(0.01)
    return [Statement(*json.loads(store.get(key))) if store.check([key]) else None for key in keys]


def _verdict(statements: Sequence[Statement | None]) -> str:
    """Return the error for these statements; empty if there is none."""
    mistakes: dict[str, list[int]] = {}
    for rank, statement in enumerate(statements):
        if statement is not None and statement.mistake is not None:
            mistakes.setdefault(statement.mistake, []).append(rank)
    if len(mistakes) == 1 and len(next(iter(mistakes.values()))) == len(statements):
        return next(iter(mistakes))
    if mistakes:
        return ". ".join(f"{ranks_in_words(ranks)}: {mistake}" for mistake, ranks in mistakes.items())
    missing = [rank for rank, statement in enumerate(statements) if statement is None]
    if missing:
        return (
            f"expected {len(statements)} ranks to start, got no answer from {ranks_in_words(missing)}; look at the "
            "output or the log of these ranks and hosts"
        )
    return _difference([statement.facts for statement in statements if statement is not None])


def _difference(facts: Sequence[Mapping[str, str]]) -> str:
    found = difference(facts)
    if not found:
        return ""
    return (
        f"expected the same job on every rank, found {found}; start all ranks with the same configuration, data, code "
        "and environment"
    )


def difference(facts: Sequence[Mapping[str, str]]) -> str:
    """Return the first key that differs among these facts of the ranks, in words; empty if none does."""
    differing = [key for key in dict.fromkeys(key for each in facts for key in each)
                 if len({each.get(key) for each in facts}) > 1]  # fmt: skip
    if not differing:
        return ""
    key, *others = differing
    holders: dict[str, list[int]] = {}
    for rank, each in enumerate(facts):
        holders.setdefault(each.get(key, "not known"), []).append(rank)
    values = ", ".join(f"{value} on {ranks_in_words(ranks)}" for value, ranks in holders.items())
    more = f" ({', '.join(others[:3])}{', ...' if len(others) > 3 else ''} too)" if others else ""
    return f"{key}: {values}{more}"


def is_to_report(store: dist.Store, rank: int, message: str) -> bool:
    """Return whether this rank prints a mistake. Several ranks may meet the same one; then the first one does."""
    key = f"reported/{hashlib.sha256(message.encode(errors='replace')).hexdigest()}"
    deadline = time.monotonic() + (SECONDS_TO_REPORT if rank else 0.0)

    def ask() -> bool:
        while time.monotonic() < deadline:
            if store.check([key]):
                return False
            time.sleep(0.05)
        return store.compare_set(key, "", str(rank)).decode() == str(rank)

    return asked(ask, otherwise=True)  # Nobody is left to ask: better twice than never.


def asked(question: Callable[[], Result], otherwise: Result) -> Result:
    """Return the answer to a question to a store, or `otherwise` if the store is gone or does not answer.

    If the network is cut without a reset, an operation of the store waits for many minutes, whatever its timeout. So
    the question is asked in a thread. The caller must end the process, since the thread may wait for ever.
    """
    answers: queue.SimpleQueue[Result] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(question())
        except RuntimeError:
            answers.put(otherwise)

    threading.Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=SECONDS_TO_REPORT + SECONDS_TO_ANSWER)
    except queue.Empty:
        return otherwise
