"""The programs of examples/ports before and after a port to Shardwright print equal losses, and say who sharded."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.integrations.migration_pages import PAGES, ROOT, changes
from tests.support import multirank

FOLDER = ROOT / "examples" / "ports"
OURS = "sharded by shardwright"
#: By port: the packages that it needs, and how far losses may be apart. 0: the same digits, since both engines reduce
#: shards alike. Else DDP or FSDP1 was replaced, whose sums over ranks and whose norm add up in another order.
PORTS = {
    "accelerate": (["accelerate", "transformers"], 0.0),
    "accelerate_ddp": (["accelerate", "transformers"], 1e-5),
    "ddp": ([], 1e-5),
    "deepspeed": (["deepspeed"], 1e-5),
    "distributed_config": (["transformers"], 0.0),
    "fabric": (["lightning"], 1e-5),
    "fsdp1": ([], 1e-5),
    "fsdp2": ([], 0.0),
    "hf_trainer": (["accelerate", "transformers"], 1e-5),
    "torchtitan": ([], 0.0),
    "trl": (["trl", "datasets"], 1e-5),
}


PLAIN = [
    port for port, (packages, _) in PORTS.items() if not packages
]  #: run in the pool, which has no framework


def test_every_program_is_tested() -> None:
    programs = {path.stem for path in FOLDER.glob("*.py")} - {"tiny"}
    assert programs == {f"{port}_{when}" for port in PORTS for when in ("before", "after")}


def test_pages_show_the_ports() -> None:
    pages = {page.stem: page.read_text() for page in (ROOT / "docs" / "migration").glob("*.md")}
    for port, page in PAGES.items():
        assert f"```diff\n{changes(port)}\n```" in pages[page], f"docs/migration/{page}.md: {changes(port)}"
    assert PAGES.keys() == PORTS.keys()
    assert all(f"({page}.md)" in pages["README"] for page in pages.keys() - {"README"})


def source_of(program: str) -> str:
    return (FOLDER / f"{program}.py").read_text()


def losses(lines: list[str]) -> list[float]:
    return [float(line.split()[-1]) for line in lines if line.startswith("step")]


def check_equal(before: list[str], after: list[str], tolerance: float) -> None:
    expected, found = losses(before), losses(after)
    assert len(found) == len(expected) >= 6
    apart = max(abs(one - other) for one, other in zip(found, expected, strict=True))
    assert apart <= tolerance, (before, after)
    assert found[-1] < found[0]


@functools.cache
def run(program: Path, *through: str) -> tuple[list[str], str]:
    """The lines of a program on two ranks, and its messages."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, *through, str(program)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = done.stdout.splitlines()
    return [line for line in lines if line.startswith(("sharded", "not sharded", "step"))], done.stderr


def need(packages: list[str]) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")


def printed(source: str, name: str) -> list[str]:
    """The lines of a program on this rank of the pool, whose process group stays."""
    output = io.StringIO()
    begin, end = dist.init_process_group, dist.destroy_process_group
    sys.path.insert(0, str(FOLDER))
    dist.init_process_group = dist.destroy_process_group = lambda *_: None  # type: ignore[assignment]
    try:
        with contextlib.redirect_stdout(output):
            exec(compile(source, name, "exec"), {"__name__": "__main__"})
    finally:
        dist.init_process_group, dist.destroy_process_group = begin, end
        sys.path.remove(str(FOLDER))
        sys.modules.pop("tiny", None)
    return output.getvalue().splitlines()


@pytest.mark.extensive("a program of each library", but=("ddp-*", "torchtitan-*"))
@multirank(2)
@pytest.mark.parametrize("port", PLAIN)
def test_losses_of_plain_loops_stay(rank: int, world_size: int, port: str) -> None:
    before, after = (printed(source_of(f"{port}_{when}"), port) for when in ("before", "after"))
    if rank == 0:
        assert after[0].startswith(OURS)
        check_equal(before, after, PORTS[port][1])


@pytest.mark.extensive("frameworks in processes of their own")
@pytest.mark.parametrize("port", ["fsdp2", *(port for port in PORTS if port not in PLAIN)])
def test_losses_of_programs_stay(port: str) -> None:
    packages, tolerance = PORTS[port]
    need(packages)
    before, _ = run(FOLDER / f"{port}_before.py")
    after, messages = run(FOLDER / f"{port}_after.py")
    check_equal(before, after, tolerance)
    (engine,) = (line for line in after if "sharded" in line)
    if port == "accelerate":  # on the CPU it takes DDP, whatever its plugin says
        assert engine.startswith("sharded by torch's DDP")
        wraps = "torch's DistributedDataParallel wraps Qwen3ForCausalLM"
        assert messages.count(wraps) == 2  # one on each rank
    else:
        assert engine.startswith(OURS)
        assert "DistributedDataParallel wraps" not in messages


@pytest.mark.extensive("frameworks in processes of their own")
def test_the_plugin_of_accelerate_shards_as_on_a_gpu() -> None:
    need(PORTS["accelerate"][0])
    through = str(Path(__file__).with_name("accelerate_on_cpu.py"))
    before, _ = run(FOLDER / "accelerate_before.py", through)
    after, messages = run(FOLDER / "accelerate_after.py", through)
    check_equal(before, after, 0.0)
    assert after[0].startswith(OURS) and "DistributedDataParallel wraps" not in messages


@pytest.mark.extensive("frameworks in processes of their own")
def test_fabric_runs_the_lightning_module_of_its_page(tmp_path: Path) -> None:
    need(PORTS["fabric"][0])
    page = (ROOT / "docs" / "migration" / "fabric.md").read_text()
    (example,) = (
        each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "LightningModule" in each
    )
    program = tmp_path / "module.py"
    program.write_text(example.replace('f"epoch', 'f"step'))
    lines, _ = run(program)
    assert lines[0].startswith(OURS)
    assert len(losses(lines)) == 3 and losses(lines)[-1] < losses(lines)[0]


#: By port: what takes the place of lines of the program after it, so that no rank has all logits.
IN_CHUNKS = {
    "hf_trainer": {"say(sw": "sw.chunk_causal_lm_loss(model)\nsay(sw"},
    "fabric": {
        "for step": 'model.mark_forward_method("hidden")\n\nfor step',
        "loss = loss_of(model(inputs), targets)": (
            "loss_sum, _ = sw.chunked_cross_entropy(model.hidden(inputs), model.output, targets)\n"
            "    loss = loss_sum / targets.numel()"
        ),
    },
    "torchtitan": {
        "for step": 'sw.register_fsdp_forward_method(model, "hidden")\n\nfor step',
        "logits = model(inputs).float().flatten(0, 1)\n": "hidden = model.hidden(inputs)\n",
        'loss = nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")': (
            "loss, _ = sw.chunked_cross_entropy(hidden, model.output, targets)"
        ),
    },
}


def in_chunks(port: str) -> str:
    source = source_of(f"{port}_after")
    for line, lines in IN_CHUNKS[port].items():
        assert source.count(line) == 1
        source = source.replace(line, lines)
    return source


@multirank(2)
def test_losses_in_chunks_of_a_plain_loop_stay(rank: int, world_size: int) -> None:
    before, after = (
        printed(source_of("torchtitan_after"), "whole"),
        printed(in_chunks("torchtitan"), "chunks"),
    )
    if rank == 0:
        # The gradient of the head is a sum over chunks, and each step rounds the weights to bfloat16.
        check_equal(before, after, 1e-2)


@pytest.mark.extensive("frameworks in processes of their own")
@pytest.mark.parametrize("port", ["fabric", "hf_trainer"])
def test_losses_in_chunks_stay(port: str, tmp_path: Path) -> None:
    need(PORTS[port][0])
    (tmp_path / "tiny.py").write_text(source_of("tiny"))
    program = tmp_path / "chunked.py"
    program.write_text(in_chunks(port))
    before, _ = run(FOLDER / f"{port}_after.py")
    after, _ = run(program)
    check_equal(before, after, 1e-5)  # the gradient of the head is a sum over chunks
