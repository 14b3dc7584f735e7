"""`shardwright plan --fit` and `plan A.toml B.toml`: settings that are tried, and what is said of them."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shardwright import cli
from shardwright.planner import STEP, Alloc, Free, Kernel, Owner, Phase, Program, Rules, known_devices
from shardwright.planner.allocator import GIB
from shardwright.train.commands.plans import fit as fitting, grids, plan as planning
from shardwright.train.commands.plans.planned_job import PlannedJob
from shardwright.train.config import Config, load_config
from shardwright.train.errors import UserError
from shardwright.train.parallel.checks import check_division
from tests.train.report.page.kit import read_page

EXAMPLES = Path(__file__).parents[3] / "examples"
DEBUG = str(EXAMPLES / "llama_debug.toml")
SLOW: dict[str, int] = {}  #: by how much collectives are slower without tensor parallelism
LOGITS: dict[str, float] = {}  #: GiB of a step's logits, unless the loss is computed in chunks
#: By kind of checkpoints the part of the activations that stays, and the work of a step.
SIZES = {"none": 1, "ops": 0.5, "half_ops": 0.3, "full": 0.25}
WORK = {"none": 3, "ops": 3.4, "half_ops": 3.6, "full": 4}
#: Options with which neither context parallelism nor offload of activations is tried.
WITHOUT = "--parallel.context", "1", "--activations.offload", "none"


def config(*keys: tuple[str, str], ranks: int = 8) -> Config:
    return load_config(EXAMPLES / "llama_8b.toml", keys, ranks=ranks)


def program(config: Config, ranks: int, caches: bool = True, kind: str = "cuda") -> Program:
    """8 GiB for each sample of a micro-batch, a fourth of it with checkpoints, which take a third more time. Tensor
    parallelism divides it, and collectives then take time; context parallelism, too. Offload of activations leaves a
    tenth of them, offload of the state a part of the weights."""
    train, way = config.train, config.activations.checkpoint
    if way == "ops" and train.compile != "none":
        raise UserError("these do not go together")
    parallel = config.parallel
    nbytes = int(8 * GIB * train.micro_batch * SIZES[way] / parallel.tensor)
    nbytes = int(nbytes / parallel.context * (0.1 if config.activations.offload != "none" else 1))
    nbytes += int(GIB * LOGITS.get("gib", 0)) if not train.loss_chunks else 0
    check_division(config, ranks)
    gathers = 1 if parallel.strategy == "zero2" else 2 if parallel.reshard_after_forward == "never" else 3
    whole = 20 * GIB if config.parallel.strategy == "zero2" else 5 * GIB
    whole = int(whole * {"none": 1, "optimizer": 0.5, "cpu": 0.25}[parallel.offload])
    times = {"none": 0, "optimizer": 1, "cpu": 3}[parallel.offload] + (config.activations.offload != "none")
    copies = [Kernel("pcie.copy_", "compute", 64 * GIB, (), "uint8")] * times
    gathers *= 4 * SLOW["gathers"] if SLOW and parallel.tensor == 1 else parallel.tensor
    gathers *= 2 * parallel.context - 1
    count = train.global_batch // ranks
    work = int(1e4 * WORK[way] * (0.8 if train.compile != "none" else 1))
    work += work // 50 if train.loss_chunks else 0
    product = Kernel("mm", "compute", 100, ((4096, 4096), (4096, work * count)), "bfloat16")
    gather = Kernel("c10d.allgather", "compute", 1 << 28, (), "uint8", (ranks, 1))
    events = [
        Alloc(0, whole, "compute", 0),
        *(
            [
                Phase(STEP), Phase("forward"), *[gather] * (gathers * count // train.micro_batch),
                *copies, Alloc(1 + i, nbytes, "compute", 1), product, Free(1 + i),
            ]
            for i in range(2)
        ),
    ]  # fmt: skip
    flat = [events[0], *[event for step in events[1:] for event in step]]
    owners = [
        Owner("parameters", "w", "", ""),
        Owner("activations", "layers.0", "mm bfloat16 [2]", "model.py:3"),
    ]
    return Program(flat, owners, count * train.seq_len, 1e12)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "program_of", program)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """`shardwright plan`: status, stdout, and stderr without the progress, which only slow plans show."""
    status = cli.main(["plan", *arguments])
    out, err = capsys.readouterr()
    return status, out, "\n".join(line for line in err.split("\n") if not line.startswith("planning: "))


def test_the_settings_that_are_tried() -> None:
    found = list(grids.axes_of(config(("train.global_batch", "96")), 8, 8, {}))
    assert [grid[0].values for grid in found] == [
        ((("train.compile", way),),) for way in ("inductor", "none")
    ]
    strategies, sizes = found[0][1].values, found[0][2].values
    assert [dict(each)["parallel.strategy"] for each in strategies] == ["zero2", "zero3", "zero3"]
    assert [dict(each)["train.micro_batch"] for each in sizes] == ["12", "4", "2", "1"]
    for keys in strategies:  # each is a configuration
        config(*keys)


@pytest.mark.parametrize("ranks", [16, 64, 256])
def test_on_several_nodes_replicas_are_whole_nodes(ranks: int) -> None:
    given = config(("train.global_batch", str(ranks)), ranks=ranks)
    strategies = next(iter(grids.axes_of(given, ranks, 8, {})))[1].values
    replicas = [int(dict(each)["parallel.replicas"]) for each in strategies]
    assert (
        replicas[0] == ranks // 8 and replicas[-2:] == [1, 1] and replicas == sorted(replicas, reverse=True)
    )
    for keys in strategies:
        config(("train.global_batch", str(ranks)), *keys, ranks=ranks)


def test_keys_of_the_command_line_stay() -> None:
    given = {"train.compile": "none", "train.micro_batch": "2"}
    (grid,) = grids.axes_of(config(*given.items()), 8, 8, given)
    assert [axis.name for axis in grid] == ["compile", "strategy", "checkpoint"] and len(grid[0].values) == 1


def test_another_engine_keeps_its_strategy() -> None:
    assert next(iter(grids.axes_of(config(("parallel.engine", "fsdp2")), 8, 8, {})))[1].values == ((),)


def test_the_fastest_settings_are_lines_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(
        capsys, str(EXAMPLES / "llama_8b.toml"), "--on", "8xh100", "--fit", "--processes", "1"
    )
    assert (status, err) == (0, "")
    head, now, best, *rest = out.splitlines()
    assert now.startswith("now ") and head.startswith("fit ") and " of them fit NVIDIA H100" in head
    assert "tokens/s on each device, MFU " in best
    smaller = next(i for i, line in enumerate(rest) if line.startswith("smaller"))
    values = tomllib.loads("\n".join(line.strip() for line in rest[:smaller]))
    # 20 + 32 GiB: four samples at once, compiled, nothing computed twice.
    assert values == {"train": {"compile": "inductor", "micro_batch": 4}, "parallel": {"strategy": "zero2"}}
    assert "a step more: " in rest[smaller + 1]


def test_a_half_of_the_products_where_all_of_them_do_not_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The runtime takes 2.8 GiB. The job needs 9 GiB with "ops" and 7.4 with "half_ops"."""
    keys = "--parallel.tensor", "1", "--parallel.offload", "none", *WITHOUT, "--parallel.strategy", "zero3"
    status, out = fit_on(capsys, tmp_path, 10.9, *keys, "--train.compile", "none")
    assert status == 0 and 'checkpoint = "half_ops"' in out.partition("smaller")[0]


def test_settings_with_room_come_before_those_that_barely_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The runtime takes 2.8 GiB. With zero3 the job needs 13 GiB, with two samples at once 21."""
    keys = "--parallel.tensor", "1", "--parallel.offload", "none", *WITHOUT
    keys = (*keys, "--activations.checkpoint", "none", "--parallel.strategy", "zero3")
    status, out = fit_on(capsys, tmp_path, 24.2, *keys)
    best = out.partition("smaller")[0]
    assert status == 0 and "13.00 GiB reserved; as a file's lines" in best and "micro_batch" not in best
    assert "of them fit own and" not in best and " BARELY fit\n" in best

    status, out = fit_on(capsys, tmp_path, 16.0, *keys)
    assert status == 0 and ", 0 of them fit " in out
    assert "13.00 GiB reserved, which BARELY fit; as a file's lines" in out.partition("smaller")[0]
    status, out = fit_on(capsys, tmp_path, 16.0, *keys, "--json")
    best = json.loads(out)["best"]
    assert best["barely"] and best["reserved_bytes"] == 13 * GIB


def test_settings_that_need_more_than_the_device_never_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator would have to empty its cache, of blocks that are too small for the next ones."""

    def cached(config: Config, *arguments: object) -> Program:
        whole = program(config, *arguments)  # type: ignore[arg-type]
        events = list(whole.events)
        events[1:1] = [Alloc(90, 9 * GIB, "compute", 1), Free(90)]
        events += [Alloc(91, 10 * GIB, "compute", 1), Free(91)]
        return Program(events, whole.owners, whole.tokens, whole.model_flops)

    monkeypatch.setattr(planning, "program_of", cached)
    keys = ["--parallel.tensor", "1", "--parallel.offload", "none", *WITHOUT]
    keys += ["--activations.checkpoint", "full", "--parallel.strategy", "zero3", "--train.micro_batch", "1"]
    (tmp_path / "small.toml").write_text('like = "h100"\ngib = 20\n')
    job = [str(EXAMPLES / "llama_8b.toml"), "--on", f"8x{tmp_path}/small.toml", *keys]
    status, out, _ = run(capsys, *job, "--no-edits")
    assert status == 0 and "BARELY" in out and "GiB are missing" in out and "empties its cache" in out
    status, out, _ = run(capsys, *job, "--fit", "--processes", "1")
    assert status == 3 and "best     none; " in out


def test_a_host_without_room_is_no_place_for_activations(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of offload needs 40 GiB of the host here, for each of eight ranks."""

    def on_host(config: Config, *arguments: object) -> Program:
        whole = program(config, *arguments)  # type: ignore[arg-type]
        if config.activations.offload == "none" and config.parallel.offload == "none":
            return whole
        group = "activations" if config.activations.offload != "none" else "optimizer"
        events = [*whole.events, Alloc(90, 40 * GIB, "host", 2)]
        return Program(events, [*whole.owners, Owner(group, "", "", "")], whole.tokens, whole.model_flops)

    monkeypatch.setattr(planning, "program_of", on_host)
    device = tmp_path / "small.toml"
    job = [str(EXAMPLES / "llama_8b.toml"), "--on", f"8x{device}", "--parallel.tensor", "1"]
    search = [*job, "--fit", "--processes", "1", "--parallel.context", "1"]
    for host, status, word in (
        (2048, 0, "offload"),
        (256, 3, "settings with offload need more memory of the host than it has"),
    ):
        device.write_text(f'like = "h100"\ngib = 9.2\nhost_gib = {host}\n')
        assert run(capsys, *search)[0] == status
        assert word in run(capsys, *search)[1]
    for key, way in (("activations.offload", "none"), ("parallel.offload", "none")):
        device.write_text('like = "h100"\nhost_gib = 256\n')
        value = "blocks" if key == "activations.offload" else "cpu"
        status, out, _ = run(capsys, *job, f"--{key}", value)
        assert status == 3 and "GiB of the host's memory are missing" in out
        edits = out.partition("edits ")[2]
        assert f"--{key} {way} " in edits and ", fits, " in edits
        device.write_text('like = "h100"\ngib = 4\nhost_gib = 256\n')
        edits = run(capsys, *job)[1].partition("edits ")[2]
        assert "--activations.offload" not in edits or "does not fit into the host's memory" in edits


def test_an_edit_that_fails_is_a_row(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(config: Config, *arguments: object) -> Program:
        if config.activations.checkpoint == "ops":
            raise RuntimeError("out of\nluck")
        return program(config, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(planning, "program_of", failing)
    (tmp_path / "small.toml").write_text('like = "h100"\ngib = 4.0\n')
    job = [str(EXAMPLES / "llama_8b.toml"), "--on", f"8x{tmp_path}/small.toml"]
    status, out, _ = run(capsys, *job)
    *_, row, last = out.splitlines()
    assert status == 3 and row.split() == [
        "--activations.checkpoint", "ops", "has", "no", "plan:", "RuntimeError:", "out", "of", "luck"
    ]  # fmt: skip
    assert "--fit looks for settings that fit" in last  # since no edit is enough
    status, out, _ = run(capsys, *job, "--json")
    figures = json.loads(out)
    assert figures["failed_edits"] == {"--activations.checkpoint ops": "RuntimeError: out of luck"}
    assert figures["edits"]


def test_a_terminal_shows_progress_while_plans_are_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stderr alone, and nothing of it stays."""
    (tmp_path / "small.toml").write_text('like = "h100"\ngib = 4.0\n')
    job = [str(EXAMPLES / "llama_8b.toml"), "--on", f"8x{tmp_path}/small.toml"]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _, out, err = run(capsys, *job)
    lines = err.split("\r")[1:]
    assert "edits " in out and "\r" not in out and lines[-1] == "\033[K"
    assert lines[0] == f"edit 1 of {len(lines) - 1}: --activations.checkpoint ops\033[K"
    _, out, err = run(capsys, *job, "--fit", "--processes", "1")
    lines = err.split("\r")[1:]
    assert (
        "\r" not in out
        and lines[-1] == "\033[K"
        and re.match(r"planning: 1 of about 20 plans, \d+ s; the last one ", lines[0])
    )


def test_heads_name_another_engine(capsys: pytest.CaptureFixture[str]) -> None:
    job = str(EXAMPLES / "llama_8b.toml"), "--on", "8xh100", "--no-edits"
    assert "NVIDIA H100 80GB HBM3, zero3, bfloat16" in run(capsys, *job)[1].splitlines()[1]
    lines = run(capsys, *job, "--parallel.engine", "fsdp2")[1].splitlines()
    assert "NVIDIA H100 80GB HBM3, engine fsdp2, bfloat16" in lines[1]


def test_a_model_alone_has_options_in_place_of_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With the values that are assumed, and that are not searched."""
    values = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 512}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**values, **sizes, "vocab_size": 256}))
    status, out, err = run(capsys, f"hf:{tmp_path}", "--on", "8xh100", "--fit", "--processes", "1")
    assert (status, err) == (0, "")
    best = next(line for line in out.splitlines() if line.startswith("best"))
    assert "GiB reserved: --train.compile inductor" in best
    assert "assumed  what config.json does not say" in out and "--train.seq_len 512" in out
    assert "--train.micro_batch" not in out.partition("assumed")[2]
    assert "A larger --train.global_batch allows larger micro-batches" in out


def test_figures_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(
        capsys, str(EXAMPLES / "llama_8b.toml"), "--on", "8xh100", "--fit", "--processes", "1", "--json"
    )
    values = json.loads(out)
    fastest = min((each for each in values["plans"] if each["fits"]), key=lambda each: each["step_seconds"])
    assert status == 0 and values["best"] == fastest and values["now"]["keys"] == {}


def test_a_page_has_all_plans_by_dimension(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = [str(EXAMPLES / "llama_8b.toml"), "--on", "8xh100", "--fit", "--processes", "1"]
    file = tmp_path / "fit.html"
    status, out, _ = run(capsys, *job, "--html", str(file))
    assert status == 0 and out.endswith(f"wrote {file}\n")
    plan = read_page(file.read_text())[2]["plan"]
    grid = plan["grid"]
    values = {each["name"]: each["values"] for each in grid["dimensions"]}
    assert values["train.micro_batch"] == sorted(values["train.micro_batch"], key=int)
    assert values["activations.checkpoint"] == ["none", "half_ops"]
    assert len({tuple(each["at"]) for each in grid["plans"]}) == len(grid["plans"]) > 5
    best = min((each for each in grid["plans"] if each["fits"]), key=lambda each: each["step_seconds"])
    assert best["reserved_bytes"] == plan["unlimited_reserved_bytes"] and grid["shown"].startswith(
        "the fastest"
    )
    for each in grid["plans"]:
        assert sum(loss["seconds"] for loss in each["losses"]) == pytest.approx(each["step_seconds"])


def test_results_are_printed_before_the_page_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that cannot be written loses no search, and a place that cannot have a file begins none."""
    job = [str(EXAMPLES / "llama_8b.toml"), "--on", "8xh100", "--fit", "--processes", "1"]
    searches: list[PlannedJob] = []
    search = fitting.search

    def counting(job: PlannedJob, *settings: Any) -> fitting.Search:
        searches.append(job)
        return search(job, *settings)

    def failing(file: Path, text: str, advice: str) -> None:
        raise UserError(f"{file}: cannot write: No space left on device")

    monkeypatch.setattr(fitting, "search", counting)
    monkeypatch.setattr(fitting, "write_page", failing)
    (tmp_path / "folder").mkdir()
    for place, message in (("none/a.html", "found no folder"), ("folder", "found a folder")):
        status, out, err = run(capsys, *job, "--html", str(tmp_path / place))
        assert (status, out, searches) == (2, "", []) and message in err
    status, out, err = run(capsys, *job, "--html", str(tmp_path / "a.html"))
    assert status == 2 and "\nbest     " in out and "wrote" not in out and "No space left" in err
    status, out, _ = run(capsys, *job, "--json", "--html", str(tmp_path / "a.html"))
    assert status == 2 and json.loads(out)["best"]


def test_the_help_names_all_settings_that_a_search_tries(capsys: pytest.CaptureFixture[str]) -> None:
    words = " ".join(run(capsys, "--help")[1].split())
    assert "loss chunks, if needed tensor, expert and context parallelism or offload" in words


def fit_on(capsys: pytest.CaptureFixture[str], tmp_path: Path, gib: float, *keys: str) -> tuple[int, str]:
    (tmp_path / "small.toml").write_text(f'like = "h100"\ngib = {gib}\n')
    job = [str(EXAMPLES / "llama_8b.toml"), "--on", f"8x{tmp_path}/small.toml"]
    status, out, _ = run(capsys, *job, "--fit", "--processes", "1", *keys)
    return status, out


def test_a_plan_that_fails_ends_no_search(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(config: Config, *arguments: object) -> Program:
        if config.activations.checkpoint == "full":
            raise RuntimeError("out of\nluck")
        return program(config, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(planning, "program_of", failing)
    keys = "--parallel.tensor", "1", "--parallel.offload", "none"
    status, out = fit_on(capsys, tmp_path, 12.0, *keys)
    assert status == 0 and "\nfailed   --" in out and "--activations.checkpoint full" in out
    assert out.splitlines()[-1].endswith(": RuntimeError: out of luck")


def test_nothing_fits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out = fit_on(capsys, tmp_path, 4.0)
    assert status == 3 and "best     none; the smallest one needs 1.50 GiB: " in out
    assert "--parallel.offload cpu --parallel.tensor 8" in out and out.startswith("fit      25 plans ")
    keys = "--parallel.offload", "none", "--parallel.tensor", "1", *WITHOUT
    status, out = fit_on(capsys, tmp_path, 4.0, *keys)
    assert status == 3 and "best     none; the smallest one needs 7.00 GiB: " in out


def test_tensor_parallelism_and_then_offload_if_nothing_fits_without(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The runtime takes 2.8 GiB. Without offload 5 GiB stay, with the optimizer on the host 2.5."""
    status, out = fit_on(capsys, tmp_path, 9.2)
    best = out.partition("smaller")[0]
    assert status == 0 and "tensor = 2" in best and "offload" not in best
    status, out = fit_on(capsys, tmp_path, 9.2, "--parallel.tensor", "1", *WITHOUT)
    assert status == 0 and 'offload = "optimizer"' in out and "tensor" not in out
    status, out = fit_on(capsys, tmp_path, 6.8, *WITHOUT)
    assert status == 0 and 'offload = "optimizer"' in out and "tensor = 2" in out


def test_tensor_parallelism_if_collectives_are_slow(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "tensor" not in fit_on(capsys, tmp_path, 79)[1]
    monkeypatch.setitem(SLOW, "gathers", 4)
    assert "tensor = 2" in fit_on(capsys, tmp_path, 79)[1]


def test_further_settings() -> None:
    figures = known_devices()["h100"].figures
    assert figures is not None
    (experts, tensor), (context,), last = grids.further_settings(config(), 12, figures, {})
    assert [dict(each) for each in tensor] == [{"parallel.tensor": "2"}, {"parallel.tensor": "4"}]
    assert [dict(each) for each in context] == [{"parallel.context": "2"}, {"parallel.context": "4"}]
    activations = {"activations.offload": "inputs", "activations.checkpoint": "full"}
    assert list(map(dict, last)) == [
        activations, {"parallel.offload": "optimizer"}, {"parallel.offload": "cpu"}
    ]  # fmt: skip
    given = {"parallel.tensor": "2", "parallel.context": "1", "parallel.offload": "none"}
    assert grids.further_settings(config(), 12, figures, given)[:2] == ([experts], [])
    given |= {"activations.checkpoint": "full"}
    assert not grids.further_settings(config(), 12, figures, given)[2]
    of_torch = grids.further_settings(config(("parallel.engine", "fsdp2")), 8, figures, {})
    assert [values[0] for values in of_torch[0]] == [(("parallel.tensor", "2"),)]
    assert list(map(dict, of_torch[2])) == [activations]


def test_chunks_of_the_loss_where_logits_are_large(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "loss_chunks" not in fit_on(capsys, tmp_path, 79)[1]
    monkeypatch.setitem(LOGITS, "gib", 30)
    assert 'loss_chunks = "auto"' in fit_on(capsys, tmp_path, 79)[1].partition("smaller")[0]
    assert "loss_chunks" not in fit_on(capsys, tmp_path, 79, "--train.loss_chunks", "0")[1]
    grid = next(grids.axes_of(config(), 8, 8, {"train.loss_chunks": "0"}, chunks=True))
    assert "loss chunks" not in [axis.name for axis in grid]


def test_context_parallelism_or_offload_of_activations_if_nothing_fits_without(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The runtime takes 2.8 GiB, the state 5 GiB, and activations 2 GiB."""
    keys = "--parallel.tensor", "1", "--parallel.offload", "none"
    status, out = fit_on(capsys, tmp_path, 9.2, *keys, "--parallel.context", "1")
    assert status == 0 and 'offload = "inputs"' in out and 'checkpoint = "full"' in out
    status, out = fit_on(capsys, tmp_path, 9.2, *keys, "--activations.offload", "none")
    assert status == 0 and "context = 2" in out


def test_settings_that_do_not_divide_the_model_have_no_grid() -> None:
    """8 groups of heads; experts, which no plan compiles if they are divided; keys of the file do not stay."""
    h100, rules = known_devices()["h100"], Rules()
    job = PlannedJob(str(EXAMPLES / "llama_8b.toml"), (("parallel.offload", "cpu"),), 16, h100, rules)
    assert grids.grids_of(job, job(), 16, False, (("parallel.tensor", "8"),))
    assert not grids.grids_of(job, job(), 16, False, (("parallel.tensor", "16"),))
    assert not grids.grids_of(job, job(), 16, False, (("parallel.expert", "2"),))
    job = PlannedJob(str(EXAMPLES / "hybrid_debug.toml"), (), 2, h100, rules)
    (axes,) = grids.grids_of(job, job(), 8, False, (("parallel.expert", "2"),))
    assert axes[0].values == ((("train.compile", "none"),),) and axes[-1].values == (
        (("parallel.expert", "2"),),
    )


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("gib = 80\n")
    text = 'gib = 80\n[speed]\ngeneration = "ada"\ntflops = { float32 = 1 }\n'
    (tmp_path / "alone.toml").write_text(
        text + "bandwidth = 1\nunits = 1\nnode = 1\nwithin = 1\nacross = 1\n"
    )
    for arguments, message in (
        (
            (DEBUG, "--on", f"2x{tmp_path}/alone.toml", "--fit", "--parallel.offload", "cpu"),
            "expected a device of which host_memory and pcie are known with parallel.offload 'cpu', found 'alone'",
        ),
        (
            (DEBUG, "--on", f"2x{tmp_path}/own.toml", "--fit", "--processes", "1"),
            "expected a device whose speed is known, found 'own'",
        ),
        (
            (DEBUG, DEBUG, "--on", "2xh100", "--fit", "--processes", "1"),
            "expected one job with --fit, found two",
        ),
        ((DEBUG, DEBUG, "--on", "2xh100", "--html", "a.html"), "expected one job with --html, found two"),
        ((DEBUG, "nowhere.toml", "--on", "2xh100"), "nowhere.toml"),
    ):
        status, out, err = run(capsys, *arguments)
        assert (status, out, err.count("\n")) == (2, "", 1) and message in err


def test_what_makes_the_difference(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = (EXAMPLES / "llama_8b.toml").read_text()
    (tmp_path / "b.toml").write_text(text + '\n[activations]\ncheckpoint = "full"\n')
    jobs = [str(EXAMPLES / "llama_8b.toml"), str(tmp_path / "b.toml")]
    status, out, err = run(capsys, *jobs, "--on", "8xh100")
    first, second, *rest = out.splitlines()
    assert (status, err) == (0, "") and first.startswith(jobs[0]) and second.startswith(jobs[1])
    assert rest[0] == "memory   the second one has"
    assert rest[1].split() == ["-6.00", "GiB", "activations,", "mm,", "model.py:3"]
    assert rest[2] == "time     the second one has" and "operations beyond the model's" in "".join(rest[3:])
    status, out, _ = run(capsys, jobs[0], jobs[0], "--on", "8xh100")
    assert "memory   no difference of 1% or more\ntime     no difference of 1% or more" in out
    values = json.loads(run(capsys, *jobs, "--on", "8xh100", "--json")[1])
    assert values["memory"] == [{"owner": "activations, mm, model.py:3", "bytes": -6 * GIB}]


def test_progress_is_also_lines_of_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fitting, "SECONDS", 0.0)
    for number in (1, 2):
        fitting._Shown()(f"plan {number}")
    assert capsys.readouterr().err == "plan 1\nplan 2\n"
    plans = fitting._Plans(lambda keys: None)
    assert plans.plan(())() is None and plans.words() == "planning: 1 of about 20 plans, 0 s"


def test_the_largest_micro_batch_with_all_else_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = [str(EXAMPLES / "llama_8b.toml"), "--on", "8xh100", "--processes", "1"]
    status, out, _ = run(capsys, *job, "--fit", "--only", "train.micro_batch", "--train.global_batch", "128")
    assert status == 0
    row = next(line for line in out.splitlines() if line.startswith("largest"))
    assert row.startswith("largest  train.micro_batch 8 fits, with ") and "; 16 needs " in row
    assert "compile" not in out and "strategy" not in out
    assert run(capsys, *job, "--only", "train.micro_batch")[0] == 2
    status, _, err = run(capsys, *job, "--fit", "--only", "train.micro_batches")
    assert status == 2 and "did you mean train.micro_batch?" in err
