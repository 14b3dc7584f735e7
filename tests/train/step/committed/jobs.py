"""Jobs whose losses are committed, and the environment in which any processor gives them the same bits.

python -m tests.train.step.committed.jobs     adds the losses of this version of torch to losses.json
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch

from shardwright.cli import main as shardwright
from tests.train.kit.jobs import losses

ROOT, MODULE = Path(__file__).parents[4], "tests.train.step.committed.jobs"
FILE = Path(__file__).with_name("losses.json")
VERSION = torch.__version__.partition("+")[0]
#: Values of ATEN_CPU_CAPABILITY. With both, the losses of a processor are those of others that have these instructions.
CAPABILITIES = ("default", "avx2")
PINNED = {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
HYBRID = (
    "--model.kind hybrid --model.pattern M*E- --model.n_layers 4 --model.head_dim 8 --model.mamba_heads 4 "
    "--model.mamba_head_dim 8 --model.mamba_state 8 --model.chunk_size 16 --model.n_experts 4 --model.expert_dim 16 "
    "--model.shared_dim 16 --model.mtp_pattern *"
).replace("--model.n_layers 4 ", "")
#: By name, the options of each.
JOBS: dict[str, str] = {
    "llama": "--model.n_layers 2",
    "hybrid": HYBRID,
    "bfloat16": "--model.n_layers 2 --parallel.param_dtype bfloat16 --activations.checkpoint full",
    "adapters": "--model.n_layers 2 --finetune.method lora --finetune.rank 4",
    "muon": "--model.n_layers 2 --optimizer.name muon --parallel.strategy zero2 --parallel.layout ragged",
    "long samples": "--model.n_layers 2 --parallel.context 2 --train.loss_chunks 3 --data.packing best_fit "
    "--activations.offload blocks",
}
COMMON = (
    "--run.device cpu --run.sample_tokens 0 --model.dim 32 --model.n_heads 4 --model.n_kv_heads 2 --model.ffn_dim 64 "
    "--model.max_seq_len 64 --train.steps 5 --train.seq_len 64 --train.global_batch 4 --train.micro_batch 2 "
    "--optimizer.warmup_steps 2 --validation.every 0 --checkpoint.every 0 --train.deterministic true"
)


def found(capability: str, folder: Path) -> dict[str, list[str]]:
    """By job, the losses on two ranks, all bits of them. The two processes of a capability run all jobs."""
    words = [f"word{n}" for n in range(50)]
    draw = random.Random(0)
    documents = [" ".join(draw.choices(words, k=draw.randint(5, 40))) for _ in range(200)]
    folder.mkdir(exist_ok=True)
    (folder / "data.jsonl").write_text(
        "".join(json.dumps({"text": document}) + "\n" for document in documents)
    )
    (folder / "job.toml").write_text("")
    ports = ",".join(map(str, free_ports(len(JOBS))))
    environment = {**os.environ, **PINNED, "ATEN_CPU_CAPABILITY": capability, "WORLD_SIZE": "2"}
    environment |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    processes = []
    for rank in ("0", "1"):
        with open(folder / f"{rank}.log", "wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", MODULE, str(folder), ports],
                    env=environment | {"RANK": rank, "LOCAL_RANK": rank}, stdout=log, stderr=log, cwd=ROOT,
                )
            )  # fmt: skip
    statuses = [process.wait(300) for process in processes]
    logs = [(folder / f"{rank}.log").read_text(errors="replace")[-3000:] for rank in (0, 1)]
    assert statuses == [0, 0], "\n".join(logs)
    return {name: [loss.hex() for loss in losses(folder / name)] for name in JOBS}


def free_ports(count: int) -> list[int]:
    """Ports of this host that nothing uses now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def run_as_rank(folder: Path, ports: list[str]) -> int:
    """Run all jobs as a rank of the environment."""
    for (name, options), port in zip(JOBS.items(), ports, strict=True):
        os.environ["MASTER_PORT"] = port
        keys = ["--data.source", str(folder / "data.jsonl"), "--run.dir", str(folder / name)]
        if status := shardwright(
            ["train", str(folder / "job.toml"), *COMMON.split(), *options.split(), *keys]
        ):
            return status
    return 0


def committed() -> dict[str, dict[str, dict[str, list[str]]]]:
    """By version of torch, by capability and by job, the losses."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def main() -> int:
    if len(sys.argv) > 1:
        return run_as_rank(Path(sys.argv[1]), sys.argv[2].split(","))
    values = committed()
    for capability in CAPABILITIES:
        with tempfile.TemporaryDirectory() as folder:
            values.setdefault(VERSION, {})[capability] = found(capability, Path(folder))
    FILE.write_text(json.dumps(values, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
