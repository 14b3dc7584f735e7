"""Rows of .parquet and .arrow files, and of saved datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwright.train.data.sources.documents import Completion, Conversation, DataFiles, documents, spans
from shardwright.train.data.sources.places import DataFile
from shardwright.train.errors import UserError
from tests.train.data.samples import chat, source, texts_of

pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")

TEXTS = [f"Document {number}: " + "é " * (number % 50) for number in range(3000)]


def write(path: Path, table: Any, rows: int = 700) -> Path:
    """In parts of so many rows: row groups or record batches. A name with "file" gets Arrow's file format."""
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=rows)
        return path
    opened = pyarrow.ipc.new_file if "file" in path.name else pyarrow.ipc.new_stream
    with opened(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


KINDS = ["a.parquet", "stream.arrow", "file.arrow"]


@pytest.mark.parametrize("name", KINDS)
def test_rows_come_in_order(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, pyarrow.table({"id": range(3000), "text": TEXTS}))
    assert texts_of(path) == TEXTS


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
def test_strings_of_every_type_are_read(tmp_path: Path, name: str, kind: str) -> None:
    column = pyarrow.array(["a", "é", "a"])
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(getattr(pyarrow, kind)())
    assert texts_of(write(tmp_path / name, pyarrow.table({"text": column}))) == ["a", "é", "a"]


@pytest.mark.parametrize("name", KINDS)
def test_absent_fields_of_messages_look_absent(tmp_path: Path, name: str) -> None:
    # A column of structs gives all messages the fields of any; a template asks whether tool_calls is there.
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": 1}}]}
    rows = [chat("Hi", "Hello"), [call, {"role": "tool", "content": "3", "name": "f"}]]
    path = write(tmp_path / name, pyarrow.table({"messages": rows}))
    first, second = documents(source(path, kind="conversations"))
    assert first == Conversation(tuple(rows[0])) and second == Conversation(tuple(rows[1]))


def test_completions_of_columns_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pyarrow.table({"prompt": ["a", "b"], "completion": ["c", "d"]}))
    assert list(documents(source(path, kind="completions"))) == [Completion("a", "c"), Completion("b", "d")]


@pytest.mark.parametrize("name", KINDS)
def test_a_large_file_has_several_spans(tmp_path: Path, name: str) -> None:
    table = pyarrow.table({"text": ["x" * 40_000 + str(number) for number in range(1000)]})
    path = write(tmp_path / name, table, rows=100)
    given = list(spans(DataFile(str(path)), DataFiles((str(path),))))
    assert len(given) >= 2 and [each.start for each in given[1:]] == [each.stop for each in given[:-1]]
    assert [text[40_000:] for text in texts_of(path)] == list(map(str, range(1000)))


def test_urls_of_columns_are_read(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec", reason="needs fsspec")
    memory = fsspec.filesystem("memory")
    for name in KINDS:
        path = write(tmp_path / name, pyarrow.table({"text": TEXTS}))
        memory.pipe(f"/rows/{name}", path.read_bytes())
    try:
        for name in KINDS:
            assert texts_of(f"memory://rows/{name}") == TEXTS
    finally:
        memory.rm("/rows", recursive=True)


def test_a_saved_dataset_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    # With a fingerprint of ours: to compute one, its library pickles modules, and cannot with each version of pyarrow.
    table = datasets.table.InMemoryTable(pyarrow.table({"text": TEXTS}))
    made = datasets.Dataset(table, fingerprint="made")
    made.save_to_disk(str(tmp_path / "one"), num_shards=3)
    assert texts_of(tmp_path / "one") == TEXTS
    shuffled = made.shuffle(seed=1, new_fingerprint="shuffled")
    shuffled.save_to_disk(str(tmp_path / "shuffled"))
    assert texts_of(tmp_path / "shuffled") == shuffled["text"][:]
    table = datasets.table.InMemoryTable(pyarrow.table({"messages": [chat("Hi", "Hello")]}))
    talks = datasets.Dataset(table, fingerprint="talks")
    datasets.DatasetDict({"train": talks}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(UserError, match=r"found the splits train in .*; set .*splits/train"):
        list(documents(source(tmp_path / "splits")))
    found = documents(source(tmp_path / "splits" / "train", kind="conversations"))
    assert list(found) == [Conversation(tuple(chat("Hi", "Hello")))]


# ------------------------------------------------------------------------------
# What is damaged


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("share", [0.02, 0.5, 0.98])
def test_files_that_are_cut_off_are_refused(tmp_path: Path, name: str, share: float) -> None:
    path = write(tmp_path / name, pyarrow.table({"text": TEXTS}), rows=100)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(UserError) as caught:
        texts_of(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert "cut off" in str(caught.value)


def test_a_stream_whose_writer_was_not_closed_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", pyarrow.table({"text": TEXTS}))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match="expected an Arrow stream with its end mark, found none in"):
        texts_of(path)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_damaged_bytes_are_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"neither of these formats" * 100)
    with pytest.raises(
        UserError, match=rf"expected a complete {suffix} file, found one that pyarrow cannot read"
    ):
        texts_of(path)


def test_a_damaged_row_group_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pyarrow.table({"text": TEXTS}), rows=1000)
    group = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    start = group.dictionary_page_offset or group.data_page_offset
    content[start : start + 40] = b"\xff" * 40
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"cannot read: row group 1 of .*a\.parquet"):
        texts_of(path)


WRONG = [
    (
        {"body": ["x"], "id": [1]},
        {},
        "data.text_key: expected key 'text' in each row, found only 'body', 'id' in PATH; set data.text_key",
    ),
    ({"text": [1, 2]}, {}, "data.text_key: expected strings, found int64 in column 'text' of PATH"),
    ({"text": [b"x"]}, {}, "expected strings, found binary in column 'text' of PATH"),
    ({"text": ["x", None]}, {}, "found nothing (null) in 'text' of row 1 of PATH"),
    (
        {"messages": ["x"]},
        {"kind": "conversations"},
        "data.messages_key: expected a list of messages, found string in column",
    ),
    ({"messages": [chat("a")]}, {}, 'or data.kind = "conversations"'),
    (
        {"messages": [chat("a"), []]},
        {"kind": "conversations"},
        "found an empty list in 'messages' of row 1 of PATH",
    ),
    (
        {"messages": [[{"from": "human", "value": "x"}]]},
        {"kind": "conversations"},
        "found 'from', 'value' in message 1 in 'messages' of row 0 of PATH",
    ),
    (
        {"prompt": ["x"]},
        {"kind": "completions"},
        "data.completion_key: expected key 'completion' in each row, found only 'prompt' in PATH",
    ),
]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("columns", "options", "message"), WRONG)
def test_columns_that_cannot_be_learnt_are_refused(
    tmp_path: Path, name: str, columns: dict[str, list[Any]], options: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / name, pyarrow.table(columns))
    with pytest.raises(UserError) as caught:
        list(documents(source(path, **options)))
    assert message.replace("PATH", str(path)) in str(caught.value)


@pytest.mark.parametrize("name", KINDS)
def test_rows_that_are_not_utf8_are_named(tmp_path: Path, name: str) -> None:
    values = [b"fine"] * 900 + [b"caf\xe9"] + [b"fine"] * 5
    texts = pyarrow.array(values, pyarrow.binary())
    buffers = texts.buffers()
    column = pyarrow.StringArray.from_buffers(len(values), buffers[1], buffers[2])
    path = write(tmp_path / name, pyarrow.table({"text": column}))
    with pytest.raises(UserError, match=r"found byte 0xe9 at offset 3 of column 'text' in row 900 of"):
        texts_of(path)
