"""Loading: the right values in every layout, strategy and state of the model, no byte too many, and clear refusals."""

from __future__ import annotations

import os
import weakref
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import shardwright as sw
from shardwright.checkpoint import Joined, Slice, Stacked, Transposed
from tests.checkpoint.kit.models import LAYOUTS, source_model
from tests.engine.kit.models import build, full, loss_of, shard, tokens
from tests.engine.kit.places import On, on, on_meshes
from tests.support import multirank, world_mesh


def stored(folder: Path, form: str) -> Path:
    """The model of seed 0, saved once for all ranks."""
    path = folder / {"sharded": "sharded", "file": "single", "torch": "weights.pt"}[form]
    if torch.distributed.get_rank() == 0 and not path.exists():
        if form == "torch":
            torch.save(source_model().state_dict(), path)
        else:
            sw.save_pretrained(source_model(), path, max_shard_size="0.5 KB" if form == "sharded" else "1 GB")
    torch.distributed.barrier()
    return path


WHERE = [
    *on("zero3", (2,), (3,), (4,)),
    *on("zero1", (2,)),
    *on("zero2", (3,)),
    *on("ddp", (2,)),
    *on("hsdp", (2, 2)),
    *on("hfsdp", (2, 2)),
]
STATES: dict[str, AbstractContextManager[Any]] = {
    "real": nullcontext(),
    "meta": torch.device("meta"),
    "deferred": sw.deferred_init(),
}
FORMS = [*zip(STATES, ("sharded", "file", "torch"), strict=True)]
CASES = [
    (at, layout, *FORMS[(i + j // 2) % 3])
    for i, at in enumerate(WHERE)
    for j, layout in enumerate(LAYOUTS)
    if not (layout == "shard_1" and str(at).startswith("hfsdp"))
    and (os.environ.get("SHARDWRIGHT_MATRIX") == "all" or (i + j) % 2 == 0)
]


@on_meshes(CASES)
def test_values_arrive_and_each_rank_reads_its_part(
    rank: int, world_size: int, at: On, layout: str, state: str, form: str, tmp_path: Path
) -> None:
    path = stored(tmp_path, form)
    with {**STATES, "deferred": sw.deferred_init()}[state]:
        model = source_model(seed=1)
    optimizer_first = torch.optim.SGD(model.parameters()) if state == "real" else None
    model = shard(model, head_unit=False, mesh=at.mesh, strategy=at.strategy, **LAYOUTS[layout])
    before = list(model.parameters())
    if state == "real":
        model(tokens(0, 0, rank))  # strategies that keep full weights keep these
    else:
        with pytest.raises(RuntimeError, match="hold no values yet"):
            model(tokens(0, 0, rank))
    loaded = sw.load_pretrained(model, path)
    assert (loaded.missing, loaded.unexpected) == ([], [])
    expected = source_model()
    assert [id(p) for p in model.parameters()] == [id(p) for p in before]
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(full(p), q), name
    assert model.head.weight is model.embed.weight
    assert model.norm.count.tolist() == [0, 7]
    # What is stored twice, the tied weight in a state dict of torch's, is compared.
    own = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    twice = model.embed.weight.to_local() if form == "torch" else torch.empty(0)
    assert loaded.bytes_read == sum(t.nbytes for t in own) + 2 * 8 + 2 * twice.nbytes
    sw.materialize(model) if state == "deferred" else model.blocks[0]._buffers.update(table=torch.ones(2))
    if state == "deferred":
        assert model.blocks[0].table.tolist() == [1, 1]  # it is not stored
    assert all(
        torch.equal(full(p), q) for p, q in zip(model.parameters(), expected.parameters(), strict=True)
    )
    batch = tokens(1, 0, rank)
    assert torch.allclose(model(batch), expected(batch), atol=1e-6)
    assert optimizer_first is None or optimizer_first.param_groups


class ReadOfFiles:
    """Counts the bytes of mapped files that are copied from."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.nbytes = 0
        mapped: list[torch.Tensor] = []
        from_file = torch.from_file
        patch.setattr(torch, "from_file", lambda *a, **k: mapped.append(from_file(*a, **k)) or mapped[-1])

        def counted(function: Any, place: int) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                source = args[place]
                if any(m.data_ptr() <= source.data_ptr() < m.data_ptr() + m.nbytes for m in mapped):
                    self.nbytes += source.nbytes
                return function(*args, **kwargs)

            return call

        for name in ("copy_", "clone", "contiguous", "to"):
            patch.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name), int(name == "copy_")))


@on_meshes([on("zero3", (4,))[0], on("hfsdp", (2, 2))[0], on("hsdp", (2, 2))[0]])
def test_nothing_of_other_ranks_is_read(rank: int, world_size: int, at: On, tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Linear(256, 32, bias=False))
    if rank == 0:
        sw.save_pretrained(plain, tmp_path / "saved", dtype=torch.bfloat16, max_shard_size=40_000)
    torch.distributed.barrier()
    model = sw.fully_shard(plain, mesh=at.mesh, strategy=at.strategy, layout=sw.Ragged("element"))
    sw.load_pretrained(model, tmp_path / "saved")  # what is imported and made at the first call
    with pytest.MonkeyPatch.context() as patch:
        counting = ReadOfFiles(patch)
        loaded = sw.load_pretrained(model, tmp_path / "saved")
    whole = 2 * (64 * 256 + 256 * 32)
    assert counting.nbytes == loaded.bytes_read == whole // at.parts


@pytest.mark.parametrize("state", list(STATES))
def test_plain_models_are_loaded_in_every_state(tmp_path: Path, state: str) -> None:
    sw.save_pretrained(source_model(), tmp_path / "saved")
    with {**STATES, "deferred": sw.deferred_init()}[state]:
        model = source_model(seed=1)
    objects = list(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    loaded = sw.load_pretrained(model, tmp_path / "saved")
    assert loaded.bytes_read == sum(t.nbytes for t in source_model().state_dict().values()) - 11 * 7 * 4
    assert all(p is q for p, q in zip(model.parameters(), objects, strict=True))
    assert model.head.weight is model.embed.weight
    for (name, p), q in zip(model.state_dict().items(), source_model().state_dict().values(), strict=True):
        assert torch.equal(p, q), name
    if state == "deferred":
        sw.materialize(model)
    else:
        model.blocks[0].table = torch.ones(2)
    loss_of(model(tokens(0, 0, 0)), tokens(0, 0, 0)).backward()
    optimizer.step()
    assert not torch.equal(model.embed.weight, source_model().embed.weight)


class Scaled(nn.Linear):
    """With a buffer that requires a gradient, held under another name too."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("scale", torch.ones(2).requires_grad_())
        self.also = self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


@multirank(1, 2)
@pytest.mark.parametrize("state", ["meta", "deferred"])
@pytest.mark.parametrize("sharded", [False, True])
def test_what_is_loaded_keeps_all_that_it_has_beside_values(
    rank: int, world_size: int, state: str, sharded: bool, tmp_path: Path
) -> None:
    if rank == 0:
        sw.save_pretrained(Scaled(), tmp_path / "saved")
    torch.distributed.barrier()
    with {**STATES, "deferred": sw.deferred_init()}[state]:
        model = Scaled()
    seen: list[str] = []
    model.weight.register_hook(lambda _: seen.append("weight"))
    model.bias.register_post_accumulate_grad_hook(lambda _: seen.append("bias"))
    model.scale.register_hook(lambda _: seen.append("scale"))
    references = [weakref.ref(t) for t in (model.weight, model.scale)]  # which torch then does not exchange
    if sharded:
        sw.fully_shard(model, mesh=world_mesh(world_size))
    sw.load_pretrained(model, tmp_path / "saved")
    references.clear()
    assert model.scale.requires_grad
    assert model.also is model.scale
    model(torch.ones(1, 2)).sum().backward()
    assert sorted(seen) == ["bias", "scale", "weight"]


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4))
        self.register_buffer("part", self.table[1:3], persistent=False)
        self.register_buffer("whole", torch.ones(2))
        self.flat = self.whole.view(1, 2)


@pytest.mark.parametrize("state", ["meta", "deferred"])
def test_views_that_would_not_see_what_is_loaded_are_refused(state: str, tmp_path: Path) -> None:
    sw.save_pretrained(Views(), tmp_path / "saved")
    with {**STATES, "deferred": sw.deferred_init()}[state]:
        model = Views()
    with pytest.raises(ValueError, match=r"(?s)'table'.* memory with 'part'.*'whole'.* memory with 'flat'"):
        sw.load_pretrained(model, tmp_path / "saved")
    if state == "deferred":
        sw.load_pretrained(sw.materialize(model), tmp_path / "saved")
        assert model.table[1:].data_ptr() == model.part.data_ptr()


def test_buffers_that_are_part_of_a_graph_are_not_loaded(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("doubled", model.weight * 2)
        return model

    sw.save_pretrained(build(), tmp_path / "saved")
    with torch.device("meta"):
        model = build()
    with pytest.raises(ValueError, match="Buffer 'doubled' was computed from tensors that require gradients"):
        sw.load_pretrained(model, tmp_path / "saved")
    assert model.weight.is_meta


def part_of_a_model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 5), nn.BatchNorm1d(5))


@multirank(2, 3)
@pytest.mark.parametrize("layout", ["per_parameter", "row"])
def test_materialising_gives_values_to_what_was_not_loaded_and_to_nothing_else(
    rank: int, world_size: int, layout: str, tmp_path: Path
) -> None:
    kept = part_of_a_model()
    kept[1].register_parameter("bias", None)  # is not stored, as is all of the first one
    if rank == 0:
        torch.save(
            {k: v + 1 for k, v in kept.state_dict().items() if not k.startswith("0")}, tmp_path / "weights.pt"
        )
    torch.distributed.barrier()
    stored = torch.load(tmp_path / "weights.pt")
    for number, (state, first) in enumerate(
        [("deferred", "shard"), ("deferred", "load"), ("meta", "shard"), ("meta", "load"), ("real", "shard")]
    ):
        torch.manual_seed(number)
        plain = part_of_a_model()
        if state == "meta":  # module by module draws what the constructors drew
            torch.manual_seed(number)
            plain[0].reset_parameters(), plain[1].reset_parameters()
        drawn = torch.get_rng_state()
        torch.manual_seed(number)
        with {**STATES, "deferred": sw.deferred_init()}[state]:
            model = part_of_a_model()
        if first == "shard":
            sw.fully_shard(model, mesh=world_mesh(world_size), **LAYOUTS[layout])
        loaded = sw.load_pretrained(model, tmp_path / "weights.pt", allow_missing=["0.*", "1.bias"])
        assert loaded.missing == ["0.weight", "0.bias", "1.bias"]
        if first == "load":
            sw.fully_shard(model, mesh=world_mesh(world_size), **LAYOUTS[layout])
        sw.materialize(model)
        assert torch.equal(torch.get_rng_state(), drawn)
        plain.load_state_dict(stored, strict=False)
        for (name, p), q in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            assert torch.equal(full(p), q), (state, first, name)


# -- names and forms ---------------------------------------------------------------------------------------------------


@multirank(3)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_tensors_in_other_forms_are_put_together(
    rank: int, world_size: int, tmp_path: Path, layout: str
) -> None:
    model = build(0).bfloat16()
    model.experts = nn.Parameter(torch.rand(4, 6, 5))
    generator = torch.Generator().manual_seed(3)
    content = {
        "wte": torch.rand(7, 11, generator=generator),
        "norms": torch.rand(3, 2, 7, generator=generator).double(),  # of both blocks and the last one
        "mlp.0.up": torch.rand(5, 7, generator=generator),
        "mlp.0.more": torch.rand(7, 7, generator=generator),
        "mlp.1.up": torch.rand(7, 12, generator=generator),
        **{f"expert.{e}": torch.rand(5, 6, generator=generator) for e in range(4)},
    }
    own = {k: v for k, v in build(5).state_dict().items() if "norm" not in k and "up.weight" not in k}
    del own["embed.weight"]
    content["flat_norms"] = content.pop("norms").flatten(0, 1).flatten()
    if rank == 0:
        torch.save({**content, **own}, tmp_path / "weights.bin")
    torch.distributed.barrier()
    names = ["blocks.0.norm", "blocks.1.norm", "norm"]
    key_map: dict[str, Any] = {
        "embed.weight": Transposed("wte"),
        "blocks.0.up.weight": Joined(("mlp.0.up", "mlp.0.more"), sizes=(5, 7)),
        "blocks.1.up.weight": Transposed("mlp.1.up"),
        "experts": Stacked(tuple(Transposed(f"expert.{e}") for e in range(4))),
    }
    for i, name in enumerate(names):
        for j, kind in enumerate(("weight", "bias")):
            key_map[f"{name}.{kind}"] = Slice("flat_norms", 14 * i + 7 * j, 7)
    model = shard(model, mesh=world_mesh(3), **LAYOUTS[layout])
    loaded = sw.load_pretrained(model, tmp_path / "weights.bin", key_map=key_map)
    expected = {
        "embed.weight": content["wte"].T,
        "blocks.0.up.weight": torch.cat([content["mlp.0.up"], content["mlp.0.more"]]),
        "blocks.1.up.weight": content["mlp.1.up"].T,
        "experts": torch.stack([content[f"expert.{e}"].T for e in range(4)]),
        **own,
    }
    flat = content["flat_norms"].view(3, 2, 7)
    expected |= {
        f"{n}.{k}": flat[i, j] for i, n in enumerate(names) for j, k in enumerate(("weight", "bias"))
    }
    read = 0
    for name, p in model.named_parameters():
        assert torch.equal(full(p), expected[name].to(p.dtype)), name
        read += p.to_local().numel() * expected[name].element_size()
    assert loaded.bytes_read == read
    assert len(expected) == len(list(model.parameters()))


@multirank(2)
def test_everything_that_does_not_fit_is_told_at_once_and_changes_nothing(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    content = dict(source_model().state_dict())
    del content["head.weight"], content["blocks.1.norm.bias"]
    content["blocks.0.up.weight"] = torch.zeros(12, 8)
    content["norm.count"] = torch.zeros(2)
    content["rotary.inv_freq"] = torch.zeros(3)
    if rank == 0:
        torch.save(content, tmp_path / "weights.pt")
    torch.distributed.barrier()
    model = shard(source_model(1), mesh=world_mesh(2))
    before = [full(p).clone() for p in model.parameters()]
    with pytest.raises(ValueError) as told:
        sw.load_pretrained(model, tmp_path / "weights.pt")
    text = str(told.value)
    assert "weights.pt does not fit the model. Nothing was changed" in text
    assert "Missing in the files (1): 'blocks.1.norm.bias'." in text
    assert "Unexpected, not in the model (1): 'rotary.inv_freq'." in text
    assert "or value (2): 'blocks.0.up.weight': expected shape (12, 7), found (12, 8), 'norm.count': " in text
    assert "expected torch.int64, found torch.float32" in text
    assert "allow_missing or allow_unexpected" in text
    with pytest.raises(ValueError, match=r"or value \(2\)"):  # those are never allowed
        sw.load_pretrained(model, tmp_path / "weights.pt", allow_missing=True, allow_unexpected=True)
    assert all(torch.equal(full(p), q) for p, q in zip(model.parameters(), before, strict=True))
    # A rank whose files are others: all of them raise, and none loads.
    path = tmp_path / ("weights.pt" if rank else "nothing.pt")
    error, said = (
        (RuntimeError, r"Rank 0 failed.*FileNotFoundError") if rank else (FileNotFoundError, "expected a")
    )
    key_map = {"blocks.0.up.weight": None, "norm.count": None, "blocks.1.norm.bias": None}
    with pytest.raises(error, match=said):
        sw.load_pretrained(model, path, key_map=key_map, allow_unexpected=True)
    assert all(torch.equal(full(p), q) for p, q in zip(model.parameters(), before, strict=True))
    loaded = sw.load_pretrained(
        model,
        tmp_path / "weights.pt",
        key_map={"blocks.0.up.weight": None, "norm.count": None},
        allow_missing=["blocks.*.bias"],
        allow_unexpected=["rotary.*", "norm.count", "blocks.0.up.weight"],
    )
    assert loaded.missing == ["blocks.1.norm.bias"]
    assert loaded.unexpected == ["blocks.0.up.weight", "norm.count", "rotary.inv_freq"]
    assert torch.equal(full(model.embed.weight), source_model().embed.weight)
    assert torch.equal(full(model.blocks[0].up.weight), source_model(1).blocks[0].up.weight)


def test_very_many_names_are_abbreviated(tmp_path: Path) -> None:
    torch.save({f"k{i}": torch.zeros(1) for i in range(2000)}, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"\(2000\): 'k0', 'k1', 'k2', 'k3' and 1,996 more\.") as told:
        sw.load_pretrained(nn.Linear(1, 1), tmp_path / "weights.pt")
    assert len(str(told.value)) < 1000


@multirank(3)
def test_tied_weights_are_found_under_any_name_and_must_agree(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    content = dict(source_model().state_dict())
    alone = {k: v for k, v in content.items() if k != "embed.weight"}
    nearly = {**content, "head.weight": content["embed.weight"].clone()}
    nearly["head.weight"][-1, -1] += 1  # which only the last rank can see
    if rank == 0:
        for name, saved in (("both", content), ("alone", alone), ("nearly", nearly)):
            torch.save(saved, tmp_path / f"{name}.pt")
    torch.distributed.barrier()
    for name in ("both", "alone"):
        model = shard(source_model(1), mesh=world_mesh(3))
        sw.load_pretrained(model, tmp_path / f"{name}.pt")
        assert torch.equal(full(model.head.weight), content["embed.weight"])
    model = shard(source_model(1), mesh=world_mesh(3))
    before = full(model.embed.weight)
    error, said = (ValueError, r"(?s)'embed\.weight' is tied to 'head\.weight', and .* different values")
    with pytest.raises(
        error if rank == 2 else RuntimeError, match=said if rank == 2 else f"(?s)Rank 2 failed.*{said[4:]}"
    ):
        sw.load_pretrained(model, tmp_path / "nearly.pt")
    assert torch.equal(full(model.embed.weight), before)


@multirank(2)
def test_refusals(rank: int, world_size: int, tmp_path: Path) -> None:
    path = stored(tmp_path, "file")
    model = shard(source_model(1), mesh=world_mesh(2))
    handle = model.blocks[1].register_forward_hook(lambda *_: sw.load_pretrained(model, path))
    with pytest.raises(
        RuntimeError, match=r"load_pretrained was called while unit '.*' is in use: call it between"
    ):
        model(tokens(0, 0, rank))
    handle.remove()
    with pytest.raises(TypeError, match="got the string"):
        sw.load_pretrained(model, path, allow_missing="norm.bias")
    other = nn.Linear(4, 2, bias=False)
    other.weight = nn.Parameter(DTensor.from_local(torch.zeros(2, 4), world_mesh(2), [Shard(0)]))
    if rank == 0:
        torch.save({"weight": torch.zeros(4, 4)}, tmp_path / "other.pt")
    torch.distributed.barrier()
    with pytest.raises(
        NotImplementedError, match="'weight' is a DTensor that belongs to no unit of fully_shard"
    ):
        sw.load_pretrained(other, tmp_path / "other.pt")
    sw.load_pretrained(model, path)
    assert torch.equal(full(model.embed.weight), source_model().embed.weight)


@multirank(2)
def test_ranks_with_other_files_are_named(rank: int, world_size: int, tmp_path: Path) -> None:
    stored = {"weight": torch.ones(3, 3)} | ({"bias": torch.ones(3)} if rank == 0 else {})
    torch.save(stored, tmp_path / f"{rank}.pt")
    model = sw.fully_shard(nn.Linear(3, 3))
    before = full(model.weight).clone()
    with pytest.raises(ValueError, match="Rank 1 found other tensors in its files than rank 0"):
        sw.load_pretrained(model, tmp_path / f"{rank}.pt", allow_missing=True)
    assert torch.equal(full(model.weight), before)
