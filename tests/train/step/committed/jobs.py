"""Jobs whose losses are committed, and the environment in which any processor gives them the same bits.

python -m tests.train.step.committed.jobs     adds the losses of this version of torch to losses.json
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from pathlib import Path

import torch

from tests.train.kit.jobs import losses, run

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


def found(name: str, capability: str, folder: Path) -> list[str]:
    """The losses of a job on two ranks, all bits of them."""
    words = [f"word{n}" for n in range(50)]
    draw = random.Random(0)
    documents = [" ".join(draw.choices(words, k=draw.randint(5, 40))) for _ in range(200)]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    (folder / "job.toml").write_text("")
    options = [
        *COMMON.split(),
        *JOBS[name].split(),
        "--data.source",
        str(data),
        "--run.dir",
        str(folder / "run"),
    ]
    environment = {**os.environ, **PINNED, "ATEN_CPU_CAPABILITY": capability}
    status, out, err = run("train", folder / "job.toml", *options, "--nproc", "2", environment=environment)
    assert status == 0, out + err
    return [loss.hex() for loss in losses(folder / "run")]


def committed() -> dict[str, dict[str, dict[str, list[str]]]]:
    """By version of torch, by capability and by job, the losses."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def main() -> None:
    values = committed()
    for capability in CAPABILITIES:
        for name in JOBS:
            with tempfile.TemporaryDirectory() as folder:
                values.setdefault(VERSION, {}).setdefault(capability, {})[name] = found(
                    name, capability, Path(folder)
                )
            print(VERSION, capability, name, flush=True)
    FILE.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
