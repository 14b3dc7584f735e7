"""Costs of plans of public models of transformers, made from the sizes in their config.json alone.

    python -m benchmarks.families [--only Qwen3] [-- --train.compile inductor]

Each row is `shardwright plan hf:... --no-edits --no-cache` in a process of its own, from its start to its end. What
follows `--` goes to each plan.

seconds:  of CPU time
MiB:      the most resident memory
reserved: GiB of a device, and whether the job fits
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

SECONDS, MIB = 20, 1024  #: that a plan may take
PLAN = "import sys; from shardwright.cli.program import main; sys.exit(main(sys.argv[1:]))"


class Family(NamedTuple):
    """A public model.

    Attributes:
        kind: its `model_type`.
        values: of its config.json that differ from the defaults of transformers.
        ranks: H100 that it is planned on.
    """

    kind: str
    values: dict[str, Any]
    ranks: int = 8


def sizes(
    width: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        **more,
    }


def windowed(every: int, layers: int) -> list[str]:
    """Kinds of layers: a whole attention after each `every` - 1 windows."""
    return ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]


FAMILIES = {
    "Llama-3-8B": Family("llama", sizes(4096, 14336, 32, 32, 8, 128256, rope_theta=5e5)),
    "Llama-3-70B": Family("llama", sizes(8192, 28672, 80, 64, 8, 128256, rope_theta=5e5), 64),
    "Qwen3-0.6B": Family("qwen3", sizes(1024, 3072, 28, 16, 8, 151936, head_dim=128, tie_word_embeddings=True)),
    "Qwen3-30B-A3B": Family(
        "qwen3_moe",
        sizes(
            2048, 6144, 48, 32, 4, 151936, head_dim=128, moe_intermediate_size=768, num_experts=128,
            num_experts_per_tok=8, norm_topk_prob=True,
        ),
        64,
    ),
    "Qwen3-Next-80B-A3B": Family(
        "qwen3_next",
        sizes(
            2048, 5120, 48, 16, 2, 151936, head_dim=256, moe_intermediate_size=512, num_experts=512,
            num_experts_per_tok=10, shared_expert_intermediate_size=512, linear_num_key_heads=16,
            linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
        ),
        64,
    ),
    "Mixtral-8x7B": Family(
        "mixtral", sizes(4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2), 64
    ),
    "DeepSeek-V3": Family(
        "deepseek_v3",
        sizes(
            7168, 18432, 61, 128, 128, 129280, moe_intermediate_size=2048, n_routed_experts=256,
            n_shared_experts=1, num_experts_per_tok=8, n_group=8, topk_group=4, first_k_dense_replace=3,
            q_lora_rank=1536, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        ),
        512,
    ),
    "gpt-oss-20b": Family(
        "gpt_oss",
        sizes(
            2880, 2880, 24, 64, 8, 201088, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
            sliding_window=128, layer_types=windowed(2, 24),
        ),
    ),
    "gpt-oss-120b": Family(
        "gpt_oss",
        sizes(
            2880, 2880, 36, 64, 8, 201088, head_dim=64, num_local_experts=128, num_experts_per_tok=4,
            sliding_window=128, layer_types=windowed(2, 36),
        ),
        64,
    ),
    "Gemma-3-27B": Family(
        "gemma3_text",
        sizes(
            5376, 21504, 62, 32, 16, 262208, head_dim=128, sliding_window=1024, query_pre_attn_scalar=168,
            layer_types=windowed(6, 62), tie_word_embeddings=True,
        ),
        16,
    ),
    "Phi-4": Family("phi3", sizes(5120, 17920, 40, 40, 10, 100352, pad_token_id=100349), 8),
    "Phi-3.5-MoE": Family(
        "phimoe", sizes(4096, 6400, 32, 32, 8, 32064, num_local_experts=16, num_experts_per_tok=2), 64
    ),
    "OLMo-2-13B": Family("olmo2", sizes(5120, 13824, 40, 40, 40, 100352)),
    "OLMoE-1B-7B": Family(
        "olmoe", sizes(2048, 1024, 16, 16, 16, 50304, num_experts=64, num_experts_per_tok=8)
    ),
    "Granite-3-MoE-3B": Family(
        "granitemoe",
        sizes(1536, 512, 32, 24, 8, 49155, num_local_experts=40, num_experts_per_tok=8, tie_word_embeddings=True),
    ),
    "Granite-4-small": Family(
        "granitemoehybrid",
        sizes(
            4096, 768, 40, 32, 8, 100352, num_local_experts=72, num_experts_per_tok=10,
            shared_intermediate_size=1536, mamba_n_heads=128, mamba_n_groups=1, mamba_d_state=128,
            mamba_d_head=64, mamba_expand=2, position_embedding_type="nope",
            layer_types=["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
        ),
        64,
    ),
    "GLM-4.5-Air": Family(
        "glm4_moe",
        sizes(
            4096, 10944, 46, 96, 8, 151552, head_dim=128, moe_intermediate_size=1408, n_routed_experts=128,
            n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=1, partial_rotary_factor=0.5,
        ),
        128,
    ),
    "Falcon-H1-7B": Family(
        "falcon_h1",
        sizes(
            3072, 12288, 44, 12, 2, 130048, head_dim=128, mamba_d_ssm=3072, mamba_n_heads=24, mamba_d_head=128,
            mamba_n_groups=1, mamba_d_state=256, mamba_expand=2,
        ),
    ),
    "Nemotron-H-8B": Family(
        "nemotron_h",
        sizes(
            4096, 21504, 52, 32, 8, 131072, head_dim=128, mamba_num_heads=128, mamba_head_dim=64, n_groups=8,
            ssm_state_size=128,
            hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        ),
    ),
    "Llama-4-Scout": Family(
        "llama4_text",
        sizes(
            5120, 8192, 48, 40, 8, 202048, head_dim=128, intermediate_size_mlp=16384, num_local_experts=16,
            num_experts_per_tok=1, interleave_moe_layer_step=1,
        ),
        128,
    ),
    "Mistral-7B": Family("mistral", sizes(4096, 14336, 32, 32, 8, 32768, sliding_window=None)),
    "SmolLM3-3B": Family("smollm3", sizes(2048, 11008, 36, 16, 4, 128256, pad_token_id=128004)),
}  # fmt: skip


class Cost(NamedTuple):
    """The cost of a plan. `text` is its output, or the error in its last line."""

    status: int
    seconds: float
    mib: float
    text: str

    @property
    def holds(self) -> bool:
        return self.status in (0, 3) and self.seconds <= SECONDS and self.mib <= MIB


def cost_of(family: Family, options: list[str]) -> Cost:
    """Plan a model in a process of its own. Returns CPU seconds, MiB and its output."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as out:
        config = {"model_type": family.kind, **family.values}
        Path(folder, "config.json").write_text(json.dumps(config))
        command = [sys.executable, "-W", "ignore", "-c", PLAN, "plan", f"hf:{folder}"]
        command += ["--on", f"{family.ranks}xh100", *options]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": folder}
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read()
    return Cost(process.returncode, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, text)


def row_of(name: str, options: list[str]) -> tuple[str, Cost]:
    """A line of the table, with its figures."""
    family = FAMILIES[name]
    cost = cost_of(family, options)
    parameters = re.search(r"\(([\d,]+) parameters\)", cost.text)
    verdict = re.search(r"fits\?\s+(\w+)", cost.text)
    reserved = re.search(r"([\d,.]+) GiB reserved", cost.text)
    if parameters and verdict and reserved:
        billions = int(parameters[1].replace(",", "")) / 1e9
        words = f"{billions:10.2f}B {reserved[1]:>9} {verdict[1]}"
    else:
        words = "".join(cost.text.splitlines()[-1:])[:90]
    mark = " " if cost.holds else "!"
    return f"{name:20}{family.ranks:6}{cost.seconds:9.1f}{cost.mib:7.0f}{mark}{words}", cost


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="families whose names match this expression")
    parser.add_argument("options", nargs="*", help="of each plan")
    options = parser.parse_args()
    versions = ", ".join(f"{each} {version(each)}" for each in ("torch", "transformers"))
    print(f"{versions}, Python {platform.python_version()}, {platform.machine()}", *options.options)
    print(f"{'model':20}{'GPUs':>6}{'seconds':>9}{'MiB':>7} {'parameters':>11} {'reserved':>9}")
    costs = []
    for name in FAMILIES:
        if re.search(options.only, name):
            line, cost = row_of(name, [*(options.options or ["--no-edits"]), "--no-cache"])
            print(line, flush=True)
            costs.append(cost)
    within = sum(cost.holds for cost in costs)
    print(f"{within} of {len(costs)} plans took at most {SECONDS} CPU seconds and {MIB} MiB")


if __name__ == "__main__":
    main()
