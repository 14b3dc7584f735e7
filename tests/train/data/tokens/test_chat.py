"""Conversations and completions: which text a template writes, and which of its tokens are learnt."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shardwright.train.data.sources.items import Completion, Conversation, Origin
from shardwright.train.data.sources.places import DataFile
from shardwright.train.data.tokens.chat import (
    check_template,
    encode_completion,
    encode_conversation,
    rendered,
)
from shardwright.train.data.tokens.tokenizers import Bytes, FromFile, Tokenizer
from shardwright.train.errors import UserError
from tests.train.data.samples import CHATML, GEMMA, LLAMA, MARKED, MISTRAL, THINKING, chat, save_tokenizer

pytest.importorskip("jinja2", reason="needs jinja2")

END = {
    CHATML: "<|im_end|>",
    LLAMA: "<|eot_id|>",
    GEMMA: "<end_of_turn>",
    MISTRAL: "</s>",
    MARKED: "<|im_end|>",
}
TEMPLATES = pytest.mark.parametrize("template", END, ids=["chatml", "llama", "gemma", "mistral", "marked"])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FromFile:
    folder = save_tokenizer(tmp_path_factory.mktemp("bytes"), eos_token="</s>")
    return FromFile(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> FromFile:
    folder = save_tokenizer(tmp_path_factory.mktemp("pieces"), "pieces", eos_token="</s>")
    return FromFile(folder / "tokenizer.json")


def talk(*turns: str, system: str = "", **options: Any) -> Conversation:
    messages = [{"role": "system", "content": system}] if system else []
    return Conversation((*messages, *chat(*turns)), **options)


def learnt(conversation: Conversation, template: str, tokenizer: Tokenizer) -> list[str]:
    """The texts that are learnt, one for each run of tokens."""
    ids, trained = encode_conversation(conversation, template, tokenizer)
    assert len(ids) == len(trained) and trained.dtype == bool
    runs: list[list[int]] = []
    for number, (token, mark) in enumerate(zip(ids.tolist(), trained.tolist(), strict=True)):
        if mark and not (number and trained[number - 1]):
            runs.append([])
        if mark:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


@TEMPLATES
def test_the_assistant_and_the_end_of_its_turns_are_learnt(template: str, tokenizer: FromFile) -> None:
    conversation = talk("Hi there", "Hello! é\n\nBye", "Again?", "No.")
    before = " " if template is MISTRAL else ""
    end = END[template]
    assert learnt(conversation, template, tokenizer) == [f"{before}Hello! é\n\nBye{end}", f"{before}No.{end}"]


@pytest.mark.parametrize("name", ["troubleshooting.md", "data.md"])
def test_the_template_of_a_page(name: str, tokenizer: FromFile) -> None:
    page = (Path(__file__).parents[4] / "docs" / name).read_text()
    (template,) = re.findall(r"```jinja\n(.*?)```", page, re.DOTALL)
    check_template(template, "docs")
    assert learnt(talk("Hi", "Hello!"), template, tokenizer) == ["Hello!<|im_end|>"]


@TEMPLATES
def test_ids_are_those_of_the_text_with_one_bos(template: str, tokenizer: FromFile) -> None:
    conversation = talk("Hi there", "Hello!", "Again?", "No.")
    text, parts = rendered(conversation, template, tokenizer.names)
    ids = encode_conversation(conversation, template, tokenizer).ids.tolist()
    assert tokenizer.decode(ids) == text
    assert ids.count(tokenizer.begin) == (0 if template in (CHATML, MARKED) else 1)
    assert ids.count(tokenizer.encode(END[template])[0]) >= 2  # a token each, not its letters
    edges = [0, *(start for start, _ in parts), len(text)]
    pieces = [text[start:stop] for start, stop in pairwise(edges)]
    assert ids == [number for piece in pieces for number in tokenizer.encode(piece)]


@TEMPLATES
def test_a_prompt_has_the_tokens_that_a_model_is_asked_with(template: str, tokenizer: FromFile) -> None:
    conversation = talk("Hi there", "\n\nHello!" if template in (CHATML, MISTRAL) else "Hello!")
    prompt = Conversation(conversation.messages[:1])
    asked, _ = rendered(prompt, template, tokenizer.names)
    asked += {CHATML: "<|im_start|>assistant\n", MARKED: "<|im_start|>assistant\n"}.get(template, "")
    asked += {
        LLAMA: "<|start_header_id|>assistant<|end_header_id|>\n\n",
        GEMMA: "<start_of_turn>model\n",
    }.get(template, "")
    ids, trained = encode_conversation(conversation, template, tokenizer)
    assert ids[: trained.tolist().index(True)].tolist() == tokenizer.encode(asked)


@pytest.mark.parametrize("template", [CHATML, LLAMA, MARKED], ids=["chatml", "llama", "marked"])
def test_a_system_message_is_read_and_not_learnt(template: str, tokenizer: FromFile) -> None:
    conversation = talk("Hi", "Hello", system="Be brief.")
    assert "Be brief." in rendered(conversation, template, tokenizer.names)[0]
    assert learnt(conversation, template, tokenizer) == ["Hello" + END[template]]


def test_calls_of_tools_are_learnt_and_their_results_are_not(tokenizer: FromFile) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Zürich <1>"}}}
    messages = (
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": {"degrees": 3}},
        {"role": "assistant", "content": "Cold."},
    )
    conversation = Conversation(messages, tools=({"name": "weather", "parameters": {}},))
    text, _ = rendered(conversation, LLAMA, tokenizer.names)
    assert '{\n    "name": "weather",\n    "parameters": {}\n}' in text and '{"degrees": 3}' in text
    written = '{"name": "weather", "parameters": {"city": "Zürich <1>"}}<|eot_id|>'
    assert learnt(conversation, LLAMA, tokenizer) == [written, "Cold.<|eot_id|>"]


@TEMPLATES
def test_a_conversation_without_an_answer_has_nothing_to_learn(template: str, tokenizer: FromFile) -> None:
    ids, trained = encode_conversation(talk("Hi"), template, tokenizer)
    assert len(ids) > 3 and not trained.any()


def test_a_conversation_may_begin_with_the_assistant(tokenizer: FromFile) -> None:
    conversation = Conversation(
        ({"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Hi"})
    )
    assert learnt(conversation, CHATML, tokenizer) == ["Hello<|im_end|>"]


def test_bytes_can_learn_conversations(tokenizer: FromFile) -> None:
    conversation = talk("Hi", "é!", "Bye", "Bye")
    # No byte is special, so all that the template adds is learnt.
    assert learnt(conversation, CHATML, Bytes()) == ["é!<|im_end|>\n", "Bye<|im_end|>\n"]


@TEMPLATES
def test_a_tokenizer_that_puts_blanks_before_texts_learns_the_same(template: str, pieces: FromFile) -> None:
    conversation = talk("Hi there", "Hello again", "the", "and the")
    end = END[template]
    found = [text.strip() for text in learnt(conversation, template, pieces)]
    assert found == [f"Hello again{end}", f"and the{end}"]


def test_no_token_crosses_the_start_of_an_answer(tokenizer: FromFile) -> None:
    # The blank of the template and the first word of the answer would be one token.
    template = CHATML.replace("assistant\\n' }}", "assistant ' }}").replace(
        "+ '\\n' + message['content']", "+ ' ' + message['content']"
    )
    assert tokenizer.encode("assistant the end") != [
        *tokenizer.encode("assistant "),
        *tokenizer.encode("the end"),
    ]
    ids, trained = encode_conversation(talk("Hi", "the end"), template, tokenizer)
    first = trained.tolist().index(True)
    assert ids[first:-1].tolist() == tokenizer.encode("the end<|im_end|>")
    assert ids[:first].tolist() == tokenizer.encode("<|im_start|>user Hi<|im_end|>\n<|im_start|>assistant ")


def test_no_token_crosses_the_end_of_an_answer(tokenizer: FromFile, pieces: FromFile) -> None:
    template = "Say: {% generation %}{{ messages[1].content }}{% endgeneration %}e end"
    for each in (tokenizer, pieces):
        assert each.encode("x th")[-1] not in each.encode("x the end")
        assert [text.strip() for text in learnt(talk("Hi", " th"), template, each)] == ["th"]
        ids = encode_conversation(talk("Hi", " th"), template, each).ids.tolist()
        assert each.decode(ids) == "Say:  the end"


# ------------------------------------------------------------------------------
# Templates that do not fit


def test_a_template_that_changes_earlier_messages_is_refused(tokenizer: FromFile) -> None:
    where = Origin(DataFile("/data/a.parquet"), "row", 7)
    conversation = talk("Hi", "<think>hm</think>Hello", "Bye", "<think>so</think>Bye", origin=where)
    with pytest.raises(UserError) as caught:
        encode_conversation(conversation, THINKING, tokenizer)
    message = str(caught.value)
    assert message.startswith("data.chat_template: expected a template that writes")
    assert "message 2 of row 7 of /data/a.parquet" in message and "'<think>hm</think>Hello" in message
    assert "generation" in message and "\n" not in message
    # Without thinking in front of another message the same template is fine.
    conversation = talk("Hi", "Hello", "Bye", "<think>so</think>Bye")
    assert learnt(conversation, THINKING, tokenizer)[1] == "<think>so</think>Bye<|im_end|>"


def test_a_template_that_writes_something_only_at_the_end_is_refused(tokenizer: FromFile) -> None:
    with pytest.raises(UserError, match="message 2 of the conversation"):
        encode_conversation(talk("a", "b", "c"), "{{ messages|length }}" + CHATML, tokenizer)
    with pytest.raises(UserError, match="message 4 of the conversation"):
        template = CHATML.replace("'\\n' + message", "'\\n' + ('' if loop.index < 4 else '!') + message")
        template = template.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant:' }}")
        encode_conversation(
            Conversation(tuple(chat("a", "b", "c", "d")[i] for i in (0, 2, 2, 3))), template, tokenizer
        )


def test_the_date_of_a_template_does_not_depend_on_the_day(tokenizer: FromFile) -> None:
    text, _ = rendered(talk("Hi", "Hello"), LLAMA, tokenizer.names)
    assert "Today Date: 26 Jul 2024\n" in text
    clock = "{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}" + CHATML
    assert learnt(talk("Hi", "Hello"), clock, tokenizer) == ["Hello<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "conversation", "message"),
    [
        (GEMMA, talk("Hi", "Hello", system="x"), "TemplateError: System role not supported"),
        (GEMMA, Conversation(tuple(chat("a", "b")[::-1])), "Conversation roles must alternate"),
        ("{{ messages[0].content.nothing.at.all }}", talk("Hi", "b"), "UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", talk("Hi", "b"), "SecurityError"),
        ("{{ messages.append(1) }}", talk("Hi", "b"), "SecurityError"),
    ],
)
def test_templates_that_fail_are_named(
    template: str, conversation: Conversation, message: str, tokenizer: FromFile
) -> None:
    placed = Conversation(conversation.messages, origin=Origin(DataFile("/a.parquet"), "row", 3))
    with pytest.raises(UserError) as caught:
        encode_conversation(placed, template, tokenizer)
    assert "of row 3 of /a.parquet" in str(caught.value) and message in str(caught.value)


def test_a_template_that_is_not_jinja_is_refused() -> None:
    with pytest.raises(UserError, match=r"found an error at line 2 of chat\.jinja"):
        check_template("{{ x }}\n{% for %}", "chat.jinja")


def test_marks_inside_marks_are_refused(tokenizer: FromFile) -> None:
    template = "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}"
    with pytest.raises(UserError, match="tags that follow one another"):
        encode_conversation(talk("Hi", "b"), template, tokenizer)
    with pytest.raises(UserError, match="the characters U\\+FDD0"):
        encode_conversation(talk("Hi \ufdd0", "b"), MARKED, tokenizer)


def test_templates_render_as_in_transformers(tokenizer: FromFile) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils", reason="needs transformers")
    conversation = talk("Hi é", "<b>Hello</b>", "Again?", "No.")
    for template in (CHATML, GEMMA, MISTRAL):
        theirs, _ = utils.render_jinja_template(
            conversations=[list(conversation.messages)], chat_template=template, **tokenizer.names
        )
        assert rendered(conversation, template, tokenizer.names)[0] == theirs[0]
    theirs, marks = utils.render_jinja_template(
        conversations=[list(conversation.messages)],
        chat_template=MARKED,
        return_assistant_tokens_mask=True,
        **tokenizer.names,
    )
    assert rendered(conversation, MARKED, tokenizer.names) == (theirs[0], [tuple(each) for each in marks[0]])


# ------------------------------------------------------------------------------
# Completions


def test_a_completion_and_the_end_of_the_document_are_learnt(tokenizer: FromFile) -> None:
    ids, trained = encode_completion(Completion("Translate: good day =>", " bonjour"), tokenizer)
    assert ids[0] == tokenizer.begin and ids[-1] == tokenizer.end and trained[-1]
    assert tokenizer.decode(ids[trained].tolist()) == " bonjour</s>"
    assert ids[1:-1].tolist() == tokenizer.encode("Translate: good day => bonjour")


def test_no_token_crosses_the_start_of_a_completion(tokenizer: FromFile, pieces: FromFile) -> None:
    for each in (tokenizer, pieces):
        ids, trained = encode_completion(Completion("the answer is ", "the end"), each)
        assert each.decode(ids[trained].tolist()) == "the end</s>"
        prompt = each.encode("the answer is ")
        assert ids[~trained].tolist() == ([each.begin] if each.begin is not None else []) + prompt


def test_an_empty_prompt_or_completion_is_fine(tokenizer: FromFile) -> None:
    ids, trained = encode_completion(Completion("", "all"), tokenizer)
    assert tokenizer.decode(ids[trained].tolist()) == "all</s>"
    ids, trained = encode_completion(Completion("all", ""), tokenizer)
    assert tokenizer.decode(ids[trained].tolist()) == "</s>"


def test_a_line_feed_ends_a_completion_of_bytes() -> None:
    ids, trained = encode_completion(Completion("2+2=", "é"), Bytes())
    assert Bytes().decode(ids.tolist()) == "2+2=é\n" and trained.tolist() == [False] * 4 + [True] * 3
