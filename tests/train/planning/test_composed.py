"""Plans of long models from plans of short ones, beside traces of the whole model: equal, event for event."""

from __future__ import annotations

import random
from typing import Any

import pytest

from shardwright.planner import Program
from shardwright.train.config import Config, load_config
from shardwright.train.errors import UserError
from shardwright.train.planning import programs
from shardwright.train.planning.programs import composed_program, program_of, traced_program
from shardwright.train.planning.shorter_jobs import series_of
from tests.train.planning.kit import EXAMPLES, config_of, plain

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
LAYERS = 31  #: more than the three short models have together

#: Cases, of which each has something that the others have not.
HANDFUL: dict[str, str] = {
    "bf16, ragged, checkpoints": "parallel.param_dtype=bfloat16 parallel.reduce_dtype=float32 parallel.layout=ragged "
    "activations.checkpoint=full model.n_layers=16 validation.every=0",
    "compiled blocks": "train.compile=inductor model.n_layers=19 validation.every=0",
    "fsdp2, tied, asynchronous saves": "parallel.engine=fsdp2 model.tied_embeddings=true model.n_layers=20 "
    "checkpoint.asynchronous=true",
}
#: Settings for the matrix, of which a case has one of each row.
ROWS: list[list[str]] = [
    ["", "parallel.strategy=zero1", "parallel.strategy=zero2", "parallel.strategy=ddp", "parallel.engine=fsdp2",
     "parallel.strategy=hsdp parallel.replicas=2"],
    ["", "parallel.layout=ragged", "parallel.layout=element", "parallel.layout=32"],
    ["", "parallel.memory=double_buffer"],
    ["", "parallel.prefetch=0", "parallel.prefetch=2", "parallel.prefetch=3"],
    ["", "parallel.reshard_after_forward=always", "parallel.reshard_after_forward=never",
     "parallel.reshard_after_forward=2"],
    ["", "activations.checkpoint=full", "activations.checkpoint=ops", "activations.checkpoint=layers"],
    ["", "train.micro_batch=2", "train.micro_batch=2 train.accumulate=hold"],
    ["", "model.tied_embeddings=true"],
    ["", "parallel.param_dtype=bfloat16 parallel.reduce_dtype=float32"],
    ["", "finetune.method=lora", "finetune.method=dora", 'finetune.method=lora finetune.train_also=["*norm.weight"]'],
    ["", "optimizer.name=adamw8bit", "optimizer.in_backward=true train.max_norm=0"],
    ["", "parallel.tensor=2"],
    ["", "validation.every=0", "checkpoint.asynchronous=true"],
    ["", "", "", "train.compile=inductor"],
    ["", "", "parallel.offload=cpu", "parallel.offload=optimizer"],
]  # fmt: skip


def check(config: Config, ranks: int = 2, kind: Any = "cuda") -> None:
    composed = composed_program(config, ranks, kind)
    assert composed is not None
    assert plain(composed) == plain(traced_program(config, ranks, kind))


@pytest.mark.extensive("two traces of each", but=("bf16, ragged, checkpoints",))
@pytest.mark.parametrize("words", HANDFUL.values(), ids=HANDFUL)
def test_a_composed_plan_is_the_traced_one(words: str) -> None:
    check(config_of(words))


@pytest.mark.extensive("several compiled graphs", but=("other shapes",))
@pytest.mark.parametrize(
    "before, words",
    [
        ("parallel.strategy=zero2 train.loss_chunks=2", "parallel.reshard_after_forward=never"),
        ("train.micro_batch=4", "train.micro_batch=2"),
        ("activations.checkpoint=ops", "activations.checkpoint=ops parallel.strategy=zero2"),
        ("activations.checkpoint=ops", "activations.checkpoint=half_ops"),
    ],
    ids=["other strategy", "other shapes", "checkpoints", "other checkpoints"],
)
def test_a_plan_of_a_search_is_that_of_a_plan_alone(before: str, words: str) -> None:
    """Plans of a search share the graphs of torch.compile, as far as blocks are the same."""
    first, config = (
        config_of(f"train.compile=inductor model.n_layers=19 {each}") for each in (before, words)
    )
    programs.open_search()
    try:
        program_of(first, 2)
        searched = program_of(config, 2)
    finally:
        programs.close_search()
    assert plain(searched) == plain(program_of(config, 2))


def cases(number: int, seed: int) -> list[tuple[str, int, str]]:
    """Random settings that go together."""
    choose = random.Random(seed)
    cases: list[tuple[str, int, str]] = []
    while len(cases) < number:
        words = " ".join(each for row in ROWS if (each := choose.choice([row[0], *row])))
        ranks = 4 if any(each in words for each in ("replicas", "tensor", "forward=2")) else 2
        try:
            config_of(words, ranks=ranks)
        except UserError:
            continue
        cases.append((words, ranks, choose.choice(["cuda", "cpu"])))
    return cases


@pytest.mark.extensive("random settings")
@pytest.mark.parametrize("case", cases(24, seed=7), ids=str)
def test_composed_plans_of_random_settings_are_the_traced_ones(case: tuple[str, int, str]) -> None:
    words, ranks, kind = case
    try:
        config = config_of(f"{words} model.n_layers={LAYERS}", ranks=ranks)
        *_, layers = series_of(config, ranks)
        traced_program(layers.of(1), ranks, kind)  # type: ignore[arg-type]
    except UserError:
        pytest.skip("these settings do not go together")
    composed = composed_program(config, ranks, kind)  # type: ignore[arg-type]
    if composed is None:
        pytest.skip("the whole model is traced")
    assert plain(composed) == plain(traced_program(config, ranks, kind))  # type: ignore[arg-type]


@pytest.mark.extensive("micro-batches")
@pytest.mark.parametrize(
    "words",
    [
        "", "train.accumulate=hold", "parallel.engine=fsdp2", "parallel.strategy=zero1 activations.checkpoint=full",
        "optimizer.name=muon", "finetune.method=lora model.n_layers=19", "parallel.memory=arena",
        "parallel.memory=max_pool train.accumulate=hold",
    ],
)  # fmt: skip
def test_composed_plans_of_many_micro_batches_are_the_traced_ones(words: str) -> None:
    check(config_of(f"train.micro_batch=1 train.global_batch=40 {words}"))


@pytest.mark.extensive("patterns of layers")
@pytest.mark.parametrize("pattern", ["M-" * 16, "*-" + "M-" * 15 + "M", "M" * 20])
@pytest.mark.parametrize("words", ["", "activations.checkpoint=full parallel.layout=ragged"])
def test_composed_plans_of_patterns_are_the_traced_ones(pattern: str, words: str) -> None:
    check(config_of(f'model.pattern="{pattern}" model.mtp_pattern="*-" {words}', "hybrid_debug"))


@pytest.mark.parametrize(
    "keys, parts",
    [
        ({}, 17),
        ({"activations.checkpoint": "layers", "activations.every": "4"}, 4),
        ({"parallel.memory": "arena"}, None),
        ({"parallel.memory": "max_pool"}, None),
        ({"optimizer.name": "muon"}, None),
        ({"parallel.prefetch": "1 MiB"}, None),
        ({"finetune.method": "lora", "finetune.targets": '["layers.3.attention.wq"]'}, None),
        ({"finetune.method": "lora", "finetune.targets": '["layers.?.attention.wq"]'}, None),
        ({"finetune.method": "lora", "finetune.targets": '["wq"]'}, 17),
    ],
    ids=str,
)
def test_the_series_of_a_model(keys: dict[str, str], parts: int | None) -> None:
    overrides = [("model.n_layers", "17"), *keys.items()]
    config = load_config(EXAMPLES / "llama_debug.toml", overrides, ranks=2)
    series = [each.parts for each in series_of(config, 2)]
    assert series == ([1] if parts is None else [1, parts])
    for each in series_of(config, 2):
        assert each.of(each.parts) == config


@pytest.mark.parametrize(
    "pattern, shorter",
    [
        ("M-" * 9, "M-M-"),
        ("MM*-" + "M-" * 9 + "*", "MM*-M-M-*"),
        ("M" * 5 + "*" * 9, "MMMMM**"),
        ("M*-ME", None),
    ],
)
def test_a_pattern_repeats_fewer_pieces(pattern: str, shorter: str | None) -> None:
    config = config_of(f"model.pattern={pattern}", "hybrid_debug")
    _, *layers = series_of(config, 2)
    assert [each.of(2).model.pattern for each in layers] == ([] if shorter is None else [shorter])
    assert all(each.of(each.parts).model.pattern == pattern for each in layers)


def test_a_plan_takes_the_composed_program(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("model.n_layers=20")
    program = Program()
    monkeypatch.setattr(programs, "composed_program", lambda *_: program)
    assert program_of(config, 2) is program


@pytest.mark.extensive("three plans")
def test_a_plan_does_not_depend_on_those_before_it() -> None:
    """torch keeps results of DTensor with their meshes, which are equal to later ones whose groups are others."""

    def program(words: str, ranks: int) -> Any:
        return plain(traced_program(config_of(f"model.n_layers=1 {words}", ranks=ranks), ranks))

    replicas = "parallel.tensor=2 parallel.strategy=hsdp parallel.replicas=2"
    first = program("parallel.tensor=2", 2)
    with_replicas = program(replicas, 4)
    program("parallel.tensor=2", 4)
    assert program(replicas, 4) == with_replicas
    assert program("parallel.tensor=2", 2) == first
