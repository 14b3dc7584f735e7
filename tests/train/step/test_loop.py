"""The training loop through the command line: what a run writes, and that its numbers are those of plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwright.train.config import OptimizerConfig, load_config
from shardwright.train.models.build import build_model
from shardwright.train.report.device_peaks import peak_flops
from shardwright.train.run.folder import RunFolder
from shardwright.train.step.loading import load_weights
from tests.train.kit.jobs import config_file, losses, records, run_config, run_record, steps_in, train_here
from tests.train.kit.text import batch, ends_of_pydoc, pydoc, text_of


def test_run_folder_holds_everything(plain_run: Path) -> None:
    folder = RunFolder(plain_run)
    record, taken = folder.record(), records(plain_run)
    config = load_config(folder.config_file)
    assert config.run.dir == str(plain_run) and config.train.steps == 8
    assert [step["step"] for step in taken] == list(range(1, 9))
    assert [step["step"] for step in taken if step["validation_loss"] is not None] == [4, 8]
    assert [step["samples"] for step in taken] == [8 * n for n in range(1, 9)]
    assert all(step["mfu"] is None and step["memory_active"] > 0 for step in taken)
    assert all(0 < step["data_seconds"] < step["seconds"] for step in taken)
    timed = taken[3:]
    waited = sum(step["data_seconds"] for step in timed) / sum(step["seconds"] for step in timed)
    assert record["results"]["data_share"] == pytest.approx(waited)
    assert f"{waited:.1%} of the steps' time" in folder.summary_file.read_text()
    assert steps_in(folder.checkpoints) == [8, 6]  # 3 was deleted: two are kept
    assert record["status"] == "finished" and record["corpus"]["sha256"] == text_of(pydoc()).sha256
    assert record["sessions"][0]["engine"] == "none" and record["sessions"][0]["end"]
    assert record["parameters"] == build_model(config.model, 256).num_params()
    assert folder.picture.read_bytes().startswith(b"\x89PNG")
    assert "checkpoints/step-8" in folder.summary_file.read_text()
    assert list((folder.path / "tensorboard").glob("events.*"))


def test_losses_are_those_of_a_plain_loop(plain_run: Path) -> None:
    config = load_config(plain_run / "config.toml")
    text = text_of(pydoc(), config.data.validation_fraction, ends_of_pydoc())
    torch.manual_seed(0)
    model = build_model(config.model, 256)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for number, record in enumerate(records(plain_run)):
        inputs, targets = batch(text, 0, number * 8, 8, 32)  # the whole global batch at once
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (number + 1) / 2)
        optimizer.step()
        optimizer.zero_grad()
        # The run adds four micro-batches up in another order: float32 rounding, amplified over the steps.
        assert record["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert record["lr"] == group["lr"]


def test_validation_is_the_mean_over_its_windows(plain_run: Path) -> None:
    config = load_config(plain_run / "config.toml")
    text = text_of(pydoc(), config.data.validation_fraction, ends_of_pydoc())
    model = build_model(config.model, 256)
    load_weights(plain_run / "checkpoints" / "step-8", model)
    inputs, targets = batch(text, 0, 0, 16, 32, split="validation")  # 2 global batches
    with torch.no_grad():
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    assert records(plain_run)[-1]["validation_loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_two_ranks_see_what_one_sees(plain_run: Path, sharded_run: Path) -> None:
    assert losses(sharded_run) == pytest.approx(losses(plain_run), rel=1e-5)
    ours, theirs = records(sharded_run)[-1], records(plain_run)[-1]
    assert ours["validation_loss"] == pytest.approx(theirs["validation_loss"], rel=1e-5)


def test_only_the_first_rank_speaks(sharded_run: Path) -> None:
    out = (sharded_run.parent / "output.txt").read_text()
    assert out.count("\nstep ") == 8 and out.count("done: 8 steps") == 1
    assert "engine shardwright (strategy zero3, layout per_parameter, memory dynamic) on 2 ranks" in out
    assert sorted(path.name for path in (sharded_run / "logs").glob("*/*.log")) == [
        "rank-0.log",
        "rank-1.log",
    ]
    assert not any(path.read_text() for path in (sharded_run / "logs").glob("*/*"))  # nothing to complain of


def test_same_seed_same_losses_another_seed_others(tmp_path: Path, plain_run: Path) -> None:
    config = config_file(tmp_path)
    for seed in (0, 1):
        assert train_here(config, "--run.dir", tmp_path / f"{seed}", "--run.seed", str(seed)) == 0
    assert losses(tmp_path / "0") == losses(plain_run)
    assert losses(tmp_path / "1") != losses(plain_run)


def test_non_finite_loss_stops_the_run_and_keeps_what_was_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_file(tmp_path)
    arguments = ("--run.dir", tmp_path / "infinite", "--optimizer.lr", "1e38", "--checkpoint.every", "1")
    assert train_here(config, *arguments) == 1
    assert capsys.readouterr().err.startswith("error: step 1: expected finite weights")
    assert not steps_in(tmp_path / "infinite" / "checkpoints")
    arguments = ("--run.dir", tmp_path / "run", "--optimizer.lr", "1e22", "--checkpoint.every", "1")
    assert train_here(config, *arguments) == 1
    error = capsys.readouterr().err
    done = steps_in(tmp_path / "run" / "checkpoints")[0]
    assert error.startswith(f"error: step {done + 1}: expected a finite loss")
    assert len(records(tmp_path / "run")) == done
    assert run_record(tmp_path / "run")["status"] == "failed"


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_learning_rate_rises_and_falls_to_its_ends(schedule: str) -> None:
    settings = OptimizerConfig.model_validate(
        {"lr": 2.0, "warmup_steps": 4, "schedule": schedule, "min_lr_ratio": 0.1}
    )
    rates = [settings.rate(step, 24) for step in range(24)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0 and rates == sorted(rates[:4]) + sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(2.0 if schedule == "constant" else 0.2)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_a_single_step_has_the_peak_rate_or_its_part_of_the_warm_up(schedule: str) -> None:
    rates = [
        OptimizerConfig.model_validate({"lr": 2.0, "warmup_steps": warmup, "schedule": schedule}).rate(0, 1)
        for warmup in (0, 1, 5)
    ]
    assert rates == [2.0, 2.0, 0.4]


def test_the_page_has_the_formula_of_the_rate(plain_run: Path) -> None:
    """docs/reading_runs.md, against the optimizer's rates and those of a run."""
    page = (Path(__file__).parents[3] / "docs" / "reading_runs.md").read_text()
    code = page[page.index("from math import cos, pi") :].partition("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    for schedule in ("cosine", "linear", "constant"):
        for steps, warmup in ((24, 4), (3, 5), (5, 4), (1, 0)):
            settings = OptimizerConfig.model_validate(
                {"lr": 2.0, "warmup_steps": warmup, "schedule": schedule, "min_lr_ratio": 0.1}
            )
            for n in range(1, steps + 1):
                expected = pytest.approx(settings.rate(n - 1, steps))
                assert names["rate"](n, steps, warmup, 2.0, 0.1, schedule) == expected
    own = run_config(plain_run).optimizer
    for record in records(plain_run):
        values = (own.warmup_steps, own.lr, own.min_lr_ratio, own.schedule)
        assert names["rate"](record["step"], 8, *values) == pytest.approx(record["lr"])


def test_the_page_reads_the_batches_of_a_run(
    plain_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/data.md: the batch of a step gives the loss of that step."""
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    code = page[page.index("## Batches in Python") :].partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(code.replace("runs/NAME-TIME", str(plain_run)).replace("step, size = 3", "step, size = 7"), names)
    batch, config = names["batch"], names["config"]
    assert batch.inputs.shape == (8, 32) and capsys.readouterr().out.startswith("torch.Size([8, 32])")
    model = build_model(config.model, 256)
    load_weights(plain_run / "checkpoints" / "step-6", model)
    loss = F.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten())
    assert float(loss.detach()) == pytest.approx(losses(plain_run)[6], rel=1e-5)


def test_tensorboard_shows_what_was_recorded(plain_run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(plain_run / "tensorboard"))
    events.Reload()

    def shown(name: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in events.Scalars(name)]

    def recorded(name: str) -> list[tuple[int, float]]:
        # Event files hold float32.
        values = [(record["step"], record[name]) for record in records(plain_run)]
        return [(step, torch.tensor(value).item()) for step, value in values if value is not None]

    assert shown("loss/train") == recorded("loss")
    assert shown("loss/validation") == recorded("validation_loss")
    assert shown("step/lr") == recorded("lr")
    assert shown("step/tokens_per_second") == recorded("tokens_per_second")
    assert "step/mfu" not in events.Tags()["scalars"]  # not known for a CPU


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A30", 165e12),
        ("NVIDIA RTX A3000 Laptop GPU", None),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("AMD Instinct MI300X", 1307e12),
        ("cpu", None),
    ],
)
def test_peak_is_found_by_whole_words_and_only_for_bfloat16(device: str, peak: float | None) -> None:
    assert peak_flops(device, "bfloat16") == peak
    assert peak_flops(device, "float32") is None
