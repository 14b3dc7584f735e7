"""Documents that are appended to the data of a run: the past stays, and each new document comes once per epoch.

The tests compare the stream itself: what each rank's loader hands out before and after the data has grown.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardwright.train.config import Config
from shardwright.train.data.dataset import Dataset, continued, extended, load_dataset
from shardwright.train.data.samples.batch import Batch
from shardwright.train.data.samples.loader import Loader, Share
from shardwright.train.data.sources.documents import DataFiles
from shardwright.train.data.tokens.cache import tokenised
from shardwright.train.data.tokens.growth import Known, check_grown, known_of, parts_of, with_part
from shardwright.train.data.tokens.tokenizers import Bytes
from shardwright.train.data.tokens.tokens import Row, Tokens
from shardwright.train.errors import UserError
from tests.train.kit.jobs import tiny

GLOBAL, SEQ_LEN = 12, 16
SETTINGS = [
    {"packing": "split"},
    {"packing": "split", "document_mask": True},
    {"packing": "best_fit"},
    {"packing": "none"},
]


def write(path: Path, texts: Sequence[str], mode: str = "w") -> None:
    with open(path, mode, encoding="utf-8") as stream:
        stream.writelines(json.dumps({"text": text}) + "\n" for text in texts)


def texts(name: str, first: int, stop: int) -> list[str]:
    """Texts that name their documents; some end with a line feed, and their lengths differ."""
    return [
        f"<{name}{number:03}>" + "x" * (number * 7 % 23) + "\n" * (number % 3 == 1)
        for number in range(first, stop)
    ]


def files(folder: Path) -> None:
    """Two files of one source, and one of another source."""
    folder.mkdir(exist_ok=True)
    write(folder / "a1.jsonl", texts("a", 0, 14))
    write(folder / "a2.jsonl", texts("b", 0, 9))
    write(folder / "m.jsonl", texts("m", 0, 20))


def to_the_last(folder: Path) -> None:
    write(folder / "a2.jsonl", texts("b", 9, 20), "a")


def to_the_first(folder: Path) -> None:
    write(folder / "a1.jsonl", texts("a", 14, 25), "a")


def new_file(folder: Path) -> None:
    write(folder / "a3.jsonl", texts("c", 0, 11))


def everywhere(folder: Path) -> None:
    to_the_last(folder), to_the_first(folder), new_file(folder)


GROWTHS = [to_the_last, to_the_first, new_file, everywhere]


def config_of(folder: Path, mixed: bool = False, **data: Any) -> Config:
    pattern = str(folder / "a*.jsonl")
    source: dict[str, Any] = {"source": pattern}
    if mixed:
        other = {"path": str(folder / "m.jsonl"), "weight": 0.4}
        source = {"sources": [{"path": pattern, "weight": 0.6}, other]}
    values = {"validation_fraction": 0.2, **source, "cache": str(folder / "cache"), **data}
    train = {"seq_len": SEQ_LEN, "global_batch": GLOBAL, "micro_batch": 1, "steps": 100}
    return tiny(data=values, train=train)


def again(config: Config, known: Sequence[Known], samples: int) -> Dataset:
    """As a resume: what the run knows comes from a file."""
    stored = json.loads(json.dumps([each.as_json() for each in known]))
    dataset = continued(
        config.for_data, load_dataset(config.for_data), [Known.from_json(each) for each in stored]
    )
    return extended(config.for_data, dataset, samples)[0]


def known(dataset: Dataset) -> list[Known]:
    return [each.known for each in dataset.materials]


def rows(
    dataset: Dataset, first: int, stop: int, ranks: int = 1, workers: int = 0
) -> list[tuple[bytes, ...]]:
    """Samples of the steps from sample `first` to `stop`, as the ranks get them, in the order of the run."""
    loaders = [
        Loader(dataset.train, Share(GLOBAL, 1, rank, ranks), first=first, stop=stop, workers=workers)
        for rank in range(ranks)
    ]
    result = []
    for steps in zip(*loaders, strict=True):
        result += [_bytes(batch) for step in steps for batch in step.batches]
    for loader in loaders:
        loader.close()
    return result


def _bytes(batch: Batch) -> tuple[bytes, ...]:
    tensors = (batch.inputs, batch.targets, batch.documents, batch.positions)
    return tuple(each.numpy().tobytes() for each in tensors if each is not None)


@pytest.mark.extensive("each step of each source", but=("data1-*-False-4", "data2-*-True-2"))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("data", SETTINGS)
def test_the_past_stays_and_everything_new_comes_once(
    tmp_path: Path, data: dict[str, Any], growth: Callable[[Path], None], mixed: bool, ranks: int
) -> None:
    files(tmp_path)
    config = config_of(tmp_path, mixed, appended=True, **data)
    before = load_dataset(config.for_data)
    at = GLOBAL * (2 + before.train.sources[0].samples // GLOBAL // 2)
    past = rows(before, 0, at)
    epoch = before.train.epochs_under_way(at)[0]
    untouched = rows(again(config, known(before), at), 0, at + 5 * GLOBAL, ranks, workers=ranks % 3)
    growth(tmp_path)
    grown = again(config, known(before), at)
    later = again(config, known(grown), at + 7 * GLOBAL)  # a resume after the growth, and no growth since
    assert rows(grown, 0, at, ranks, workers=ranks % 3) == past == untouched[:at]
    end = at + 8 * grown.windows // GLOBAL * GLOBAL
    assert rows(later, 0, end, ranks, workers=ranks % 2) == rows(grown, 0, end)
    # The source's samples of the epoch under way: the old ones as before, then the new ones, each once.
    old, more = before.train.sources[0].samples, grown.train.sources[0].samples
    assert more > old
    samples = [place[1:] for place in map(grown.train.place, range(end)) if place.source == 0]
    was = [place[1:] for place in map(before.train.place, range(end)) if place.source == 0]
    stop = (epoch + 1) * old
    assert samples[:stop] == was[:stop]
    new = grown.train.sources[0].parts[1].packing
    assert sorted(samples[stop : stop + more - old]) == [(1, number) for number in range(len(new))]
    everything = samples[stop + more - old : stop + more - old + more]
    assert len(set(everything)) == more and len(everything) == more
    # What no step trains on is what it was.
    assert before.validation is not None and grown.validation is not None
    assert _bytes(before.validation.batch(0, 1)) == _bytes(grown.validation.batch(0, 1))
    assert [source.samples for source in before.validation.sources] == [
        source.samples for source in grown.validation.sources
    ]


@pytest.mark.parametrize("growth", GROWTHS)
def test_no_document_is_repeated_or_lost_within_an_epoch(
    tmp_path: Path, growth: Callable[[Path], None]
) -> None:
    files(tmp_path)
    config = config_of(
        tmp_path,
        appended=True,
        packing="none",
        validation_fraction=0.0,
        validation_source=str(tmp_path / "m.jsonl"),
    )
    config = config.model_copy(update={"train": config.train.model_copy(update={"seq_len": 48})})
    before = load_dataset(config.for_data)
    at = GLOBAL
    growth(tmp_path)
    grown = again(config, known(before), at)
    names: Counter[str] = Counter()
    for index in range(grown.windows):
        row = bytes(grown.train.batch(index, 1).inputs[0].tolist()).decode().strip("\0")
        names[row[:6]] += 1
    expected = [
        json.loads(line)["text"][:6]
        for path in tmp_path.glob("a*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert names == Counter(expected)


@pytest.mark.extensive("many sessions")
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_parts_are_the_tokens_that_each_session_had(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Files of several kinds grow in any order: what the first session read is found again, token for token."""
    folder: Path = tmp_path_factory.mktemp("grown")
    documents = st.lists(st.sampled_from(["a", "bc", "d\n", "", "\n", "long " * 5]), max_size=3)
    count = data.draw(st.integers(1, 4))
    kinds = [data.draw(st.sampled_from(["jsonl", "txt"])) for _ in range(count + 2)]

    def path(number: int) -> Path:
        return folder / f"{number}.{kinds[number]}"

    def make(numbers: range) -> Tokens:
        source = DataFiles(tuple(str(path(number)) for number in numbers))
        return tokenised(source, Bytes(), cache=folder / "cache", workers=1)

    for number in range(count):
        if kinds[number] == "jsonl":
            path(number).write_text("\n")
            write(path(number), data.draw(documents), "a")
        else:
            path(number).write_text(data.draw(st.sampled_from(["x", "y\n"])))
    write(path(0).with_suffix(".jsonl"), ["first"], "a")
    kinds[0] = "jsonl"
    first = make(range(count))
    knows = known_of(first, "1")
    sessions = [first]
    for session in range(2):
        for number in range(count):
            if kinds[number] == "jsonl":
                write(path(number), data.draw(documents), "a")
        if data.draw(st.booleans()):
            path(count).with_suffix(".jsonl").write_text("\n")
            kinds[count] = "jsonl"
            write(path(count), data.draw(documents), "a")
            count += 1
        now = make(range(count))
        check_grown(knows, now, [path(number) for number in range(count)], "all")
        parts = parts_of(knows, now)
        assert len(parts) == session + 2
        if sum(len(part.ends) for part in parts) != now.documents:
            raise AssertionError("a document is lost")
        _same(parts[0], first)
        if session == 1:
            _same(parts[1], sessions[-1])
        sessions.append(parts[-1])
        knows = Known.from_json(json.loads(json.dumps(with_part(knows, now, "2", session).as_json())))


def _same(part: Tokens, tokens: Tokens) -> None:
    assert part.ids[0 : len(part.ids)].tobytes() == tokens.ids[0 : len(tokens.ids)].tobytes()
    assert part.ends.tolist() == tokens.ends.tolist()


def test_stretches_read_like_one_array() -> None:
    array = np.arange(100)
    stretches = [(5, 9), (20, 21), (50, 80)]
    row, plain = Row(array, stretches), np.concatenate([array[start:stop] for start, stop in stretches])
    assert len(row) == len(plain) and row.dtype == plain.dtype
    for start in range(len(plain) + 1):
        for stop in range(start, len(plain) + 3):
            assert row[start:stop].tolist() == plain[start:stop].tolist()
            part = row.between(start, min(stop, len(plain)))
            assert part[0 : len(part)].tolist() == plain[start:stop].tolist()
    numbers = np.array([0, 3, 4, 5, 34, 4])
    assert row[numbers].tolist() == plain[numbers].tolist()
    assert np.shares_memory(row[5:20], array)


@pytest.mark.parametrize("data", SETTINGS)
def test_trained_tokens_of_a_source_that_grew_in_the_middle(tmp_path: Path, data: dict[str, Any]) -> None:
    """Then ids and marks of the first part lie in stretches."""

    def append(name: str, first: int, stop: int) -> None:
        rows = [
            {"prompt": f"<{n}>" + "p" * (n % 5), "completion": "c" * (n * 7 % 31 + 1)}
            for n in range(first, stop)
        ]
        with open(tmp_path / name, "a") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in rows)

    append("a1.jsonl", 0, 20)
    append("a2.jsonl", 100, 120)
    config = config_of(tmp_path, appended=True, kind="completions", **data)
    before = load_dataset(config.for_data)
    append("a1.jsonl", 20, 40)
    grown = again(config, known(before), 2 * GLOBAL)
    old, new = (each.train.sources[0].parts[0] for each in (before, grown))
    assert isinstance(new.tokens.trained, Row) and old.tokens.trained is not None
    assert new.packing.trained_counts.tolist() == old.packing.trained_counts.tolist()
    assert rows(grown, 0, 2 * GLOBAL) == rows(before, 0, 2 * GLOBAL)
    assert 0 < new.packing.trained_counts.sum() < len(new.tokens.ids)
    with pytest.raises(UserError, match="found other tokens"):
        again(
            config_of(tmp_path, appended=True, kind="documents", text_key="completion", **data),
            known(before),
            0,
        )


# ------------------------------------------------------------------------------
# What is refused


def change(folder: Path) -> None:
    write(folder / "a1.jsonl", [*texts("a", 0, 5), "other", *texts("a", 6, 25)])


def lengthen_the_last(folder: Path) -> None:
    write(folder / "a1.jsonl", [*texts("a", 0, 13), texts("a", 13, 14)[0] + "\n", *texts("a", 14, 25)])


def separate_otherwise(folder: Path) -> None:
    """The same bytes in the same file, and more."""
    joined = "\n".join(texts("a", 0, 2))
    write(folder / "a1.jsonl", [joined, *texts("a", 2, 25)])


def insert(folder: Path) -> None:
    write(folder / "a1.jsonl", [*texts("a", 0, 5), "inserted", *texts("a", 5, 14)])


def shrink(folder: Path) -> None:
    write(folder / "a2.jsonl", texts("b", 0, 8))
    new_file(folder)


def lose_a_file(folder: Path) -> None:
    (folder / "a2.jsonl").unlink()


def file_before(folder: Path) -> None:
    write(folder / "a0.jsonl", texts("c", 0, 30))


@pytest.mark.parametrize(
    "wrong", [change, lengthen_the_last, separate_otherwise, insert, shrink, lose_a_file, file_before]
)
@pytest.mark.parametrize("data", SETTINGS)
def test_other_changes_are_refused_with_and_without_the_option(
    tmp_path: Path, data: dict[str, Any], wrong: Callable[[Path], None]
) -> None:
    files(tmp_path)
    config = config_of(tmp_path, **data)
    knows = known(load_dataset(config.for_data))
    wrong(tmp_path)
    for appended in (True, False):
        with pytest.raises(UserError, match=r"--resume: .*expected .* found .*restore") as caught:
            again(config_of(tmp_path, appended=appended, **data), knows, GLOBAL)
        assert "data.appended" not in str(caught.value)
    if wrong is not lose_a_file:
        file = {shrink: "a2", file_before: "a0"}.get(wrong, "a1")
        assert f"{tmp_path / file}.jsonl no longer begins with the " in str(caught.value)
        assert "on which the run was trained; expected these, then any appended ones" in str(caught.value)


@pytest.mark.parametrize("growth", GROWTHS)
def test_growth_needs_the_option(tmp_path: Path, growth: Callable[[Path], None]) -> None:
    files(tmp_path)
    config = config_of(tmp_path)
    knows = known(load_dataset(config.for_data))
    growth(tmp_path)
    with pytest.raises(UserError, match=r"found \d+ more; set data.appended to true"):
        again(config, knows, GLOBAL)


def test_a_longer_text_is_a_changed_document(tmp_path: Path) -> None:
    path = tmp_path / "a1.txt"
    path.write_text("one text\n" * 50)
    config = config_of(tmp_path, appended=True, source=str(path))
    knows = known(load_dataset(config.for_data))
    path.write_text("one text\n" * 51)
    with pytest.raises(UserError, match="found other tokens: a document"):
        again(config, knows, GLOBAL)


def test_too_few_new_documents_wait_for_more(tmp_path: Path) -> None:
    files(tmp_path)
    config = config_of(tmp_path, appended=True, packing="split")
    before = load_dataset(config.for_data)
    write(tmp_path / "a2.jsonl", ["tiny"], "a")
    grown, lines = extended(
        config.for_data, continued(config.for_data, load_dataset(config.for_data), known(before)), GLOBAL
    )
    assert len(lines) == 1 and lines[0].endswith("they come in once more are appended")
    assert rows(grown, 0, 20 * GLOBAL) == rows(before, 0, 20 * GLOBAL)
    write(tmp_path / "a2.jsonl", texts("b", 30, 40), "a")
    more = again(config, known(grown), 2 * GLOBAL)
    part = more.train.sources[0].parts[1].tokens
    assert bytes(part.ids[0 : len(part.ids)]).decode().startswith("tiny\n<b030>") and len(part.ends) == 11


def test_the_same_tokens_in_other_files_are_the_same_data(tmp_path: Path) -> None:
    files(tmp_path)
    config = config_of(tmp_path)
    before = load_dataset(config.for_data)
    (tmp_path / "a2.jsonl").rename(tmp_path / "a7.jsonl")
    assert rows(again(config, known(before), GLOBAL), 0, 9 * GLOBAL) == rows(before, 0, 9 * GLOBAL)


@pytest.mark.parametrize(("data", "same"), [(SETTINGS[0], True), *((each, False) for each in SETTINGS[1:])])
def test_ends_of_byte_documents_count_where_samples_depend_on_them(
    tmp_path: Path, data: dict[str, Any], same: bool
) -> None:
    path = tmp_path / "a1.jsonl"
    config = config_of(tmp_path, validation_fraction=0.0, validation_source=str(path), **data)
    write(path, ["ab" * 20, "cd" * 30])
    before = load_dataset(config.for_data)
    write(path, ["ab" * 20 + "\n" + "cd" * 30])
    after = load_dataset(config.for_data)
    assert (before.sha256 == after.sha256) == same
    if same:
        assert rows(again(config, known(before), 0), 0, 5 * GLOBAL) == rows(before, 0, 5 * GLOBAL)
    else:
        with pytest.raises(UserError, match="found other tokens"):
            again(config, known(before), 0)


def test_ends_of_byte_documents_count_where_the_validation_part_begins_with_one(tmp_path: Path) -> None:
    path = tmp_path / "a1.jsonl"
    config = config_of(tmp_path)
    write(path, ["ab" * 100, "cd" * 22, "ef" * 11])
    before = load_dataset(config.for_data)
    write(path, ["ab" * 100, "cd" * 22 + "\n" + "ef" * 11])
    assert load_dataset(config.for_data).sha256 == before.sha256
    with pytest.raises(UserError, match="found other tokens"):
        again(config, known(before), 0)
