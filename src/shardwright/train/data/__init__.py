"""Text as tokens, and the order in which a run sees them: see `corpus` and `order`."""

from shardwright.train.data.corpus import Corpus, decode, encode, load_corpus
from shardwright.train.data.order import SampleOrder

__all__ = ["Corpus", "SampleOrder", "decode", "encode", "load_corpus"]
