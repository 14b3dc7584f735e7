"""The folder in which wrong commands are tried: data files, damaged ones, tokenizers, models."""

from __future__ import annotations

import contextlib
import ctypes
import gzip
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.train.data.samples import chat, save_tokenizer, write_jsonl
from tests.train.models.kit.architectures import folder_with

OWN = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, vocab_size, width=8):
        super().__init__()
        self.embedding, self.output = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.output(x)


class Flat(Model):
    def forward(self, tokens):
        return super().forward(tokens).flatten(0, 1)


class Narrow(Model):
    def forward(self, tokens):
        return super().forward(tokens)[..., :5]


class SeesAll(Model):
    def forward(self, tokens):
        return super().forward(tokens) + super().forward(tokens).mean(1, keepdim=True)


class Tuple(Model):
    def forward(self, tokens):
        return super().forward(tokens), None


class Layerless(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embedding, self.output = nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size)

    def forward(self, tokens):
        return self.output(self.embedding(tokens))


class BadLoss(Model):
    def loss(self, batch):
        return self(batch.inputs)


class Failing(Model):
    def forward(self, tokens):
        raise RuntimeError("weights are shy today")


def words(vocab_size):
    return "a model"


def broken(vocab_size):
    return 1 / 0


def forward_without_tokens(vocab_size):
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2)])
    return model


VALUE = 3
"""


def texts(count: int = 200) -> list[dict[str, Any]]:
    return [{"text": f"The {number}th fox jumps over the lazy dog. "} for number in range(count)]


def make_data(folder: Path) -> None:
    """Sound and damaged files of data."""
    (folder / "sound.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    sound = write_jsonl(folder / "sound.jsonl", texts()).read_bytes()
    lines = sound.splitlines(keepends=True)

    def changed(name: str, line: bytes, number: int = 3) -> None:
        (folder / name).write_bytes(b"".join([*lines[: number - 1], line, *lines[number:]]))

    (folder / "cut.jsonl").write_bytes(sound[:-20])
    changed("latin.jsonl", b'{"text": "caf\xe9"}\n')
    changed("number.jsonl", b'{"text": 3}\n')
    changed("null.jsonl", b'{"text": null}\n')
    changed("list.jsonl", b'["text"]\n')
    changed("nul.jsonl", b'{"text": "a\x00b"}\n')
    changed("nuls.jsonl", b"\x00" * 50 + b"\n")
    changed("otherkey.jsonl", b'{"content": "x"}\n')
    changed("single.jsonl", b"{'text': 'x'}\n")
    (folder / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + sound)
    (folder / "utf16.jsonl").write_bytes(sound.decode().encode("utf-16"))
    (folder / "huge.jsonl").write_bytes(b'{"text": "' + b"x" * (1 << 17) + b'"}\n')
    (folder / "gzip.jsonl").write_bytes(gzip.compress(sound))
    (folder / "gzip.txt").write_bytes(gzip.compress(sound))
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(sound))
    (folder / "empty.jsonl").write_bytes(b"")
    (folder / "linefeeds.jsonl").write_bytes(b"\n\n\n")
    (folder / "array.jsonl").write_text(json.dumps(texts(20), indent=1))
    (folder / "latin.txt").write_bytes(b"the quick brown fox jumps over the caf\xe9\n" * 400)
    (folder / "rows.csv").write_text("text\nx\n")
    (folder / "link.jsonl").symlink_to("nowhere.jsonl")
    (folder / "loop.jsonl").symlink_to("loop.jsonl")
    (folder / "folder.txt").mkdir()
    (folder / "texts").mkdir()
    shutil.copy(folder / "sound.jsonl", folder / "texts" / "a.jsonl")
    (folder / "denied.jsonl").write_bytes(sound)
    (folder / "denied.jsonl").chmod(0)
    (folder / "closed").mkdir()
    (folder / "closed").chmod(0o500)
    write_jsonl(folder / "short.jsonl", texts(1))
    write_jsonl(folder / "tiny.jsonl", [{"text": "abc"}])
    write_jsonl(folder / "chats.jsonl", [{"messages": chat("Hello?", "Hello. " * 9)} for _ in range(99)])
    write_jsonl(folder / "questions.jsonl", [{"messages": chat("Hello?")} for _ in range(99)])
    write_jsonl(folder / "roles.jsonl", [{"messages": [{"role": "bot", "content": "hi " * 40}]}] * 50)
    write_jsonl(folder / "sharegpt.jsonl", [{"messages": [{"from": "human", "value": "hi"}]}] * 9)
    write_jsonl(folder / "pairs.jsonl", [{"prompt": "2 + 2 = ", "completion": "4 " * 30}] * 99)
    write_jsonl(folder / "unanswered.jsonl", [{"prompt": "2 + 2 = " * 9, "completion": ""}] * 99)
    np.save(folder / "floats.npy", np.zeros(999, np.float32))
    np.save(folder / "square.npy", np.zeros((30, 30), np.uint16))
    np.save(folder / "negative.npy", np.r_[np.zeros(900, np.int32), -1, np.zeros(99, np.int32)])
    np.save(folder / "beyond.npy", np.r_[np.zeros(900, np.int32), 256, np.zeros(99, np.int32)])
    np.save(folder / "sound.npy", np.zeros(3000, np.uint16))
    (folder / "cut.npy").write_bytes((folder / "sound.npy").read_bytes()[:-10])
    (folder / "text.npy").write_text("1 2 3")
    np.save(folder / "pickled.npy", np.array([{}, {}]), allow_pickle=True)
    make_tables(folder)


def make_tables(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.feather
    import pyarrow.parquet as pq

    table = pa.table({"text": [row["text"] for row in texts()], "number": list(range(200))})
    pq.write_table(table, folder / "sound.parquet")
    (folder / "cut.parquet").write_bytes((folder / "sound.parquet").read_bytes()[:-100])
    with pa.OSFile(str(folder / "sound.arrow"), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    (folder / "cut.arrow").write_bytes((folder / "sound.arrow").read_bytes()[:-1000])
    (folder / "text.parquet").write_text("no table\n" * 50)
    (folder / "text.arrow").write_text("no table\n" * 50)


def make_models(folder: Path) -> None:
    """Tokenizers, and folders of transformers, sound and damaged."""
    save_tokenizer(folder / "tokenizer")
    (folder / "tokenizer-cut").mkdir()
    content = (folder / "tokenizer" / "tokenizer.json").read_text()
    (folder / "tokenizer-cut" / "tokenizer.json").write_text(content[: len(content) // 2])
    shutil.copytree(folder / "tokenizer", folder / "tokenizer-eos")
    (folder / "tokenizer-eos" / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    shutil.copytree(folder / "tokenizer", folder / "tokenizer-json")
    (folder / "tokenizer-json" / "tokenizer_config.json").write_text("{")
    (folder / "tokenizer-old").mkdir()
    (folder / "tokenizer-old" / "vocab.json").write_text("{}")
    (folder / "bad.jinja").write_text("{% for message in messages %}{{ message.content }}")
    (folder / "empty.jinja").write_text("")
    (folder / "silent.jinja").write_text("Hello")
    (folder / "latin.jinja").write_bytes(b"{{ '\xe9' }}")
    folder_with("llama", folder / "llama")
    folder_with("gpt2", folder / "gpt2")

    def copy(name: str) -> Path:
        return Path(shutil.copytree(folder / "llama", folder / name))

    (copy("llama-weightless") / "model.safetensors").unlink()
    (copy("llama-json") / "config.json").write_text('{"model_type": "llama",')
    config = json.loads((folder / "llama" / "config.json").read_text())
    (copy("llama-wide") / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    (copy("llama-deeper") / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    encoder = {**config, "model_type": "bert", "architectures": ["BertModel"]}
    (copy("bert") / "config.json").write_text(json.dumps(encoder))
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (copy("llama-index") / "model.safetensors.index.json").write_text(json.dumps(index))
    (copy("llama-index-json") / "model.safetensors.index.json").write_text('{"weight_map": [')
    weights = (folder / "llama" / "model.safetensors").read_bytes()
    (copy("llama-cut") / "model.safetensors").write_bytes(weights[:-100])
    (copy("llama-header") / "model.safetensors").write_bytes(b"\xff" * 64)
    (folder / "adapters").mkdir()
    (folder / "own_models.py").write_text(OWN)
    (folder / "broken_syntax.py").write_text("def build(:\n")
    (folder / "needs_more.py").write_text("import no_such_package\n")


@contextlib.contextmanager
def as_a_user() -> Iterator[None]:
    """For this thread, without root's right to open every file."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread
    before = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, low words first
    assert libc.capget(header, before) == 0
    without = (ctypes.c_uint32 * 6)(*before)
    without[0] &= ~(1 << 1 | 1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, without) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


def state_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file and folder, but for what Python compiles, locks of runs, and how a run ended."""
    found = {}
    for path in folder.rglob("*"):
        if "__pycache__" not in path.parts and path.name not in (".lock", "exit.json"):
            facts = path.lstat()
            is_folder = stat.S_ISDIR(facts.st_mode)
            found[str(path.relative_to(folder))] = (0, 0) if is_folder else (facts.st_size, facts.st_mtime_ns)
    return found
