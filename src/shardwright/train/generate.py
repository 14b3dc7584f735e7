"""Text from a trained model: the newest checkpoint of a run, of any engine and any number of ranks, in one process.

`sample` works on any model that maps token numbers to logits; `generate` is the command around it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.train import checkpoint
from shardwright.train.data.tokenizers import open_tokenizer
from shardwright.train.errors import UserError
from shardwright.train.finetune.adapters import adapt, merge
from shardwright.train.finetune.base import base_of, check_same_base
from shardwright.train.finetune.finetuning import source_of
from shardwright.train.models.build import build_model
from shardwright.train.runs import RunFolder


@torch.no_grad()
def sample(
    model: nn.Module,
    prompt: Tensor,
    *,
    count: int,
    temperature: float,
    top_k: int,
    seed: int,
    context: int,
    device: torch.device,
    multiple: int = 1,
) -> list[int]:
    """`count` token numbers that follow `prompt` (int64, 1-D). The model sees the last `context` tokens.

    What it sees is filled up to a `multiple`, which divides `context`, as sequence parallelism wants it.

    Temperature 0 takes the likeliest token; `top_k` 0 draws from all. Drawn on the CPU from a generator of its own,
    so ranks that run the same model in step draw the same tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = prompt.tolist()
    training = model.training
    model.eval()
    for _ in range(count):
        window = tokens[-context:]
        window_1S = torch.tensor([window + [0] * (-len(window) % multiple)], device=device)
        logits_V = model(window_1S)[0, len(window) - 1]
        logits_V = (logits_V.full_tensor() if isinstance(logits_V, DTensor) else logits_V).float().cpu()
        tokens.append(_draw(logits_V, temperature, top_k, generator))
    model.train(training)
    return tokens[len(prompt) :]


def _draw(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k:
        candidates, places = logits_V.topk(min(top_k, len(logits_V)))
    else:
        candidates, places = logits_V, torch.arange(len(logits_V))
    choice = torch.multinomial(torch.softmax(candidates / temperature, dim=-1), 1, generator=generator)
    return int(places[choice])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # stdout is for what was generated


def generate(run: Path, prompt: str, tokens: int, temperature: float, top_k: int, seed: int) -> str:
    """The prompt and `tokens` tokens the run's newest checkpoint puts after it.

    Raises UserError for a folder that is no run or has no whole checkpoint, and for a prompt that is no text.
    """
    if not prompt:
        raise UserError("--prompt: expected at least one character, found none")
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise UserError("--prompt: expected UTF-8 text, found other bytes")
    folder = RunFolder(run)
    record, config = folder.record(), folder.config()
    tokenizer = open_tokenizer(config.data.tokenizer)
    device = torch.device("cuda" if config.run.device != "cpu" and torch.cuda.is_available() else "cpu")
    torch.manual_seed(config.run.seed)  # of a frozen base, which the checkpoint does not hold
    model = build_model(config.model, record["vocab_size"])
    if config.finetune.method != "full":
        model.read_weights()  # of the frozen base, which the checkpoint does not hold
    adapt(model, config.finetune, config.run.seed)
    checkpoint.load_newest_weights(folder.checkpoints, model, say=_say)
    if config.finetune.method != "full":
        check_same_base(folder.base_file, base_of(model, source_of(config)))
        merge(model)
    ids = tokenizer.encode(prompt)
    if tokenizer.begin is not None and ids[:1] != [tokenizer.begin]:
        ids = [tokenizer.begin, *ids]  # as before each document in training
    new_tokens = sample(
        model.to(device), torch.tensor(ids, dtype=torch.int64), count=tokens, temperature=temperature, top_k=top_k,
        seed=seed,
        context=config.train.seq_len, device=device,  # positions beyond were never trained
    )  # fmt: skip
    return prompt + tokenizer.decode([*ids, *new_tokens]).removeprefix(tokenizer.decode(ids))
