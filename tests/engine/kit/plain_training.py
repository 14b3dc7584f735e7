"""The trainings of simulated.py on a plain model of the CPU, which has all ranks' data."""

from __future__ import annotations

import functools
import itertools

import torch

from tests.engine.kit.edits_of_shards import EDITS
from tests.engine.kit.models import loss_of, tokens
from tests.engine.kit.simulated import HOOK_FACTORS, Case, Net, Outcome, is_edited, plain_net

#: Events that change numbers. All others are of streams, order and memory.
CHANGES = ("another order", "frozen", "hook on a stream", "validation on a stream", "whole matrices", *EDITS)
#: Gradients or weights travel in fewer bits: how far a weight may be from the plain model's, as a part of its change.
LOSSY = {"compressed": 0.05, "weights encoded": 0.3, "thin matrices": 1.0}


def plain_outcome(case: Case, steps: int, rank: int, world: int) -> Outcome:
    """Cases that differ only in what must not change numbers share one training."""
    event = case.event if case.event in CHANGES else "none"
    return _trained(event, case.micros, case.uses_sgd, case.steps == "optimizer", steps, rank, world)


@functools.cache
def _trained(
    event: str, micros: int, uses_sgd: bool, clips: bool, steps: int, rank: int, world: int
) -> Outcome:
    model = plain_net()
    optimizer = _optimizer_of(model, event, uses_sgd)
    if event == "frozen":
        model.blocks[1].requires_grad_(False)
        model.embed.requires_grad_(False)
    losses = []
    for step in range(steps):
        if event == "another order":
            model.skipped = (-1, 2, -1, 1)[step]
        for micro in range(micros):
            batches = [tokens(step, micro, each) for each in range(world)]
            outputs = model(torch.cat(batches)).chunk(world)
            of_ranks = [loss_of(output, batch) for output, batch in zip(outputs, batches, strict=True)]
            (sum(of_ranks) / world).backward()  # type: ignore[union-attr]
            losses.append(of_ranks[rank].detach())
        if event == "hook on a stream":
            own = [model.embed, model.norm, model.head]
            for modules, factor in zip(
                (own, *([block] for block in model.blocks)), HOOK_FACTORS, strict=True
            ):
                for p in itertools.chain(*[module.parameters() for module in modules]):
                    p.grad.mul_(factor)  # type: ignore[union-attr]
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        with torch.no_grad():
            if event in EDITS and is_edited(step):
                EDITS[event](model)
            if event == "validation on a stream":
                losses.append(loss_of(model(tokens(99, 0, rank)), tokens(99, 0, rank)))
    return Outcome(losses, [p.detach() for p in model.parameters()])


def _optimizer_of(model: Net, event: str, uses_sgd: bool) -> torch.optim.Optimizer:
    if event == "whole matrices":
        return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-3)
    if uses_sgd:
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def farness(case: Case, found: Outcome, steps: int, rank: int, world: int) -> list[str]:
    """The losses and weights that are far from the plain model's, in words.

    float32 sums differ in their order only. Fewer bits round products and sums: then losses may differ a little, and
    each weight's whole change may differ by a part of itself.
    """
    plain, start = plain_outcome(case, steps, rank, world), [p.detach() for p in plain_net().parameters()]
    # AdamW steps by the sign of a gradient first, which sums in bfloat16 change where the gradient is nearly 0.
    of_dtypes = 0.0 if case.dtypes == (None, None) else 0.4
    part = LOSSY.get(case.event, of_dtypes)
    tolerance = 3e-2 if part else 1e-5
    far = []
    for i, (ours, theirs) in enumerate(zip(found.losses, plain.losses, strict=True)):
        if not torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance):
            far.append(f"losses[{i}]: {ours.item():.6g}, expected {theirs.item():.6g}")
    for i, (ours, theirs, first) in enumerate(zip(found.weights, plain.weights, start, strict=True)):
        distance, moved = (ours - theirs).norm().item(), (theirs - first).norm().item()
        most = part * moved or 1e-5 * (1 + theirs.norm().item())
        if not distance <= most:
            far.append(f"weights[{i}]: {distance:.3g} from the plain model's, which moved by {moved:.3g}")
    return far
