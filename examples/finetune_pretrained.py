"""Fine-tune pretrained weights, sharded from the first byte on: load, train a few steps, save.

    torchrun --standalone --nproc-per-node 2 examples/finetune_pretrained.py
    torchrun --standalone --nproc-per-node 2 examples/finetune_pretrained.py --from llama-folder --to tuned-folder

The folder holds safetensors and config.json in Hugging Face's names, of a Llama or a hybrid. Without one a small Llama
is made first. The text is Python's own reference, as ids of the tokenizer.json in the folder. Without this file a byte
is a token, which fits only a model of 256 ids.
No rank ever holds the whole model: parameters are made as shards, each rank reads its part of the files, and saving
gathers one parameter at a time.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import tempfile
from pathlib import Path
from pydoc_data.topics import topics  # half a MB of English text, a part of every CPython

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw
from shardwright.train.config.shapes.presets import LlamaConfig
from shardwright.train.models import hugging_face
from shardwright.train.models.build import model_of

BATCH, LENGTH = 4, 128  # sequences per rank and step, tokens in each


def make_pretrained(folder: Path) -> None:
    """A small Llama, not trained at all, as somebody else might have left it. On one rank."""
    shape = LlamaConfig(
        dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=192, vocab_size=256, max_seq_len=256
    )
    torch.manual_seed(0)
    sw.save_pretrained(
        model_of(shape),
        folder,
        key_map=hugging_face.key_map(shape),
        config=hugging_face.config_json(shape),
        max_shard_size="200 KB",
    )


def tokens_for(folder: Path, vocab_size: int) -> torch.Tensor:
    """Python's own reference as ids of the folder's tokenizer, int [N]; as bytes if the model has one id for each byte.

    Other text would train other rows of the embedding than those that the pretrained model uses, in silence. So a model
    with another vocabulary and without tokenizer.json ends the program.
    """
    text = "\n\n".join(topics.values())
    file = folder / "tokenizer.json"
    if not file.is_file():
        if vocab_size != 256:
            raise SystemExit(
                f"error: {folder}: expected tokenizer.json for a model of {vocab_size} ids, found none; bytes are ids "
                "only of a model with 256. Copy the model's tokenizer.json into the folder."
            )
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise SystemExit(f"error: {file} needs the library tokenizers: pip install tokenizers") from None
    tokenizer = Tokenizer.from_file(str(file))
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    if max(ids) >= vocab_size:
        raise SystemExit(
            f"error: {file}: expected ids below the model's {vocab_size}, found {max(ids)}; this tokenizer does not "
            "belong to this model"
        )
    return torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids, dtype=torch.int32)


def batch(tokens: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, int64 [BATCH, LENGTH]: pieces of the text that depend on the number alone."""
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(len(tokens) - LENGTH, (BATCH, 1), generator=generator)
    rows = tokens[starts + torch.arange(LENGTH + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune pretrained weights on several ranks.")
    parser.add_argument(
        "--from", dest="source", type=Path, help="folder of weights; default: a small one is made"
    )
    parser.add_argument(
        "--to", type=Path, help="folder for the result, which must be new; default: a temporary one"
    )
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
    atexit.register(dist.destroy_process_group)  # after failures, too: threads at work would abort the exit
    first = mesh.get_rank() == 0

    def say(text: str) -> None:
        if first:
            print(text, flush=True)

    # Every rank must know the same folders.
    folders = [options.source, options.to, tempfile.mkdtemp(prefix="shardwright-") if first else None]
    dist.broadcast_object_list(folders, src=0)
    source, target, scratch = folders
    if source is None:
        source = Path(scratch) / "pretrained"
        if first:
            make_pretrained(source)
        dist.barrier()
        say(f"made a small pretrained Llama in {source}")
    target = target or Path(scratch) / "tuned"

    shape = hugging_face.shape_of(json.loads((source / "config.json").read_text()))
    tokens = tokens_for(source, shape.vocab_size)  # before anything is allocated
    key_map = hugging_face.key_map(shape)
    torch.manual_seed(0)
    with sw.deferred_init():  # nothing is allocated
        model = model_of(shape)
    for block in model.blocks():
        sw.fully_shard(block, mesh=mesh)
    sw.fully_shard(model.head(), mesh=mesh)
    sw.fully_shard(model, mesh=mesh)
    loaded = sw.load_pretrained(model, source, key_map=key_map)
    sw.materialize(model)  # what is not stored: rotary tables
    say(
        f"{model.num_params():,} parameters on {mesh.size()} ranks; this one read {loaded.bytes_read:,} of "
        f"{sum(file.stat().st_size for file in source.glob('*.safetensors')):,} bytes"
    )

    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for step in range(options.steps):
        number = step * mesh.size() + mesh.get_rank()  # every rank has data of its own
        inputs, targets = (t.to(device) for t in batch(tokens, number))
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        sw.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / mesh.size()
        dist.all_reduce(mean)
        say(f"step {step}: loss {mean.item():.4f}")

    sw.save_pretrained(model, target, key_map=key_map, config=hugging_face.config_json(shape))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if first and (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    say(f"saved the tuned model in {target}")


if __name__ == "__main__":
    main()
