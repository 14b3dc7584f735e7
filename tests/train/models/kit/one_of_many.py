"""Run as a program by test_hf_jobs.py: a Llama of 1.2 billion parameters of transformers, as one of 256 ranks that are
not there. Its weights are a file with a hole in place of values."""

from __future__ import annotations

import json
import logging
import struct
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.train.config import Config
from shardwright.train.models.offers import sizes_of
from shardwright.train.parallel.world import World
from shardwright.train.step.trainer import Trainer
from tests.train.kit.datasets import byte_dataset

RANKS = 256
SIZES = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 4096,
}  # fmt: skip


def sparse_weights(folder: Path) -> int:
    """A folder with config.json and bfloat16 weights of zeros, which need no disk; returns the parameters."""
    import transformers

    config = transformers.LlamaConfig(**SIZES)
    with torch.device("meta"):
        model: nn.Module = transformers.LlamaForCausalLM(config)
    config.save_pretrained(folder)
    header, end = {}, 0
    for name, tensor in model.state_dict().items():
        header[name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [end, end + 2 * tensor.numel()],
        }
        end += 2 * tensor.numel()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # as the format wants it: tensors are aligned
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return end // 2


class Peak:
    """The most memory of this process that is no page of a file, in bytes, while the context lasts.

    Pages of files are the system's: some systems map many more of them than are read.
    """

    def __enter__(self) -> Peak:
        self.nbytes, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.nbytes = max(self.nbytes, own_bytes())


def own_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def main(folder: Path) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    dist.init_process_group("fake", rank=3, world_size=RANKS, store=FakeStore())
    parameters = sparse_weights(folder)
    config = Config.model_validate(
        {
            "model": {"kind": "hf", "path": str(folder)},
            "train": {"seq_len": 64, "global_batch": RANKS, "micro_batch": 1},
            "validation": {"every": 0},
        }
    )
    assert sizes_of(config.model.shape()).parameters == parameters
    world = World.of(config.parallel, 3, RANKS, torch.device("cpu"))
    before = own_bytes()
    with Peak() as peak:
        trainer = Trainer(config, world, byte_dataset(config, bytes(4000), bytes(4000), "zeros"))
    grown = peak.nbytes - before
    whole = 4 * parameters
    shards = sum(parameter.to_local().nbytes for parameter in trainer.model.parameters())
    assert whole / RANKS <= shards < 1.01 * whole / RANKS, shards
    # The shards, conversions from bfloat16, and Python's objects.
    bound = 2 * shards + 64 * 2**20
    assert bound < 0.02 * whole
    assert grown < bound, f"grown by {grown:,}, bound {bound:,}"
    assert all(bool((p.to_local() == 0).all()) for p in trainer.model.parameters())
    print(f"{grown:,} of {bound:,} bytes, the whole model {whole:,}")
    print("passed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
