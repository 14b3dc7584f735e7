"""Steps of the engine on models of real sizes, for their leases. Weights are never read or written.

A model here is a chain of :class:`Layer`. A layer owns parameters of given shapes, and its forward uses all of them at
once. The engine makes all leases of a step. Three parts do nothing here, because they would write gigabytes:
collectives move headers only, gradients are not packed, and the optimizer steps nothing. So the memory of weights and
gradients is allocated, but the operating system never maps its pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.engine.comm import Communicator
from shardwright.engine.gradients.packer import Packer
from shardwright.engine.memory import Item
from shardwright.engine.model.pools import Pools
from tests.engine.layout.shapes import DEEPSEEK_V3_DENSE, MAMBA_2, RESNET_34, Shapes, decoder


class Use(torch.autograd.Function):
    """Uses weights in forward, and gives each a gradient in backward, without a look at their numbers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.weights = [(w.shape, w.dtype) for w in weights]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, *(torch.empty(shape, dtype=dtype) for shape, dtype in ctx.weights)


class Layer(nn.Module):
    """Uses its weights, after its inner layers have run one after another."""

    def __init__(self, shapes: Shapes, *inner: Layer) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.empty(shape)) for shape in shapes])
        self.inner = nn.ModuleList(inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.inner:
            x = layer(x)
        return Use.apply(x, *self.weights)  # type: ignore[no-any-return]


class Chain(nn.Module):
    """Layers one after another. ``calls`` are their numbers in the order of calls; ``own`` are the root's shapes."""

    def __init__(
        self, layers: Sequence[Layer], own: Shapes, calls: Sequence[int] | None, recompute: bool
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.own = Layer(own)
        self._calls = range(len(layers)) if calls is None else calls
        self._recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.own(x)
        for i in self._calls:
            layer = self.layers[i]
            x = checkpoint(layer, x, use_reentrant=False) if self._recompute else layer(x)
        return x


def llama(width: int, ffn: int, kv: int, layers: int) -> list[Layer]:
    return [Layer(decoder(width, ffn, width, kv)) for _ in range(layers)]


def table(vocabulary: int, width: int) -> Layer:
    return Layer([(vocabulary, width)])


def mamba(width: int, inner: int, groups: int, heads: int) -> Shapes:
    """The shapes of Mamba-2 with states of 128."""
    convolved = inner + 2 * groups * 128
    return [(inner + convolved + heads, width), (convolved, 1, 4), (convolved,), (heads,), (heads,), (heads,),
            (inner,), (width, inner), (width,)]  # fmt: skip


def nemotron() -> list[Layer]:
    """The pattern of Nemotron-H 9B, the trainer's preset "9B"."""
    kinds = {
        "M": mamba(4480, 10240, 8, 128),
        "-": [(15_680, 4480), (4480, 15_680), (4480,)],
        "*": [(5120, 4480), (1024, 4480), (1024, 4480), (4480, 5120), (4480,)],
    }
    pattern = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
    return [table(131_072, 4480), *(Layer(kinds[kind]) for kind in pattern), table(131_072, 4480)]


def experts(width: int, ffn: int, count: int) -> Layer:
    """A unit within the unit of its layer. As matrices, so that many ranks share few experts without padding."""
    return Layer([(count * ffn, width), (count * ffn, width), (count * width, ffn)])


def attention(width: int, q: int, kv: int) -> Shapes:
    return [(q, width), (kv, width), (kv, width), (width, q), (width,), (width,)]


def jamba() -> list[Layer]:
    """Jamba's period of eight layers, four times: one of attention, seven of Mamba; every second has experts."""
    layers = []
    for i in range(32):
        mixer = attention(4096, 4096, 1024) if i % 8 == 4 else mamba(4096, 8192, 1, 128)
        if i % 2:
            layers.append(Layer([*mixer, (16, 4096)], experts(4096, 14_336, 4)))
        else:
            layers.append(Layer([*mixer, (14_336, 4096), (14_336, 4096), (4096, 14_336)]))
    return layers


def bidirectional(width: int, ffn: int, *more: tuple[int, ...]) -> Shapes:
    """Attention and an MLP with biases and layer norms, as in ViT, and what comes beside."""
    return [(3 * width, width), (3 * width,), (width, width), (width,), (ffn, width), (ffn,), (width, ffn), (width,),
            (width,), (width,), (width,), (width,), *more]  # fmt: skip


def encoder_decoder(width: int, ffn: int, layers: int) -> list[Layer]:
    """As T5 and Whisper: a decoder's layer has a second attention."""
    cross = [(width, width)] * 4 + [(width,)] * 2
    return [Layer(bidirectional(width, ffn)) for _ in range(layers)] + [
        Layer(bidirectional(width, ffn, *cross)) for _ in range(layers)
    ]


def residual_blocks(shapes: Shapes) -> list[Layer]:
    """The convolutions of a ResNet, each with its norm."""
    return [Layer([s, s[:1], s[:1]]) for s in shapes if len(s) == 4]


def u_net() -> list[Layer]:
    """The widths of Stable Diffusion's U-Net: down, the middle, and up, where inputs are twice as wide."""
    widths = [320, 320, 640, 640, 1280, 1280, 1280, 1280]
    down = [Layer([(w, w, 3, 3), (w, w, 3, 3), (w, 1280), *bidirectional(w, 8 * w)]) for w in widths]
    up = [Layer([(w, 2 * w, 3, 3), (w, w, 3, 3), (w, 1280), *bidirectional(w, 8 * w)]) for w in widths[::-1]]
    return [*down, Layer([(1280, 1280, 3, 3)] * 4), *up]


@dataclass(frozen=True)
class Model:
    """Layers, in the order of their calls unless ``calls`` has another, and the shapes that the root keeps."""

    layers: Callable[[], list[Layer]]
    own: Shapes = field(default_factory=list)
    calls: tuple[int, ...] | None = None


#: Shapes from the config.json on Hugging Face of the models that have a name there, else the trainer's presets.
MODELS = {
    "Llama 150M": Model(lambda: llama(1024, 3072, 512, 12), [(256, 1024), (1024,), (256, 1024)]),
    "Llama 1B, tied": Model(lambda: llama(2048, 8192, 512, 16), [(128_256, 2048), (2048,)]),
    "Llama 8B": Model(
        lambda: [table(128_256, 4096), *llama(4096, 14_336, 1024, 32), table(128_256, 4096)], [(4096,)]
    ),
    "Llama 8B, root's tables": Model(
        lambda: llama(4096, 14_336, 1024, 32), [(128_256, 4096), (4096,), (128_256, 4096)]
    ),
    "Qwen3 32B": Model(
        lambda: [Layer(decoder(5120, 25_600, 8192, 1024, (128,), (128,))) for _ in range(64)],
        [(151_936, 5120), (5120,), (151_936, 5120)],
    ),
    "Qwen3 30B, experts": Model(
        lambda: [
            Layer([*attention(2048, 4096, 512), (128, 2048)], experts(2048, 768, 128)) for _ in range(48)
        ],
        [(151_936, 2048), (2048,), (151_936, 2048)],
    ),
    "DeepSeek V3, four experts": Model(
        lambda: [
            table(129_280, 7168),
            *(Layer(DEEPSEEK_V3_DENSE) for _ in range(3)),
            *(Layer(DEEPSEEK_V3_DENSE[:7] + [(256, 7168)], experts(7168, 2048, 4)) for _ in range(58)),
        ],
        [(7168,), (129_280, 7168)],
    ),
    "hybrid 9B": Model(nemotron, [(4480,)]),
    "Mamba 7B": Model(lambda: [Layer(MAMBA_2) for _ in range(64)], [(32_768, 4096), (4096,), (32_768, 4096)]),
    "Jamba, four experts": Model(jamba, [(65_536, 4096), (4096,), (65_536, 4096)]),
    "shared layer": Model(  # as in Zamba: after every sixth layer the first, which is larger
        lambda: [Layer(decoder(4096, 14_336, 4096, 4096)), *(Layer(MAMBA_2) for _ in range(24))],
        [(32_000, 4096), (4096,)],
        tuple(n for i in range(1, 25) for n in ((i, 0) if i % 6 == 0 else (i,))),
    ),
    "ViT-H": Model(
        lambda: [Layer(bidirectional(1280, 5120)) for _ in range(32)],
        [(1280, 3, 14, 14), (257, 1280), (1000, 1280)],
    ),
    "ResNet-34": Model(lambda: residual_blocks(RESNET_34), [(1000, 512), (1000,)]),
    "U-Net": Model(u_net, [(320, 4, 3, 3), (4, 320, 3, 3)]),
    "T5 3B": Model(lambda: encoder_decoder(1024, 16_384, 24), [(32_128, 1024)]),
    "picture and text": Model(  # as LLaVA: the layers of a ViT, a projection, the layers of Llama 8B
        lambda: [
            *(Layer(bidirectional(1024, 4096)) for _ in range(24)),
            Layer([(4096, 1024), (4096,), (4096, 4096), (4096,)]),
            *llama(4096, 14_336, 1024, 32),
        ],
        [(128_256, 4096), (4096,), (128_256, 4096)],
    ),
}


@dataclass(frozen=True)
class Step:
    """A step of a model.

    Attributes:
        model: a key of ``MODELS``.
        strategy, ranks: the strategy, and the ranks of each mesh axis.
        bf16: whether weights are gathered in bfloat16, with gradients reduced in float32.
        micros: number of micro-batches.
        reshard: ``reshard_after_forward``.
        recompute: whether layers are computed again in backward.
        prefetch, layout: of ``fully_shard``.
        keeps_gradients: whether gradients exist when the step begins.
    """

    model: str
    strategy: str = "zero3"
    ranks: tuple[int, ...] = (256,)
    bf16: bool = False
    micros: int = 1
    reshard: bool | int | None = None
    recompute: bool = False
    prefetch: int | str = 1
    layout: str = "per_parameter"
    keeps_gradients: bool = False

    def __str__(self) -> str:
        options = [
            "bf16" if self.bf16 else "fp32",
            f"prefetch {self.prefetch}" if self.prefetch != 1 else "",
            f"{self.micros} micro-batches" if self.micros > 1 else "",
            f"reshard {self.reshard}" if self.reshard is not None else "",
            "recompute" if self.recompute else "",
            self.layout if self.layout != "per_parameter" else "",
            "gradients kept" if self.keeps_gradients else "",
        ]
        return ", ".join([self.model, self.strategy, *filter(None, options)])


class _Recorded(Exception):
    """Ends the step in which the engine would plan its memory."""


def record(step: Step) -> list[Item]:
    """The leases that the engine would plan memory for. This process must be rank 0 of ``math.prod(step.ranks)``."""
    torch.manual_seed(0)
    found = MODELS[step.model]
    model = Chain(found.layers(), found.own, found.calls, step.recompute)
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", step.ranks, mesh_dim_names=("outer", "inner")[-len(step.ranks) :]),
        "strategy": step.strategy,
        "layout": step.layout,
        "reshard_after_forward": step.reshard,
    }
    if step.bf16:
        options["mp_policy"] = sw.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.layers:
        for inner in layer.inner:
            sw.fully_shard(inner, **options)
        sw.fully_shard(layer, **options)
    sw.fully_shard(model, memory="arena", prefetch=step.prefetch, **options)
    optimizer = Nothing(model.parameters(), {})
    with ExitStack() as patches:
        for change in _changes():
            patches.enter_context(change)
        try:
            for _ in range(3):
                for _ in range(step.micros):
                    model(torch.zeros(1, requires_grad=True)).sum().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=not step.keeps_gradients)
        except _Recorded as recorded:
            return recorded.args[0]  # type: ignore[no-any-return]
    raise AssertionError("the engine did not plan")


class Nothing(torch.optim.Optimizer):
    """Steps nothing."""

    def step(self, closure: Any = None) -> None: ...

    def zero_grad(self, set_to_none: bool = True) -> None:
        if set_to_none:
            super().zero_grad()


def _changes() -> list[Any]:
    gather, scatter, reduce = Communicator.all_gather, Communicator.reduce_scatter, Communicator.all_reduce
    one = torch.zeros(1)

    def headers_only(self: Communicator, outputs: Any, inputs: Any, casts: Any = None, *rest: Any) -> Any:
        small = [pair for pair in zip(outputs, inputs, strict=True) if pair[1].numel() <= 64]
        small = small or [(one.expand(self.world_size).clone(), one)]  # an outer axis sends no header
        return gather(self, [o for o, _ in small], [i for _, i in small], ([], []), *rest)

    def nothing(self: Communicator, outputs: Any, inputs: Any, division: Any, *rest: Any) -> Any:
        return scatter(self, [one], [one.expand(self.world_size).clone()], division, *rest)

    def nothing_whole(self: Communicator, tensor: Any, division: Any, *rest: Any) -> Any:
        return reduce(self, one.clone(), division, *rest)

    def recorded(self: Pools, items: list[Item], slabs: Any) -> None:
        raise _Recorded(items)

    return [
        mock.patch.object(Communicator, "all_gather", headers_only),
        mock.patch.object(Communicator, "reduce_scatter", nothing),
        mock.patch.object(Communicator, "all_reduce", nothing_whole),
        mock.patch.object(Packer, "pack", lambda self, tensors, out: None),
        mock.patch.object(Pools, "_make_plan", recorded),
    ]


HSDP: dict[str, Any] = {"strategy": "hsdp", "ranks": (4, 256)}
HFSDP: dict[str, Any] = {"strategy": "hfsdp", "ranks": (4, 256)}

#: Thirty steps. The hard ones have experts or two kinds of layers, and several units are gathered ahead.
STEPS = [
    Step("Llama 150M"),
    Step("Llama 150M", "zero2", bf16=True, micros=2),
    Step("Llama 150M", ranks=(64,), reshard=8, prefetch=2, layout="ragged"),
    Step("Llama 1B, tied", bf16=True, prefetch=2),
    Step("Llama 1B, tied", reshard=False, micros=4, keeps_gradients=True),
    Step("Llama 8B", bf16=True),
    Step("Llama 8B", bf16=True, recompute=True, prefetch=2, micros=2),
    Step("Llama 8B, root's tables", **HFSDP, micros=2),
    Step("Llama 8B, root's tables", "zero2", bf16=True, micros=4),
    Step("Qwen3 32B", **HSDP, bf16=True, prefetch=2),
    Step("Qwen3 30B, experts", prefetch=2, layout="ragged"),
    Step("Qwen3 30B, experts", bf16=True, prefetch=3, keeps_gradients=True),
    Step("Qwen3 30B, experts", **HFSDP, prefetch=2, micros=4, recompute=True),
    Step("DeepSeek V3, four experts", reshard=False, recompute=True, prefetch=2),
    Step("DeepSeek V3, four experts", bf16=True),
    Step("hybrid 9B", bf16=True, micros=2),
    Step("hybrid 9B", bf16=True, micros=2, prefetch=2),
    Step("hybrid 9B", prefetch=3, layout="ragged"),
    Step("hybrid 9B", prefetch=0, recompute=True),
    Step("Mamba 7B", bf16=True, prefetch=2),
    Step("Jamba, four experts", bf16=True, prefetch=3, layout="ragged"),
    Step("Jamba, four experts", prefetch=3, layout="ragged"),
    Step("Jamba, four experts", **HSDP, prefetch=2, recompute=True),
    Step("shared layer", **HFSDP, micros=4, layout="ragged"),
    Step("ViT-H", "zero2", prefetch=0, micros=2, keeps_gradients=True),
    Step("ResNet-34", **HFSDP, prefetch=3, micros=2, keeps_gradients=True),
    Step("U-Net", prefetch=3),
    Step("T5 3B", bf16=True, prefetch=2),
    Step("T5 3B", **HFSDP, bf16=True, micros=2, keeps_gradients=True),
    Step("picture and text", bf16=True, prefetch=2),
]
