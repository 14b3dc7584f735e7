"""A sharded model between and around steps: classes, state dicts, memory, gradients, modes."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.engine import UNIT
from tests.engine.kit.averaged import backward, check_gradients, expected_gradients
from tests.engine.kit.models import Model, Reference, build, full, loss_of, shard, tokens
from tests.engine.kit.observing import observe
from tests.engine.kit.torch_versions import subclasses_dispatch
from tests.support import multirank, world_mesh

pytestmark = pytest.mark.central("shards that differ in size", ranks=3)


@multirank(2)
def test_class_is_swapped_in_place(rank: int, world_size: int) -> None:
    plain = build()
    names = [n for n, _ in plain.named_parameters()]
    model = shard(plain)
    assert model is plain
    assert type(model).__name__ == "FSDPModel" and isinstance(model, (Model, sw.FSDPModule))
    assert type(model).__mro__[1:3] == (sw.FSDPModule, Model)
    assert [n for n, _ in model.named_parameters()] == names
    for p in model.parameters():
        assert isinstance(p, DTensor) and isinstance(p, nn.Parameter)
        assert p.placements == (Shard(0),)


@multirank(3)
def test_parameters_at_rest_are_torch_chunks(rank: int, world_size: int) -> None:
    plain = build()
    before = {n: p.detach().clone() for n, p in plain.named_parameters()}
    model = shard(plain, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)
    for name, p in model.named_parameters():
        dim = 1 if p.ndim == 2 else 0
        chunks = before[name].chunk(world_size, dim)
        mine = chunks[rank] if rank < len(chunks) else before[name].narrow(dim, 0, 0)
        torch.testing.assert_close(p.to_local().detach(), mine, rtol=0, atol=0)
        torch.testing.assert_close(p.full_tensor().detach(), before[name], rtol=0, atol=0)


@multirank(2)
def test_padding_is_zero_and_shards_are_aligned(rank: int, world_size: int) -> None:
    model = shard(build())
    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    for step in range(2):
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    for module in model.modules():
        unit = getattr(module, UNIT, None)
        if unit is None:
            continue
        for i, p in enumerate(unit.parameters):
            chunk = unit.weights.shards[i]
            assert chunk.data_ptr() % 16 == 0 and p.local.storage_offset() == 0
            owned = torch.zeros_like(chunk, dtype=torch.bool)
            owned[: p.local.numel()] = True
            assert not chunk[~owned].any()


@multirank(2)
def test_module_sees_full_parameters_only_inside_forward(rank: int, world_size: int) -> None:
    seen: list[tuple[torch.Size, bool]] = []
    plain = build()
    plain.blocks[0].up.register_forward_hook(
        lambda m, a, o: seen.append((m.weight.shape, isinstance(m.weight, DTensor)))
    )
    model = shard(plain)
    backward(model, rank)
    assert seen == [(torch.Size((12, 7)), False)]
    assert all(isinstance(p, DTensor) for p in model.parameters())


@multirank(2)
def test_root_and_asked_for_units_stay_gathered_until_backward(rank: int, world_size: int) -> None:
    plain = build()
    sw.fully_shard(plain.blocks[0])
    sw.fully_shard(plain.blocks[1], reshard_after_forward=False)
    model = sw.fully_shard(plain)
    batch = tokens(0, 0, rank)
    loss = loss_of(model(batch), batch)
    held = {getattr(m, UNIT).name: getattr(m, UNIT).weights.gathered for m in (model, *model.blocks)}
    assert held == {"Model": True, "blocks.0": False, "blocks.1": True}
    assert all(isinstance(p, DTensor) for p in model.parameters())
    loss.backward()
    assert not any(getattr(m, UNIT).weights.gathered for m in (model, *model.blocks))


@multirank(2)
def test_deleting_the_model_frees_everything_without_the_collector(rank: int, world_size: int) -> None:
    gc.collect()
    gc.disable()
    try:
        model = shard(build(), head_unit=True)
        optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
        for step in range(2):
            backward(model, rank, step)
            sw.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(tokens(0, 0, rank))
        unit = getattr(model.blocks[0], UNIT)
        watched = [weakref.ref(x) for x in (model, unit, unit.root, unit.parameters[0].full, optimizer)]
        del model, optimizer, unit
        alive = [type(w()).__name__ for w in watched if w() is not None]
        assert alive == []
    finally:
        gc.enable()


@multirank(2)
def test_a_graph_outlives_its_model(rank: int, world_size: int) -> None:
    """As with plain torch: the graph keeps what its backward needs."""
    model = shard(build())
    parameters = dict(model.named_parameters())
    batch = tokens(0, 0, rank)
    loss = loss_of(model(batch), batch)
    del model
    loss.backward()
    for (_, p), q in zip(parameters.items(), expected_gradients(world_size), strict=True):
        torch.testing.assert_close(full(p.grad), q, rtol=1e-5, atol=1e-6)


@multirank(2)
def test_gradients_that_the_user_kept_are_not_overwritten(rank: int, world_size: int) -> None:
    for keep in (lambda g: g, lambda g: g.to_local(), lambda g: g.to_local()[:1], lambda g: g._local_tensor):
        model = shard(build())
        backward(model, rank, 0)
        kept = [keep(p.grad) for p in model.parameters()]
        copies = [full(k).clone() for k in kept]
        model.zero_grad()
        backward(model, rank, 1)
        for k, c in zip(kept, copies, strict=True):
            torch.testing.assert_close(full(k), c, rtol=0, atol=0)


@multirank(2)
def test_gradient_memory_is_given_back_and_used_again(rank: int, world_size: int) -> None:
    model = shard(build())
    optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    shards = []
    for zero in (optimizer.zero_grad, model.zero_grad, optimizer.zero_grad):
        backward(model, rank)
        reduction = getattr(model, UNIT).gradients.reductions[0].delivery
        shards.append(reduction._shard)
        assert reduction._shard.leased
        zero()
        assert not reduction._shard.leased
    assert shards[0] is shards[1] is shards[2]


@multirank(1, 2, 3)
@pytest.mark.parametrize("hold", [True, False])
def test_gradients_set_or_dropped_by_hand_between_micro_batches(
    rank: int, world_size: int, hold: bool
) -> None:
    plain = build()
    expected = [g.clone() for g in expected_gradients(world_size, micros=2, model=plain)]
    once = expected_gradients(world_size, model=plain)
    model = shard(plain)
    backward(model, rank, 0, 0)
    first, second = list(model.parameters())[:2]
    first.grad = first.grad.clone()
    second.grad = None
    model.set_requires_gradient_sync(True)
    backward(model, rank, 0, 1)
    expected[1] = expected[1] - once[1]
    check_gradients(model, expected)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(5, 5), nn.Linear(5, 5)
        self.use_both = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.used(x)
        return self.unused(x) if self.use_both else x


@multirank(1, 2, 3)
def test_parameters_unused_on_every_rank_get_no_gradient(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = sw.fully_shard(Unused())
    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), weight_decay=0.5))
    before = full(model.unused.weight).clone()
    model(torch.randn(2, 5)).sum().backward()
    assert model.unused.weight.grad is None and model.used.weight.grad is not None
    optimizer.step()
    torch.testing.assert_close(full(model.unused.weight), before, rtol=0, atol=0)
    model.use_both = True
    model(torch.randn(2, 5)).sum().backward()
    assert model.unused.weight.grad is not None


@multirank(2, 3)
def test_a_parameter_unused_on_one_rank_counts_as_zero_there(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = Unused()
    inputs = [torch.randn(2, 5) for _ in range(world_size)]
    total = torch.zeros_like(plain.unused.weight)
    for r in range(1, world_size):
        plain.zero_grad()
        plain.use_both = True
        plain(inputs[r]).square().sum().backward()
        total += plain.unused.weight.grad
    plain.zero_grad()
    model = sw.fully_shard(plain)
    model.use_both = rank > 0
    model(inputs[rank]).square().sum().backward()
    torch.testing.assert_close(full(model.unused.weight.grad), total / world_size, rtol=1e-5, atol=1e-6)


@multirank(2)
def test_frozen_parameters_are_gathered_and_not_reduced(rank: int, world_size: int) -> None:
    plain = build()
    plain.blocks[0].requires_grad_(False)
    plain.blocks[1].up.bias.requires_grad_(False)
    expected = expected_gradients(world_size, model=plain)
    model = shard(plain)
    backward(model, rank)
    for (name, p), q in zip(model.named_parameters(), expected, strict=True):
        frozen = name.startswith("blocks.0") or name == "blocks.1.up.bias"
        assert p.requires_grad != frozen
        if frozen:
            assert p.grad is None
        else:
            torch.testing.assert_close(full(p.grad), q, rtol=1e-5, atol=1e-6)


@multirank(2)
def test_ignored_parameters_are_left_alone(rank: int, world_size: int) -> None:
    plain = build()
    ignored = plain.head.bias
    model = shard(plain, ignored_params={ignored})
    assert model.head.bias is ignored and not isinstance(ignored, DTensor)
    backward(model, rank)
    assert ignored.grad is not None


@multirank(2)
def test_nested_units_and_units_that_own_nothing(rank: int, world_size: int) -> None:
    plain = build()
    expected = expected_gradients(world_size)
    for block in plain.blocks:
        sw.fully_shard(block.up)
        sw.fully_shard(block)
    sw.fully_shard(plain.embed)
    sw.fully_shard([plain.norm, plain.head])
    model = sw.fully_shard(plain)  # owns nothing
    assert getattr(model, UNIT).parameters == []
    for _ in range(2):
        backward(model, rank)
        check_gradients(model, expected)
        model.zero_grad()


@multirank(2)
def test_tied_weights_inside_a_unit(rank: int, world_size: int) -> None:
    def tied() -> Model:
        model = build()
        model.head.weight = model.embed.weight
        return model

    expected = expected_gradients(world_size, model=tied())
    plain = tied()
    for block in plain.blocks:
        sw.fully_shard(block)
    sw.fully_shard([plain.embed, plain.norm, plain.head])
    model = sw.fully_shard(plain)
    assert model.head.weight is model.embed.weight
    for _ in range(2):
        backward(model, rank)
        check_gradients(model, expected)
        model.zero_grad()


@multirank(2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_activation_checkpointing(rank: int, world_size: int, reentrant: bool, inside: bool) -> None:
    plain = build(layers=3)
    expected = expected_gradients(world_size, model=build(layers=3))
    if inside:
        for block in plain.blocks:
            up = block.up
            original = up.forward
            up.forward = lambda x, f=original: checkpoint(f, x, use_reentrant=reentrant)
    model = shard(plain)
    if not inside:
        forward = model.forward

        def checkpointed(batch: torch.Tensor) -> torch.Tensor:
            h = model.embed(batch)
            for block in model.blocks:
                h = checkpoint(block, h, use_reentrant=reentrant)
            return model.head(model.norm(h))

        model.forward = checkpointed
        del forward
    for _ in range(2):
        backward(model, rank)
        check_gradients(model, expected)
        model.zero_grad()


@multirank(2)
def test_evaluation_between_steps(rank: int, world_size: int) -> None:
    plain = build()
    sw.fully_shard(plain.blocks[0])
    sw.fully_shard(plain.blocks[1], reshard_after_forward=False)
    reference = build()
    model = sw.fully_shard(plain)
    optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    for step in range(3):
        with torch.no_grad():
            for _ in range(2):
                batch = tokens(step, 9, rank)
                torch.testing.assert_close(model(batch), reference(batch), rtol=1e-5, atol=1e-6)
        backward(model, rank, step)
        ref = Reference(reference, torch.float32, torch.float32)
        ref.backward(world_size, [[tokens(step, 0, r) for r in range(world_size)]])
        for p, q in zip(reference.parameters(), ref.model.parameters(), strict=True):
            p.data.sub_(0.5 * q.grad)
        optimizer.step()
        optimizer.zero_grad()


@multirank(2)
def test_edits_by_hand_are_seen_at_the_next_forward(rank: int, world_size: int) -> None:
    model, reference = shard(build()), build()
    batch = tokens(0, 0, rank)
    model(batch)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        with torch.no_grad():
            p.to_local().mul_(1.5)
            q.mul_(1.5)
    torch.testing.assert_close(model(batch), reference(batch))


@multirank(2)
def test_two_forwards_then_one_backward(rank: int, world_size: int) -> None:
    model = shard(build())
    losses = [loss_of(model(tokens(0, m, rank)), tokens(0, m, rank)) for m in range(2)]
    sum(losses).backward()
    check_gradients(model, expected_gradients(world_size, micros=2))


@multirank(2)
def test_an_exception_in_forward_or_backward_costs_nothing(rank: int, world_size: int) -> None:
    model = shard(build())
    expected = expected_gradients(world_size)

    class Boom(BaseException):  # as KeyboardInterrupt is, which torch's always-called hooks miss
        pass

    def fail(*_: object) -> None:
        raise Boom

    for where in ("forward", "backward"):
        if where == "forward":
            handle = model.blocks[1].up.register_forward_hook(fail)
        else:
            handle = model.blocks[0].up.register_full_backward_hook(fail)
        with pytest.raises(Boom):
            backward(model, rank)
        handle.remove()
        model.zero_grad()
        backward(model, rank)
        check_gradients(model, expected)
        assert not getattr(model, UNIT).root.gathered
        model.zero_grad()


@multirank(2)
def test_outputs_without_any_tensor_are_refused(rank: int, world_size: int) -> None:
    class Later:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = lambda: tensor

    class Hiding(nn.Linear):
        def forward(self, x: torch.Tensor) -> Later:
            return Later(super().forward(x))

    model = sw.fully_shard(Hiding(2, 2))
    with pytest.raises(TypeError, match=r"output of unit 'Hiding' .* found a Later"):
        model(torch.randn(1, 2))
    with torch.no_grad():
        model(torch.randn(1, 2))


@multirank(2)
def test_unshard_and_reshard_by_hand(rank: int, world_size: int) -> None:
    model = shard(build())
    block = model.blocks[0]
    expected = build().blocks[0].up.weight
    handle = block.unshard(async_op=True)
    assert isinstance(block.up.weight, DTensor)
    handle.wait()
    torch.testing.assert_close(block.up.weight, expected)
    block.reshard()
    assert isinstance(block.up.weight, DTensor)
    assert model.blocks[1].unshard() is None
    assert not isinstance(model.blocks[1].up.weight, DTensor)
    backward(model, rank)
    check_gradients(model, expected_gradients(world_size))


@multirank(2)
def test_kept_after_backward_until_the_optimizer_steps(rank: int, world_size: int) -> None:
    if not subclasses_dispatch:
        pytest.skip("with this torch nothing is kept beyond a root call")
    model = shard(build())
    model.set_reshard_after_backward(False)
    model.set_reshard_after_forward(False)
    optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    issued: list[str] = []
    backward(model, rank)
    observe(model, lambda event, weights: issued.append(event))
    backward(model, rank, 0, 1)
    assert issued == []
    check_gradients(model, expected_gradients(world_size, micros=2))
    optimizer.step()
    batch = tokens(5, 0, rank)
    reference = build()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        q.data.copy_(full(p))
    torch.testing.assert_close(model(batch), reference(batch), rtol=1e-5, atol=1e-6)
    assert "issue" in issued


@multirank(2)
def test_output_and_input_dtypes(rank: int, world_size: int) -> None:
    seen = []
    plain = build()
    plain.blocks[0].register_forward_hook(lambda m, a, o: seen.append((a[0].dtype, o.dtype)))
    for block in plain.blocks:
        sw.fully_shard(block, mp_policy=sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model = sw.fully_shard(
        plain, mp_policy=sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    )
    assert model(tokens(0, 0, rank)).dtype == torch.float32
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    plain = build()
    kept = shard(plain, mp_policy=sw.MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False))
    with pytest.raises(RuntimeError, match="dtype"):
        kept.blocks[0](torch.randn(2, 7))


@multirank(2)
def test_state_dicts_hold_dtensors_and_load_back(rank: int, world_size: int) -> None:
    model = shard(build())
    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    backward(model, rank)
    optimizer.step()
    with torch.no_grad():
        model(tokens(0, 0, rank))  # leaves nothing gathered behind
    model.blocks[0].unshard()
    state = model.state_dict()
    assert all(isinstance(v, DTensor) for v in state.values())
    other = shard(build(seed=1))
    other.load_state_dict(state)
    batch = tokens(3, 0, rank)
    torch.testing.assert_close(other(batch), model(batch), rtol=0, atol=0)
    whole = get_model_state_dict(model)
    assert whole.keys() == state.keys()
    moments = get_optimizer_state_dict(model, optimizer)["state"]
    assert isinstance(moments["head.weight"]["exp_avg"], DTensor)
    assert moments["head.weight"]["exp_avg"].shape == (11, 7)


@multirank(2)
def test_two_models_in_one_process_do_not_see_each_other(rank: int, world_size: int) -> None:
    first, second = shard(build()), shard(build(seed=3), reshard_after_forward=True)
    for model, seed in ((first, 0), (second, 3), (first, 0)):
        backward(model, rank)
        check_gradients(model, expected_gradients(world_size, model=build(seed=seed)))
        model.zero_grad()


@multirank(2)
def test_lstm_keeps_its_second_list_of_weights_in_step(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = nn.LSTM(4, 6, batch_first=True)
    x = torch.randn(2, 3, 4)
    expected = plain(x)[0]
    model = sw.fully_shard(plain)
    torch.testing.assert_close(model(x)[0], expected)
    model(x)[0].sum().backward()
    assert model.weight_hh_l0.grad is not None


@multirank(2)
def test_moving_to_where_it_is_already_changes_nothing(rank: int, world_size: int) -> None:
    model = shard(build())
    before = [p.to_local().data_ptr() for p in model.parameters()]
    assert model.to("cpu") is model and model.float() is model
    assert [p.to_local().data_ptr() for p in model.parameters()] == before


@multirank(2)
def test_a_custom_divide_factor(rank: int, world_size: int) -> None:
    model = shard(build())
    for module in (model, *model.blocks):
        module.set_gradient_divide_factor(1.0)
    backward(model, rank)
    check_gradients(model, [g * world_size for g in expected_gradients(world_size)])


@multirank(1)
def test_mesh_of_this_rank_alone(rank: int, world_size: int) -> None:
    model = shard(build(), mesh=world_mesh(1))
    backward(model, rank)
    check_gradients(model, expected_gradients(1))
