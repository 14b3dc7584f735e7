"""Times of programs: works of kernels, rates of devices, and replays whose parts have the step's time as their sum."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shardwright.planner import (
    OPTIMIZER,
    STEP,
    Alloc,
    DeviceError,
    Figures,
    Kernel,
    Phase,
    Program,
    Rates,
    Step,
    in_time,
    known_devices,
    parse_devices,
    replay,
    speed_of,
    work_of,
)
from shardwright.planner.devices import GENERATIONS
from shardwright.planner.program import (
    AFTER_OPTIMIZER,
    ALL_PAIRS,
    CROSSING,
    GRAPH,
    HOST,
    Event,
    HostWait,
    Mark,
    Wait,
)
from shardwright.planner.rates import ranges_of, spread
from shardwright.planner.timeline import CAPTURE

H100 = known_devices()["h100"]
assert H100.figures is not None
RATES = Rates.of(H100.figures)
ALONE = RATES.with_share("host", 0.0).with_share("host_collective", 0.0).with_share("launch", 0.0)
PRODUCT = Kernel("mm", "compute", 3 * 2 * 4096**2, ((4096, 4096),) * 3, "bfloat16")
GATHER = Kernel("c10d.allgather", "gather", 9 << 27, ((1 << 29,),), "bfloat16", (8, 1))
UPDATE = Kernel("_fused_adamw_", HOST, 16 << 20, ((1 << 20,),), "float32")
UPLOAD = Kernel(f"{CROSSING}_foreach_copy_", "upload", 2 << 25, ((1 << 23,),), "float32")


def seconds(kernel: Kernel, rates: Rates = ALONE) -> float:
    return rates.seconds(kernel, work_of(kernel))


def program_of(*events: Event) -> Program:
    return Program([Phase(STEP), Phase("forward"), Phase(STEP), Phase("forward"), *events])


def step_of(*events: Event) -> Step:
    return Step.of(program_of(*events))


# -- works


@pytest.mark.parametrize("name", ["mm", "addmm", "bmm", "baddbmm"])
def test_products_have_the_operations_that_torch_counts(name: str) -> None:
    draw = random.Random(name)
    for _ in range(20):
        b, m, n, k = (draw.randint(1, 9) for _ in range(4))
        one, other = (
            (torch.ones(b, m, k), torch.ones(b, k, n))
            if "b" in name[:1]
            else (torch.ones(m, k), torch.ones(k, n))
        )
        sum_of = (
            (torch.ones(m, n),) if name == "addmm" else (torch.ones(b, m, n),) if name == "baddbmm" else ()
        )
        with FlopCounterMode(display=False) as counted:
            getattr(torch, name)(*sum_of, one, other)
        shapes = tuple(tuple(each.shape) for each in (*sum_of, one, other))
        work = work_of(Kernel(name, "compute", 4 * (m * k + k * n), shapes, "float32"))
        assert (work.kind, work.flops) == ("products", counted.get_total_flops())


def test_attention_counts_the_pairs_below_the_diagonal() -> None:
    q, kv = (2, 8, 64, 16), (2, 4, 64, 16)
    forward = work_of(
        Kernel("_scaled_dot_product_flash_attention", "compute", 100, (q, kv, kv, q), "bfloat16")
    )
    backward = work_of(
        Kernel("_scaled_dot_product_flash_attention_backward", "compute", 100, (q, q, kv, kv), "bfloat16")
    )
    assert forward.flops == 4 * 2 * 8 * 64 * 64 / 2 * 16
    assert backward.flops == 2.5 * forward.flops


@pytest.mark.parametrize("name", ["flash_attention", "efficient_attention_backward"])
def test_attention_that_is_not_causal_counts_all_pairs(name: str) -> None:
    square = Kernel(f"_scaled_dot_product_{name}", "compute", 100, ((2, 8, 64, 16),) * 4, "bfloat16")
    whole = work_of(square._replace(name=f"{ALL_PAIRS}{square.name}"))
    assert (whole.kind, whole.flops) == ("attention", 2 * work_of(square).flops)


@pytest.mark.parametrize(
    ("name", "shapes", "nbytes", "moved"),
    [
        ("add", ((8, 4), (8, 4), (8, 4)), 384, 384),
        ("mul_", ((8, 4), (8, 4)), 256, 384),  # it is read and written
        ("mul_", ((8, 4),), 128, 256),
        ("zero_", ((8, 4),), 128, 128),
        ("copy_", ((8, 4), (8, 4)), 256, 256),
        ("embedding", ((1000, 4), (2, 4), (2, 4, 4)), 16_000 + 64 + 128, 256),
        ("nll_loss_backward", ((), (8, 4), (8,), (), (8, 4)), 256, 128),
        ("empty", (), 0, 0),
    ],
)
def test_bytes_that_move(name: str, shapes: tuple[tuple[int, ...], ...], nbytes: int, moved: int) -> None:
    assert work_of(Kernel(name, "compute", nbytes, shapes, "float32")).nbytes == moved


# -- rates


@pytest.mark.parametrize("name", ["convolution", "convolution_backward"])
def test_operations_without_a_peak_have_bytes_alone(name: str) -> None:
    """Those of few taps, as in Mamba-2, are limited by memory. MFU is of products and attention."""
    work = work_of(Kernel(name, "compute", 96, ((2, 3, 4), (2, 3, 4), (3, 1, 4)), "float32"))
    assert (work.kind, work.flops) == ("memory", 0)


def test_more_work_takes_no_less_time_and_no_device_exceeds_its_figures() -> None:
    draw = random.Random(0)
    for device in known_devices().values():
        figures = device.figures
        assert (
            figures is not None
            and figures.generation in GENERATIONS
            and figures.source.startswith("https://")
        )
        rates = Rates.of(figures)
        for name, span in ranges_of(figures).items():
            worst, best = (span.low, span.high) if span.low < span.high else (span.high, span.low)
            assert worst <= span.likely <= best, name
        for _ in range(50):
            m, n, k = (2 ** draw.randint(4, 13) for _ in range(3))
            small, large = (
                Kernel("mm", "compute", 2 * (m * r * k + k * n + m * r * n), ((m * r, k), (k, n)), "bfloat16")
                for r in (1, 2)
            )
            assert seconds(small, rates) <= seconds(large, rates)
            assert seconds(small, rates) > work_of(small).flops / figures.flops["bfloat16"]


def test_less_power_is_a_lower_clock() -> None:
    less = Rates.of(Figures(**{**vars(RATES.figures), "power": 0.7}))
    assert seconds(PRODUCT, less) > 1.1 * seconds(PRODUCT, RATES)
    memory = Kernel("add", "compute", 1 << 30, ((1 << 28,),), "float32")
    assert seconds(memory, less) == seconds(memory, RATES)


@pytest.mark.parametrize(
    ("ranks", "stride", "nodes", "members"),
    [(8, 1, 1, 8), (4, 1, 1, 4), (16, 1, 2, 8), (4, 8, 4, 1), (4, 2, 1, 4), (8, 4, 4, 2), (32, 32, 32, 1)],
)
def test_groups_on_nodes_of_eight(ranks: int, stride: int, nodes: int, members: int) -> None:
    assert spread(ranks, stride, 8) == (nodes, members)


def test_collectives() -> None:
    """Twice the bytes for a reduction to all, and between nodes the network."""
    gather = GATHER
    whole = gather.nbytes * 8 / 9
    assert seconds(gather) == pytest.approx(whole * 7 / 8 / (450e9 * RATES.shares["links"]), rel=0.02)
    reduced = gather._replace(name="c10d.allreduce_", nbytes=int(whole))
    assert seconds(reduced) == pytest.approx(2 * seconds(gather), rel=0.01)
    assert seconds(gather._replace(group=(16, 1))) > 1.05 * seconds(gather)
    assert seconds(gather._replace(group=(8, 8))) > 5 * seconds(gather)
    assert seconds(gather._replace(group=(1, 1))) == 0
    # A ring over two nodes of eight sends all but one part of the tensor over the network, on eight links at a time.
    two_nodes = gather._replace(nbytes=gather.nbytes * 100, group=(16, 1))
    sent = two_nodes.nbytes * 16 / 17 * 15 / 16
    assert seconds(two_nodes) == pytest.approx(sent / (8 * 50e9 * RATES.shares["network"]), rel=0.02)


def test_what_is_offloaded() -> None:
    """The host reads four numbers for each parameter and writes three. A copy crosses once."""
    figures, shares = RATES.figures, RATES.shares
    assert seconds(UPDATE) == pytest.approx((28 << 20) / (614e9 * shares["host_memory"]))
    shared = Rates.of(figures, 16)  # 8 of 16 ranks are on a node
    assert seconds(UPDATE, shared) == pytest.approx(8 * seconds(UPDATE))
    assert seconds(UPLOAD) == pytest.approx((1 << 25) / (figures.pcie * shares["pcie"]))
    for device in known_devices().values():
        assert device.figures is not None and device.figures.knows_host
        assert device.figures.pcie < device.figures.host_memory < device.figures.bandwidth


# -- replays


def test_a_gather_beside_the_computation_costs_what_it_slows_down() -> None:
    gather = GATHER._replace(nbytes=GATHER.nbytes // 20)
    hidden: list[Event] = [gather, Mark(1, "gather"), *[PRODUCT] * 40, Wait("compute", 1), PRODUCT]
    found = replay(step_of(*hidden), ALONE)
    assert found.waits == 0 and found.seconds == pytest.approx(41 * seconds(PRODUCT) + found.beside)
    assert found.beside == pytest.approx(seconds(gather) * (RATES.shares["beside"] - 1), rel=0.01)
    exposed = replay(step_of(gather, Mark(1, "gather"), Wait("compute", 1), PRODUCT), ALONE)
    assert exposed.waits == pytest.approx(seconds(gather)) and exposed.beside == 0


def test_collectives_share_a_link_and_not_two() -> None:
    other = GATHER._replace(name="c10d.reduce_scatter", stream="reduce")
    one_link = replay(step_of(GATHER, other, Mark(1, "reduce"), Wait("compute", 1), PRODUCT), ALONE)
    across = other._replace(group=(4, 8))
    two_links = replay(step_of(GATHER, across, Mark(1, "reduce"), Wait("compute", 1), PRODUCT), ALONE)
    assert one_link.waits == pytest.approx(seconds(GATHER) + seconds(other))
    assert two_links.waits == pytest.approx(seconds(across))


def test_the_host_is_waited_for() -> None:
    small = Kernel("add", "compute", 1024, ((256,),), "float32")
    found = replay(step_of(*[small] * 100), RATES)
    assert found.seconds == pytest.approx(100 * RATES.shares["host"], rel=0.1)
    assert found.host > 0.5 * found.seconds
    graphed = [Alloc(0, 4, f"{GRAPH}1 {CAPTURE}", 0), *[small._replace(stream=CAPTURE)] * 100]
    of_graph = replay(step_of(*graphed), RATES)
    assert of_graph.host == 0 and of_graph.busy == found.busy
    compiled = replay(step_of(*[small._replace(name="fused_add")] * 100), RATES)
    assert compiled.seconds < found.seconds
    # A host that waits queues nothing.
    waiting: list[Event] = [PRODUCT, Mark(1, "compute"), HostWait(1), small]
    assert replay(step_of(*waiting), RATES).seconds > seconds(PRODUCT) + 2 * RATES.shares["host"]


def test_an_offloaded_step() -> None:
    """A copy costs what it makes the computation wait, and the device waits while the host computes."""
    hidden: list[Event] = [UPLOAD, Mark(1, "upload"), *[PRODUCT] * 40, Wait("compute", 1), PRODUCT]
    found = replay(step_of(*hidden), ALONE)
    assert found.copies == found.offloaded == 0 and found.seconds == pytest.approx(41 * seconds(PRODUCT))
    exposed = replay(step_of(UPLOAD, Mark(1, "upload"), Wait("compute", 1), PRODUCT), ALONE)
    assert exposed.copies == pytest.approx(seconds(UPLOAD)) and exposed.waits == 0
    download = UPLOAD._replace(stream="download")
    steps: list[Event] = [
        PRODUCT, Mark(1, "compute"), Wait("download", 1), download, Mark(2, "download"), HostWait(2), UPDATE,
    ]  # fmt: skip
    found = replay(step_of(*steps), ALONE)
    assert found.copies == pytest.approx(seconds(download))
    assert found.offloaded == pytest.approx(seconds(UPDATE))
    assert found.seconds == pytest.approx(sum(map(seconds, (PRODUCT, download, UPDATE))))
    # The host of 8 ranks is known less well than the device.
    plain = speed_of(program_of(PRODUCT), H100, 8)
    offloaded = speed_of(program_of(*steps), H100, 8)
    assert plain is not None and offloaded is not None
    assert offloaded.seconds[2] / offloaded.seconds[1] > 1.2 * plain.seconds[2] / plain.seconds[1]
    figures = Figures(**{**vars(RATES.figures), "pcie": 0.0})
    assert speed_of(program_of(*steps), replace(H100, figures=figures), 8) is None


@pytest.mark.parametrize("seed", range(20))
def test_the_parts_have_the_steps_time_as_their_sum(seed: int) -> None:
    draw = random.Random(seed)
    events: list[Event] = []
    marks = itertools.count(1)
    known: list[int] = []
    kernels = [
        PRODUCT,
        GATHER,
        GATHER._replace(stream="compute"),
        Kernel("add", "compute", 1 << 26, (), "float32"),
    ]
    kernels += [GATHER._replace(name="c10d.allreduce_", stream="reduce", group=(4, 8))]
    if seed % 2:
        kernels += [UPDATE, UPLOAD, UPLOAD._replace(stream="compute")]
    for _ in range(60):
        kind = draw.randrange(5)
        if kind < 2:
            events.append(draw.choice(kernels))
        elif kind == 2:
            known.append(next(marks))
            events.append(Mark(known[-1], draw.choice(["compute", "gather", "reduce", "upload"])))
        elif known:
            number = draw.choice(known)
            stream = draw.choice(["compute", "gather", "reduce"])
            events.append(Wait(stream, number) if kind == 3 else HostWait(number))
    program = Program([Phase(STEP), Phase(STEP), Phase("forward"), *events], [], 4096, 1e12)
    speed = speed_of(program, H100, 8)
    assert speed is not None
    found = speed.timeline
    parts = (
        sum(found.busy.values()) + found.beside + found.waits + found.host + found.copies + found.offloaded
    )
    assert found.seconds == pytest.approx(parts)
    assert sum(loss.seconds for loss in speed.losses()) == pytest.approx(found.seconds)
    low, likely, high = speed.seconds
    assert low <= likely <= high and speed.tokens_per_second == (4096 / high, 4096 / likely, 4096 / low)


def test_the_last_step_counts() -> None:
    first: list[Event] = [Phase("forward"), PRODUCT]
    second: list[Event] = [Phase("forward"), PRODUCT, PRODUCT, Phase("backward"), PRODUCT]
    trainers: list[Event] = [
        Phase("build"),
        Phase(STEP),
        *first,
        Phase(STEP),
        *second,
        Phase("validation"),
        PRODUCT,
    ]
    loops: list[Event] = [
        Phase("build"),
        *first,
        Phase(OPTIMIZER),
        Phase(AFTER_OPTIMIZER),
        *second,
        Phase(OPTIMIZER),
        Phase(AFTER_OPTIMIZER),
    ]
    for events in (trainers, loops):
        kernels = Step.of(Program(events)).events
        assert len(kernels) == 3, events
    with pytest.raises(ValueError, match="no second step"):
        Step.of(Program([Phase("build"), *first, Phase(OPTIMIZER), Phase(AFTER_OPTIMIZER)]))
    assert speed_of(Program([Phase("build"), *first]), H100, 8) is None


# -- devices


def test_a_device_like_another_one(tmp_path: Path) -> None:
    file = tmp_path / "slow.toml"
    file.write_text('like = "h100"\ngib = 95.0\n[speed]\npower = 0.7\n')
    count, device = parse_devices(f"8x{file}", lambda: H100)
    assert count == 8 and device.nbytes == 95 << 30 and device.figures is not None
    assert device.figures == Figures(**{**vars(RATES.figures), "power": 0.7})


@pytest.mark.parametrize("name", ["a100", "h100", "b200", "rtx4090"])
def test_a_file_without_a_generation_has_that_of_the_most_similar_device(tmp_path: Path, name: str) -> None:
    known = known_devices()[name].figures
    assert known is not None
    peaks = ", ".join(f"{dtype} = {0.9e-12 * flops}" for dtype, flops in known.flops.items())
    figures = "bandwidth = 3000\nunits = 100\nnode = 8\nwithin = 300\nacross = 25\n"
    (tmp_path / "own.toml").write_text(f"gib = 80\n[speed]\ntflops = {{ {peaks} }}\n{figures}")
    _, device = parse_devices(str(tmp_path / "own.toml"), lambda: pytest.fail())
    assert device.figures is not None and device.figures.generation == known.generation


def test_a_device_may_be_like_one_that_is_like_another(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('like = "h200"\ngib = 100\n')
    _, device = parse_devices(str(tmp_path / "own.toml"), lambda: pytest.fail())
    assert device.figures == known_devices()["h200"].figures and device.nbytes == 100 << 30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('like = "h1000"\ngib = 1', "expected like, the name of another device, found 'h1000'"),
        (
            'like = "h100"\n[speed]\ngeneration = "volta"',
            "expected a generation of ampere, ada, .*, found 'volta'",
        ),
        ('like = "h100"\n[speed]\nbandwith = 3', r"\[speed\] has 'bandwith'; expected across, bandwidth"),
        ('like = "h100"\n[speed]\nbandwidth = "fast"', "expected bandwidth, GB/s .*, found 'fast'"),
        (
            'like = "h100"\n[speed]\npower = 0.1',
            "expected power, .*, above 0.2, which its memory alone takes, found 0.1",
        ),
        ('like = "h100"\n[speed]\npower = 1.5', "expected power, the share of its nominal power, found 1.5"),
        ("gib = 80\nbandwidth = 3", r"own: it has 'bandwidth'; expected gib, host_gib, kind, like"),
        ("gib = 80\nspeed = 3", r"expected a table \[speed\], found 3"),
        ('gib = 80\n[speed]\ngeneration = "ada"\ntflops = {bfloat16 = 3}', "a table of dtypes with float32"),
    ],
)
def test_a_wrong_device_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "own.toml"
    file.write_text(text)
    with pytest.raises(DeviceError, match=message) as error:
        parse_devices(str(file), lambda: H100)
    assert "\n" not in str(error.value)


def test_durations_in_words() -> None:
    assert [in_time(each) for each in (0.0123, 1.864, 1864, 18720, 1e6)] == [
        "12.3 ms", "1.86 s", "31.1 minutes", "5.2 hours", "11.6 days",
    ]  # fmt: skip
