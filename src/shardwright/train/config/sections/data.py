"""The section `[data]`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from shardwright.train.config.sections.base import Section

# strict=False on the outside only: TOML has lists where an immutable model wants tuples.
Paths = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False, min_length=1)]
DataKind = Literal["documents", "conversations", "completions"]
_KIND = (
    "What a row holds. documents: a text. conversations: messages with role and content, of which the assistant's are "
    "trained. completions: a prompt and a text, of which the text is trained."
)

UNMASKED = 'data.packing = "split" and data.document_mask = false: documents of a sample then see one another'
"""Advice for an error: data without a document mask, for any model."""
ONE_OR_UNMASKED = (
    f'data.packing = "none" and data.document_mask = "auto": one document in each sample; or {UNMASKED}'
)
"""Advice for an error: data for a model that would mix the documents of a sample."""


class SourceConfig(Section):
    """One of several sources, with its share of the tokens of the run."""

    path: str | Paths = Field(min_length=1, description="As data.source.")
    weight: float = Field(
        gt=0,
        description="Share of the tokens of the run that come from this source, in proportion to the others.",
    )
    kind: DataKind = Field(default="documents", description=_KIND)
    text_key: str = Field(default="text", min_length=1, description="Key or column of a document's text.")
    messages_key: str = Field(default="messages", min_length=1, description="Key or column of the messages.")
    prompt_key: str = Field(default="prompt", min_length=1, description="Key or column of the prompt.")
    completion_key: str = Field(
        default="completion", min_length=1, description="Key or column of the text after the prompt."
    )


class ValidationSourceConfig(SourceConfig):
    """One of several sources for validation, maybe part of a set with a name."""

    weight: float = Field(
        gt=0,
        description=(
            "Share of the tokens of a validation that come from this source, in proportion to the others: of those of "
            "its set, too."
        ),
    )
    name: str = Field(
        default="",
        pattern=r"^([A-Za-z0-9_][A-Za-z0-9._-]*)?$",
        description=(
            "Set of this source. Each set has a validation loss of its own, too: validation_loss/NAME. Empty: none."
        ),
    )


class DataSource(NamedTuple):
    """A source of the run: `data.source` with the keys beside it, or a table of `data.sources`; or for validation."""

    key: str  #: of its path, for messages
    paths: tuple[str, ...]
    weight: float
    kind: DataKind
    text_key: str
    messages_key: str
    prompt_key: str
    completion_key: str

    @classmethod
    def at(cls, key: str, path: str | Paths, weight: float, keys: DataConfig | SourceConfig) -> DataSource:
        """Return the source at a path, with the keys of its table or those beside `data.source`."""
        paths = (path,) if isinstance(path, str) else path
        names = (keys.text_key, keys.messages_key, keys.prompt_key, keys.completion_key)
        return cls(key, paths, weight, keys.kind, *names)


class DataConfig(Section):
    """The training data and its tokenizer."""

    source: str | Paths = Field(
        default="pydoc",
        min_length=1,
        description=(
            "pydoc: the English reference text that is part of every CPython. Otherwise the path of a .txt, .jsonl, "
            ".parquet, .arrow or .npy file, of a folder of a data set, a pattern such as data/*.jsonl, a URL, or "
            "a list "
            "of these, read in that order."
        ),
    )
    sources: Annotated[tuple[SourceConfig, ...], Field(strict=False)] = Field(
        default=(),
        description=(
            "Several sources with weights, as tables [[data.sources]] with path, weight and the keys below, in place "
            "of data.source."
        ),
    )
    kind: DataKind = Field(default="documents", description=_KIND)
    text_key: str = Field(
        default="text", min_length=1, description="Key or column of a document's text in a file with rows."
    )
    messages_key: str = Field(
        default="messages", min_length=1, description="Key or column of the messages of a conversation."
    )
    prompt_key: str = Field(
        default="prompt", min_length=1, description="Key or column of the prompt of a completion."
    )
    completion_key: str = Field(
        default="completion", min_length=1, description="Key or column of the text after the prompt."
    )
    tokenizer: str = Field(
        default="bytes",
        min_length=1,
        description=(
            "bytes: every byte of the UTF-8 text is a token. Otherwise the path of a tokenizer.json or of its folder, "
            "or the name of a model on the Hugging Face hub."
        ),
    )
    chat_template: str = Field(
        default="", description="File with the chat template of conversations. Empty: the tokenizer's own."
    )
    special_tokens: Literal["text", "tokens"] | None = Field(
        default=None,
        description=(
            "What becomes of a special token that the text of a document or a message spells. text: it stays text. "
            "tokens: it becomes the token, for text that was rendered with a template before. Unset: text; a run ends "
            "before its first step if documents spell one. Also for prompts of `shardwright generate`."
        ),
    )
    packing: Literal["split", "best_fit", "none"] = Field(
        default="split",
        description=(
            "How documents fill the samples of seq_len tokens. split: one after the other, cut where a sample ends. "
            "best_fit: whole documents that fit together, and padding. none: one document in each sample."
        ),
    )
    document_mask: bool | Literal["auto"] = Field(
        default="auto",
        description=(
            "Whether a token sees only its own document in a sample of several. auto: yes, except for text that is "
            "tokenised as bytes and split."
        ),
    )
    validation_fraction: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description=(
            "Fraction of each source, taken from its end, that is used only for validation. Not used with "
            "validation_source or validation_sources."
        ),
    )
    validation_source: str | Paths = Field(
        default="",
        description=(
            "Data for validation alone, as data.source and with its kind and keys. Then all of data.source is trained."
        ),
    )
    validation_sources: Annotated[tuple[ValidationSourceConfig, ...], Field(strict=False)] = Field(
        default=(),
        description=(
            "Several sources for validation, as tables [[data.validation_sources]] with the keys of data.sources, in "
            "place of validation_source, and with a name for a validation loss of their own."
        ),
    )
    appended: bool = Field(
        default=False,
        description=(
            "Whether a run that resumes continues with documents that were appended to its files, or that are in new "
            "files after them. Other changes of the data are always an error."
        ),
    )
    cache: str = Field(
        default="",
        description="Folder for tokens, which are made once. Empty: shardwright/tokens in the user's cache folder.",
    )
    workers: int = Field(
        default=1,
        ge=0,
        description="Threads of each rank that prepare batches ahead of the step. 0: each batch when it is needed.",
    )

    @property
    def training(self) -> tuple[DataSource, ...]:
        """The sources of training, at least one."""
        return self._sources_at("sources") or (DataSource.at("data.source", self.source, 1.0, self),)

    @property
    def validating(self) -> tuple[DataSource, ...]:
        """The sources for validation alone. Empty: validation uses the ends of those of training, or there is none."""
        if self.validation_source:
            return (DataSource.at("data.validation_source", self.validation_source, 1.0, self),)
        return self._sources_at("validation_sources")

    @property
    def validation_sets(self) -> dict[str, list[int]]:
        """By name of a set for validation, the numbers of its sources in `validating`."""
        sets: dict[str, list[int]] = {}
        for number, each in enumerate(self.validation_sources):
            if each.name:
                sets.setdefault(each.name, []).append(number)
        return sets

    def _sources_at(self, key: Literal["sources", "validation_sources"]) -> tuple[DataSource, ...]:
        tables: Sequence[SourceConfig] = getattr(self, key)
        return tuple(
            DataSource.at(f"data.{key}.{number}.path", each.path, each.weight, each)
            for number, each in enumerate(tables)
        )

    @property
    def separates(self) -> bool:
        """Whether tokens must see their own document alone in samples of several."""
        if self.packing != "split":
            return self.packing == "best_fit"
        if self.document_mask == "auto":
            return self.tokenizer != "bytes" or any(each.kind != "documents" for each in self.training)
        return self.document_mask

    @property
    def spelled(self) -> Literal["text", "tokens"]:
        """The treatment of special tokens that a text spells."""
        return self.special_tokens or "text"

    @property
    def split_fraction(self) -> float:
        """Fraction of each source that is kept for validation."""
        return 0.0 if self.validating else self.validation_fraction

    @property
    def validates(self) -> bool:
        """Whether there is text to validate on."""
        return bool(self.validating or self.validation_fraction)

    def resolved(self) -> DataConfig:
        """Return the same data with absolute paths, to be found from any folder."""
        changes: dict[str, Any] = {"source": _absolute(self.source), "special_tokens": self.spelled}
        if self.validation_source:
            changes["validation_source"] = _absolute(self.validation_source)
        for key in ("sources", "validation_sources"):
            changes[key] = tuple(
                source.model_copy(update={"path": _absolute(source.path)}) for source in getattr(self, key)
            )
        for key in ("tokenizer", "chat_template", "cache"):
            if (value := getattr(self, key)) != "bytes" and os.path.exists(value):
                changes[key] = os.path.abspath(value)
        return self.model_copy(update=changes)


def _absolute(source: str | tuple[str, ...]) -> str | tuple[str, ...]:
    if not isinstance(source, str):
        return tuple(str(_absolute(each)) for each in source)
    return source if source == "pydoc" or "://" in source else os.path.abspath(source)
