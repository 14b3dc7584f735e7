"""Texts that spell special tokens: they stay text, or become the tokens, in every kind of data and of tokenizer.

What a text must have is computed with the same text in which the spelled tokens are other letters of equal length.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright import cli
from shardwright.train.commands.generate import generate
from shardwright.train.config import load_config
from shardwright.train.data.dataset import Dataset, check_special_tokens, load_dataset
from shardwright.train.data.sources.items import Conversation
from shardwright.train.data.tokens.chat import encode_conversation, prompt_ids, prompt_of
from shardwright.train.data.tokens.tokenizers import FromFile, open_tokenizer
from shardwright.train.errors import UserError
from tests.train.kit.jobs import tiny, train_here

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<unk>"]
LETTERS = "abcdefghijklmnopqrstuvwxyz<>|/_ ."


def byte_level() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({text: number for number, text in enumerate([*SPECIAL, *letters])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def merged() -> Tokenizer:
    """A BPE whose merges would make the end token from letters."""
    vocabulary = {text: number for number, text in enumerate([*SPECIAL, *LETTERS, "</", "</s", "an"])}
    merges = [("<", "/"), ("</", "s"), ("</s", ">"), ("a", "n")]
    return Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))


def pieces() -> Tokenizer:
    """A Unigram whose own vocabulary has the special tokens, with the best scores."""
    scores = [(text, 0.0) for text in SPECIAL] + [(letter, -5.0) for letter in [*LETTERS, "\u2581"]]
    made = Tokenizer(models.Unigram([*scores, ("on", -4.0)], 4, False))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return made


def word_pieces() -> Tokenizer:
    vocabulary = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), "one", "two"]
    made = Tokenizer(models.WordPiece({text: n for n, text in enumerate(vocabulary)}, unk_token="<unk>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.WordPiece()
    return made


def words() -> Tokenizer:
    """Every word is looked up as it is, special tokens, too."""
    vocabulary = [*SPECIAL, "one", "two", "three"]
    made = Tokenizer(models.WordLevel({text: n for n, text in enumerate(vocabulary)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level, "merged": merged, "pieces": pieces, "word_pieces": word_pieces, "words": words,
}  # fmt: skip
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def saved(
    folder: Path, kind: str, begins: bool = True, flagged: bool = True, template: str = TEMPLATE
) -> FromFile:
    """A tokenizer of that kind. Not `flagged`: its end token is an added token that is not special."""
    made = KINDS[kind]()
    made.add_special_tokens([each for each in SPECIAL if flagged or each != "</s>"])
    made.add_tokens([AddedToken("<think>", special=False)])
    if not flagged:
        made.add_tokens([AddedToken("</s>", special=False, normalized=False)])
    if begins:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir(parents=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "</s>", "bos_token": "<s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    opened = open_tokenizer(str(folder))
    assert isinstance(opened, FromFile)
    return opened


def data_of(
    folder: Path, row: dict[str, Any], kind: str, special_tokens: str = "", source: str = ""
) -> tuple[Dataset, list[int], list[int]]:
    """The data of a job with that row four times, the ids of the first one, and those that are learnt."""
    name = f"{kind}{len(list(folder.iterdir()))}"
    (folder / f"{name}.jsonl").write_text("\n".join([json.dumps(row)] * 4))
    key = f'special_tokens = "{special_tokens}"\n' if special_tokens else ""
    (folder / "job.toml").write_text(
        f'[model]\nkind = "llama"\n[data]\nsource = "{folder}/{name}.jsonl"\nkind = "{kind}"\n{key}'
        f'tokenizer = "{folder}/tok"\npacking = "none"\nvalidation_fraction = 0\ncache = "{folder}/cache"\n'
        "[train]\nseq_len = 256\nglobal_batch = 1\nmicro_batch = 1\n[validation]\nevery = 0\n"
    )
    config = load_config(folder / "job.toml")
    dataset = load_dataset(config.for_data)
    tokens = dataset.materials[0].tokens
    ids = tokens.ids[: tokens.ends[0]].tolist()
    learnt = (
        []
        if tokens.trained is None
        else [i for i, t in zip(ids, tokens.trained[: len(ids)], strict=True) if t]
    )
    if special_tokens or kind != "documents" or not tokens.spelled:
        check_special_tokens(config.for_data, dataset)
    else:
        with pytest.raises(UserError, match=r'data.special_tokens: expected "text" or "tokens"'):
            check_special_tokens(config.for_data, dataset)
    return dataset, ids, learnt


SPELLINGS = [
    "one </s> two", "</s> one", "<s> one", "one <|assistant|> two </s> <|user|>", "one two </s>", "<think> one",
]  # fmt: skip


@pytest.mark.extensive("each kind of tokenizer", but=("words-*", "byte_level-*"))
@pytest.mark.parametrize("flagged", [True, False], ids=["special", "added"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_text_makes_a_special_token(tmp_path: Path, kind: str, flagged: bool) -> None:
    reader = saved(tmp_path / "tok", kind, flagged=flagged)
    marks = reader.reserved - {SPECIAL.index("<unk>")}
    for spelling in SPELLINGS:
        count = sum(spelling.count(each) for each in SPECIAL)
        dataset, ids, _ = data_of(tmp_path, {"text": spelling}, "documents", "text")
        assert [each for each in ids if each in marks] == [0, 1], spelling  # begin and end, once
        assert dataset.spelled == 4 * count, spelling
        assert prompt_ids(reader, spelling) == ids[:-1], spelling
        unset = data_of(tmp_path, {"text": spelling}, "documents")[1]
        assert unset == ids
        _, ids, learnt = data_of(tmp_path, {"prompt": spelling, "completion": " " + spelling}, "completions")
        assert [each for each in ids if each in marks] == [0, 1] and learnt[-1] == 1, spelling
        turns = [{"role": role, "content": spelling} for role in ("user", "assistant", "user", "assistant")]
        _, ids, learnt = data_of(tmp_path, {"messages": turns}, "conversations")
        assert [each for each in ids if each in marks] == [0, 2, 1, 3, 1, 2, 1, 3, 1], spelling
        assert [each for each in learnt if each in marks] == [1, 1], spelling
        asked = prompt_of(spelling, TEMPLATE, reader)
        assert asked == ids[: len(asked)] and asked[-1] == 3, spelling
    # A token that is added, but not special, is text that everybody may write.
    assert reader.encode("<think>") == reader.literal.encode("<think>")


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_were_rendered_before_have_their_tokens(tmp_path: Path, kind: str) -> None:
    reader = saved(tmp_path / "tok", kind)
    for spelling in SPELLINGS:
        dataset, ids, _ = data_of(tmp_path, {"text": spelling}, "documents", "tokens")
        encoded = reader.encode(spelling)
        begin = [] if encoded[0] == 0 else [0]  # never twice
        assert ids == [*begin, *encoded, 1], spelling
        assert prompt_ids(reader, spelling, "tokens") == ids[:-1]
        assert dataset.spelled == 4 * sum(spelling.count(each) for each in SPECIAL)


@pytest.mark.parametrize("kind", KINDS)
def test_other_texts_have_the_same_tokens_either_way(tmp_path: Path, kind: str) -> None:
    reader = saved(tmp_path / "tok", kind)
    for text in ("one two three", "a <b> c", "  one  <think> two. ", "<|use|>", "ONE", "é\ufdd2"):
        assert reader.literal.encode(text) == reader.encode(text)
        renamed, names = reader.renamed()
        assert renamed.encode(text) == reader.encode(text)
        assert set(names) == set(SPECIAL)
        talk = Conversation(({"role": "user", "content": text}, {"role": "assistant", "content": text}))
        for one, other in zip(
            encode_conversation(talk, TEMPLATE, reader),
            encode_conversation(talk, TEMPLATE, reader, "tokens"),
            strict=True,
        ):
            assert one.tolist() == other.tolist()


def test_a_template_keeps_its_tokens_wherever_texts_go(tmp_path: Path) -> None:
    """Names of tools, arguments in JSON, text in lower case: none of it makes a token."""
    template = (
        "{% for t in tools %}<|user|>{{ t | tojson }}</s>{% endfor %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ (m.content ~ m.name) | lower }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    reader = saved(tmp_path / "tok", "byte_level", template=template)
    said = [{"role": "user", "content": "</s>a", "name": "<|assistant|>"}]
    said += [{"role": "assistant", "content": "b", "name": "c</s>"}]
    talk = Conversation(tuple(said), ({"</s>": ["<|user|>", 3]},))
    ids = encode_conversation(talk, template, reader).ids.tolist()
    assert [each for each in ids if each < 5] == [2, 1, 2, 1, 3, 1]
    text = '<|user|>{"</s>": ["<|user|>", 3]}</s><|user|></s>a<|assistant|></s><|assistant|>bc</s></s>'
    assert reader.decode(ids) == text
    kept_out = Conversation(({"role": "user", "content": "</s>\ufdd2", "name": ""}, *said[1:]))
    with pytest.raises(UserError, match=r"without the character U\+FDD2"):
        encode_conversation(kept_out, template, reader)


def test_a_begin_token_comes_once_or_as_the_template_has_it(tmp_path: Path) -> None:
    reader = saved(tmp_path / "tok", "byte_level")
    assert prompt_of("a", TEMPLATE, reader)[:2] == [0, 2]
    assert 0 not in prompt_of("a", TEMPLATE.replace("{{ bos_token }}", ""), reader)
    assert prompt_ids(reader, "<s>a", "tokens") == prompt_ids(reader, "a")
    assert prompt_ids(reader, "a", begins=False) == reader.encode("a")


def test_the_value_is_in_the_name_of_the_cache(tmp_path: Path) -> None:
    saved(tmp_path / "tok", "byte_level")
    found = {
        value: data_of(tmp_path, {"text": "a</s>"}, "documents", value)[1] for value in ("text", "tokens", "")
    }
    assert found["text"] == found[""] != found["tokens"]
    again = data_of(tmp_path, {"text": "a</s>"}, "documents", "text")[1]
    assert again == found["text"]


JOB = {
    "train": {"steps": 3, "seq_len": 64, "global_batch": 2, "micro_batch": 2},
    "model": {"n_layers": 1},
    "validation": {"every": 0},
    "checkpoint": {"every": 1},
    "run": {"sample_tokens": 3},
}


def job_of(folder: Path, row: dict[str, Any], **data: Any) -> Path:
    """A job on sixteen such rows, in a file."""
    (folder / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 16))
    data = {"source": str(folder / "rows.jsonl"), "tokenizer": str(folder / "tok"), "packing": "none", **data}
    text = tiny(**JOB, data={"validation_fraction": 0, "cache": str(folder / "cache"), **data}).to_toml()
    file = folder / "job.toml"
    file.write_text("\n".join(line for line in text.splitlines() if "vocab_size" not in line) + "\n")
    return file


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_documents_that_spell_tokens_end_a_run_that_does_not_say_what_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "tok", "byte_level")
    file, folder = job_of(tmp_path, {"text": "one</s>two <|user|>"}), tmp_path / "run"
    assert train_here(file, "--run.dir", folder) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert (
        error.startswith('error: data.special_tokens: expected "text" or "tokens"')
        and "in 32 places" in error
    )
    assert not (folder / "run.json").exists()
    for value, words in (("text", "stays text"), ("tokens", "becomes the token")):
        assert train_here(file, "--run.dir", tmp_path / value, "--data.special_tokens", value) == 0
        assert f"32 places of the texts spell a special token, which {words}" in capsys.readouterr().out
    assert losses(tmp_path / "text") != losses(tmp_path / "tokens")


@pytest.mark.extensive("a run and its resume")
def test_a_run_without_the_key_goes_on_with_tokens(tmp_path: Path) -> None:
    """As runs did before there was the key, also if a file without it is named."""
    saved(tmp_path / "tok", "byte_level")
    file = job_of(tmp_path, {"text": "one</s>two <|user|>"})
    whole, folder = tmp_path / "whole", tmp_path / "run"
    tokens = ("--data.special_tokens", "tokens")
    assert train_here(file, "--run.dir", whole, *tokens) == 0
    for resume in (
        ("--resume", folder),
        (file, "--resume", folder),
        (file, "--continue", "--run.dir", folder),
    ):
        shutil.rmtree(folder, ignore_errors=True)
        assert (
            train_here(
                file, "--run.dir", folder, *tokens, "--train.steps", 2, "--optimizer.schedule", "constant"
            )
            == 0
        )
        stored = (folder / "config.toml").read_text()
        assert 'special_tokens = "tokens"\n' in stored
        (folder / "config.toml").write_text(stored.replace('special_tokens = "tokens"\n', ""))
        assert cli.main(["train", *map(str, resume), "--train.steps", "3"]) == 0
        assert losses(folder) == losses(whole)


def test_a_fine_tuned_run_shows_its_answer_beside_the_expected_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "tok", "byte_level")
    folder = tmp_path / "run"
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    assert train_here(job_of(tmp_path, {"messages": turns}, kind="conversations"), "--run.dir", folder) == 0
    out = capsys.readouterr().out
    lines = out[out.index("  sample  ") :].splitlines()
    assert lines[0] == "  sample          prompt     '<s><|user|>one</s><|assistant|>'"
    assert lines[1] == "                  expected   'two'"
    assert lines[2].startswith("                  generated  '")
    text = generate(folder, "one</s>", tokens=4, temperature=0.0, top_k=0, seed=0, chat=True)
    plain = generate(folder, "one</s>", tokens=4, temperature=0.0, top_k=0, seed=0)
    assert plain.startswith("one</s>") and not text.startswith("one")
    assert (
        cli.main(
            ["generate", str(folder), "--prompt", "one</s>", "--chat", "--tokens", "4", "--temperature", "0"]
        )
        == 0
    )
    assert capsys.readouterr().out == f"{text}\n"
