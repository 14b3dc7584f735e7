"""`train.loss_chunks`: the losses of whole logits, with less memory, for each kind of model and engine."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.extend import ExtensionError
from shardwright.train.config import Config
from shardwright.train.errors import UserError
from shardwright.train.step.evaluation import check_model, validate
from shardwright.train.step.trainer import Trainer
from tests.support import multirank
from tests.support.matrix import select, together
from tests.train.kit.jobs import HYBRID, config_file, tiny, train_here, trainer
from tests.train.kit.parallel import take_steps
from tests.train.models.kit.foreign import NATIVE, job_of

LLAMA: dict[str, Any] = {"n_kv_heads": 2}
KINDS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "tied": {**LLAMA, "tied_embeddings": True},
    "hybrid": HYBRID | {"tied_embeddings": False},
    "tied hybrid": HYBRID,
}
#: Sums have another order in gradients, which each step adds to the weights. In bfloat16 gradients round to 8 bits.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


def _config(kind: str, chunks: int | str, **sections: dict[str, Any]) -> Config:
    train = {"loss_chunks": chunks, **sections.pop("train", {})}
    return tiny(model=KINDS[kind], train=train, **sections)


def _same_training(expected: Trainer, found: Trainer, tolerance: float) -> None:
    """Two steps and a validation with the same losses."""
    for job in (expected, found):
        job.close()
    assert take_steps(found, 2) == [
        pytest.approx(figures, rel=tolerance, abs=tolerance) for figures in take_steps(expected, 2)
    ]
    if expected.dataset.validation is not None:
        assert validate(found).loss == pytest.approx(validate(expected).loss, rel=tolerance)


@multirank(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", [3, "auto"])
def test_each_kind_of_model(rank: int, world_size: int, kind: str, chunks: int | str) -> None:
    whole, job = (trainer(_config(kind, each), 0, 1) for each in (0, chunks))
    _same_training(whole, job, TOLERANCE["float32"])


@multirank(1)
@pytest.mark.parametrize("packing", ["split", "none", "best_fit"])
def test_losses_of_documents(rank: int, world_size: int, packing: str) -> None:
    """Multi-token prediction and balance losses of samples with several documents, or with padding."""
    data = {"packing": packing}
    whole, job = (trainer(_config("hybrid", each, data=data), 0, 1) for each in (0, 3))
    _same_training(whole, job, TOLERANCE["float32"])


def _cases() -> list[tuple[Any, ...]]:
    rows = itertools.product(
        KINDS,
        (
            {"engine": "shardwright"},
            {"engine": "fsdp2"},
            {"engine": "ddp"},
            {"engine": "shardwright", "tensor": 2},
        ),
        ("float32", "bfloat16"),
        ("communicate", "hold"),
        ("none", "full"),
        ("default", "always"),
    )
    legal = [row for row in rows if row[1]["engine"] == "shardwright" or row[5] == "default"]
    return select(legal, lambda row, strength: together(strength, row[0], str(row[1]), *row[2:]))


@multirank(2)
@pytest.mark.parametrize(("kind", "parallel", "dtype", "accumulate", "checkpoint", "reshard"), _cases())
def test_on_two_ranks(
    rank: int,
    world_size: int,
    kind: str,
    parallel: dict[str, Any],
    dtype: str,
    accumulate: str,
    checkpoint: str,
    reshard: str,
) -> None:
    sections = {
        "parallel": {**parallel, "param_dtype": dtype, "reshard_after_forward": reshard},
        "activations": {"checkpoint": checkpoint},
        "train": {"accumulate": accumulate},
    }
    whole, job = (
        trainer(
            _config(kind, each, **{name: dict(value) for name, value in sections.items()}), rank, world_size
        )
        for each in (0, 3)
    )
    _same_training(whole, job, TOLERANCE[dtype])


@pytest.mark.extensive("each packing", but=("split-*",))
@multirank(2)
@pytest.mark.parametrize("packing", ["split", "none"])
def test_ranks_that_divide_samples(rank: int, world_size: int, packing: str) -> None:
    """Multi-token prediction predicts tokens of another rank."""
    sections = {"parallel": {"engine": "shardwright", "context": 2}, "data": {"packing": packing}}
    whole, job = (
        trainer(_config("hybrid", each, **{k: dict(v) for k, v in sections.items()}), rank, world_size)
        for each in (0, 3)
    )
    _same_training(whole, job, TOLERANCE["float32"])


@multirank(2)
def test_an_optimizer_in_backward_and_adapters(rank: int, world_size: int) -> None:
    for sections in (
        {"optimizer": {"in_backward": True}, "train": {"max_norm": 0.0}},
        {"finetune": {"method": "lora", "rank": 4, "targets": ["output", "*.wq"]}},
    ):
        own = {"parallel": {"engine": "shardwright"}, **sections}
        whole, job = (
            trainer(_config("llama", each, **{k: dict(v) for k, v in own.items()}), rank, world_size)
            for each in (0, 3)
        )
        stop = [take_steps(each, 2)[1][0] for each in (whole, job)]
        assert stop[0] == pytest.approx(stop[1], rel=1e-4)


def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_here(config_file(tmp_path), "--train.loss_chunks", "auto") == 0


# -- other models ------------------------------------------------------------------------------------------------------


class Capped(nn.Module):
    """A user's module with a soft cap of its logits.

    Args:
        odd: what else it does with them.
    """

    def __init__(self, vocab_size: int, odd: str = "") -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(vocab_size, 24), nn.Linear(24, vocab_size)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))
        self.odd = odd
        if odd == "tied without a call":
            self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        if self.odd == "tied without a call":
            return x @ self.out.weight.T
        logits = 5.0 * torch.tanh(self.out(x) / 5.0)
        if self.odd == "softmax":
            logits = logits.log_softmax(-1)
        return logits


def _python(chunks: int, **arguments: Any) -> Trainer:
    model = {
        **dict.fromkeys(NATIVE),
        "kind": "python",
        "target": f"{__name__}:Capped",
        "arguments": arguments,
    }
    return trainer(tiny(model=model, train={"loss_chunks": chunks}), 0, 1)


@multirank(1)
def test_a_users_module(rank: int, world_size: int) -> None:
    whole, job = (_python(each) for each in (0, 3))
    check_model(job)
    _same_training(whole, job, TOLERANCE["float32"])


@multirank(1)
@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (
            "softmax",
            "train.loss_chunks: forward of .*Capped.* raised TypeError: the model calls log_softmax with its logits",
        ),
        (
            "tied without a call",
            "returned other logits than those of its output layer, a Linear; call that layer once",
        ),
    ],
)
def test_a_module_that_does_more_with_its_logits_is_refused(
    rank: int, world_size: int, odd: str, message: str
) -> None:
    with pytest.raises(ExtensionError, match=message):
        check_model(_python(3, odd=odd))


@multirank(1)
def test_a_model_with_its_own_loss_is_refused(rank: int, world_size: int) -> None:
    model = {
        **dict.fromkeys(NATIVE), "kind": "python", "target": "tests.train.models.kit.user_module:MeanLoss",
    }  # fmt: skip
    with pytest.raises(
        UserError, match=r"train.loss_chunks: expected 0 with .*which computes its own loss, found 3"
    ):
        trainer(tiny(model=model, train={"loss_chunks": 3}), 0, 1)


@multirank(1)
@pytest.mark.extensive("models of transformers", but=("*gemma2*",))
@pytest.mark.parametrize("kind", ["gemma2", "llama", "granite", "gpt2", "opt", "cohere", "mixtral"])
def test_models_of_transformers(rank: int, world_size: int, kind: str, tmp_path: Path) -> None:
    import transformers

    common = {"vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    sizes = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8,
    }  # fmt: skip
    own: dict[str, dict[str, Any]] = {
        "gemma2": sizes | {"final_logit_softcapping": 2.0},
        "granite": sizes | {"logits_scaling": 3.0},
        "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "opt": {
            "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "dropout": 0.0,
            "word_embed_proj_dim": 16,
        },
        "mixtral": sizes | {"num_local_experts": 2, "output_router_logits": True},
    }  # fmt: skip
    transformers.AutoConfig.for_model(kind, **common, **own.get(kind, sizes)).save_pretrained(tmp_path)
    whole, job = (
        job_of(tmp_path, 0, 1, model={"weights": "random"}, train={"loss_chunks": each}, engine="none")
        for each in (0, 3)
    )
    check_model(job)
    _same_training(whole, job, TOLERANCE["float32"])


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"loss_chunks": -1}}, "train.loss_chunks"),
        ({"train": {"loss_chunks": "some"}}, "train.loss_chunks"),
        (
            {"train": {"loss_chunks": 2}, "parallel": {"engine": "fsdp1"}},
            r"train.loss_chunks: expected 0 with parallel.engine 'fsdp1', found 2; the weight of its output layer",
        ),
    ],
)
def test_wrong_settings(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**sections)
