"""The speed of a program: tokens a second with a range, and the losses between a device's peak and that."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.planner.devices import Device, Figures
from shardwright.planner.program import Program
from shardwright.planner.rates import Rates, ranges_of
from shardwright.planner.timeline import Step, Timeline, replay, step_seconds

#: Shares that are wrong together, if they are wrong: products and attention follow one clock.
_TOGETHER = (
    ("products", "attention", "attention_backward"),
    ("memory",),
    ("links", "network"),
    ("beside",),
    ("launch", "host", "host_compiled", "host_collective"),
    ("host_memory",),
    ("pcie",),
)
LEAST = 0.005  #: the part of a step that a loss must take to be shown
#: How many of the speeds that others have published are inside the range of their plan, and of how many. A test
#: compares this with the committed results of benchmarks/published_rows.py, hsdp_rows.py and trainer_rows.py.
INSIDE, PUBLISHED = 26, 28


class Loss(NamedTuple):
    """A part of a step's time.

    Attributes:
        name: a word for programs.
        seconds: its time in a step.
        text: the part in words.
        setting: what changes it; empty: nothing does.
    """

    name: str
    seconds: float
    text: str
    setting: str


@dataclass(frozen=True)
class Speed:
    """The time of a step of one rank.

    Attributes:
        timeline: its parts.
        seconds: the least, the likely and the largest time.
        tokens: trained tokens of one rank in a step; 0: unknown.
        model_flops: operations of the model's formula for these tokens; 0: unknown.
        peak: operations a second of the device, in the dtypes of the step's products.
        ranks: devices.
        is_measured: whether the times are those of a device that was measured.
    """

    timeline: Timeline
    seconds: tuple[float, float, float]
    tokens: float
    model_flops: float
    peak: float
    ranks: int
    is_measured: bool = False

    @property
    def tokens_per_second(self) -> tuple[float, float, float]:
        """The least, the likely and the largest number of each device."""
        low, likely, high = self.seconds
        return self.tokens / high, self.tokens / likely, self.tokens / low

    @property
    def mfu(self) -> float:
        """The share of the device's peak that the model's operations take."""
        return self.model_flops / self.seconds[1] / self.peak

    def losses(self) -> list[Loss]:
        """Return the parts of the likely time, from the model's operations at the peak on.

        Their sum is the step's time.
        """
        found, busy = self.timeline, self.timeline.busy
        ideal = self.model_flops / self.peak if self.model_flops else found.ideal
        parts = [
            Loss(
                "peak",
                ideal,
                f"the model's operations at {self.peak / 1e12:{',.0f' if self.peak > 1e13 else '.2g'}} TFLOP/s",
                "",
            )
        ]
        extra = found.ideal - ideal
        if extra >= 0:
            parts.append(Loss("recomputed", extra, "operations beyond the model's", "activations.checkpoint"))
        else:
            parts.append(
                Loss("skipped", extra, "operations that kernels leave out, such as masked pairs", "")
            )
        below = busy["products"] + busy["attention"] - found.ideal
        return [
            *parts,
            Loss("below_peak", below, "products and attention below the peak", "train.micro_batch"),
            Loss("memory", busy["memory"], "kernels that read and write memory", "train.compile"),
            Loss("optimizer", busy["optimizer"], "the optimizer", "train.global_batch"),
            Loss("beside", found.beside, "kernels slowed down by collectives", "train.micro_batch"),
            Loss("waits", found.waits, "waits for collectives", "parallel.prefetch, parallel.strategy"),
            Loss("host", found.host, "waits for the host", "train.compile, train.cuda_graph"),
            Loss("copies", found.copies, "copies between host and device", "parallel.offload"),
            Loss(
                "offloaded",
                found.offloaded,
                "the host's computation of what is offloaded",
                "parallel.offload",
            ),
        ]

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield the rows of a plan about speed: a head and a text."""
        low, likely, high = self.tokens_per_second
        rate = (
            f"{likely:,.0f} tokens/s on each device, between {low:,.0f} and {high:,.0f}; " if likely else ""
        )
        share = f"MFU {self.mfu:.1%}; " if self.model_flops else ""
        source = "" if self.is_measured else "; not measured here"
        yield "speed", f"{rate}{share}{in_time(self.seconds[1])} a step{source}"
        if likely and not self.is_measured:
            yield "", f"such ranges held {INSIDE} of {PUBLISHED} published speeds"
        shown = [loss for loss in self.losses() if abs(loss.seconds) >= LEAST * self.seconds[1]]
        for i, loss in enumerate(shown):
            setting = f" ({loss.setting})" if loss.setting else ""
            yield "time" if not i else "", f"{loss.seconds / self.seconds[1]:>7.1%}  {loss.text}{setting}"


def in_time(seconds: float) -> str:
    """Return a duration in words, such as 12.3 ms, 1.86 s, 5.2 hours or 12 days."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} minutes"
    return f"{seconds / 3600:.3g} hours" if seconds < 72 * 3600 else f"{seconds / 86400:,.3g} days"


def speed_of(program: Program, device: Device, ranks: int, with_range: bool = True) -> Speed | None:
    """Return the speed of a program's last step. None: the device's speed is not known, or the program makes one step.
    With offload also the bandwidth of the host's memory and of PCIe must be known.

    ``with_range``: find the range, too, which takes ten times as long.
    """
    if device.figures is None:
        return None
    try:
        step = Step.of(program)
    except ValueError:
        return None
    if step.offloads and not device.figures.knows_host:
        return None
    rates = Rates.of(device.figures, ranks)
    likely = replay(step, rates)
    seconds = (likely.seconds,) * 3
    if with_range:
        seconds = _range(step, device.figures, rates, likely.seconds)
    peak = likely.flops / likely.ideal if likely.ideal else rates.peak("bfloat16")
    is_measured = device.figures.measured is not None and device.figures.measured.whole
    return Speed(likely, seconds, program.tokens, program.model_flops, peak, ranks, is_measured)


def _range(step: Step, figures: Figures, rates: Rates, likely: float) -> tuple[float, float, float]:
    """Return the least, the likely and the largest time: the differences that groups of shares make, as if they were
    independent of one another."""
    slower = faster = 0.0
    spans = ranges_of(figures)
    for group in _TOGETHER:
        for way in ("low", "high"):
            other = rates
            for name in group:
                other = other.with_share(name, getattr(spans[name], way))
            difference = step_seconds(step, other) - likely
            if difference > 0:
                slower += difference**2
            else:
                faster += difference**2
    return likely - math.sqrt(faster), likely, likely + math.sqrt(slower)
