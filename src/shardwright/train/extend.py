"""Names for values of the trainer: optimizers, kinds of models, places for metrics, hooks. See docs/extending.md."""

from shardwright.train.config import Config as RunConfiguration
from shardwright.train.config.catalog.hooks import Fault, Job, StepInProgress, TrainerHook, hooks
from shardwright.train.config.catalog.kinds import Kind, Offers, kinds
from shardwright.train.config.catalog.losses import NamedLoss, losses
from shardwright.train.config.catalog.optimizers import NamedOptimizer, OptimizerSettings, optimizers
from shardwright.train.config.catalog.records import RunEnd, Sink, StepRecord
from shardwright.train.config.catalog.sinks import NamedSink, RunSite, sinks
from shardwright.train.models.language_model import LanguageModel
from shardwright.train.models.native.decoder import Decoder

__all__ = [
    "Decoder",
    "Fault",
    "Job",
    "Kind",
    "LanguageModel",
    "NamedLoss",
    "NamedOptimizer",
    "NamedSink",
    "Offers",
    "OptimizerSettings",
    "RunConfiguration",
    "RunEnd",
    "RunSite",
    "Sink",
    "StepInProgress",
    "StepRecord",
    "TrainerHook",
    "hooks",
    "kinds",
    "losses",
    "optimizers",
    "sinks",
]
