"""Small models and the text of Python's standard library for the programs of this folder: nothing is downloaded."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

LENGTH = 32  #: bytes in a sample; a byte is a token


def text() -> torch.Tensor:
    """The first MiB of the standard library's source, int64 [bytes]."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    data = b"".join(file.read_bytes() for file in files)[: 1 << 20]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


TEXT = text()


def samples(step: int, rows: int = 4) -> torch.Tensor:
    """Rows of text, int64 [rows, LENGTH + 1], others on every rank and in every step."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    starts = torch.randint(len(TEXT) - LENGTH, (rows, 1), generator=generator)
    return TEXT[starts + torch.arange(LENGTH + 1)]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, int64 [rows, LENGTH] each."""
    rows = samples(step)
    return rows[:, :-1], rows[:, 1:]


class Block(nn.TransformerEncoderLayer):
    def __init__(self, width: int) -> None:
        super().__init__(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)


class Model(nn.Module):
    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.hidden(tokens))

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.norm(x)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def qwen_folder() -> str:
    """A folder with a Qwen3 of two layers, as the hub has them. Every rank writes its own, with equal weights."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.config.architectures = [type(model).__name__]
    model.config.to_json_file(f"{folder}/config.json")  # save_pretrained writes on the first rank alone
    save_file(model.state_dict(), f"{folder}/model.safetensors", metadata={"format": "pt"})
    return folder


class Rows(torch.utils.data.Dataset):
    """Samples as a model of transformers takes them, for its Trainer. All ranks have the same ones."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = TEXT[index * LENGTH : (index + 1) * LENGTH]
        return {"input_ids": row, "labels": row}


def byte_tokenizer():
    """A tokenizer of transformers whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=letters[0], eos_token=letters[0])


def completions():
    """Prompts and completions, a table of ``datasets``: sums of small numbers."""
    from datasets import Dataset

    pairs = [(i % 10, i // 10 % 10) for i in range(100)]
    return Dataset.from_list([{"prompt": f"{a} plus {b} is ", "completion": f"{a + b}."} for a, b in pairs])


def report(step: int, loss: torch.Tensor) -> None:
    """Print the mean loss of all ranks."""
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"step {step} loss {mean.item() / dist.get_world_size():.7f}", flush=True)


def report_history(trainer) -> None:
    """Print the losses that a Trainer has logged."""
    if dist.get_rank() == 0:
        for row in trainer.state.log_history:
            if "loss" in row:
                print(f"step {row['step']} loss {row['loss']:.7f}", flush=True)


def say(line: object) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)
