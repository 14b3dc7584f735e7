"""The data of a run: its sources as tokens, cut into samples, in the order of the run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardwright.train.config import DataConfig
from shardwright.train.config.sections.data import DataSource
from shardwright.train.config.values import DataSettings
from shardwright.train.data.samples.packing import pack
from shardwright.train.data.samples.stream import VALIDATION_PART, VALIDATION_SOURCE, Part, Source, Stream
from shardwright.train.data.samples.validation import training_and_validation
from shardwright.train.data.sources.documents import places
from shardwright.train.data.sources.items import DataFiles
from shardwright.train.data.sources.places import DataFile
from shardwright.train.data.statement import shortened_name
from shardwright.train.data.tokens.cache import tokenised
from shardwright.train.data.tokens.chat import check_template
from shardwright.train.data.tokens.growth import (
    Known,
    appended_documents,
    check_grown,
    known_of,
    parts_of,
    seen,
    with_part,
)
from shardwright.train.data.tokens.tokenizers import Bytes, Tokenizer, open_tokenizer
from shardwright.train.data.tokens.tokens import Tokens
from shardwright.train.errors import UserError, counted

VALIDATION_SEED = 0  # of the order of validation samples: the same ones whatever the run's own seed
PROMPT = 48  # tokens
QUESTIONS = 100  # documents that are searched for one


@dataclass(frozen=True, eq=False)
class Material:
    """A source as tokens, before it is cut into samples.

    Attributes:
        name: its paths.
        weight: as in the configuration.
        tokens: all of them.
        places: the files.
        known: what the run knows of it.
    """

    name: str
    weight: float
    tokens: Tokens
    places: tuple[DataFile, ...]
    known: Known

    def parts(self) -> list[Tokens]:
        """Return the parts of the run."""
        return [self.tokens] if self.is_whole else parts_of(self.known, self.tokens)[:-1]

    @property
    def is_whole(self) -> bool:
        """Whether the run began with all tokens."""
        return not self.known.epochs and not appended_documents(self.known, self.tokens)


class Question(NamedTuple):
    """Ids that a model is asked to continue, and the ids that the data has after them; None: not a fixed answer."""

    ids: list[int]
    answer: list[int] | None = None


def _first_question(tokens: Tokens) -> Question | None:
    """Split the first conversation or completion with a prompt at the start of its first learnt stretch."""
    assert tokens.trained is not None
    start = 0
    for stop in tokens.ends[:QUESTIONS].tolist():
        flags = np.asarray(tokens.trained[start:stop])
        if flags.any() and (first := int(flags.argmax())):
            count = int(np.argmin(flags[first:])) or stop - start - first
            ids = np.asarray(tokens.ids[start : start + first + count]).tolist()
            return Question(ids[:first], ids[first:])
        start = stop
    return None


@dataclass(frozen=True, eq=False)
class Dataset:
    """The samples of a run.

    Attributes:
        tokenizer: of all sources.
        train: the samples of the steps.
        validation: the samples that no step trains on; None where a run validates nothing.
        validation_sets: the samples of each set for validation, by its name. `validation` has them, too.
        sha256: a digest of the tokens of all sources, and of the ends of documents where samples depend on them. It is
            that of the text where a token is a byte and samples do not.
        materials: the sources; none for texts in memory.
        validation_materials: the sources for validation alone.
    """

    tokenizer: Tokenizer
    train: Stream
    validation: Stream | None
    sha256: str
    materials: tuple[Material, ...] = ()
    validation_materials: tuple[Material, ...] = ()
    validation_sets: Mapping[str, Stream] = field(default_factory=dict)

    @property
    def validation_sha256(self) -> str:
        """A digest of the sources for validation alone. Empty without one."""
        return _joined_digest(self.validation_materials) if self.validation_materials else ""

    @property
    def fingerprints(self) -> dict[str, str]:
        """Digests of what is behind the paths of `[data]`, each under its name in messages."""
        digests = {
            "the text of data.source": self.sha256,
            "the tokenizer of data.tokenizer": self.tokenizer.fingerprint,
        }
        if self.validation_sha256:
            digests["the text of data.validation_source"] = self.validation_sha256
        return digests

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def windows(self) -> int:
        """Training samples of one epoch of all sources."""
        return sum(source.samples for source in self.train.sources)

    @property
    def spelled(self) -> int:
        """Places where texts spell special tokens."""
        return sum(each.tokens.spelled for each in (*self.materials, *self.validation_materials))

    def question(self) -> Question:
        """Return the beginning of the validation text, or of the training text. For conversations and completions, the
        first one with a prompt, up to its first learnt token."""
        for stream in (self.validation, self.train):
            if stream is None:
                continue
            tokens = stream.sources[0].parts[0].tokens
            if tokens.trained is not None:
                if question := _first_question(tokens):
                    return question
                continue
            ids = np.asarray(tokens.ids[:PROMPT]).tolist()
            if isinstance(self.tokenizer, Bytes):  # which may cut a character in half at either end
                ids = self.tokenizer.encode(self.tokenizer.decode(ids).strip("\ufffd"))
            if ids:
                return Question(ids)
        return Question(self.tokenizer.encode("\n"))


def load_dataset(
    settings: DataSettings, progress: bool = False, advanced: Callable[[], None] = lambda: None
) -> Dataset:
    """Return the data of a run. Tokens are made where the cache has none; `progress` shows that, and `advanced` is
    called after each part, see :func:`tokenised`.

    Raises:
        UserError: the data, the tokenizer or the template is missing, damaged or empty, or does not fill a sample.
    """
    data = settings.data
    tokenizer = open_tokenizer(data.tokenizer)
    template = _template(data)
    cache = Path(data.cache) if data.cache else None

    def material(source: DataSource) -> Material:
        values = source._asdict()
        weight = values.pop("weight")
        files = DataFiles(**values)
        tokens = tokenised(
            files,
            tokenizer,
            cache=cache,
            template=template,
            special_tokens=data.spelled,
            progress=progress,
            advanced=advanced,
        )
        _check_completions(files, tokens, tokenizer)
        known = known_of(tokens, _identity(settings, tokens))
        return Material(", ".join(files.paths), weight, tokens, tuple(places(files)), known)

    materials = [material(each) for each in data.training]
    validation = [material(each) for each in data.validating] if settings.validation.every else []
    return _dataset(settings, tokenizer, materials, validation)


def check_special_tokens(settings: DataSettings, dataset: Dataset) -> None:
    """Refuse documents that spell special tokens, if the configuration does not say what becomes of them."""
    data = settings.data
    if data.special_tokens is not None:
        return
    pairs = (
        *zip(data.training, dataset.materials, strict=True),
        *zip(
            data.validating, dataset.validation_materials, strict=False
        ),  # without validation there are none
    )
    for source, material in pairs:
        if source.kind == "documents" and material.tokens.spelled:
            places = counted(material.tokens.spelled, "place")
            raise UserError(
                f'data.special_tokens: expected "text" or "tokens", since documents of {material.name} spell special '
                f'tokens of the tokenizer in {places}, found neither; "text" keeps them as text, "tokens" makes '
                "tokens of them, for text that was rendered with a template before"
            )


def continued(settings: DataSettings, dataset: Dataset, known: Sequence[Known]) -> Dataset:
    """Return the samples of a run that knows this of its sources, without documents that were appended since.

    Raises UserError where documents were changed or removed, and where some were appended without `data.appended`.
    """
    materials = [_recognised(settings, *each) for each in zip(dataset.materials, known, strict=True)]
    if all(each.is_whole for each in materials):
        return dataset
    return _dataset(settings, dataset.tokenizer, materials, dataset.validation_materials)


def extended(settings: DataSettings, dataset: Dataset, samples: int) -> tuple[Dataset, list[str]]:
    """Return the samples of a run from here on, after its first `samples` ones: with documents that were appended,
    where `data.appended` asks for them. Also lines that say so."""
    materials, lines = [], []
    for each, epoch in zip(dataset.materials, dataset.train.epochs_under_way(samples), strict=False):
        documents = appended_documents(each.known, each.tokens)
        known = each.known
        if documents and settings.data.appended:
            identity = _identity(settings, each.tokens)
            part = parts_of(known, each.tokens)[-1]
            number = len(_part(settings, part).packing)
            known = (
                with_part(known, each.tokens, identity, epoch)
                if number
                else seen(known, each.tokens, identity)
            )
            use = (
                f"{counted(number, 'sample')} after the others of its epoch {epoch + 1}"
                if number
                else "too few for a sample; they come in once more are appended"
            )
            lines.append(
                f"appended to {each.name}: {counted(documents, 'document')} of {counted(len(part.ids), 'token')}: {use}"
            )
        materials.append(replace(each, known=known))
    if not lines:
        return dataset, []
    return _dataset(settings, dataset.tokenizer, materials, dataset.validation_materials), lines


def _recognised(settings: DataSettings, material: Material, known: Known) -> Material:
    """Return the source with what a run knows of it. Raises as `continued`."""
    tokens = material.tokens
    same = known.identity == material.known.identity
    if same and not known.epochs and known.documents == sum(file.documents for file in known.files):
        return material  # the same tokens, maybe in other files
    check_grown(known, tokens, material.places, material.name)
    if not same and not settings.data.appended:
        more = tokens.documents - sum(file.documents for file in known.files)
        raise UserError(
            f"--resume: expected the documents that the run has of {material.name}, found {more:,} more; set "
            "data.appended to true to continue with them, or restore the data"
        )
    return replace(material, known=known)


def _dataset(
    settings: DataSettings,
    tokenizer: Tokenizer,
    materials: Sequence[Material],
    validation: Sequence[Material],
) -> Dataset:
    """Return the samples of sources. Without sources for `validation` a part of each is kept for it, of its first part:
    what no step trains on stays the same when documents are appended."""
    training, kept = [], []
    for each in materials:
        first, *more = each.parts()
        begin, rest = training_and_validation(first, settings.data.split_fraction)
        source = Source(each.name, (_part(settings, begin),))
        for tokens, epoch in zip(more, each.known.epochs, strict=True):
            source = source.grown(_part(settings, tokens), epoch)
        training.append(source)
        kept.append(rest)
    train = Stream(
        training, [each.weight for each in materials], settings.seed, separate=settings.data.separates
    )
    stream, sets = None, {}
    if settings.validation.every:
        if validation:
            sources = [
                Source(
                    f"{VALIDATION_SOURCE}{each.name}",
                    (_part(settings, each.tokens),),
                    label=f"validation: {shortened_name(each.name)}",
                )
                for each in validation
            ]
        else:
            labels = [f"validation of {shortened_name(each.name)}" for each in materials]
            sources = [
                Source(
                    f"{VALIDATION_PART}{each.name}",
                    (_part(settings, rest),),
                    label=label if len(labels) > 1 else "validation",
                )
                for each, rest, label in zip(materials, kept, labels, strict=True)
            ]
        weights = [each.weight for each in validation or materials]

        def stream_of(numbers: Sequence[int]) -> Stream:
            made = Stream(
                [sources[n] for n in numbers],
                [weights[n] for n in numbers],
                VALIDATION_SEED,
                separate=settings.data.separates,
            )
            _check_validated(settings, made)
            return made

        stream = stream_of(range(len(sources)))
        sets = {name: stream_of(numbers) for name, numbers in settings.data.validation_sets.items()}
    return Dataset(
        tokenizer,
        train,
        stream,
        _digest(settings, materials),
        tuple(materials),
        tuple(validation),
        sets,
    )


def validation_samples(settings: DataSettings, stream: Stream) -> int:
    """Return the samples that each validation is computed on, the first ones of the stream."""
    windows = sum(source.samples for source in stream.sources)
    return min(windows, settings.validation.batches * settings.global_batch)


def _check_validated(settings: DataSettings, stream: Stream) -> None:
    """Refuse validations without a trained token, whose loss would be 0."""
    samples = validation_samples(settings, stream)
    if not stream.trained(0, samples):
        raise UserError(
            f"validation.batches: expected trained tokens in the first {counted(samples, 'validation sample')} "
            f"({settings.validation.batches} of train.global_batch), found none; raise validation.batches, or raise "
            "train.seq_len so that samples reach the text to learn"
        )


def _part(settings: DataSettings, tokens: Tokens) -> Part:
    separate = settings.data.separates
    return Part(tokens, pack(tokens, settings.seq_len, settings.data.packing, separate=separate))


def _digest(settings: DataSettings, materials: Sequence[Material]) -> str:
    if len(materials) == 1 and _ends_count_for_nothing(settings, materials[0].tokens):
        return materials[0].tokens.sha256  # the digest that runs of text had before there were tokens
    return _joined_digest(materials)


def _joined_digest(materials: Sequence[Material]) -> str:
    return hashlib.sha256("\n".join(each.tokens.fingerprint for each in materials).encode()).hexdigest()


def _identity(settings: DataSettings, tokens: Tokens) -> str:
    """Equal for tokens that make the same samples."""
    digest = tokens.sha256 if _ends_count_for_nothing(settings, tokens) else tokens.fingerprint
    training, _ = training_and_validation(tokens, settings.data.split_fraction)
    return f"{digest} {len(training.ids)}"  # where the cut is also depends on documents


def _ends_count_for_nothing(settings: DataSettings, tokens: Tokens) -> bool:
    """Return whether the documents are one text, cut into samples wherever they end: bytes that are split, without a
    mask."""
    one_text = settings.data.packing == "split" and not settings.data.separates
    return one_text and tokens.ids.dtype == np.uint8 and tokens.trained is None and bool(tokens.sha256)


def template_of(data: DataConfig, tokenizer: Tokenizer) -> str | None:
    """Return the chat template of a run: that of data.chat_template, else the tokenizer's own. None: there is none.

    Raises UserError if the file cannot be read."""
    template = _template(data)
    return tokenizer.chat_template if template is None else template


def _template(data: DataConfig) -> str | None:
    template = read_template(data)
    has_conversations = any(each.kind == "conversations" for each in (*data.training, *data.validating))
    if template is not None and has_conversations:
        check_template(template, data.chat_template)
    return template


def read_template(
    data: DataConfig, of_run: str = "", way: str = "set the path of a jinja template"
) -> str | None:
    """Return the text of the file data.chat_template; None: it is not set. `of_run` and `way` are for the UserError
    about a file that cannot be read."""
    try:
        return Path(data.chat_template).read_text(encoding="utf-8") if data.chat_template else None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(
            f"data.chat_template: cannot read {data.chat_template}{of_run}: {reason}; {way}"
        ) from None


def _check_completions(files: DataFiles, tokens: Tokens, tokenizer: Tokenizer) -> None:
    """Refuse completions of which only the token that ends each is trained."""
    has_end = isinstance(tokenizer, Bytes) or tokenizer.end is not None
    if files.kind == "completions" and has_end and tokens.trained_tokens <= len(tokens.ends):
        raise UserError(
            f"{files.section}.completion_key: expected texts to train on, found {len(tokens.ends):,} empty completions "
            f"in {', '.join(files.paths)}; set it to the key of the text after the prompt"
        )
