"""The data of a run: its sources as tokens, cut into samples, in the order of the run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwright.train.config import Config, DataConfig
from shardwright.train.data.cache import tokenised
from shardwright.train.data.chat import check_template
from shardwright.train.data.items import Source as Files
from shardwright.train.data.packing import pack
from shardwright.train.data.stream import VALIDATION_PART, Part, Source, Stream
from shardwright.train.data.tokenizers import Bytes, Tokenizer, open_tokenizer
from shardwright.train.data.tokens import Tokens
from shardwright.train.data.validation import training_and_validation
from shardwright.train.errors import UserError

VALIDATION_SEED = 0  # of the order of validation samples: the same ones whatever the run's own seed
PROMPT = 48  # tokens


@dataclass(frozen=True, eq=False)
class Dataset:
    """The samples of a run.

    Attributes:
        tokenizer: of all sources.
        train: the samples of the steps.
        validation: the samples that no step trains on; None where a run validates nothing.
        sha256: a digest of the tokens of all sources. It is that of the text where a token is a byte.
    """

    tokenizer: Tokenizer
    train: Stream
    validation: Stream | None
    sha256: str

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def windows(self) -> int:
        """Training samples of one epoch of all sources."""
        return sum(source.samples for source in self.train.sources)

    def prompt(self) -> str:
        """The beginning of the validation text, or of the training text."""
        for stream in (self.validation, self.train):
            if stream is None:
                continue
            ids = stream.sources[0].parts[0].tokens.ids[:PROMPT]
            # Bytes may cut a character in half at either end.
            if text := self.tokenizer.decode(np.asarray(ids).tolist()).strip("\ufffd"):
                return text
        return "\n"


def load_dataset(config: Config, progress: bool = False) -> Dataset:
    """The data of a configuration. Tokens are made where the cache has none; `progress` shows that.

    Raises:
        UserError: the data, the tokenizer or the template is missing, damaged or empty, or does not fill a sample.
    """
    data = config.data
    tokenizer = open_tokenizer(data.tokenizer)
    template = _template(data)
    cache = Path(data.cache) if data.cache else None
    names, weights, tokens = [], [], []
    for files, weight in _files(data):
        names.append(", ".join(files.paths))
        weights.append(weight)
        tokens.append(tokenised(files, tokenizer, cache=cache, template=template, progress=progress))
        _check_completions(files, tokens[-1], tokenizer)
    return dataset_of(config, tokenizer, tokens, names, weights)


def dataset_of(
    config: Config,
    tokenizer: Tokenizer,
    tokens: Sequence[Tokens],
    names: Sequence[str],
    weights: Sequence[float],
) -> Dataset:
    """The samples of tokens: one of `tokens`, `names` and `weights` for each source. Raises as :func:`load_dataset`."""
    parts = [training_and_validation(each, config.data.validation_fraction) for each in tokens]
    training = [(name, part) for name, (part, _) in zip(names, parts, strict=True)]
    train = _stream(config, training, weights, config.run.seed)
    validation = None
    if config.validation.every:
        rest = [(f"{VALIDATION_PART}{name}", part) for name, (_, part) in zip(names, parts, strict=True)]
        validation = _stream(config, rest, weights, VALIDATION_SEED)
    return Dataset(tokenizer, train, validation, _digest(tokens))


def byte_dataset(config: Config, training: bytes, validation: bytes, sha256: str) -> Dataset:
    """The samples of two texts whose bytes are the tokens. Raises UserError where a text is shorter than a sample."""

    def stream(name: str, text: bytes, seed: int) -> Stream:
        ids = np.frombuffer(text, np.uint8)
        return _stream(config, [(name, Tokens(ids, np.array([len(ids)]), None, name))], [1.0], seed)

    rest = stream("the validation text", validation, VALIDATION_SEED) if config.validation.every else None
    return Dataset(Bytes(), stream("the training text", training, config.run.seed), rest, sha256)


def _stream(
    config: Config, parts: Sequence[tuple[str, Tokens]], weights: Sequence[float], seed: int
) -> Stream:
    separate = config.data.separates
    sources = [
        Source(name, (Part(each, pack(each, config.train.seq_len, config.data.packing, separate=separate)),))
        for name, each in parts
    ]
    return Stream(sources, weights, seed, separate=separate)


def _digest(tokens: Sequence[Tokens]) -> str:
    if (
        len(tokens) == 1
        and tokens[0].ids.dtype == np.uint8
        and tokens[0].trained is None
        and tokens[0].sha256
    ):
        return tokens[0].sha256  # the digest that runs of text had before there were tokens
    return hashlib.sha256("\n".join(each.fingerprint for each in tokens).encode()).hexdigest()


def _files(data: DataConfig) -> list[tuple[Files, float]]:
    if not data.sources:
        keys = data.kind, data.text_key, data.messages_key, data.prompt_key, data.completion_key
        return [(Files(_paths(data.source), *keys), 1.0)]
    return [
        (
            Files(
                _paths(each.path),
                each.kind,
                each.text_key,
                each.messages_key,
                each.prompt_key,
                each.completion_key,
                f"data.sources.{number}.path",
            ),
            each.weight,
        )
        for number, each in enumerate(data.sources)
    ]


def _paths(source: str | tuple[str, ...]) -> tuple[str, ...]:
    return (source,) if isinstance(source, str) else source


def _template(data: DataConfig) -> str | None:
    if not data.chat_template:
        return None
    try:
        template = Path(data.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(
            f"data.chat_template: cannot read {data.chat_template}: {reason}; set the path of a jinja template"
        ) from None
    if "conversations" in {data.kind, *(source.kind for source in data.sources)}:
        check_template(template, data.chat_template)
    return template


def _check_completions(files: Files, tokens: Tokens, tokenizer: Tokenizer) -> None:
    """Refuse completions of which only the token that ends each is trained."""
    has_end = isinstance(tokenizer, Bytes) or tokenizer.end is not None
    if files.kind == "completions" and has_end and tokens.trained_tokens <= len(tokens.ends):
        raise UserError(
            f"{files.section}.completion_key: expected texts to train on, found {len(tokens.ends):,} empty completions "
            f"in {', '.join(files.paths)}; set it to the key of the text after the prompt"
        )
