"""The cache: the tokens it makes, that it makes them once, and what it does with damage."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.train.data.sources.documents import DataFiles
from shardwright.train.data.sources.places import DataFile
from shardwright.train.data.tokens import cache as cache_module
from shardwright.train.data.tokens.cache import content_digest, tokenised
from shardwright.train.data.tokens.tokenizers import Bytes, FromFile
from shardwright.train.data.tokens.tokens import IDS, Tokens
from shardwright.train.errors import UserError
from shardwright.train.report import progress
from tests.train.data.samples import CHATML, chat, save_tokenizer, texts, write_jsonl
from tests.train.kit.text import joined, pydoc


@pytest.fixture
def tokenizer(tmp_path: Path) -> FromFile:
    return FromFile(save_tokenizer(tmp_path / "tokenizer") / "tokenizer.json")


def make(
    tmp_path: Path, *paths: Path | str, tokenizer: Any = None, workers: int = 1, **options: Any
) -> Tokens:
    template = options.pop("template", None)
    source = DataFiles(tuple(map(str, paths)), **options)
    return tokenised(
        source, tokenizer or Bytes(), cache=tmp_path / "cache", workers=workers, template=template
    )


def folders(tmp_path: Path) -> list[Path]:
    """Complete folders and rests of the cache."""
    return [each for each in (tmp_path / "cache").iterdir() if each.name not in ("digests", "locks")]


def documents_of(tokens: Tokens) -> list[list[int]]:
    starts = [0, *tokens.ends[:-1].tolist()]
    return [tokens.ids[start:stop].tolist() for start, stop in zip(starts, tokens.ends.tolist(), strict=True)]


# ------------------------------------------------------------------------------
# The tokens


def test_bytes_of_pydoc_are_its_text(tmp_path: Path) -> None:
    tokens = make(tmp_path, "pydoc")
    assert tokens.ids.dtype == np.uint8 and tokens.trained is None
    assert tokens.ids.tobytes() == pydoc() and tokens.sha256 == hashlib.sha256(pydoc()).hexdigest()
    assert tokens.documents > 50 and tokens.ends[-1] == len(tokens.ids) == tokens.trained_tokens
    assert bytes(documents_of(tokens)[0]).decode() == texts(1)[0] + "\n\n"


FILES = {
    "a.txt": "one",
    "b.jsonl": '{"text": "tw\\u2028o"}\n\n{"text": ""}\n{"text": "drei \\u00e9\\n"}\n',
    "c.txt": "four\n",
    "d.txt": "five",
    "e.jsonl": '{"text": ""}\n',
    "f.jsonl": '\n{"text": "x\\n"}\n{"text": ""}\n',
    "g.txt": "\n",
    "h.txt": "five",
}


@pytest.mark.parametrize(
    "names", ["abcd", "e", "ea", "eea", "fgf", "dcba", "aaee", "efe", "hdcgab", "bb", "egeff"]
)
def test_bytes_of_files_are_their_text(tmp_path: Path, names: str) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    paths = [tmp_path / next(name for name in FILES if name[0] == letter) for letter in names]
    text = joined(*paths)
    if not text:
        with pytest.raises(UserError, match=r"data\.source: expected text, found none in"):
            make(tmp_path, *paths)
        return
    tokens = make(tmp_path, *paths)
    assert tokens.ids.tobytes() == text and tokens.sha256 == hashlib.sha256(text).hexdigest()
    documents = sum(1 if path.suffix == ".txt" else path.read_text().count('"text"') for path in paths)
    assert tokens.documents == documents and np.all(np.diff(tokens.ends) >= 0)


def large_files(tmp_path: Path, lines: int = 6000) -> list[Path]:
    """Up to 6 MB: a text; many lines, with blank ones between, one longer than a span; a text of one line."""
    words = " ".join(texts(40)).split()
    rows = [{"text": " ".join(words[number % 900 : number % 900 + number % 60])} for number in range(lines)]
    rows[lines // 2] = {"text": " ".join(words * 6)}
    path = write_jsonl(tmp_path / "b.jsonl", rows)
    path.write_text(path.read_text().replace("\n", "\n\n\n"))
    (tmp_path / "a.txt").write_text("\n".join([*texts(40)] * 6), encoding="utf-8")
    (tmp_path / "c.txt").write_text("é" * 1_200_000, encoding="utf-8")
    return [tmp_path / name for name in ("a.txt", "b.jsonl", "c.txt")]


def test_bytes_of_large_files_are_their_text(tmp_path: Path) -> None:
    paths = large_files(tmp_path)
    tokens = make(tmp_path, *paths, workers=2)
    assert len(tokens.ids) > 5_000_000 and tokens.sha256 == hashlib.sha256(joined(*paths)).hexdigest()
    assert tokens.documents == 6002


@pytest.mark.extensive("processes of their own")
def test_the_number_of_processes_changes_nothing(
    tmp_path: Path, tokenizer: FromFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "WORTH_A_PROCESS", 0)
    paths = large_files(tmp_path, 1500)[:2]
    made = [
        tokenised(
            DataFiles(tuple(map(str, paths))), tokenizer, cache=tmp_path / f"cache{count}", workers=count
        )
        for count in (1, 2, 4)
    ]
    assert made[0].documents == 1501 and made[0].ids.dtype == np.uint16
    assert len({each.fingerprint for each in made}) == 1
    for each in made[1:]:
        assert np.array_equal(each.ids, made[0].ids) and np.array_equal(each.ends, made[0].ends)
        assert each.files == made[0].files
    alone = [make(tmp_path, path, tokenizer=tokenizer).files[0] for path in paths]
    assert list(made[0].files) == alone and [each.documents for each in alone] == [1, 1500]


def test_documents_stand_between_the_ids_of_their_tokenizer(tmp_path: Path, tokenizer: FromFile) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "one two"}, {"text": ""}, {"text": "x" * 40}])
    (tmp_path / "b.txt").write_text("three")
    tokens = make(tmp_path, path, tmp_path / "b.txt", tokenizer=tokenizer)
    assert documents_of(tokens) == [
        [tokenizer.begin, *tokenizer.encode(text), tokenizer.end]
        for text in ("one two", "", "x" * 40, "three")
    ]


@pytest.mark.extensive("a text of megabytes")
def test_a_long_text_has_the_ids_of_the_whole(tmp_path: Path, tokenizer: FromFile) -> None:
    text = "\n\n".join(texts(40) * 5)
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    assert path.stat().st_size > 1_000_000
    tokens = make(tmp_path, path, write_jsonl(tmp_path / "b.jsonl", [{"text": text}]), tokenizer=tokenizer)
    whole = [tokenizer.begin, *tokenizer.encode(text), tokenizer.end]
    assert documents_of(tokens) == [whole, whole]


def test_tokens_of_files_are_documents_between_end_ids(tmp_path: Path, tokenizer: FromFile) -> None:
    end = tokenizer.end
    np.save(tmp_path / "a.npy", np.array([5, 6, end, end, 7], np.int64))
    np.save(tmp_path / "b.npy", np.array([8, end], np.uint16))
    tokens = make(tmp_path, tmp_path / "a.npy", tmp_path / "b.npy", tokenizer=tokenizer)
    assert documents_of(tokens) == [[5, 6, end], [end], [7], [8, end]]
    raw = make(tmp_path, tmp_path / "b.npy", write_jsonl(tmp_path / "c.jsonl", [{"text": "x"}]))
    assert documents_of(raw) == [[8, 0], [120]]  # bytes have no id between documents
    long = np.arange(3 << 20) % 250
    np.save(tmp_path / "d.npy", long)
    assert np.array_equal(make(tmp_path, tmp_path / "d.npy").ids, long)


@pytest.mark.parametrize("wrong", [-1, 256, 2**40])
def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path, wrong: int) -> None:
    ids = np.zeros((1 << 20) + 50, np.int64)
    ids[(1 << 20) + 7] = wrong
    np.save(tmp_path / "a.npy", ids)
    with pytest.raises(UserError) as caught:
        make(tmp_path, tmp_path / "a.npy")
    assert (
        f"expected ids from 0 to 255, the vocabulary of data.tokenizer, found {wrong:,} at position 1,048,583"
        in str(caught.value)
    )
    assert not folders(tmp_path)


def test_conversations_have_marks_and_those_without_an_answer_are_counted(
    tmp_path: Path, tokenizer: FromFile
) -> None:
    pytest.importorskip("jinja2", reason="needs jinja2")
    rows = [
        {"messages": chat("Hi", "Hello")},
        {"messages": chat("Hi")},
        {"messages": chat("a", "b", "c", "d")},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    tokens = make(tmp_path, path, tokenizer=tokenizer, kind="conversations", template=CHATML)
    assert tokens.trained is not None and tokens.trained.dtype == np.uint8
    learnt = tokenizer.decode(tokens.ids[tokens.trained == 1].tolist())
    assert learnt == "Hello<|im_end|>b<|im_end|>d<|im_end|>"
    assert (tokens.documents, tokens.untrained_documents) == (3, 1)
    assert tokens.trained_tokens == tokens.trained.sum() == len(tokenizer.encode(learnt))
    with pytest.raises(UserError, match="expected a chat template for conversations, found none"):
        make(tmp_path, path, tokenizer=tokenizer, kind="conversations")


def test_completions_have_marks(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}] * 3)
    tokens = make(tmp_path, path, kind="completions")
    assert tokens.ids.tobytes() == b"ab\n" * 3 and tokens.trained is not None
    assert tokens.trained.tolist() == [0, 1, 1] * 3 and tokens.ends.tolist() == [3, 6, 9]


# ------------------------------------------------------------------------------
# Once


def test_the_second_start_reads_neither_data_nor_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some text")
    os.utime(path, (1, 1))
    first = make(tmp_path, path)

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("read again")

    monkeypatch.setattr(cache_module, "_digest", fail)
    monkeypatch.setattr(cache_module, "encoded", fail)
    assert make(tmp_path, path).fingerprint == first.fingerprint
    os.utime(path, (2, 2))
    with pytest.raises(AssertionError, match="read again"):
        make(tmp_path, path)


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = content_digest(DataFile(str(path)), tmp_path)
    assert before == hashlib.sha256(b"one").hexdigest() and not (tmp_path / "digests").exists()
    stamp = path.stat().st_mtime_ns
    path.write_text("two")
    os.utime(path, ns=(stamp, stamp))
    assert content_digest(DataFile(str(path)), tmp_path) != before


def test_content_tokenizer_and_settings_have_folders_of_their_own(
    tmp_path: Path, tokenizer: FromFile
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "one", "body": "two"}])
    made = {make(tmp_path, path).fingerprint, make(tmp_path, path, text_key="body").fingerprint}
    made.add(make(tmp_path, path, tokenizer=tokenizer).fingerprint)
    moved = path.rename(tmp_path / "b.jsonl")
    assert make(tmp_path, moved).fingerprint in made and len(folders(tmp_path)) == 3
    write_jsonl(moved, [{"text": "ona", "body": "two"}])
    made.add(make(tmp_path, moved).fingerprint)
    assert len(made) == len(folders(tmp_path)) == 4


def test_another_text_of_a_special_token_makes_other_tokens(tmp_path: Path) -> None:
    """A template writes it, and no file of the data and no id of the tokenizer has changed."""
    pytest.importorskip("jinja2", reason="needs jinja2")
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": chat("Hi", "Hello")}])
    template = "{{ bos_token }}" + CHATML
    first = [
        make(tmp_path, path, tokenizer=opened, kind="conversations", template=template).ids[0]
        for begin in ("<|bos|>", "<|im_end|>")
        for opened in [FromFile(save_tokenizer(tmp_path / begin, bos_token=begin) / "tokenizer.json")]
    ]
    assert first[0] != first[1]


def test_the_fingerprint_knows_ids_ends_and_marks(tmp_path: Path) -> None:
    one = make(tmp_path, write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "b"}]))
    other = make(tmp_path, write_jsonl(tmp_path / "b.jsonl", [{"text": "a\nb"}]))
    rows = [{"prompt": "", "completion": "a\nb"[:-1]}]
    third = make(tmp_path, write_jsonl(tmp_path / "c.jsonl", rows), kind="completions")
    assert one.sha256 == other.sha256 != third.sha256
    assert len({one.fingerprint, other.fingerprint, third.fingerprint}) == 3


def program(tmp_path: Path, path: Path, workers: int, before: str = "") -> list[str]:
    return [
        sys.executable,
        "-c",
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from pathlib import Path\n"
        "from shardwright.train.data.tokens import cache\n"
        "from shardwright.train.data.sources.documents import DataFiles\n"
        "from shardwright.train.data.tokens.tokenizers import open_tokenizer\n"
        f"{before}\n"
        "print('made' if not list(Path(sys.argv[1]).glob('[0-9a-f]*')) else 'there', flush=True)\n"
        "tokenizer = open_tokenizer(sys.argv[3])\n"
        "source = DataFiles((sys.argv[2],))\n"
        "options = {'cache': Path(sys.argv[1]), 'progress': True}\n"
        f"print(cache.tokenised(source, tokenizer, workers={workers}, **options).fingerprint)",
        str(tmp_path / "cache"),
        str(path),
        str(tmp_path / "tokenizer"),
    ]


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


def alive(parent: int) -> list[int]:
    """Processes that make tokens for the cache of a process that may have ended."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            words = (each / "cmdline").read_bytes()
            environ = (each / "environ").read_bytes()
        except OSError:
            continue
        if b"workers import serve" in words and f"TEST_PARENT={parent}".encode() in environ:
            found.append(int(each.name))
    return found


@pytest.mark.extensive("processes of their own")
@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc")
def test_a_killed_process_leaves_no_half_of_a_cache(tmp_path: Path, tokenizer: FromFile) -> None:
    path = large_files(tmp_path, 2500)[1]
    mark = os.getpid()
    environment = {**os.environ, "TEST_PARENT": str(mark)}
    process = subprocess.Popen(
        program(tmp_path, path, 2, "cache.WORTH_A_PROCESS = 0"),
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def begun() -> bool:
        assert process.poll() is None, "it ended before it was killed"
        return any(each.stat().st_size for each in (tmp_path / "cache").glob(f".*/{IDS}"))

    wait_for(begun)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [each.name[0] for each in folders(tmp_path)] == ["."]  # a rest, never a folder with its name
    wait_for(lambda: not alive(mark))
    tokens = make(tmp_path, path, tokenizer=tokenizer, workers=2)
    assert tokens.documents == 2500
    assert [each.name[0] for each in folders(tmp_path)] != ["."] and len(folders(tmp_path)) == 1


@pytest.mark.extensive("processes of their own")
def test_two_processes_at_once_make_it_once(tmp_path: Path, tokenizer: FromFile) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some text")
    slow = (
        "make = cache._make\n"
        "def counted(folder, *rest):\n"
        "    open(folder.parent.parent / 'made.txt', 'a').write('once ')\n"
        "    import time\n"
        "    while len(list(folder.parent.parent.glob('ready-*'))) < 2: time.sleep(0.01)\n"
        "    time.sleep(4)\n"
        "    make(folder, *rest)\n"
        "cache._make = counted\n"
        "import os; (Path(sys.argv[1]).parent / f'ready-{os.getpid()}').touch()"
    )
    commands = [program(tmp_path, path, 1, slow)] * 2
    running = [
        subprocess.Popen(each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for each in commands
    ]
    results = [each.communicate(timeout=120) for each in running]
    assert [each.returncode for each in running] == [0, 0], results
    assert (tmp_path / "made.txt").read_text() == "once "
    assert results[0][0].splitlines()[-1] == results[1][0].splitlines()[-1]
    assert sum("waiting for tokens: process" in err for _, err in results) == 1


def test_a_process_that_ends_is_one_error(
    tmp_path: Path, tokenizer: FromFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "shardwright.train.data.tokens.workers._PROGRAM", "import os; os.kill(os.getpid(), 9)  # {path}"
    )
    monkeypatch.setattr(cache_module, "WORTH_A_PROCESS", 0)
    with pytest.raises(
        UserError, match=r"data\.workers: .* ended with signal 9 \(SIGKILL\); if memory ran out"
    ):
        make(tmp_path, large_files(tmp_path, 100)[1], tokenizer=tokenizer, workers=2)
    assert not folders(tmp_path)


@pytest.mark.parametrize("workers", [1, 3])
def test_the_first_damage_in_order_is_named(tmp_path: Path, workers: int) -> None:
    path = large_files(tmp_path)[1]
    lines = path.read_text().split("\n")
    lines[3000], lines[15_000] = '{"txt": 1}', "{"
    path.write_text("\n".join(lines))
    (tmp_path / "z.npy").write_bytes(b"damaged")
    with pytest.raises(UserError) as caught:
        make(tmp_path, path, tmp_path / "z.npy", workers=workers)
    assert f"found only 'txt' in line 3001 of {path}" in str(caught.value)
    assert not folders(tmp_path)


def test_errors_of_a_later_file_are_raised(tmp_path: Path) -> None:
    (tmp_path / "z.npy").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"found a damaged one at .*z\.npy"):
        make(tmp_path, large_files(tmp_path)[0], tmp_path / "z.npy", workers=2)
    assert not folders(tmp_path)


def test_a_source_without_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n")
    with pytest.raises(UserError, match=r"data\.source: expected text, found none in .*a\.jsonl"):
        make(tmp_path, path)
    assert not folders(tmp_path)


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match="cache: cannot write"):
        make(tmp_path, "pydoc")


# ------------------------------------------------------------------------------
# Damage of the cache


def shorten(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def forge(file: Path) -> None:
    """A change of tokens.json that stays JSON."""
    content = json.loads(file.read_text()) if file.suffix == ".json" else {}
    file.write_text(json.dumps({**content, "documents": 1}))


@pytest.mark.parametrize("name", ["ids.bin", "ends.bin", "trained.bin", "tokens.json"])
@pytest.mark.parametrize("damage", [shorten, flip, forge, Path.unlink])
def test_a_damaged_cache_is_made_again(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    rows = [{"prompt": "ab", "completion": "cdefgh"}] * 5
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    first = make(tmp_path, path, kind="completions")
    (folder,) = folders(tmp_path)
    content = (folder / name).read_bytes()
    damage(folder / name)
    again = make(tmp_path, path, kind="completions")
    assert again.fingerprint == first.fingerprint and (folder / name).read_bytes() == content
    assert folders(tmp_path) == [folder]
    assert again.ids.tobytes() == b"abcdefgh\n" * 5


# ------------------------------------------------------------------------------
# Memory


@pytest.mark.extensive("each form")
@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_a_large_file_needs_little_memory(tmp_path: Path, kind: str) -> None:
    """200 MB of data: the process that makes tokens of them never grows by more than 40 MB."""
    line = json.dumps({"text": "x" * 900 + " y"}) if kind == "jsonl" else "Some words of a line. " * 45
    block = (line + "\n").encode() * 1000
    path = tmp_path / f"a.{kind}"
    with open(path, "wb") as stream:
        for _ in range(200_000_000 // len(block) + 1):
            stream.write(block)
    before = (
        "import resource\n"
        "import shardwright.train.data.tokens.workers, shardwright.train.data.sources.lines\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "start = peak()\n"
        "import atexit; atexit.register(lambda: print(peak() - start))\n"
    )
    save_tokenizer(tmp_path / "tokenizer")
    command = program(tmp_path, path, 1, before)
    command[-1] = "bytes"
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < 40_000  # kB
    tokens = make(tmp_path, path)
    assert len(tokens.ids) > 180_000_000 and tokens.documents == (
        1 if kind == "txt" else (len(tokens.ids) + 1) // 903
    )
    path.unlink()


def test_each_part_of_the_work_is_a_sign_of_progress(tmp_path: Path) -> None:
    path, signs = large_files(tmp_path, 2500)[1], []
    tokenised(
        DataFiles((str(path),)),
        Bytes(),
        cache=tmp_path / "cache",
        workers=1,
        advanced=lambda: signs.append(1),
    )
    assert len(signs) > path.stat().st_size >> 20  # each block that is digested, then each span


def test_the_progress_of_another_process_is_a_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.02)
    (tmp_path / "locks").mkdir()
    other = os.open(tmp_path / "locks" / "key", os.O_RDWR | os.O_CREAT)
    fcntl.flock(other, fcntl.LOCK_EX)
    signs: list[int] = []

    def wait() -> None:
        with cache_module._locked(tmp_path, "key", False, lambda: signs.append(1)):
            pass

    thread = threading.Thread(target=wait)
    thread.start()
    for number in range(1, 4):
        os.pwrite(other, f"{number} of 9 MB".encode(), 0)
        wait_for(lambda number=number: len(signs) >= number)
    time.sleep(0.2)
    assert len(signs) == 3  # a note that stays the same is none
    os.close(other)
    thread.join()
