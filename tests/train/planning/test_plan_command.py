"""`shardwright plan`: its verdict, its statuses, its JSON, and mistakes in one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from shardwright.cli import main
from shardwright.planner.verdict import CONTEXT, NCCL
from tests.train.report.page.kit import read_page, totals

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_a_verdict_in_lines_and_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(EXAMPLES / "llama_debug.toml")
    status = main(["plan", config, "--on", "2xh100"])
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    model, job, batch, *lines = out.splitlines()
    assert "parameters)" in model
    assert job.startswith("2 x NVIDIA H100 80GB HBM3, zero3, float32, adamw, ")
    assert batch == "global batch 8 in 1 micro-batch of 4 x 256 tokens on each rank"
    assert [line.split()[0] for line in lines if line[0] != " "] == [
        "fits?",
        "exact",
        "traced",
        "cache",
        "runtime",
        "peak",
        "phases",
        "speed",
        "time",
        "run",
    ]
    small = tmp_path / "small.toml"
    small.write_text("gib = 1\n")
    status = main(["plan", config, "--on", f"2x{small}", "--json"])
    figures = json.loads(capsys.readouterr().out)
    assert (status, figures["fits"]) == (3, "no")
    assert figures["left_bytes"] < 0 < figures["exact"]["optimizer"]
    assert "--activations.checkpoint full" in [edit["keys"] for edit in figures["edits"]]
    assert all(edit["reserved_bytes"] < figures["reserved_bytes"] for edit in figures["edits"])
    assert main(["plan", config, "--on", f"2x{small}"]) == 3
    last = capsys.readouterr().out.splitlines()[-len(figures["edits"]) :]  # no --fit: the speed is not known
    assert all(edit["keys"] in line for edit, line in zip(figures["edits"], last, strict=True))


def test_a_page_has_the_figures_of_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, file = str(EXAMPLES / "llama_debug.toml"), tmp_path / "plan.html"
    assert main(["plan", config, "--on", "2xh100", "--json", "--html", str(file)]) == 0
    figures = json.loads(capsys.readouterr().out)
    data = read_page(file.read_text())[2]
    assert {key: data["plan"][key] for key in figures} == figures
    assert max(totals(data["plan"]["step"])) == figures["phases"]["step"]["live_bytes"]
    shapes = {(each["group"], each["unit"], each["what"]) for each in data["plan"]["tensors"]}
    assert {
        ("optimizer", "layers.0.feed_forward.w1.weight", "float32 [224, 128]"),  # of 448 rows on two ranks
        ("gradients", "output.weight", "float32 [128, 128]"),
        ("slabs", "reduction of norm", "output.weight [256, 128], weight [128]"),
    } <= shapes
    phases = [name for name, _ in data["plan"]["step"]["phases"]]
    assert phases[1:] == ["forward", "backward", "before the optimizer", "optimizer", "after the optimizer"]
    status = main(["plan", config, "--on", "2xh100", "--html", str(tmp_path / "no" / "plan.html")])
    assert (status, capsys.readouterr().err.count("\n")) == (2, 1)


class Reader(nn.Module):
    """A model that asks its tokens."""

    def __init__(self, vocab_size: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.output = nn.Linear(16, vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        if (tokens == 0).any():
            x = x * 2
        return self.rest(x)

    def rest(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def test_a_model_that_reads_its_tokens_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "reader.toml"
    config.write_text(f"[model]\nkind = 'python'\ntarget = '{__name__}:Reader'\n[train]\nseq_len = 8\n")
    assert main(["plan", str(config), "--on", "2xh100"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert f"{Path(__file__).name}:" in error and "reads a value (item)" in error


class OnGpus(Reader):
    """A model that moves its tokens to a GPU."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.rest(self.tokens(tokens.cuda()))


def test_a_model_that_uses_a_gpu_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "reader.toml"
    config.write_text(f"[model]\nkind = 'python'\ntarget = '{__name__}:OnGpus'\n[train]\nseq_len = 8\n")
    assert main(["plan", str(config), "--on", "2xh100"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert f"{Path(__file__).name}:" in error and "a plan runs on the CPU in place of the GPU" in error


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_the_head_has_the_batches_and_a_device_without_a_number_is_one(
    micro_batches: int, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["--train.micro_batch", "2", "--train.global_batch", str(2 * micro_batches), "--no-edits"]
    heads = []
    for on in ("h100", "1xh100"):
        assert main(["plan", str(EXAMPLES / "llama_debug.toml"), "--on", on, *keys]) == 0
        heads.append(capsys.readouterr().out.splitlines()[1:3])
    words = "1 micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
    assert heads[0] == heads[1] and heads[0][0].startswith("1 x NVIDIA H100")
    assert heads[0][1] == f"global batch {2 * micro_batches} in {words} of 2 x 256 tokens on each rank"


#: Settings with something to save, and the changes that must be among the three best of small figures.
EDITED: dict[str, tuple[str, tuple[str, ...]]] = {
    "activations": ("--train.micro_batch 8 --train.global_batch 16", ("--activations.checkpoint full",)),
    "state": (
        "--parallel.strategy ddp --train.seq_len 16 --train.micro_batch 1 --train.global_batch 2",
        ("--parallel.strategy zero3",),
    ),
    "replicas": (
        "--parallel.strategy hsdp --parallel.replicas 2 --train.seq_len 16 --train.micro_batch 1 "
        "--train.global_batch 2",
        ("--parallel.strategy zero3 --parallel.replicas 1",),
    ),
}


@pytest.mark.extensive("plans of each", but=("activations",))
@pytest.mark.parametrize("name", EDITED)
def test_an_edit_that_is_pasted_gives_its_figure(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, best = EDITED[name]
    small = tmp_path / "small.toml"
    small.write_text("gib = 1\n")
    arguments = [str(EXAMPLES / "llama_debug.toml"), "--on", f"2x{small}", "--json", *words.split()]

    def figures(*more: str) -> dict[str, Any]:
        assert main(["plan", *arguments, *more]) in (0, 3)
        return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]

    first = figures()
    edits = {edit["keys"]: edit["reserved_bytes"] for edit in first["edits"]}
    assert 0 < len(edits) <= 3 and set(best) <= set(edits)
    for edit, nbytes in edits.items():
        if edit.startswith("PYTORCH"):
            monkeypatch.setenv(*edit.split("=", 1))
            assert figures("--no-edits")["reserved_bytes"] == nbytes
            monkeypatch.undo()
        else:
            assert figures("--no-edits", *edit.split())["reserved_bytes"] == nbytes
    assert figures("--no-edits")["edits"] == []


@pytest.mark.extensive("a search for each setting", but=("tensor",))
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        pytest.param(
            ("--parallel.offload", "none", "--parallel.context", "1"), {"parallel.tensor": "2"}, id="tensor"
        ),
        pytest.param(
            ("--parallel.offload", "none", "--parallel.tensor", "1"), {"parallel.context": "2"}, id="context"
        ),
        pytest.param(
            ("--parallel.tensor", "1", "--parallel.context", "1"), {"parallel.offload": "cpu"}, id="offload"
        ),
    ],
)
def test_a_search_with_further_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: tuple[str, ...], expected: dict[str, str]
) -> None:
    """62 MiB are reserved. With tensor parallelism it is 52, with the optimizer's state on the host 58, with all 56."""
    gib = sum(most for _, most in (CONTEXT, NCCL)) / 2**30 + 56 / 2**10
    (tmp_path / "small.toml").write_text(f'like = "h100"\ngib = {gib}\n')
    command = ["plan", str(EXAMPLES / "llama_debug.toml"), "--on", f"2x{tmp_path}/small.toml", "--fit"]
    command += ["--processes", "1", "--json", "--train.micro_batch", "1", "--parallel.strategy", "zero3"]
    command += ["--train.compile", "none", "--activations.checkpoint", "none", *keys]
    status = main(command)
    values = json.loads(capsys.readouterr().out)
    assert status == 0 and not values["now"]["fits"]
    best = values["best"]
    assert {key: best["keys"].get(key) for key in expected} == expected
    assert best["fits"] and best["reserved_bytes"] < values["now"]["reserved_bytes"]
    assert best["step_seconds"] > values["now"]["step_seconds"] and len(values["plans"]) <= 5


@pytest.mark.extensive("processes start, and import torch")
@pytest.mark.parametrize("stage", ["starting", "planning"])
def test_an_interrupted_search_ends_at_once_and_leaves_no_process(stage: str, tmp_path: Path) -> None:
    """Ctrl-C of a terminal goes to all processes of the group."""
    command = [sys.executable, "-m", "shardwright", "plan", str(EXAMPLES / "llama_8b.toml"), "--on", "8xh100"]
    process = subprocess.Popen(
        [*command, "--fit", "--processes", "2", "--no-cache"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not is_at_work(psutil.Process(process.pid), stage):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        begin = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
        seconds = time.monotonic() - begin
        assert (process.returncode, out) == (130, "")
        *progress, last = err.splitlines()
        assert last == "error: interrupted" and all(line.startswith("planning: ") for line in progress), err
        assert seconds < (1 if os.getloadavg()[0] < os.cpu_count() else 10)  # type: ignore[operator]
        deadline = time.monotonic() + 5
        while is_alive(process.pid):
            assert time.monotonic() < deadline, "a process is left"
            time.sleep(0.05)
    finally:
        if is_alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


def is_at_work(process: psutil.Process, stage: str) -> bool:
    """Whether a search imports PyTorch, or processes of it make plans."""
    if stage == "starting":
        return any("libtorch" in each.path for each in process.memory_maps())
    return any(sum(each.cpu_times()[:2]) >= 0.5 for each in process.children())


def is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_eight_billion_model_on_eight_gpus_is_planned_without_its_memory() -> None:
    code = (
        "import resource, sys; from shardwright.cli.program import main; status = main(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024); sys.exit(status)"
    )
    config = str(EXAMPLES / "llama_8b.toml")
    command = [sys.executable, "-c", code, "plan", config, "--on", "8xh100", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    text, _, mebibytes = done.stdout.rstrip().rpartition("\n")
    figures = json.loads(text)
    # Parameters, gradients and two moments in float32, an eighth of each; tables of positions are whole.
    eighth = 8_030_261_248 * 4 / 8
    assert figures["exact"]["gradients"] == pytest.approx(eighth, rel=1e-6)  # beside it is padding
    assert figures["exact"]["optimizer"] == pytest.approx(2 * eighth, rel=1e-5)
    assert eighth <= figures["exact"]["parameters"] < 1.03 * eighth
    assert int(mebibytes) < 2048


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "expected CONFIG.toml"),
        (["llama_debug"], "expected --on NxDEVICE"),
        (["llama_debug", "--on", "8xh10"], "did you mean 8xh100"),
        (["llama_debug", "--on", "3xh100"], "train.global_batch"),
        (["llama_debug", "--on", "2xh100", "--parallel.engine", "ddp"], "parallel.engine"),
        (["llama_debug", "--on", "2xh100", "--parallel.engine", "none"], "parallel.engine"),
        (["nowhere", "--on", "2xh100"], "nowhere"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [str(EXAMPLES / f"{each}.toml") if i == 0 else each for i, each in enumerate(arguments)]
    status = main(["plan", *names])
    out, error = capsys.readouterr()
    assert (status, out) == (2, "")
    assert len(error.splitlines()) == 1 and message in error
