"""AdamW with 8-bit moments on one device: against AdamW and the definition of its codes."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
from shardwright.optim import adamw8bit
from tests.optim.eight_bits import BLOCK, CODED, check_equal, give, gradient, steps, tiny

quick = settings(max_examples=40, deadline=None)


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


# -- codes -------------------------------------------------------------------------------------------------------------


@functools.cache
def book(moment: str) -> torch.Tensor:
    """The values of the codes, by the words of the paper: in every decade evenly spaced means, twice as many in the
    next; ours has -1 for the smallest negative one."""
    signed, found = moment == "exp_avg", [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        means = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)).tolist()
        found += means + ([-mean for mean in means] if signed else [])
    if signed:
        found.remove(max(value for value in found if value < 0))
        found.append(-1.0)
    assert len(set(found)) == 256
    return torch.tensor(sorted(found)).float()


def decoded(state: dict[str, torch.Tensor], moment: str, block: int = BLOCK) -> torch.Tensor:
    if moment in state:
        return state[moment].clone()
    codes, scales = state[f"{moment}_codes"], state[f"{moment}_scales"]
    flat = book(moment)[codes.long().flatten()] * scales.repeat_interleave(block)[: codes.numel()]
    return flat.view(codes.shape)


def nearest(moment: str, scaled: torch.Tensor) -> torch.Tensor:
    """By comparing with all of them; of two the lower."""
    distance = (scaled.double()[:, None] - book(moment).double()).abs()
    if moment == "exp_avg_sq":
        distance[scaled > 0, 0] = math.inf
    return distance.argmin(1)


@pytest.mark.parametrize("moment", adamw8bit.MOMENTS)
def test_a_number_gets_the_nearest_code(moment: str) -> None:
    values = book(moment)
    torch.testing.assert_close(adamw8bit._values(moment, torch.device("cpu")), values, rtol=2e-7, atol=0)
    assert values[adamw8bit.ZERO[moment]] == 0 and values[-1] == 1
    exact = adamw8bit._values(moment, torch.device("cpu"))
    middle = ((exact[1:].double() + exact[:-1].double()) / 2).float()
    some = [torch.linspace(-1, 1, 2001), gradient(3000, 1).clamp(-1, 1), exact, middle]
    some += [middle.nextafter(torch.tensor(s * 2.0)) for s in (-1, 1)] + [
        torch.tensor([1e-45, 1e-38, -1e-45, -0.0])
    ]
    scaled = torch.cat(some)
    if moment == "exp_avg_sq":
        scaled = scaled.abs()
    values = exact.double()
    distance = (scaled.double()[:, None] - values).abs()
    if moment == "exp_avg_sq":
        distance[scaled > 0, 0] = math.inf
    assert torch.equal(adamw8bit._nearest(moment, scaled).long(), distance.argmin(1))


@pytest.mark.parametrize("moment", adamw8bit.MOMENTS)
@given(st.integers(0, 10**6), st.integers(1, 100), st.sampled_from([1, 2, 8, 64]), st.floats(-44, 38))
@quick
def test_rounding_is_bounded_and_done_once(
    moment: str, seed: int, size: int, block: int, decade: float
) -> None:
    """Any magnitude, denormals too, is within half the widest gap of the code, relative to the block's largest."""
    values = (gradient(size, seed).double() * 10**decade / 4).float()
    if moment == "exp_avg_sq":
        values.abs_()
    blocks = -(-size // block)
    state = {f"{moment}_codes": torch.empty(size, dtype=torch.uint8), f"{moment}_scales": torch.empty(blocks)}
    everything = slice(0, size)
    adamw8bit._write(state, moment, everything, block, values)
    largest = torch.stack([part.abs().max() for part in values.split(block)])
    assert torch.equal(state[f"{moment}_scales"], largest)
    found = adamw8bit._read(state, moment, everything, block)
    scale = largest.repeat_interleave(block)[:size].double()
    gaps = (book(moment)[1:] - book(moment)[:-1]).max().double() / 2
    assert ((found - values).abs() <= scale * gaps * (1 + 1e-5) + 2e-45).all()
    assert torch.equal(found[scale == 0], values[scale == 0])
    if moment == "exp_avg_sq":
        assert ((found > 0) | (values == 0) | (scale < 1e-37)).all()
    again = {key: value.clone() for key, value in state.items()}
    adamw8bit._write(again, moment, everything, block, found)
    if (scale[scale > 0] > 1e-30).all():  # below, what is read is rounded to denormals
        assert all(torch.equal(again[key], state[key]) for key in state)


# -- steps on one device -----------------------------------------------------------------------------------------------


OPTIONS = [
    {},
    {"maximize": True, "weight_decay": 0.3},
    {"betas": (0.5, 0.7), "eps": 1e-3, "lr": torch.tensor(0.02)},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", [(40,), (6, 5), (3, 4, 7), (2, 3)])
def test_a_step_is_that_of_adamw_from_the_rounded_moments(
    shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    """Computed here in float64 from what the state says; the new moments are rounded to the nearest codes."""
    p = leaf(*shape)
    optimizer = tiny([p], **options)
    o = optimizer.param_groups[0]
    beta1, beta2 = o["betas"]
    lr = float(o["lr"])
    for step in range(1, 8):
        g = gradient(shape, step)
        p.grad = g.clone()
        old = p.detach().double()
        state = optimizer.state[p]
        m, v = (
            decoded(state, k).double() if state else torch.zeros(shape).double() for k in adamw8bit.MOMENTS
        )
        g = -g.double() if o["maximize"] else g.double()
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        change = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + o["eps"])
        optimizer.step()
        torch.testing.assert_close(
            p.double(), old * (1 - lr * o["weight_decay"]) - lr * change, rtol=1e-6, atol=1e-7
        )
        for moment, exact in (("exp_avg", m), ("exp_avg_sq", v)):
            stored = decoded(state, moment).double()
            if p.numel() < 16:
                torch.testing.assert_close(stored, exact, rtol=1e-6, atol=1e-9)
                continue
            scales = state[f"{moment}_scales"].double().repeat_interleave(BLOCK)[: p.numel()]
            scaled = exact.flatten() / scales.where(scales > 0, torch.ones(()))
            best = book(moment).double()[nearest(moment, scaled)] * scales
            missed, least = (stored - exact).abs().flatten(), (best - exact.flatten()).abs()
            assert (missed <= least + 1e-6 * scales).all()
    assert state["step"] == 7 and len(state) == (3 if p.numel() < 16 else 5)


@pytest.mark.parametrize("options", OPTIONS)
def test_small_parameters_are_stepped_as_by_adamw(options: dict[str, Any]) -> None:
    ours, theirs = [leaf(9, 7), leaf(4095, seed=1)], [leaf(9, 7), leaf(4095, seed=1)]
    optimizer, adamw = sw.AdamW8bit(ours, **options), torch.optim.AdamW(theirs, **options)
    for step in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = gradient(p.shape, step)
            q.grad = p.grad.clone()
        optimizer.step()
        adamw.step()
        adamw.zero_grad()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
            assert optimizer.state[p].keys() == adamw.state[q].keys()


@given(st.data(), st.integers(17, 200), st.integers(0, 10**6))
@quick
def test_cuts_between_blocks_change_no_bit(data: Any, size: int, seed: int) -> None:
    """In pieces of whole blocks, some empty; and in chunks of any number of blocks."""
    cuts = data.draw(st.lists(st.integers(0, size // BLOCK), max_size=4))
    chunk = data.draw(st.sampled_from([BLOCK, 4 * BLOCK, 1 << 20]))
    bounds = [0, *sorted(cut * BLOCK for cut in cuts), size]
    whole = leaf(size, seed=seed)
    pieces = [whole.detach()[a:b].clone().requires_grad_() for a, b in itertools.pairwise(bounds)]
    for piece in pieces:
        piece.whole_shape = whole.shape
    one, many = tiny([whole]), tiny(pieces)
    previous, adamw8bit.CHUNK = adamw8bit.CHUNK, chunk
    try:
        for step in range(3):
            whole.grad = gradient(size, seed + step)
            for piece, (a, b) in zip(pieces, itertools.pairwise(bounds), strict=True):
                piece.grad = whole.grad[a:b].clone()
            one.step()
            many.step()
    finally:
        adamw8bit.CHUNK = previous
    assert torch.equal(torch.cat(pieces), whole)
    for key in CODED:
        assert torch.equal(torch.cat([many.state[piece][key] for piece in pieces]), one.state[whole][key]), (
            key
        )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_what_is_not_finite_shows_as_with_adamw(bad: float) -> None:
    """Every parameter that AdamW loses is lost here, and no later step brings one back; other blocks go on."""
    p, q, calm = leaf(5, 8), leaf(5, 8), leaf(5, 8)
    optimizer, adamw, other = tiny([p]), torch.optim.AdamW([q], lr=0.01), tiny([calm])
    lost = torch.zeros(5, 8, dtype=torch.bool)
    for step in range(4):
        for each in (p, q, calm):
            each.grad = gradient((5, 8), step)
        if step == 1:
            p.grad[2, 3] = q.grad[2, 3] = bad
        for each in (optimizer, adamw, other):
            each.step()
        assert (~q.isfinite() <= ~p.isfinite()).all()
        assert (lost <= ~p.isfinite()).all()
        lost = ~p.isfinite()
        rows = [0, 1, 3, 4]
        assert torch.equal(p[rows], calm[rows])
    assert lost[2].all() and not lost[[0, 1, 3, 4]].any()


def test_zeros_stay_and_decay() -> None:
    p = leaf(4, 8)
    optimizer = tiny([p], weight_decay=0.0)
    before = p.detach().clone()
    for _ in range(3):
        p.grad = torch.zeros(4, 8)
        optimizer.step()
    assert torch.equal(p, before) and not decoded(optimizer.state[p], "exp_avg").any()
    p.grad = gradient((4, 8), 0)
    optimizer.step()
    first = [decoded(optimizer.state[p], moment) for moment in adamw8bit.MOMENTS]
    for _ in range(5):
        p.grad = torch.zeros(4, 8)
        optimizer.step()
    for moment, value, beta in zip(adamw8bit.MOMENTS, first, (0.9, 0.999), strict=True):
        torch.testing.assert_close(decoded(optimizer.state[p], moment), value * beta**5, rtol=1e-5, atol=0)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_the_first_moment_reaches_a_constant_gradient_of_either_sign(sign: float) -> None:
    """Without a code for -1 the largest one would end 6% short of it."""
    p = leaf(4, 8)
    optimizer = tiny([p])
    g = sign * torch.linspace(0.5, 1, 32).view(4, 8)
    for _ in range(100):
        p.grad = g.clone()
        optimizer.step()
    torch.testing.assert_close(decoded(optimizer.state[p], "exp_avg")[:, -1], g[:, -1], rtol=1e-3, atol=0)


def test_a_loud_neighbour_makes_no_step_explode() -> None:
    """A second moment far below the largest of its block has the smallest code, not that of zero."""
    p = torch.zeros(16, requires_grad=True)
    optimizer = tiny([p], lr=1.0, weight_decay=0.0)
    quiet = torch.full((16,), 1e-5)
    quiet[::8] = 1.0
    for g in (quiet, torch.zeros(16), torch.zeros(16)):
        p.grad = g.clone()
        optimizer.step()
        assert p.abs().max() < 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_have_float32_arithmetic(dtype: torch.dtype) -> None:
    p, small = leaf(9, 8, dtype=dtype), leaf(3, dtype=dtype)
    q = p.detach().float().requires_grad_()
    optimizer, wide = tiny([p, small]), tiny([q])
    for step in range(4):
        p.grad = gradient((9, 8), step).to(dtype)
        small.grad = gradient((3,), step).to(dtype)
        q.grad = p.grad.float()
        with torch.no_grad():
            q.copy_(p)
        optimizer.step()
        wide.step()
        torch.testing.assert_close(p, q.to(dtype), rtol=1e-6 if dtype == torch.float64 else 0, atol=0)
    for key in CODED:
        assert torch.equal(optimizer.state[p][key], wide.state[q][key])
    assert optimizer.state[small]["exp_avg"].dtype == torch.float32
    again = tiny([p, small])
    again.load_state_dict(optimizer.state_dict())  # torch casts state to the parameter's dtype
    check_equal(again.state_dict(), optimizer.state_dict())


def test_groups_closures_frozen_and_unused() -> None:
    used, slow, unused = leaf(4, 8), leaf(4, 8, seed=1), leaf(4, 8, seed=2)
    frozen = leaf(4, 8, seed=3).requires_grad_(False)
    before = [t.detach().clone() for t in (slow, unused, frozen)]
    optimizer = tiny([{"params": [used, unused, frozen]}, {"params": [slow], "lr": 0.0, "min_size": 100}])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (used.sum() - 3).square() + slow.sum()
        loss.backward()
        return loss.detach()

    losses = [optimizer.step(closure) for _ in range(20)]
    assert losses[-1] < losses[0]
    assert all(torch.equal(a, b) for a, b in zip((slow, unused, frozen), before, strict=True))
    assert set(optimizer.state) == {used, slow} and "exp_avg" in optimizer.state[slow]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step(closure)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.005
    assert optimizer.shard_needs(used) == BLOCK and optimizer.shard_needs(slow) == 1


def test_a_parameter_that_is_not_contiguous() -> None:
    p, q = leaf(6, 8), leaf(6, 8).detach().t().contiguous().t().requires_grad_()
    assert not q.is_contiguous()
    for step in range(3):
        for each, optimizer in ((p, tiny([p])), (q, tiny([q]))):
            each.grad = gradient((6, 8), step)
            optimizer.step()
    assert torch.equal(p, q)


def test_copies_and_pickles_go_on_alike() -> None:
    p = leaf(6, 8)
    optimizer = tiny([p])
    steps(optimizer, [p], 0, 2)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    loaded = tiny([p])
    loaded.load_state_dict(torch.load(buffer))
    made = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    steps(optimizer, [p], 2, 4)
    for other in made:
        q = other.param_groups[0]["params"][0]
        steps(other, [q], 2, 4)
        assert torch.equal(p, q)
        check_equal(other.state_dict(), optimizer.state_dict())


def test_options_out_of_range_are_refused() -> None:
    p = leaf(4, 8)
    for options, said in [
        ({"lr": -1.0}, "lr: expected a number >= 0, found -1.0"),
        ({"lr": torch.ones(2)}, "lr: expected a number or a tensor of one element"),
        ({"eps": -1.0}, "eps: expected"),
        ({"weight_decay": -1.0}, "weight_decay: expected"),
        ({"betas": (0.9, 1.0)}, r"betas: expected two numbers in \[0, 1\)"),
        ({"block_size": 100}, "block_size: expected a power of two, found 100"),
        ({"min_size": 0}, "min_size: expected"),
    ]:
        with pytest.raises(ValueError, match=said):
            sw.AdamW8bit([p], **options)
        optimizer = sw.AdamW8bit([leaf(2)])
        with pytest.raises(ValueError, match=said):
            optimizer.add_param_group({"params": [p], **options})
        assert len(optimizer.param_groups) == 1
    with pytest.raises(TypeError, match=r"floating-point parameters, found torch\.complex64"):
        sw.AdamW8bit([torch.zeros(4, dtype=torch.complex64)])
    with pytest.raises(ValueError, match="does not belong to this optimizer"):
        sw.AdamW8bit([p]).shard_needs(leaf(3))
    p.grad = torch.zeros(4, 8).to_sparse()
    with pytest.raises(RuntimeError, match="expects dense gradients"):
        sw.AdamW8bit([p]).step()


def test_state_that_does_not_fit_is_refused_by_name() -> None:
    p, small = leaf(8, 8), leaf(3)
    optimizer = tiny([("weight", p), ("bias", small)])
    steps(optimizer, [p, small], 0, 1)
    before = copy.deepcopy(optimizer.state_dict())
    other = tiny([("weight", p), ("bias", small)], block_size=16)
    steps(other, [p, small], 0, 1)
    saved = other.state_dict()
    with pytest.raises(
        ValueError, match=r"group 0: expected .* of 8 elements, found blocks of 16.*block_size=16"
    ):
        optimizer.load_state_dict(saved)
    saved["param_groups"] = optimizer.state_dict()["param_groups"]  # as where only the state is stored
    with pytest.raises(
        ValueError, match=r"'weight' of shape \(8, 8\): expected .* found blocks of 16.*block_size=16"
    ):
        optimizer.load_state_dict(saved)
    wide = tiny([p, small], min_size=1000)
    steps(wide, [p, small], 0, 1)
    with pytest.raises(
        ValueError, match=r"'weight' .*found \['exp_avg', 'exp_avg_sq', 'step'\].*set min_size to"
    ):
        optimizer.load_state_dict(wide.state_dict())
    adamw = torch.optim.AdamW([p, small])
    steps(adamw, [p, small], 0, 1)
    with pytest.raises(ValueError, match=r"'weight' .*found \['exp_avg', 'exp_avg_sq', 'step'\]"):
        optimizer.load_state_dict(adamw.state_dict())
    with pytest.raises(ValueError):  # torch's own
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    check_equal(optimizer.state_dict(), before)


def test_state_takes_two_bytes_per_element_and_a_scale_per_block() -> None:
    p = leaf(300, 1000)
    optimizer, adamw = sw.AdamW8bit([p]), torch.optim.AdamW([p])
    for each in (optimizer, adamw):
        steps(each, [p], 0, 1)
    sizes = [
        sum(t.numel() * t.element_size() for t in each.state[p].values() if t.ndim)
        for each in (optimizer, adamw)
    ]
    assert sizes == [2 * 300_000 + 8 * math.ceil(300_000 / 256), 8 * 300_000]


def test_memory_of_a_step_is_that_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw8bit, "CHUNK", 64)
    p = leaf(100, 100, dtype=torch.bfloat16)
    optimizer = tiny([p])
    steps(optimizer, [p], 0, 1)
    give(p, gradient(p.shape, 1).to(p.dtype))
    owned = {t.untyped_storage().data_ptr() for t in (p, p.grad, *optimizer.state[p].values())}
    made = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in owned:
                made.append(result.untyped_storage().nbytes())
            return result

    tables = 4 << 16
    with Made():
        optimizer.step()
    assert len(made) > 100 and max(size for size in made if size != tables) <= 64 * 4
