"""Conversations and completions as tokens, with a mark on each token that is learnt.

The text of the assistant is found by rendering the chat template twice for each of its messages: the messages before it
with the prompt for a reply, and the messages up to it. The second text must begin with the first, and what it adds is
learnt. So a template needs no ``{% generation %}`` tags. Where a template has them, they decide instead.

The text is encoded in segments that begin where a learnt part begins, and the places of the tokens say which are
learnt. So the tokens before a reply are those of the prompt that a model is asked with, and a reply begins with a token
of its own. Encoded as a whole, the last line break of a prompt could be one token with the first word of the reply.
No special token is added. Those of the template are recognised, and those that the text of a message spells only if
`special_tokens` is "tokens".
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence, Set
from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from shardwright.train.data.sources.items import ASSISTANT, Completion, Conversation, strings_of
from shardwright.train.data.tokens.tokenizers import Bytes, CharRange, Tokenizer
from shardwright.train.errors import UserError

KEY = "data.chat_template"
#: The date that ``strftime_now`` of a template reads. A fixed day, so that a data set has the same tokens every day.
NOW = datetime(2024, 7, 26, 12)
# Unicode keeps these out of all texts.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_BREAK = "\ufdd2"  #: inside of what a message spells, while the template is rendered
_KEPT_OUT = re.compile("[\ufdd0-\ufdd5]")
SpecialTokens = Literal["text", "tokens"]
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class Encoded(NamedTuple):
    """ids: int64, one dimension. trained: bool, as many; True where the token is a target to learn."""

    ids: np.ndarray
    trained: np.ndarray


def encode_conversation(
    conversation: Conversation, template: str, tokenizer: Tokenizer, special_tokens: SpecialTokens = "text"
) -> Encoded:
    """Return the tokens of a conversation; those of the assistant are learnt, with the token that ends its turn.

    Line breaks that a template writes after that token are not learnt. Nothing is added to what the template writes.

    Raises:
        UserError: the template fails, or writes earlier messages differently when later ones follow. The message
        names the file, its line and the number of the message.
    """
    if special_tokens == "tokens" or not spelled_places(conversation, tokenizer):
        text, learnt = rendered(conversation, template, tokenizer.names)
        return _encoded(text, learnt, tokenizer)
    text, learnt = rendered(_broken(conversation, tokenizer), template, tokenizer.names)
    return _encoded_literally(text, learnt, tokenizer)


def prompt_of(
    message: str, template: str, tokenizer: Tokenizer, special_tokens: SpecialTokens = "text"
) -> list[int]:
    """Return the ids with which a model is asked for a reply to one message of the user.

    Raises:
        UserError: the template fails.
    """
    messages = ({"role": "user", "content": message},)
    return ids_of_prompt(prompt_text(messages, template, tokenizer, special_tokens), tokenizer)


def prompt_text(
    messages: Sequence[Mapping[str, Any]],
    template: str,
    tokenizer: Tokenizer,
    special_tokens: SpecialTokens = "text",
    begun: str = "",
) -> str:
    """Return the text that asks for a reply to messages, with marks from which `ids_of_prompt` makes the ids of
    training: where a reply begins, and inside of what a message spells. The marks are characters that no text has.

    Args:
        messages: with role and content, such as those of earlier turns.
        template: source of the jinja template.
        tokenizer: of the training.
        special_tokens: what becomes of special tokens that messages spell.
        begun: the beginning of the reply, if that is given.

    Raises:
        UserError: the template fails, or a message has a character of the marks.
    """
    conversation = Conversation(tuple(messages))
    for text in strings_of([conversation.messages, begun]):
        if match := _KEPT_OUT.search(text):
            raise _of_marks(match, conversation)
    if special_tokens == "text" and (
        spelled_places(conversation, tokenizer) or len(tokenizer.spelled(begun))
    ):
        conversation, begun = _broken(conversation, tokenizer), with_breaks(begun, tokenizer)
    text = _render(template, conversation.messages, None, tokenizer.names, True, conversation)
    if not has_generation(template):
        try:
            whole, replies = rendered(conversation, template, tokenizer.names)
        except UserError:  # it writes earlier replies in another way, of which no training has seen the ids
            whole, replies = "", []
        for start, stop in reversed(replies):
            if text[:stop] == whole[:stop]:
                text = "".join([text[:start], _OPEN, text[start:stop], _CLOSE, text[stop:]])
    return text + _OPEN + begun


def ids_of_prompt(text: str, tokenizer: Tokenizer, more: str = "") -> list[int]:
    """Return the ids of a text of `prompt_text`, and of `more` of the reply that it asks for.

    Raises:
        UserError: the template has {% generation %} tags inside others.
    """
    whole, replies = _between_marks(text + more + _CLOSE, Conversation(()))
    encoded = _encoded_literally if _BREAK in whole else _encoded
    return encoded(whole, replies, tokenizer).ids.tolist()  # type: ignore[no-any-return]


def is_prompt(text: str) -> bool:
    """Return whether a text is one of `prompt_text`."""
    return _OPEN in text


def prompt_ids(
    tokenizer: Tokenizer, text: str, special_tokens: SpecialTokens = "text", begins: bool = True
) -> list[int]:
    """Return the ids of a text without a template, as in training.

    Args:
        tokenizer: of the run.
        text: the prompt.
        special_tokens: what becomes of special tokens that the text spells.
        begins: whether the id that begins a document comes first, if the tokenizer has one. It is never there twice.
    """
    ids = content_ids(text, tokenizer, special_tokens)
    if not begins or tokenizer.begin is None or ids[:1] == [tokenizer.begin]:
        return ids
    return [tokenizer.begin, *ids]


def content_ids(text: str, tokenizer: Tokenizer, special_tokens: SpecialTokens) -> list[int]:
    """Return the ids of a text. With "text" it has no reserved token."""
    ids = tokenizer.encode(text)
    return tokenizer.literal.encode(text) if special_tokens == "text" and _reserved(ids, tokenizer) else ids


def _reserved(ids: Iterable[int], tokenizer: Tokenizer) -> bool:
    return bool(tokenizer.reserved) and not tokenizer.reserved.isdisjoint(ids)


def encode_completion(
    completion: Completion, tokenizer: Tokenizer, special_tokens: SpecialTokens = "text"
) -> Encoded:
    """Return the tokens of a prompt and its completion, which is learnt, as is the token that ends the document.

    Bytes have no such token; there a line feed ends a completion.
    """
    text = completion.prompt + completion.completion
    learnt = [(len(completion.prompt), len(text))]
    ids, trained = _encoded(text, learnt, tokenizer)
    if special_tokens == "text" and _reserved(ids.tolist(), tokenizer):
        ids, trained = _encoded(text, learnt, tokenizer.literal)
    begin = [] if tokenizer.begin is None or ids[:1].tolist() == [tokenizer.begin] else [tokenizer.begin]
    end = [] if tokenizer.end is None else [tokenizer.end]
    if isinstance(tokenizer, Bytes):
        end = [ord("\n")]
    return Encoded(
        np.concatenate([np.array(begin, np.int64), ids, np.array(end, np.int64)]),
        np.concatenate([np.zeros(len(begin), bool), trained, np.ones(len(end), bool)]),
    )


def spelled_places(item: Conversation | Completion, tokenizer: Tokenizer) -> int:
    """Return the number of places in the item's texts that spell a reserved token."""
    if isinstance(item, Completion):
        return len(tokenizer.spelled(item.prompt + item.completion))
    return sum(len(tokenizer.spelled(text)) for text in strings_of([item.messages, item.tools]))


def _broken(conversation: Conversation, tokenizer: Tokenizer) -> Conversation:
    """Return the conversation with a mark inside of each reserved token that its texts spell, so that a template cannot
    mix them with its own.

    Raises:
        UserError: a text has such a mark.
    """

    def broken(value: Any) -> Any:
        if isinstance(value, str):
            if match := _KEPT_OUT.search(value):
                raise _of_marks(match, conversation)
            return with_breaks(value, tokenizer)
        if isinstance(value, Mapping):
            return {broken(key): broken(each) for key, each in value.items()}
        return [broken(each) for each in value] if isinstance(value, list | tuple) else value

    tools = conversation.tools
    return Conversation(
        tuple(map(broken, conversation.messages)),
        None if tools is None else tuple(map(broken, tools)),
        conversation.origin,
    )


def with_breaks(text: str, tokenizer: Tokenizer) -> str:
    """Return a text with a mark inside of each reserved token that it spells."""
    parts, end = [], 0
    for start, stop in tokenizer.spelled(text):
        inside = start + (stop - start > 1)  # a token of one character has its mark before it
        parts += [text[end:inside], _BREAK]
        end = inside
    return "".join([*parts, text[end:]])


def _of_marks(match: re.Match[str], conversation: Conversation) -> UserError:
    return UserError(
        f"{KEY}: expected texts without the character U+{ord(match[0]):04X}, which Unicode keeps out of texts and "
        f"which marks parts of conversations here, found it in {_where(conversation)}; remove it"
    )


def _encoded_literally(text: str, learnt: Sequence[CharRange], tokenizer: Tokenizer) -> Encoded:
    """Return the tokens of a rendered text with marks. The tokenizer knows the template's tokens by other names, so
    that what a message spells is no token to it."""
    renamed, names = tokenizer.renamed()
    pieces: list[str] = []
    places: list[CharRange] = []  # in the text, and in the result
    done = length = 0
    for start, stop in tokenizer.spelled(text):
        if text[start - 1 : start] == _BREAK:
            continue
        for piece in (text[done:start].replace(_BREAK, ""), names[text[start:stop]]):
            pieces.append(piece)
            length += len(piece)
        places.append((stop, length))
        done = stop
    pieces.append(text[done:].replace(_BREAK, ""))

    def moved(place: int) -> int:
        before, there = max((each for each in places if each[0] <= place), default=(0, 0))
        return there + len(text[before:place].replace(_BREAK, ""))

    moved_learnt = [(moved(start), moved(stop)) for start, stop in learnt]
    return _encoded("".join(pieces), moved_learnt, renamed)


def rendered(
    conversation: Conversation, template: str, names: Mapping[str, str]
) -> tuple[str, list[CharRange]]:
    """Return the text of a conversation, and the first and last + 1 character of each part that is learnt.

    Args:
        template: source of the jinja template.
        names: texts of special tokens, as bos_token.

    Raises:
        UserError: as :func:`encode_conversation`.
    """
    messages = list(conversation.messages)
    tools = None if conversation.tools is None else list(conversation.tools)

    def render(count: int, prompt: bool = False) -> str:
        return _render(template, messages[:count], tools, names, prompt, conversation)

    if has_generation(template):
        return _between_marks(render(len(messages)), conversation)
    whole = render(len(messages))
    learnt: list[CharRange] = []
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before = render(number, prompt=True)
        after = whole if number + 1 == len(messages) else render(number + 1)
        for shorter, longer in ((before, after), (after, whole)):
            if not longer.startswith(shorter):
                raise _not_a_prefix(number + 1, shorter, longer, conversation)
        learnt.append((len(before), len(after)))
    return whole, learnt


def has_generation(template: str) -> bool:
    """Return whether a template marks the assistant's text itself, with ``{% generation %}``."""
    return _GENERATION.search(template) is not None


def check_template(template: str, where: object) -> None:
    """Raise UserError if a template is empty or not valid jinja."""
    import_jinja()
    if not template.strip():
        raise UserError(f"{KEY}: expected a jinja template, found an empty one in {where}; set another file")
    from jinja2 import TemplateSyntaxError

    try:
        _compiled(template)
    except TemplateSyntaxError as error:
        raise UserError(
            f"{KEY}: expected a jinja template, found an error at line {error.lineno} of {where} ({error.message}); "
            "mend it"
        ) from None


def import_jinja() -> None:
    """Raises UserError where jinja2 is not installed."""
    try:
        import jinja2  # noqa: F401
    except ImportError:
        raise UserError(
            f"{KEY}: conversations need the package jinja2, which is not installed; install the extra data"
        ) from None


# -- templates ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _environment() -> Any:
    """Return the environment that Hugging Face renders chat templates in: a sandbox, since templates come from a
    hub."""
    import_jinja()
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` ... ``{% endgeneration %}``: the text between is marked."""

        tags = {"generation"}  # noqa: RUF012  # jinja's own annotation

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        allowed = {name: options[name] for name in ("indent", "separators", "sort_keys") if name in options}
        return json.dumps(value, ensure_ascii=ensure_ascii, **allowed)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = NOW.strftime
    return environment


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


def _render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    names: Mapping[str, str],
    prompt: bool,
    conversation: Conversation,
) -> str:
    compiled = _compiled(template)
    try:
        text: str = compiled.render(
            messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **names
        )
    # A template can fail in any way: an undefined value, a wrong type, its own exception.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        part = (
            f"messages 1 to {len(messages)}" if messages else "a conversation that begins with the assistant"
        )
        raise UserError(
            f"{KEY}: expected a text for {part} of {_where(conversation)}, found that the template fails "
            f"({type(error).__name__}: {reason}); change the conversation, or set another template"
        ) from None
    return text


def _between_marks(text: str, conversation: Conversation) -> tuple[str, list[CharRange]]:
    """Return the text without marks, and the parts between them."""
    pieces, learnt, length = [], [], 0
    for number, piece in enumerate(text.split(_OPEN)):
        inside, closed, rest = piece.partition(_CLOSE)
        if bool(number) != bool(closed) or _CLOSE in rest:
            raise UserError(
                f"{KEY}: expected {{% generation %}} tags that follow one another, found some inside others, or "
                f"the characters U+FDD0 or U+FDD1 in {_where(conversation)}; mend the template or the text"
            )
        if closed:
            learnt.append((length, length + len(inside)))
        pieces.append(inside + rest)
        length += len(pieces[-1])
    return "".join(pieces), learnt


def _not_a_prefix(number: int, shorter: str, longer: str, conversation: Conversation) -> UserError:
    same = next(
        (place for place, (one, other) in enumerate(zip(shorter, longer, strict=False)) if one != other),
        min(len(shorter), len(longer)),
    )
    return UserError(
        f"{KEY}: expected a template that writes the messages before and up to message {number} of "
        f"{_where(conversation)} in one way, found {shorter[same : same + 30]!r} without and "
        f"{longer[same : same + 30]!r} with what follows, after {shorter[max(0, same - 30) : same]!r}; end the "
        "conversation with that message, or set a template that keeps earlier messages as they are, or one with "
        "{% generation %} tags"
    )


def _where(conversation: Conversation) -> str:
    return str(conversation.origin) if conversation.origin is not None else "the conversation"


# -- tokens ------------------------------------------------------------------------------------------------------------


def _encoded(text: str, learnt: Sequence[CharRange], tokenizer: Tokenizer) -> Encoded:
    ids, places = _tokens(text, learnt, tokenizer)
    starts = [place[0] for place in places]
    trained = np.zeros(len(ids), bool)
    for start, stop in learnt:
        first, last = bisect_left(starts, start), bisect_left(starts, stop)
        # A template may write line breaks after the token that ends the turn. A model stops before them.
        while last > first and ids[last - 1] not in tokenizer.special:
            if not text[slice(*places[last - 1])].isspace():
                break
            last -= 1
        if last == first or ids[last - 1] not in tokenizer.special:
            last = bisect_left(starts, stop)
        trained[first:last] = True
    return Encoded(np.array(ids, np.int64), trained)


def _tokens(
    text: str, learnt: Sequence[CharRange], tokenizer: Tokenizer
) -> tuple[list[int], list[CharRange]]:
    """Ids and places of a text, so that no token crosses an edge of a learnt part."""
    cuts = {start for start, _ in learnt}
    ids, places = _of_segments(text, cuts, tokenizer)
    starts = [place[0] for place in places]
    crossed = {
        stop for _, stop in learnt if (number := bisect_left(starts, stop)) and places[number - 1][1] > stop
    }
    return _of_segments(text, cuts | crossed, tokenizer) if crossed else (ids, places)


def _of_segments(text: str, cuts: Set[int], tokenizer: Tokenizer) -> tuple[list[int], list[CharRange]]:
    ids: list[int] = []
    places: list[CharRange] = []
    edges = [0, *sorted(cuts - {0, len(text)}), len(text)]
    for start, stop in pairwise(edges):
        segment_ids, segment_places = tokenizer.encode_places(text[start:stop], inside=start > 0)
        ids += segment_ids
        places += [(first + start, last + start) for first, last in segment_places]
    return ids, places
