"""Names for values of the trainer: optimizers, kinds of models, places for metrics. See docs/extending.md."""

from shardwright.train.metrics import RunEnd, Sink, StepRecord
from shardwright.train.models.decoder import Decoder
from shardwright.train.models.kinds import Kind, Offers, kinds
from shardwright.train.models.language_model import LanguageModel
from shardwright.train.optimizers import NamedOptimizer, OptimizerSettings, optimizers
from shardwright.train.sinks import NamedSink, RunConfiguration, RunSite, sinks

__all__ = [
    "Decoder",
    "Kind",
    "LanguageModel",
    "NamedOptimizer",
    "NamedSink",
    "Offers",
    "OptimizerSettings",
    "RunConfiguration",
    "RunEnd",
    "RunSite",
    "Sink",
    "StepRecord",
    "kinds",
    "optimizers",
    "sinks",
]
