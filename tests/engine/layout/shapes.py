"""Shapes of the parameters of one layer of well-known models, with the place they were taken from. Data, no tests."""

from __future__ import annotations

from itertools import pairwise

Shapes = list[tuple[int, ...]]


def decoder(width: int, ffn: int, q: int, kv: int, *more: tuple[int, ...]) -> Shapes:
    """Attention with grouped queries, SwiGLU, two norms."""
    return [(q, width), (kv, width), (kv, width), (width, q), (ffn, width), (ffn, width), (width, ffn), (width,),
            (width,), *more]  # fmt: skip


def residual(inputs: int, outputs: int) -> Shapes:
    """torchvision's BasicBlock: two 3x3 convolutions with batch norm, and a 1x1 one where the width changes."""
    norm = [(outputs,), (outputs,)]
    shapes = [(outputs, inputs, 3, 3), *norm, (outputs, outputs, 3, 3), *norm]
    return shapes if inputs == outputs else [*shapes, (outputs, inputs, 1, 1), *norm]


# The published config.json on Hugging Face: meta-llama/Meta-Llama-3-8B (hidden 4096, intermediate 14336, 32 heads of
# 128, 8 for keys and values) and Qwen/Qwen3-32B (5120, 25600, 64 heads of 128, 8, norms of queries and keys).
LLAMA_3_8B = decoder(4096, 14336, 32 * 128, 8 * 128)
QWEN3_32B = decoder(5120, 25600, 64 * 128, 8 * 128, (128,), (128,))
# deepseek-ai/DeepSeek-V3, config.json: hidden 7168, intermediate 18432, 128 heads of 128 + 64 rotary, values of 128,
# latents of 1536 (queries) and 512 (keys and values). Experts: intermediate 2048, here four to a tensor.
DEEPSEEK_V3_DENSE: Shapes = [
    (1536, 7168), (1536,), (128 * (128 + 64), 1536), (512 + 64, 7168), (512,), (128 * (128 + 128), 512),
    (7168, 128 * 128), (18432, 7168), (18432, 7168), (7168, 18432), (7168,), (7168,),
]  # fmt: skip
DEEPSEEK_V3_EXPERTS: Shapes = [(4, 2048, 7168), (4, 2048, 7168), (4, 7168, 2048)]
# mistralai/Mamba-Codestral-7B-v0.1, config.json: hidden 4096, inner 8192, 128 heads, 8 groups, state 128, kernel 4.
# in_proj makes the gate, the convolved part (inner, B and C) and a step for each head.
CONVOLVED = 8192 + 2 * 8 * 128
MAMBA_2: Shapes = [
    (8192 + CONVOLVED + 128, 4096), (CONVOLVED, 1, 4), (CONVOLVED,), (128,), (128,), (128,), (8192,), (4096, 8192),
    (4096,),
]  # fmt: skip
# torchvision's resnet34, whole: blocks of 3x3 convolutions of 64 to 512 channels, a 7x7 one, a classifier.
WIDTHS = [64] * 4 + [128] * 4 + [256] * 6 + [512] * 3
RESNET_34 = [
    (64, 3, 7, 7),
    (64,),
    (64,),
    *(s for a, b in pairwise(WIDTHS) for s in residual(a, b)),
]
RESNET_34 += [(1000, 512), (1000,)]
CONVOLUTIONS = [shape for shape in RESNET_34 if shape[2:] == (3, 3)]

LAYERS: dict[str, Shapes] = {
    "Llama-3-8B": LLAMA_3_8B,
    "Qwen3-32B": QWEN3_32B,
    "DeepSeek-V3 dense": DEEPSEEK_V3_DENSE,
    "DeepSeek 4 experts": DEEPSEEK_V3_EXPERTS,
    "Mamba-2": MAMBA_2,
    "ResNet-34": RESNET_34,
    "3x3 convolutions": CONVOLUTIONS,
}
