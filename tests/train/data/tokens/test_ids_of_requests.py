"""Ids that tasks of lm-eval give to a model, against those of training: each tokenizer with each chat template."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.train.commands.export import write_tokenizer
from shardwright.train.commands.generate import prompt_ids
from shardwright.train.commands.hugging_face.evaluate import tokenizer_of_requests
from shardwright.train.data.sources.items import Conversation
from shardwright.train.data.tokens.chat import encode_conversation, prompt_of
from shardwright.train.data.tokens.tokenizers import open_tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")
transformers = pytest.importorskip("transformers", reason="needs transformers")

TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEMPLATES = {
    "no begin": TURNS,
    "begin as text": "<s>" + TURNS,
    "begin by name": "{{ bos_token }}" + TURNS,
    "begin of each turn": TURNS.replace("<|", "<s><|"),
    "end by name": TURNS.replace("</s>", "{{ eos_token }}"),
}
#: The post-processor's tokens before and after a text.
AROUND = {"nothing": ("", ""), "a begin": ("<s> ", ""), "an end": ("", " </s>"), "both": ("<s> ", " </s>")}
CONFIGS: dict[str, dict[str, Any] | None] = {
    "no config": None,
    "names": {"bos_token": "<s>", "eos_token": "</s>"},
    "adds a begin": {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True},
    "a class": {
        "bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True,
    },
}  # fmt: skip
FEW_SHOT = (
    {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"},
)  # fmt: skip


def made(folder: Path, around: tuple[str, str], config: dict[str, Any] | None) -> Path:
    """A tokenizer of bytes with special tokens."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    library.train_from_iterator(["one two three"], trainer)
    before, after = around
    if before or after:
        library.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{before}$A{after}", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    folder.mkdir(parents=True)
    library.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def requested(
    folder: Path, chat: bool, begins: bool, text: str | None = None, history: Any = None
) -> list[int]:
    """The ids that lm-eval's class for transformers makes of a text, or of messages."""
    lm_eval = pytest.importorskip("lm_eval.models.huggingface", reason="needs lm_eval")
    with tokenizer_of_requests(folder, chat, begins) as arguments:
        tokenizer = transformers.AutoTokenizer.from_pretrained(arguments["tokenizer"])
        model = SimpleNamespace(
            tokenizer=tokenizer, add_bos_token=None, prefix_token_id=arguments["prefix_token_id"], backend="causal",
            chat_template_args={},
        )  # fmt: skip
        if history is not None:
            text = lm_eval.HFLM.apply_chat_template(model, list(history))
        one: list[int] = lm_eval.HFLM.tok_encode(model, text)
        if getattr(tokenizer, "pad_token", None) is None:
            tokenizer.pad_token = "</s>"
        batch = lm_eval.HFLM.tok_batch_encode(model, [text])[0][0].tolist()
        assert batch == one
    return one


@pytest.mark.extensive("each tokenizer", but=("a begin-no config", "nothing-names"))
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("around", AROUND)
def test_tasks_see_the_ids_of_training(around: str, config: str, tmp_path: Path) -> None:
    for number, template in enumerate(TEMPLATES.values()):
        source = made(tmp_path / f"source{number}", AROUND[around], CONFIGS[config])
        tokenizer = open_tokenizer(str(source))
        exported = tmp_path / f"exported{number}"
        exported.mkdir()
        write_tokenizer(exported, tokenizer, 64, template)
        (exported / "chat_template.jinja").write_text(template)
        found = requested(exported, True, True, history=FEW_SHOT)
        trained = encode_conversation(
            Conversation((*FEW_SHOT, {"role": "assistant", "content": "x"})), template, tokenizer
        ).ids.tolist()
        assert trained[: len(found)] == found
        alone = requested(exported, True, True, history=[{"role": "user", "content": "one"}])
        assert alone == prompt_of("one", template, tokenizer)
        for begins in (False, True):
            for text in ("one two", "<s>one two"):
                wanted = prompt_ids(tokenizer, text, "tokens", begins)
                assert requested(exported, False, begins, text) == wanted, (template, begins, text)
        if config != "a class":  # transformers' own class of it makes another tokenizer
            other = transformers.AutoTokenizer.from_pretrained(exported)
            text = other.apply_chat_template(list(FEW_SHOT), tokenize=False, add_generation_prompt=True)
            assert other.encode(text, add_special_tokens=False) == found
