"""Kernels of random graphs: each reads what was made before it, everything that leaves the graph is made, and no result
takes memory that somebody reads later."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch.fx import Graph, Node

from shardwright.planner.tracing.fusion import FusedKernel, base_of, kernels_of, nodes_in

aten = torch.ops.aten
N = 8


def random_graph(draw: random.Random) -> tuple[list[Node], set[Node]]:
    """The nodes of a graph, and inputs of it that are donated."""
    graph = Graph()
    values: list[Node] = []

    def add(target: object, *arguments: object) -> None:
        node = graph.call_function(target, arguments)  # type: ignore[arg-type]
        given = [each.meta["val"] if isinstance(each, Node) else each for each in arguments]
        node.meta["val"] = target(*given)  # type: ignore[operator]
        values.append(node)

    for number in range(draw.randrange(1, 4)):
        node = graph.placeholder(f"x{number}")
        node.meta["val"] = torch.empty(N, N, device="meta")
        values.append(node)
    inputs = list(values)
    for _ in range(draw.randrange(1, 40)):
        one, other = draw.choices(values[-8:], k=2)
        kind = draw.randrange(8)
        if kind < 3:
            add(draw.choice((aten.add.Tensor, aten.mul.Tensor)), one, other)
        elif kind == 3:
            add(draw.choice((aten.exp.default, aten.relu.default)), one)
        elif kind == 4:
            add(aten.sum.dim_IntList, one, [draw.randrange(2)], True)
        elif kind == 5:
            add(aten.permute.default, one, [1, 0])
        elif kind == 6 and one.meta["val"].shape == other.meta["val"].shape == (N, N):
            add(aten.mm.default, one, other)
        else:
            add(aten.expand.default, one, [N, N])
    graph.output(tuple(draw.sample(values, min(len(values), draw.randrange(1, 4)))))
    return list(graph.nodes), {each for each in inputs if draw.random() < 0.5}


def check(nodes: Sequence[Node], donated: set[Node], kernels: Sequence[FusedKernel]) -> None:
    there = {node for node in nodes if node.op == "placeholder"}
    holder = {node: node for node in there}  # each value to the one that took its memory first
    outputs = {base_of(node) for node in nodes_in(nodes[-1].args)}
    for number, kernel in enumerate(kernels):
        made = set(kernel.stored or kernel.nodes)
        later = {read for other in kernels[number + 1 :] for read in other.reads} | outputs
        assert set(kernel.reads) <= there, "reads what is not there yet"
        assert not made & there, "made twice"
        for node, place in kernel.places.items():
            assert node in kernel.stored and place in kernel.reads
            assert place not in later, "takes memory that is read later"
            assert place.op != "placeholder" or place in donated
            assert place.meta["val"].shape.numel() == node.meta["val"].shape.numel()
        assert len(set(kernel.places.values())) == len(kernel.places)
        holder |= {node: holder[kernel.places[node]] if node in kernel.places else node for node in made}
        there |= made
    assert outputs <= there, "an output is not made"
    assert len({holder[node] for node in outputs}) == len(outputs), "two outputs have the same memory"


@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_kernels_of_random_graphs(seed: int, on_cpu: bool) -> None:
    draw = random.Random(seed)
    fused = 0
    for _ in range(100):
        nodes, donated = random_graph(draw)
        kernels = kernels_of(nodes, donated, on_cpu)
        check(nodes, donated, kernels)
        fused += sum(len(kernel.nodes) > 1 for kernel in kernels)
    assert fused > 100
