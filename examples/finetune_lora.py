"""Fine-tune low-rank adapters on a frozen, sharded base (LoRA, Hu et al., 2021, https://arxiv.org/abs/2106.09685).

    torchrun --standalone --nproc-per-node 2 examples/finetune_lora.py
    torchrun --standalone --nproc-per-node 2 examples/finetune_lora.py --from llama-folder --to adapters-folder

The folder holds safetensors and config.json in Hugging Face's names, of a Llama. Without one a small Llama is made
first. The base is loaded in bfloat16, sharded and frozen: it has no gradients and no optimizer state on any rank. Only
the adapters learn, and only they are saved, in the file format of peft.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import tempfile
from pathlib import Path
from pydoc_data.topics import topics  # half a MB of English text, a part of every CPython
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw
from shardwright.train.config.sections.finetune import FinetuneConfig
from shardwright.train.config.shapes.presets import LlamaConfig
from shardwright.train.finetune.adapters import adapt, is_adapter, statement
from shardwright.train.finetune.peft_files import write_adapters
from shardwright.train.models import hugging_face
from shardwright.train.models.build import model_of

BATCH, LENGTH = 4, 128  # sequences per rank and step, tokens in each


def build(shape: LlamaConfig, settings: FinetuneConfig) -> Any:
    """The model with its adapters, deferred: nothing is allocated. The base is bfloat16, the adapters float32."""
    with sw.deferred_init():
        model = model_of(shape)
        adapt(model, settings, seed=0)  # the same adapters on every rank
    return model


def make_pretrained(folder: Path) -> None:
    """A small Llama, not trained at all, as somebody else might have left it. On one rank."""
    shape = LlamaConfig(
        dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=192, vocab_size=256, max_seq_len=256
    )
    torch.manual_seed(0)
    key_map, config = hugging_face.key_map(shape), hugging_face.config_json(shape)
    sw.save_pretrained(model_of(shape), folder, key_map=key_map, config=config)


def batch(tokens: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, int64 [BATCH, LENGTH]: pieces of the text that depend on the number alone."""
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(len(tokens) - LENGTH, (BATCH, 1), generator=generator)
    rows = tokens[starts + torch.arange(LENGTH + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune low-rank adapters on several ranks.")
    parser.add_argument(
        "--from", dest="source", type=Path, help="folder of weights; default: a small one is made"
    )
    parser.add_argument(
        "--to", type=Path, help="folder for the adapters, which must be new; default: a temporary one"
    )
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
    atexit.register(dist.destroy_process_group)  # after failures, too: threads at work would abort the exit
    first = mesh.get_rank() == 0

    def say(text: object) -> None:
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
    target = target or Path(scratch) / "adapters"

    shape = hugging_face.shape_of(json.loads((source / "config.json").read_text()))
    if not isinstance(shape, LlamaConfig):
        raise SystemExit(f"{source} holds another model than a Llama")
    settings = FinetuneConfig(
        method="lora", rank=options.rank, alpha=2 * options.rank, targets=("wq", "wv"), base_dtype="bfloat16"
    )
    model = build(shape, settings)
    policy = sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks():
        sw.fully_shard(block, mesh=mesh, mp_policy=policy)
    sw.fully_shard(model.head(), mesh=mesh, mp_policy=policy)
    sw.fully_shard(model, mesh=mesh, mp_policy=policy)
    base_names = hugging_face.key_map(shape)
    sw.load_pretrained(
        model,
        source,
        key_map={**base_names, **{name: None for name, _ in model.named_parameters() if is_adapter(name)}},
    )
    sw.materialize(model)  # what is not stored: adapters and rotary tables
    adapters = [p for p in model.parameters() if p.requires_grad]
    say(f"on {mesh.size()} ranks; {statement(model)}")

    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(adapters, lr=3e-2, weight_decay=0.0))
    tokens = torch.frombuffer(bytearray("\n\n".join(topics.values()).encode()), dtype=torch.uint8)
    for step in range(options.steps):
        number = step * mesh.size() + mesh.get_rank()  # every rank has data of its own
        inputs, targets = (t.to(device) for t in batch(tokens, number))
        loss = F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        sw.clip_grad_norm_(adapters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / mesh.size()
        dist.all_reduce(mean)
        say(f"step {step}: loss {mean.item():.4f}")
    say(sw.memory_report(model, optimizer))

    write_adapters(model, target, settings, key_map=base_names, base=str(source))
    say(f"saved the adapters in {target}; peft.PeftModel.from_pretrained reads them")


if __name__ == "__main__":
    main()
