"""The documents of files of each kind, and the errors about damaged ones."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.train.data.sources.documents import (
    Completion,
    Conversation,
    Document,
    Ids,
    documents,
)
from shardwright.train.data.sources.items import CONTEXT, PIECE, SPAN
from shardwright.train.errors import UserError
from tests.train.data.samples import chat, source, texts_of, write_jsonl

# ------------------------------------------------------------------------------
# Text


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\ntwo é\n\n".encode())
    assert list(documents(source(path))) == [Document("\ufeffone\r\ntwo é\n\n")]


@pytest.mark.parametrize("line", ["Grüße, 世界 \U0001f600 end.\n", "世", "\U0001f600", "word ", "\n \n"])
def test_a_long_text_comes_in_parts_that_join_to_it(tmp_path: Path, line: str) -> None:
    text = ("x" + line * (2 * SPAN // len(line.encode()) + 3000))[:-1]
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    found = [each for each in documents(source(path)) if isinstance(each, Document)]
    assert "".join(each.text for each in found) == text
    assert [each.first for each in found] == [True] + [False] * (len(found) - 1)
    assert [each.last for each in found] == [False] * (len(found) - 1) + [True]
    assert len(found) > 4 and max(len(each.text) for each in found) < 1.3 * PIECE
    start = 0
    for each in found:
        assert text[:start].endswith(each.before) and bool(each.before) == bool(start)
        start += len(each.text)
        assert text[start:].startswith(each.after) and len(each.after) <= CONTEXT
        assert bool(each.after) == (start < len(text))


def test_a_long_row_comes_in_the_same_kind_of_parts(tmp_path: Path) -> None:
    text = "A line of a long document.\n" * (3 * PIECE // 27)
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "short"}, {"text": text}, {"text": ""}])
    found = [each for each in documents(source(path)) if isinstance(each, Document)]
    assert len(found) == 5 and texts_of(path) == ["short", text, ""]
    assert all(each.text.endswith("\n") for each in found[1:3])


def test_every_line_of_a_large_file_comes_once_and_in_order(tmp_path: Path) -> None:
    # Lines of many lengths, so that the edges of spans fall inside lines, at their ends and on their starts.
    rows = [{"text": f"{number} " + "é" * (number * 37 % 900)} for number in range(4000)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    assert path.stat().st_size > 3 * SPAN
    assert texts_of(path) == [row["text"] for row in rows]


def test_a_line_that_begins_where_a_span_begins_comes_once(tmp_path: Path) -> None:
    def line(nbytes: int, name: str) -> bytes:
        return json.dumps({"text": name}).encode().ljust(nbytes - 1) + b"\n"

    path = tmp_path / "a.jsonl"
    path.write_bytes(
        line(SPAN, "a") + line(SPAN - 1, "b") + line(SPAN + 1, "c") + line(3 * SPAN, "d") + line(20, "e")
    )
    assert texts_of(path) == ["a", "b", "c", "d", "e"]


def test_a_glob_means_its_files_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    assert texts_of(tmp_path / "*.txt") == ["a", "b", "c"]
    assert texts_of(tmp_path / "[cb].txt", tmp_path / "a.txt") == ["b", "c", "a"]
    (tmp_path / "[d].txt").write_text("d")
    assert texts_of(tmp_path / "[d].txt") == ["d"]


def test_urls_and_their_globs_are_read(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec", reason="needs fsspec")
    memory = fsspec.filesystem("memory")
    rows = [{"text": str(number) * 300} for number in range(6000)]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    memory.pipe({"/box/b.txt": "two é".encode(), "/box/a.txt": b"one", "/box/c.jsonl": content})
    try:
        assert texts_of("memory://box/*.txt") == ["one", "two é"]
        assert texts_of("memory://box/c.jsonl") == [row["text"] for row in rows]
        with pytest.raises(UserError, match=r"found none that match memory://box/\*\.parquet"):
            texts_of("memory://box/*.parquet")
        with pytest.raises(UserError, match=r"found nothing at memory://box/d\.txt"):
            texts_of("memory://box/d.txt")
        with pytest.raises(UserError, match="found a folder at memory://box"):
            texts_of("memory://box")
    finally:
        memory.rm("/box", recursive=True)
    (tmp_path / "a.txt").write_text("here")
    assert texts_of(f"file://{tmp_path}/*.txt") == ["here"]


# ------------------------------------------------------------------------------
# Conversations, completions, tokens


def test_conversations_and_completions_are_read(tmp_path: Path) -> None:
    tools = [{"name": "weather"}]
    path = write_jsonl(
        tmp_path / "a.jsonl",
        [
            {"messages": chat("Hi", "Hello"), "tools": tools},
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]},
        ],
    )
    first, second = documents(source(path, kind="conversations"))
    assert first == Conversation(tuple(chat("Hi", "Hello")), tuple(tools))
    assert isinstance(second, Conversation) and second.tools is None and second.messages[0]["content"] is None
    assert str(second.origin) == f"line 2 of {path}"
    pairs = write_jsonl(tmp_path / "b.jsonl", [{"q": "2+2=", "a": "4"}])
    options = {"kind": "completions", "prompt_key": "q", "completion_key": "a"}
    assert list(documents(source(pairs, **options))) == [Completion("2+2=", "4")]


@pytest.mark.parametrize("dtype", ["uint8", "<u2", ">u2", "int32", "int64"])
def test_tokens_of_a_file_are_read_as_they_are(tmp_path: Path, dtype: str) -> None:
    ids = np.arange(SPAN + 5) % 200
    np.save(tmp_path / "a.npy", ids.astype(dtype))
    found = [each for each in documents(source(tmp_path / "a.npy")) if isinstance(each, Ids)]
    assert np.array_equal(np.concatenate([each.ids for each in found]), ids)
    assert [(each.first, each.last) for each in found] == [(True, False), (False, True)]


# ------------------------------------------------------------------------------
# What is damaged


def npy(shape: str, descr: str = "<u2", content: bytes = b"") -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


DAMAGED = [
    ("a.txt", b"", {}, "found an empty file at PATH; remove it"),
    ("a.jsonl", b"", {}, "found an empty file at PATH; remove it"),
    ("a.txt", b"caf\xe9!", {}, "found byte 0xe9 at offset 3 of PATH; convert the file to UTF-8"),
    ("a.txt", b"x" * (SPAN + 9) + b"\xff", {}, f"found byte 0xff at offset {SPAN + 9} of PATH"),
    ("a.txt", "x".encode("utf-16"), {}, "found UTF-16 in PATH; convert the file to UTF-8 (iconv -f UTF-16"),
    (
        "a.jsonl",
        b'{"text": "x"}\n{"text": "caf\xe9"}\n',
        {},
        "byte 0xe9 at offset 27 of PATH, in line 2 of PATH",
    ),
    ("a.jsonl", b'{"text": "x"}\n\n{"text": }', {}, "found an error at column 10 of line 3 of PATH"),
    (
        "a.jsonl",
        b'{"text": "x"}\n{"text": "y',
        {},
        "line 2 of PATH (Unterminated string starting at); the line seems to be cut off",
    ),
    (
        "a.jsonl",
        b'[\n {"text": "x"}\n]',
        {},
        "line 1 of PATH (Expecting value); the file seems to hold one JSON value over many lines",
    ),
    ("a.jsonl", b'\xef\xbb\xbf{"text": "x"}', {}, "found a byte order mark at the start of line 1 of PATH"),
    ("a.jsonl", b'{"text": "x"}\n["y"]', {}, "expected a JSON object per line, found list in line 2 of PATH"),
    ("a.jsonl", b'{"text": ' + b"[" * 100_000, {}, "found nesting that is too deep"),
    ("a.jsonl", b'{"text": ' + b"1" * 5000 + b"}", {}, "a number that is too long in line 1 of PATH"),
    (
        "a.jsonl",
        b'{"txt": "y", "id": 3}',
        {},
        "data.text_key: expected key 'text' in each row, found only 'txt', 'id' in line 1 of PATH; set data.text_k",
    ),
    ("a.jsonl", b"{}", {}, "expected key 'text' in each row, found none in line 1 of PATH"),
    ("a.jsonl", b'{"messages": []}', {}, 'or data.kind = "conversations"'),
    ("a.jsonl", b'{"prompt": "a", "completion": "b"}', {}, 'or data.kind = "completions"'),
    ("a.jsonl", b'{"text": 3}', {}, "expected a string, found int in 'text' of line 1 of PATH"),
    ("a.jsonl", b'{"text": null}', {}, "found nothing (null) in 'text' of line 1 of PATH; remove the row"),
    ("a.jsonl", b'{"text": [{"role": "user"}]}', {}, 'set data.kind = "conversations"'),
    (
        "a.jsonl",
        b'{"text": "ab\\ud800"}',
        {},
        "found half of a surrogate pair at character 2 in 'text' of line 1 of PATH",
    ),
    (
        "a.jsonl",
        b'{"text": "x"}',
        {"kind": "conversations"},
        "data.messages_key: expected key 'messages' in each row, found only 'text' in line 1",
    ),
    (
        "a.jsonl",
        b'{"messages": "x"}',
        {"kind": "conversations"},
        "expected a list of messages, found str in 'messages' of line 1",
    ),
    (
        "a.jsonl",
        b'{"messages": []}',
        {"kind": "conversations"},
        "found an empty list in 'messages' of line 1 of PATH",
    ),
    (
        "a.jsonl",
        b'{"messages": ["x"]}',
        {"kind": "conversations"},
        "found str as message 1 in 'messages' of line 1 of PATH",
    ),
    (
        "a.jsonl",
        b'{"messages": [{"from": "human", "value": "x"}]}',
        {"kind": "conversations"},
        "expected the keys role (a string) and content, found 'from', 'value' in message 1",
    ),
    ("a.jsonl", b'{"messages": [{"role": "user"}]}', {"kind": "conversations"}, "found 'role' in message 1"),
    (
        "a.jsonl",
        b'{"messages": [{"role": "asistant", "content": "x"}]}',
        {"kind": "conversations"},
        "found 'asistant' in message 1 in 'messages' of line 1 of PATH; did you mean 'assistant'?",
    ),
    (
        "a.jsonl",
        b'{"messages": [{"role": "Assistant", "content": "x"}]}',
        {"kind": "conversations"},
        "did you mean",
    ),
    (
        "a.jsonl",
        b'{"messages": [{"role": "assistant", "content": null}]}',
        {"kind": "conversations"},
        "expected a string as content, found nothing (null) in message 1",
    ),
    (
        "a.jsonl",
        b'{"messages": [{"role": "user", "content": 3}]}',
        {"kind": "conversations"},
        "expected a string as content, found int in message 1",
    ),
    (
        "a.jsonl",
        b'{"messages": [{"role": "user", "content": "\\udc00"}]}',
        {"kind": "conversations"},
        "half of a surrogate pair at character 0",
    ),
    (
        "a.jsonl",
        b'{"messages": [{"role": "user", "content": "x"}], "tools": "x"}',
        {"kind": "conversations"},
        "found str in 'tools' of line 1",
    ),
    (
        "a.jsonl",
        b'{"prompt": "x"}',
        {"kind": "completions"},
        "data.completion_key: expected key 'completion' in each row, found only 'prompt'",
    ),
    ("a.txt", b"x", {"kind": "conversations"}, "which can hold conversations, found PATH"),
    ("a.npy", b"", {}, "found an empty file at PATH"),
    ("a.npy", b"no numpy", {}, "expected a .npy file of tokens, found a damaged one at PATH"),
    (
        "a.npy",
        npy("(4,)", "<f4", bytes(16)),
        {},
        "expected tokens as whole numbers, found float32 in PATH; save ids.astype",
    ),
    ("a.npy", npy("(4,)", "|O", bytes(32)), {}, "expected tokens as whole numbers, found object in PATH"),
    ("a.npy", npy("(2, 2)", "<u2", bytes(8)), {}, "found the shape (2, 2) in PATH; save ids.reshape(-1)"),
    ("a.npy", npy("(0,)"), {}, "expected tokens, found none in PATH"),
    (
        "a.npy",
        npy("(9,)", "<u2", bytes(8)),
        {},
        "expected 9 tokens of uint16 as the header says, found 4 in PATH; the file is cut off",
    ),
    ("a.json", b"[]", {}, "found PATH; write one JSON object per line to a .jsonl file"),
    ("a.jsonl.gz", b"x", {}, "found PATH; unpack it first"),
    ("a.csv", b"x", {}, "convert it to .parquet or .jsonl"),
]


@pytest.mark.parametrize(("name", "content", "options", "message"), DAMAGED)
def test_damaged_files_are_refused(
    tmp_path: Path, name: str, content: bytes, options: dict[str, Any], message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        list(documents(source(path, **options)))
    assert message.replace("PATH", str(path)) in str(caught.value)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_the_line_of_an_error_is_counted_from_the_start_of_the_file(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "x" * 400})] * 9000
    lines[8000] = '{"text": 1}'
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"of line 8001 of"):
        texts_of(path)


def folder_of_text(path: Path) -> None:
    path.mkdir()
    (path / "a.jsonl").write_text("")


def empty_folder(path: Path) -> None:
    path.mkdir()


def splits(path: Path) -> None:
    (path / "test").mkdir(parents=True)
    (path / "dataset_dict.json").write_text('{"splits": ["test"]}')
    (path / "test" / "state.json").write_text("{}")


def damaged_state(path: Path) -> None:
    path.mkdir()
    (path / "state.json").write_text('{"_data_files": [')


def missing_shard(path: Path) -> None:
    path.mkdir()
    (path / "state.json").write_text('{"_data_files": [{"filename": "data-0.arrow"}]}')


def indices(path: Path) -> None:
    path.mkdir()
    (path / "state.json").write_text('{"_data_files": [], "_indices_data_files": [{"filename": "i"}]}')


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "expected a file, found nothing at PATH"),
        (folder_of_text, "expected a file, found a folder at PATH; set PATH/*.jsonl"),
        (empty_folder, "found a folder at PATH; set the path of a .txt"),
        (splits, "expected one dataset, found the splits test in PATH; set PATH/test"),
        (damaged_state, "found a damaged file at PATH/state.json"),
        (missing_shard, "found nothing at PATH/data-0.arrow"),
        (indices, "save dataset.flatten_indices()"),
    ],
)
def test_what_is_no_file_is_refused(tmp_path: Path, make: Callable[[Path], None], message: str) -> None:
    path = tmp_path / "thing"
    make(path)
    with pytest.raises(UserError) as caught:
        texts_of(path)
    assert message.replace("PATH", str(path)) in str(caught.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("*.parquet", "expected files, found none that match FOLDER/*.parquet; correct the folder"),
        ("pydocs", "found nothing at FOLDER/pydocs; expected pydoc or the path of"),
        ("nothing://a/b.txt", "expected a path or a URL that fsspec knows"),
    ],
)
def test_sources_that_stand_for_nothing_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, message: str
) -> None:
    pytest.importorskip("fsspec", reason="needs fsspec")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        texts_of(url)
    assert message.replace("FOLDER", str(tmp_path)) in str(caught.value) and url in str(caught.value)


def test_a_file_system_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = pytest.importorskip("fsspec.registry", reason="needs fsspec")
    entry = {"class": "no_such_package.FileSystem", "err": "Install no_such_package to read lake"}
    monkeypatch.setitem(registry.known_implementations, "lake", entry)
    with pytest.raises(UserError) as caught:
        texts_of("lake://box/a.txt")
    message = str(caught.value)
    assert "lake://box/a.txt (Install no_such_package to read lake)" in message
    assert "install that package" in message


def test_the_settings_of_a_source_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data\.validation_source: expected a file"):
        texts_of(tmp_path / "none.txt", key="data.validation_source")
