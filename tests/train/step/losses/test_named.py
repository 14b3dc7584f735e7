"""`train.loss`: functions of tokens by name or import path, whole, in chunks, and on ranks that share logits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.extend import ExtensionError
from shardwright.train.config import Config
from shardwright.train.extend import NamedLoss, NamedSink, losses
from shardwright.train.step.evaluation import validate
from shardwright.train.step.trainer import Trainer
from tests.support import multirank
from tests.train.kit.hooks import EXAMPLES
from tests.train.kit.jobs import HYBRID, tiny, trainer
from tests.train.kit.parallel import take_steps

KINDS: dict[str, dict[str, Any]] = {"llama": {"n_kv_heads": 2}, "hybrid": HYBRID | {"tied_embeddings": False}}
LOSSES: dict[str, dict[str, float]] = {
    "cross_entropy": {"label_smoothing": 0.2},
    "z_loss": {"weight": 0.01},
    "tests.train.step.losses.test_named:focal": {"gamma": 1.5},
}


def focal(logits: Tensor, targets: Tensor, gamma: float = 2.0) -> Tensor:
    """Cross-entropy that counts confident tokens less."""
    logarithms = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    return -((1 - logarithms.exp()) ** gamma) * logarithms


def mean(logits: Tensor, targets: Tensor) -> Tensor:
    return focal(logits, targets).mean()


def wrong(logits: Tensor, targets: Tensor) -> Tensor:
    raise KeyError("temperature")


def job(loss: str, kind: str = "llama", **sections: dict[str, Any]) -> Config:
    train = {"loss": loss, "loss_arguments": LOSSES.get(loss, {}), **sections.pop("train", {})}
    return tiny(model=KINDS[kind], train=train, **sections)


def figures(job: Trainer) -> list[Any]:
    """The losses and norms of two steps, and the loss of a validation."""
    job.close()
    return [*take_steps(job, 2), validate(job).loss]


@multirank(1)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", KINDS)
def test_in_chunks_and_with_other_micro_batches(rank: int, world_size: int, loss: str, kind: str) -> None:
    plain, *others = (
        figures(trainer(job(loss, kind, train=each), 0, 1))
        for each in ({}, {"loss_chunks": 3}, {"loss_chunks": 2, "micro_batch": 1})
    )
    for other in others:
        for found, expected in zip(other, plain, strict=True):
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


AXES: list[dict[str, Any]] = [{"tensor": 2}, {"context": 2}, {"strategy": "zero3"}]


@multirank(2)
@pytest.mark.parametrize("loss", LOSSES)
def test_on_ranks(rank: int, world_size: int, loss: str) -> None:
    engine = {"engine": "shardwright"}
    alone = figures(trainer(job(loss, parallel={**engine, "strategy": "ddp"}), rank, world_size))
    for axis, chunks in itertools.product(AXES, (0, 3)):
        config = job(loss, parallel={**engine, **axis}, train={"loss_chunks": chunks})
        for each, expected in zip(figures(trainer(config, rank, world_size)), alone, strict=True):
            assert each == pytest.approx(expected, rel=1e-4, abs=1e-4), f"{axis}, {chunks} chunks"


@multirank(1)
def test_validation_measures_the_cross_entropy(rank: int, world_size: int) -> None:
    """So that runs with different losses compare: before the first step it is that of the same weights."""
    found = [
        trainer(job(name), 0, 1) for name in ("auto", "z_loss", "tests.train.step.losses.test_named:focal")
    ]
    first, *others = (validate(each).loss for each in found)
    assert others == [first] * 2


@pytest.mark.parametrize("ignored", [False, True])
def test_gradients_of_chunks_are_those_of_the_function(ignored: bool) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(9, 5, requires_grad=True), nn.Linear(5, 7)
    targets = torch.arange(9) % 7
    if ignored:
        targets[::3] = -100
    loss_sum, of_tokens = sw.chunked_cross_entropy(hidden, head, targets, chunks=4, loss=focal)
    found = torch.autograd.grad(loss_sum, (hidden, head.weight))
    counted = targets >= 0
    expected = focal(head(hidden[counted]), targets[counted])
    torch.testing.assert_close(of_tokens[counted], expected.detach())
    assert not of_tokens[~counted].any()
    torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), (hidden, head.weight)))


@multirank(1)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mean", "expected one floating-point number for each of .* tokens, found shape \\[\\]"),
        (
            "wrong",
            "train.loss: 'tests.train.step.losses.test_named:wrong' raised KeyError: 'temperature' .*test_named.py",
        ),
    ],
)
def test_a_wrong_function_is_named(rank: int, world_size: int, name: str, message: str) -> None:
    started = trainer(job(f"tests.train.step.losses.test_named:{name}"), 0, 1)
    with pytest.raises((ExtensionError, ValueError), match=message):
        take_steps(started, 1)
    started.close()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss": "crossentropy"}, "expected one of .*; did you mean 'cross_entropy'"),
        ({"loss": "z_loss", "loss_arguments": {"gamma": 1}}, "gamma: loss 'z_loss' has no such argument"),
        ({"loss": "cross_entropy", "loss_arguments": {"label_smoothing": 10}}, "expected a number from 0 to 1"),
        ({"loss_arguments": {"weight": 1.0}}, "loss 'auto' has no such argument"),
        ({"loss": "z_loss", "loss_arguments": {"weight": "much"}}, "from 0 to 1, such as 0.0001, found 'much'"),
        ({"loss": f"{__name__}:focal", "loss_arguments": {"g": 1}}, "unexpected keyword argument 'g'"),
        ({"loss": "tests.train.step.losses.test_named:HYBRID"}, "expected a NamedLoss"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(train=values)


def test_ignored_tokens_put_nothing_into_gradients() -> None:
    """Also where the function is not finite for them: a padded row's logits may be any number."""
    logits = torch.randn(4, 5).double()
    logits[1] = torch.tensor([-2000.0, 2000.0, 0.0, 0.0, 0.0])
    logits.requires_grad_()
    targets = torch.tensor([2, -100, 1, 0])

    def powers(logits: Tensor, targets: Tensor) -> Tensor:
        chosen = logits.softmax(-1).gather(-1, targets[:, None])[:, 0]
        return -((1 - chosen) ** 2) * chosen.log()

    for loss in (powers, focal):
        hidden, head = logits.detach().requires_grad_(), nn.Identity()
        loss_sum, _ = sw.chunked_cross_entropy(hidden, head, targets, chunks=2, loss=loss)
        (gradient,) = torch.autograd.grad(loss_sum, hidden)
        assert gradient.isfinite().all() and not gradient[1].any()


def test_losses_in_half_precision_are_summed_in_float32() -> None:
    hidden, targets = torch.randn(4096, 8), torch.zeros(4096, dtype=torch.int64)
    found, _ = sw.chunked_cross_entropy(hidden, nn.Identity(), targets, loss=lambda x, t: focal(x, t).half())
    assert found.dtype == torch.float32 and found.isfinite()


@pytest.mark.parametrize(
    "make", [lambda: NamedLoss("mine", "Nothing."), lambda: NamedSink("mine", "Nothing.", None)]
)
def test_a_value_without_its_function_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="'mine': expected a function"):
        make()


def test_a_named_loss() -> None:
    added = losses.add(NamedLoss("focal of a test", "Counts confident tokens less.", focal))
    assert tiny(train={"loss": added.name, "loss_arguments": {"gamma": 3}}).train.loss_entry is added


def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_losses.py").write_text(EXAMPLES["my_losses.py"])
    monkeypatch.syspath_prepend(tmp_path)
    entry = tiny(train={"loss": "my_losses:focal", "loss_arguments": {"gamma": 1.5}}).train.loss_entry
    logits, targets = torch.randn(5, 7), torch.arange(5)
    assert entry.function is not None
    torch.testing.assert_close(entry.function(logits, targets, gamma=1.5), focal(logits, targets, 1.5))
