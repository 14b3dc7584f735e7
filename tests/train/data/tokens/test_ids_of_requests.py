"""Ids that a model is asked with, against those of training: each tokenizer with each chat template, with and without
special tokens that messages spell, after earlier turns, and by tasks of lm-eval."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardwright.train.commands.export import write_tokenizer
from shardwright.train.commands.hugging_face.evaluate import tokenizer_of_requests
from shardwright.train.commands.hugging_face.harness import with_ids_of_training
from shardwright.train.data.sources.items import Completion, Conversation
from shardwright.train.data.tokens.chat import (
    SpecialTokens,
    encode_completion,
    encode_conversation,
    prompt_ids,
    prompt_of,
)
from shardwright.train.data.tokens.requests import Requests
from shardwright.train.data.tokens.tokenizers import FromFile, open_tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")
transformers = pytest.importorskip("transformers", reason="needs transformers")

TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
#: A prompt ends in a character that one token may share with the first ones of the reply.
WORDS = (
    "{% for m in messages %}{{ m.role }}:{{ ' ' }}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{{ ' ' }}{% endif %}"
)
TEMPLATES = {
    "no begin": TURNS,
    "begin as text": "<s>" + TURNS,
    "begin by name": "{{ bos_token }}" + TURNS,
    "begin of each turn": TURNS.replace("<|", "<s><|"),
    "end by name": TURNS.replace("</s>", "{{ eos_token }}"),
    "words": WORDS,
    "words and an end": WORDS.replace("\n", "</s>"),
    "lines": TURNS.replace("|>", "|>\n\n"),
    "marked": (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
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
    {"role": "user", "content": "one"}, {"role": "assistant", "content": " two"}, {"role": "user", "content": "three"},
)  # fmt: skip
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
#: Texts in which every tokenizer here finds tokens of several words, and of what is between turns.
LEARNT = ["one two three", "assistant: two", ": one", ":  two", "\n\n\n two", " </s two"] * 20


def byte_pairs(metaspace: bool = False) -> Any:
    """A tokenizer with merges across words, so that the first character of a reply can join the end of its prompt."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    kinds = tokenizers.pre_tokenizers
    if metaspace:
        library.pre_tokenizer = kinds.Metaspace(split=False)
        library.decoder = tokenizers.decoders.Metaspace()
    else:
        library.pre_tokenizer = kinds.ByteLevel(add_prefix_space=False, use_regex=False)
        library.decoder = tokenizers.decoders.ByteLevel()
    letters = "abcdefghijklmnopqrstuvwxyz<>|/_ .:\n\u2581"
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=list(letters) if metaspace else kinds.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(LEARNT, trainer)
    return library


MAKERS = {"bytes": byte_pairs, "pieces": lambda: byte_pairs(metaspace=True)}


def made(folder: Path, around: Sequence[str], config: dict[str, Any] | None, kind: str = "bytes") -> Path:
    """A tokenizer with special tokens."""
    library = MAKERS[kind]()
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


#: Messages and replies: a reply that joins its prompt, and texts that spell special tokens.
ASKED = {
    "one": "one", "spells a turn": "one</s><|assistant|>two", "spells a begin": "<s>one",
}  # fmt: skip
ANSWERS = ("two", " two", "\ntwo", "</s> two", "<s>", " ")


@pytest.mark.parametrize("special_tokens", ["text", "tokens"])
@pytest.mark.parametrize("kind", MAKERS)
def test_requests_have_the_ids_of_training(kind: str, special_tokens: SpecialTokens, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(made(tmp_path / "tokenizer", AROUND["a begin"], CONFIGS["names"], kind)))
    joined = 0
    for template, asked in product(TEMPLATES.values(), ASKED.values()):
        requests = Requests(tokenizer, template, special_tokens)
        question = {"role": "user", "content": asked}
        for messages, answer in product([(question,), (*FEW_SHOT, question)], ANSWERS):
            reply = {"role": "assistant", "content": answer}
            trained = encode_conversation(
                Conversation((*messages, reply)), template, tokenizer, special_tokens
            ).ids.tolist()
            text = requests.chat(messages)
            found = requests.ids(text)
            assert found == trained[: len(found)], (template, messages, answer)
            before, after = requests.pair(text, answer)
            assert before == found
            # What follows a reply may be one token with its end, unless that is a special token.
            known = len(before) + len(after) - ("</s>" not in template)
            assert (before + after)[:known] == trained[:known], (template, messages, answer)
            begun = requests.chat([*messages, reply], continues=True)
            assert requests.ids(begun) == before + after
            if not any(tokenizer.spelled(each["content"]) for each in (*messages, reply)):
                whole = "".join(each for each in text if not "\ufdd0" <= each <= "\ufdd2") + answer
                joined += before + after != tokenizer.encode(whole)
        assert requests.ids(requests.chat([question])) == prompt_of(
            asked, template, tokenizer, special_tokens
        )
    assert joined  # a tokenizer without such tokens would show nothing


@pytest.mark.parametrize("special_tokens", ["text", "tokens"])
@pytest.mark.parametrize("kind", MAKERS)
def test_requests_without_a_template(kind: str, special_tokens: SpecialTokens, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(made(tmp_path / "tokenizer", AROUND["a begin"], None, kind)))
    for context, answer in product(["one", "assistant: ", "one</s>", "a\n\n", "<s>one"], ANSWERS):
        apart = Requests(tokenizer, None, special_tokens, apart=True)
        trained = encode_completion(Completion(context, answer), tokenizer, special_tokens).ids.tolist()
        before, after = apart.pair(context, answer)
        assert [*before, *after, 1] == trained, (context, answer)
        assert before == prompt_ids(tokenizer, context, special_tokens)
        for begins in (True, False):
            whole = Requests(tokenizer, None, special_tokens, begins)
            before, after = whole.pair(context, answer)
            ids = prompt_ids(tokenizer, context + answer, special_tokens, begins)
            assert before + after == (ids if len(ids) > 1 else [whole.prefix(), *ids])
            assert before and after


def requested(
    folder: Path, requests: Requests, text: str | None = None, history: Any = None, answer: str = ""
) -> list[int]:
    """The ids that lm-eval's class for transformers makes of a text, or of messages, and of an answer."""
    lm_eval = pytest.importorskip("lm_eval.models.huggingface", reason="needs lm_eval")
    model = cast(Any, type("Model", (lm_eval.HFLM,), {}))
    settings = {key: value for key, value in vars(requests).items() if key != "tokenizer"}
    with_ids_of_training(model, str(folder), **settings)
    opened = open_tokenizer(str(folder))
    assert isinstance(opened, FromFile)
    with tokenizer_of_requests(opened) as decoder:
        own = transformers.AutoTokenizer.from_pretrained(decoder)
        if getattr(own, "pad_token", None) is None:
            own.pad_token = "</s>"
        one = SimpleNamespace(tokenizer=own, add_bos_token=None, backend="causal", chat_template_args={})
        if history is not None:
            text = model.apply_chat_template(one, list(history))
        assert text is not None
        ids: list[int] = model.tok_encode(one, text)
        batch, mask = model.tok_batch_encode(one, [text, text + " one"])
        assert batch[0][mask[0].bool()].tolist() == ids and batch.shape == mask.shape
        assert model.tok_encode(one, text, left_truncate_len=2) == ids[-2:]
        before, after = model._encode_pair(one, text, answer) if answer else (ids, [])
        return [*before, *after]


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
        requests = Requests(tokenizer, template)
        trained = encode_conversation(
            Conversation((*FEW_SHOT, {"role": "assistant", "content": "two</s>"})), template, tokenizer
        ).ids.tolist()
        found = requested(exported, requests, history=FEW_SHOT, answer="two</s>")
        assert trained[: len(found)] == found
        alone = requested(exported, requests, history=[{"role": "user", "content": "one"}])
        assert alone == prompt_of("one", template, tokenizer)
        for begins in (False, True):
            for text in ("one two", "<s>one two"):
                found = requested(exported, Requests(tokenizer, begins=begins), text)
                assert found == prompt_ids(tokenizer, text, "text", begins), (template, begins, text)
        if config != "a class":  # transformers' own class of it makes another tokenizer
            other = transformers.AutoTokenizer.from_pretrained(exported)
            text = other.apply_chat_template([FEW_SHOT[0]], tokenize=False, add_generation_prompt=True)
            assert other.encode(text, add_special_tokens=False) == alone
