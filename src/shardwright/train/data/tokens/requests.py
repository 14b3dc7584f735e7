"""Ids of what a model is asked outside of its training, such as by tasks of lm-eval: those of training.

Nothing here knows lm-eval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.train.data.tokens.chat import (
    SpecialTokens,
    content_ids,
    ids_of_prompt,
    is_prompt,
    prompt_ids,
    prompt_text,
    with_breaks,
)
from shardwright.train.data.tokens.tokenizers import Tokenizer


@dataclass(frozen=True)
class Requests:
    """Makes the ids of requests as the data of a run made those of its texts.

    Attributes:
        tokenizer: of the run.
        template: its chat template, if requests are chats.
        special_tokens: what becomes of special tokens that texts spell.
        begins: whether texts without a template begin with the tokenizer's begin token.
        apart: whether an answer to a text without a template begins with a token of its own, as completions do. In
            documents one token may have characters of both.
    """

    tokenizer: Tokenizer
    template: str | None = None
    special_tokens: SpecialTokens = "text"
    begins: bool = True
    apart: bool = False

    def chat(self, messages: Sequence[Mapping[str, Any]], continues: bool = False) -> str:
        """Return the text that asks for a reply, with marks for `ids`.

        Args:
            messages: with role and content.
            continues: whether the last message is the beginning of the reply.

        Raises:
            UserError: the template fails.
        """
        assert self.template is not None
        messages, begun = (messages[:-1], messages[-1]["content"]) if continues else (messages, "")
        return prompt_text(messages, self.template, self.tokenizer, self.special_tokens, begun)

    def ids(self, text: str, begins: bool | None = None) -> list[int]:
        """Return the ids of a text, or of one of `chat`. `begins`: another value than that of the run."""
        if is_prompt(text):
            return ids_of_prompt(text, self.tokenizer)
        begins = self.begins if begins is None else begins
        return prompt_ids(self.tokenizer, text, self.special_tokens, begins)

    def pair(self, context: str, answer: str) -> tuple[list[int], list[int]]:
        """Return the ids of a context, and of an answer to it. Neither is empty.

        A token that has characters of both is one of the answer, as trained texts have it.
        """
        before = self.ids(context)
        if is_prompt(context):
            more = with_breaks(answer, self.tokenizer) if self.special_tokens == "text" else answer
            whole = ids_of_prompt(context, self.tokenizer, more)
        elif self.apart:
            literal = self.special_tokens == "text" and self.tokenizer.spelled(context + answer)
            tokenizer = self.tokenizer.literal if literal else self.tokenizer
            whole = before + tokenizer.encode_places(answer, inside=True)[0]
        else:
            whole = self.ids(context + answer)
        same = (
            number for number, (one, other) in enumerate(zip(before, whole, strict=False)) if one != other
        )
        cut = min(next(same, len(before)), len(whole) - 1)
        first = self.prefix()
        return (whole[:cut], whole[cut:]) if cut > 0 or first is None else ([first], whole)

    def prefix(self) -> int | None:
        """Return the token before a text without context: the one that begins texts, or ends them, or a line."""
        begin = self.tokenizer.begin if self.begins else None
        marks = [each for each in (begin, self.tokenizer.end) if each is not None]
        first = [*marks, *content_ids("\n", self.tokenizer, "text")][:1]
        return first[0] if first else None
