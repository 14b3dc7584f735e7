"""Text from a trained model: a checkpoint of a run, of any engine and any number of ranks, in one process.

`sample` works on any model that maps token numbers to logits; `generate` is the command around it.
"""

from __future__ import annotations

from pathlib import Path

import torch

from shardwright.train.config import DataConfig
from shardwright.train.data.dataset import template_of
from shardwright.train.data.tokens.chat import prompt_ids, prompt_of
from shardwright.train.data.tokens.tokenizers import Tokenizer, open_tokenizer
from shardwright.train.errors import UserError
from shardwright.train.finetune.adapters import adapt, merge
from shardwright.train.finetune.base import base_of, check_same_base
from shardwright.train.models.build import build_model
from shardwright.train.models.sampling import sample
from shardwright.train.report.progress import to_stderr
from shardwright.train.run.folder import RunFolder, checkpoints_of
from shardwright.train.run.same_job import check_same_tokenizer, recorded_tokenizer
from shardwright.train.step import loading


def texts_begin(data: DataConfig, tokenizer: Tokenizer) -> bool:
    """Return whether texts of the run begin with the tokenizer's begin token. Conversations begin as their template
    does."""
    if tokenizer.begin is None or {each.kind for each in data.training} != {"conversations"}:
        return tokenizer.begin is not None
    template = template_of(data, tokenizer)
    return template is not None and prompt_of("a", template, tokenizer)[:1] == [tokenizer.begin]


def generate(
    run: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    chat: bool = False,
    step: int | None = None,
) -> str:
    """Return the prompt and the text that the run's checkpoint of a step, or its newest whole one, puts after it. With
    `chat` the prompt is a message of the user, the run's chat template makes the text of it that the model continues,
    and only the reply is returned.

    This text has at most `tokens` tokens, and ends before the first token that ends a document for the tokenizer or its
    generation_config.json. An empty prompt asks for a document from its beginning.

    Raises UserError for a folder that is no run or has no whole checkpoint, for a tokenizer whose files have changed
    since the run, for a prompt that is no text, and for one without a token if the tokenizer has no token that begins a
    document.

    Raises NonFiniteLogitsError if the training has diverged.
    """
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise UserError("--prompt: expected UTF-8 text, found other bytes")
    folder = RunFolder(run)
    record, config = folder.record(), folder.config()
    name = recorded_tokenizer(record, config.data)
    tokenizer = open_tokenizer(name)
    check_same_tokenizer(folder, name, tokenizer.fingerprint)
    if chat:
        template = template_of(config.data, tokenizer)
        if template is None:
            raise UserError(
                "--chat: expected a chat template, found none beside the tokenizer; set data.chat_template in "
                f"{folder.config_file} to a file with one, or leave --chat out"
            )
        ids = prompt_of(prompt, template, tokenizer, config.data.spelled)
    else:
        ids = prompt_ids(tokenizer, prompt, config.data.spelled, texts_begin(config.data, tokenizer))
    if not ids:
        raise UserError(
            f"--prompt: expected a text of at least one token, found none in {prompt!r}; data.tokenizer = "
            f"{config.data.tokenizer!r} has no token that begins a document"
        )
    device = torch.device("cuda" if config.run.device != "cpu" and torch.cuda.is_available() else "cpu")
    torch.manual_seed(config.run.seed)  # of a frozen base, which the checkpoint does not hold
    model = build_model(config.model, record["vocab_size"])
    if config.finetune.has_base:
        model.read_weights()  # of the frozen base, which the checkpoint does not hold
    adapt(model, config.finetune, config.run.seed)
    loading.load_newest_weights(checkpoints_of(folder, config.checkpoint), model, say=to_stderr, step=step)
    if config.finetune.has_base:
        check_same_base(folder.base_file, base_of(model, config.for_building.source))
        merge(model.float())  # a narrower base would round what the adapters have learnt
    new_tokens = sample(
        model.to(device), torch.tensor(ids, dtype=torch.int64), count=tokens, temperature=temperature, top_k=top_k,
        seed=seed,
        context=config.train.seq_len, device=device,  # positions beyond were never trained
        ends=tokenizer.ends,
    )  # fmt: skip
    if chat:
        return tokenizer.decode(new_tokens)
    return prompt + tokenizer.decode([*ids, *new_tokens]).removeprefix(tokenizer.decode(ids))
