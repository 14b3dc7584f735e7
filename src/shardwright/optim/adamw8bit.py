"""AdamW with its moments in 8 bits: one code per element, one scale per block of consecutive elements.

This is a plain optimizer that knows no ranks. The update of a block depends only on that block. So a tensor that is cut
between blocks gets the same bits as the whole tensor. ``sharded.py`` checks the cuts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from shardwright.engine.compat import outside_dispatch_modes
from shardwright.optim.kept import Kept, prepared

#: Elements of one pass. Each needs about 30 bytes beside the state. On a CPU they must fit into its caches: four times
#: elements took four times as long for each. On other devices they must hide the cost of kernel launches.
CHUNK = 1 << 18
DEVICE_CHUNK = 1 << 22


@contextmanager
def chunks_of_devices() -> Iterator[None]:
    """Update tensors on the CPU in passes as large as on other devices, because a plan for those runs on the CPU."""
    global CHUNK
    own, CHUNK = CHUNK, DEVICE_CHUNK
    try:
        yield
    finally:
        CHUNK = own


MOMENTS = ("exp_avg", "exp_avg_sq")
#: The code of zero.
ZERO = {"exp_avg": 127, "exp_avg_sq": 0}


class AdamW8bit(Optimizer):
    """AdamW whose two moments take 2 bytes and 8 / ``block_size`` per element, in place of 8.

        optimizer = sw.AdamW8bit(model.parameters(), lr=1e-3)
        optimizer = sw.fully_shard_optimizer(sw.AdamW8bit(model.parameters()))  # of a model with layout=sw.Ragged(1)

    A parameter of ``min_size`` elements or more has, for each moment, uint8 codes of its shape and one float32 scale,
    the largest magnitude, per block of ``block_size`` consecutive elements in row-major order. The last block may be
    short. A code names one of 256 values in [-1, 1], for the second moment in [0, 1]. Small values are closer together
    than large ones (dynamic quantisation: Dettmers et al., arXiv:2110.02861, as in bitsandbytes and torchao). A moment
    is rounded to the nearest value, or to the lower of two. Two things differ from bitsandbytes. First, -1 has a code;
    without it a negative largest moment of a block would shrink at every step. Second, no positive second moment
    becomes zero, since the step divides by its root. Smaller parameters have float32 moments, as in AdamW.

    The arithmetic is AdamW's in float32, whatever dtype parameters and gradients have. If a moment is not finite, all
    moments of its block become not finite.

    Args:
        params: floating-point tensors, or groups with separate options, as for any torch optimizer.
        lr: learning rate, a number or a tensor of one element.
        betas: decay of the first and the second moment, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled from the gradient, multiplied by ``lr``.
        maximize: ascend instead of descend.
        block_size: elements that share a scale, a power of two.
        min_size: parameters of fewer elements keep float32 moments.

    Raises:
        ValueError: an option out of range, or a state dict made with another ``block_size`` or another optimizer.
        TypeError: a parameter that is not of floating point.
    """

    #: The step computes in float32, whatever dtype gradients have.
    takes_any_gradient = True
    #: Keys of state that has one element per block of :meth:`shard_needs` elements of its parameter.
    state_per_block: frozenset[str] = frozenset(f"{moment}_scales" for moment in MOMENTS)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        block_size: int = 256,
        min_size: int = 4096,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "block_size": block_size,
            "min_size": min_size,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            _check_options(self.param_groups[-1])
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise

    def shard_needs(self, p: Tensor) -> int:
        """Return the number of consecutive elements of ``p``, counted from its first, that must be on one rank.

        Raises:
            ValueError: ``p`` is not a parameter of this optimizer.
        """
        for group in self.param_groups:
            if any(q is p for q in group["params"]):
                return group["block_size"] if _has_codes(p, group) else 1
        raise ValueError(f"A parameter of shape {tuple(p.shape)} does not belong to this optimizer.")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient, as ``torch.optim.Optimizer.step``; return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    _update(p, p.grad, self.state[p] or _new_state(self.state[p], p, group), group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # torch casts all state tensors to the parameter's dtype, which would destroy codes and scales. It does not cast
        # other objects. This hook is the last one, so other hooks see the tensors.
        with prepared(self, _checked_and_kept):
            super().load_state_dict(state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for p, values in self.state.items():
            for key, value in values.items():
                if isinstance(value, Kept):
                    values[key] = value.tensor.to(p.device)


def _checked_and_kept(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict with wrapped tensors, and with this optimizer's block size and minimum size in its groups.

    Raises ValueError before anything is loaded if the state has other blocks or none.
    """
    state, groups = dict(state_dict["state"]), []
    for number, (group, theirs) in enumerate(
        zip(optimizer.param_groups, state_dict["param_groups"], strict=False)
    ):
        if theirs.get("block_size", group["block_size"]) != group["block_size"]:
            raise _other_blocks(f"Parameter group {number}", theirs["block_size"], group)
        groups.append({**theirs, "block_size": group["block_size"], "min_size": group["min_size"]})
        for place, (p, key) in enumerate(zip(group["params"], theirs["params"], strict=False)):
            values = state.get(key)
            if values:
                names = group.get("param_names")
                name = repr(names[place]) if names else f"number {place} of group {number}"
                _check_state(f"Parameter {name} of shape {tuple(p.shape)}", p, values, group)
                state[key] = {
                    k: Kept(v) if isinstance(v, Tensor) and k != "step" else v for k, v in values.items()
                }
    groups += state_dict["param_groups"][len(groups) :]  # torch raises an error for it
    return {**state_dict, "state": state, "param_groups": groups}


def _check_state(what: str, p: Tensor, values: dict[str, Any], group: dict[str, Any]) -> None:
    coded = _has_codes(p, group)
    expected = {
        "step",
        *(f"{m}{part}" for m in MOMENTS for part in (("_codes", "_scales") if coded else ("",))),
    }
    if set(values) != expected:
        raise ValueError(
            f"{what}: expected optimizer state {sorted(expected)}, found {sorted(values)}. Load a state of AdamW8bit "
            f"with min_size={group['min_size']}, or set min_size to the value of the save."
        )
    for key in AdamW8bit.state_per_block if coded else ():
        blocks = values[key].numel()
        if blocks != -(-p.numel() // group["block_size"]):
            raise _other_blocks(
                what, next((1 << n for n in range(64) if -(-p.numel() >> n) == blocks), 0), group
            )


def _other_blocks(what: str, block_size: int, group: dict[str, Any]) -> ValueError:
    return ValueError(
        f"{what}: expected optimizer state in blocks of {group['block_size']} elements, found blocks of {block_size}. "
        f"Build the optimizer with AdamW8bit(..., block_size={block_size})."
    )


def _check_options(group: dict[str, Any]) -> None:
    lr, betas, block_size = group["lr"], group["betas"], group["block_size"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr: expected a number or a tensor of one element, found shape {tuple(lr.shape)}")
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0:
            raise ValueError(f"{name}: expected a number >= 0, found {group[name]}")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas: expected two numbers in [0, 1), found {betas}")
    # Powers of two, because then the number of scales shows the block size of a stored state.
    if not isinstance(block_size, int) or block_size < 1 or block_size & (block_size - 1):
        raise ValueError(f"block_size: expected a power of two, found {block_size}")
    if not isinstance(group["min_size"], int) or group["min_size"] < 1:
        raise ValueError(f"min_size: expected a number of elements >= 1, found {group['min_size']}")
    for p in group["params"]:
        if not p.is_floating_point():
            raise TypeError(f"AdamW8bit expects floating-point parameters, found {p.dtype}, {tuple(p.shape)}")


def _has_codes(p: Tensor, group: dict[str, Any]) -> bool:
    # For the local tensor of a sharded parameter, the size of the whole parameter counts.
    shape: torch.Size = getattr(p, "whole_shape", p.shape)
    return shape.numel() >= group["min_size"]


def _new_state(state: dict[str, Tensor], p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    """Fill an empty state."""
    if hasattr(p, "full_tensor"):
        raise TypeError(
            f"AdamW8bit steps on plain tensors, found a {type(p).__name__} of shape {tuple(p.shape)}, which is "
            "sharded. Step with sw.fully_shard_optimizer(optimizer)."
        )
    state["step"] = torch.tensor(
        0.0, device="cpu"
    )  # on the CPU, as in torch's optimizers, because the host reads its value
    for moment in MOMENTS:
        if _has_codes(p, group):
            blocks = -(-p.numel() // group["block_size"])
            state[f"{moment}_codes"] = torch.full(p.shape, ZERO[moment], dtype=torch.uint8, device=p.device)
            state[f"{moment}_scales"] = torch.zeros(blocks, device=p.device)
        else:
            state[moment] = torch.zeros(p.shape, device=p.device)
    return state


def _update(p: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """One step of AdamW. Every operation rounds once, so the cuts of the tensor change no bit."""
    if gradient.is_sparse:
        raise RuntimeError(
            "AdamW8bit expects dense gradients, found a sparse one. See torch.optim.SparseAdam."
        )
    state["step"] += 1
    step, (beta1, beta2), lr = state["step"].item(), group["betas"], group["lr"]
    if isinstance(lr, Tensor):
        lr = lr.reshape(())
    decay, rate = 1 - lr * group["weight_decay"], lr / (1 - beta1**step)
    correction = math.sqrt(1 - beta2**step)
    flat, gradient = p.reshape(-1), gradient.reshape(-1)
    chunk = max(
        CHUNK if p.is_cpu else DEVICE_CHUNK, group["block_size"]
    )  # powers of two, so each pass begins with a block
    for start in range(0, p.numel(), chunk):
        part = slice(start, start + chunk)
        g = gradient[part].float()
        if group["maximize"]:
            g = -g
        m, v = (_read(state, moment, part, group["block_size"]) for moment in MOMENTS)
        m.mul_(beta1).add_(g * (1 - beta1))
        v.mul_(beta2).add_((g * g).mul_(1 - beta2))
        for moment, value in zip(MOMENTS, (m, v), strict=True):
            _write(state, moment, part, group["block_size"], value)
        change = (m / v.sqrt().div_(correction).add_(group["eps"])).mul_(rate)
        old = flat[part]
        flat[part] = (old.float() if old.itemsize < 4 else old).mul(decay).sub_(change)
    if not p.is_contiguous():
        p.copy_(flat.view(p.shape))


def _read(state: dict[str, Tensor], moment: str, part: slice, block_size: int) -> Tensor:
    """Return the elements ``part`` of a moment, flat; ``part`` begins with a block. A float32 moment is not copied."""
    if moment in state:
        return state[moment].view(-1)[part]
    codes = state[f"{moment}_codes"].view(-1)[part]
    values = _values(moment, codes.device).index_select(0, codes.int())
    scales = state[f"{moment}_scales"][part.start // block_size : -(-part.stop // block_size)]
    return _blocks(values, block_size).mul_(scales[:, None]).view(-1)[: codes.numel()]


def _write(state: dict[str, Tensor], moment: str, part: slice, block_size: int, values: Tensor) -> None:
    """The reverse of :func:`_read`."""
    if moment in state:
        return
    codes = state[f"{moment}_codes"].view(-1)[part]
    blocks = _blocks(values, block_size)
    scales = blocks.abs().amax(1)
    divisors = torch.where(scales > 0, scales, 1.0)  # 0: all elements are 0; NaN: the scale makes all NaN
    codes.copy_(_nearest(moment, blocks / divisors[:, None]).view(-1)[: codes.numel()])
    state[f"{moment}_scales"][part.start // block_size : -(-part.stop // block_size)] = scales


def _blocks(flat: Tensor, block_size: int) -> Tensor:
    """Return the elements as rows of ``block_size``, padded with zeros."""
    short = -flat.numel() % block_size
    return (pad(flat, (0, short)) if short else flat).view(-1, block_size)


@functools.cache
def _values(moment: str, device: torch.device) -> Tensor:
    """Return the number of each code, in units of the scale, ascending."""
    signed = moment == "exp_avg"
    positive = [1.0]
    for decade in range(7):  # 10^-7 to 10^-6, ..., 0.1 to 1: each has twice as many values as the last
        count = 2 ** (decade if signed else decade + 1)
        positive += [(0.1 + 0.9 * (i + 0.5) / count) * 10.0 ** (decade - 6) for i in range(count)]
    negative = [-v for v in positive if v > min(positive)] if signed else []  # one fewer: 256 in all
    with outside_dispatch_modes():  # the table stays, so a mode around its first use must not change it
        return torch.tensor(sorted([*negative, 0.0, *positive]), device=device)


def _nearest(moment: str, scaled: Tensor) -> Tensor:
    """Return the code of each number.

    ``torch.bucketize`` with :func:`_bounds` gives the same, in ten times the time.
    """
    bounds, lowest = _bounds(moment, scaled.device)
    # Numbers with the same high half have one of two codes.
    codes = lowest.index_select(0, (scaled.view(torch.int32) >> 16).bitwise_and_(0xFFFF).view(-1))
    return codes.add_(scaled.view(-1) > bounds.index_select(0, codes))


@functools.cache
def _bounds(moment: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the largest number of each code, and for each high half of a float32 its lowest code."""
    with outside_dispatch_modes():
        return _new_bounds(moment, device)


def _new_bounds(moment: str, device: torch.device) -> tuple[Tensor, Tensor]:
    values = _values(moment, torch.device("cpu")).double()
    middle = (values[1:] + values[:-1]) / 2  # exact; comparing with it rounded down is exact, too
    bounds = middle.float()
    bounds = torch.where(bounds > middle, bounds.nextafter(torch.tensor(-math.inf, device="cpu")), bounds)
    if moment == "exp_avg_sq":
        bounds[:1] = 0.0  # nothing positive becomes zero
    half = torch.arange(1 << 16, dtype=torch.int32, device="cpu")
    lowest = ((half << 16) | (half >> 15) * 0xFFFF).view(
        torch.float32
    )  # of negative ones that with a full low half
    codes = torch.bucketize(lowest, bounds, out_int32=True)
    return torch.cat([bounds, torch.tensor([math.inf], device="cpu")]).to(device), codes.to(device)
