"""Devices: a file for each, ``NAME.toml``, with its memory, its speed, and sources for these figures."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from shardwright.planner.measured import Measured, MeasuredError, read_measured

GIB = 1 << 30
Kind = Literal["cpu", "cuda"]


class DeviceError(ValueError):
    """A text names no device."""


@dataclass(frozen=True)
class Figures:
    """The speed of a device, as its maker states it.

    Attributes:
        generation: a key of ``rates.GENERATIONS``.
        flops: by dtype the peak of dense products, in operations a second.
        bandwidth: bytes a second of the device's memory.
        units: parts that compute a tile of a product at a time.
        power: the share of its nominal power that the device may take.
        node: devices of a node, which are joined by links.
        within: bytes a second that a device sends to the others of its node.
        across: bytes a second that a device sends to other nodes.
        source: the source of these figures.
        measured: times of this device, in place of shares of its figures; None: there are none. If they are not whole,
            other kernels have shares of its figures.
        host_memory: bytes a second of the memory of a node's host; 0: unknown.
        pcie: bytes a second between the host and a device, in each direction; 0: unknown.
    """

    generation: str
    flops: dict[str, float]
    bandwidth: float
    units: int
    power: float
    node: int
    within: float
    across: float
    source: str
    measured: Measured | None = None
    host_memory: float = 0.0
    pcie: float = 0.0

    @property
    def knows_host(self) -> bool:
        """Whether the time of what is offloaded to the host is known."""
        return self.host_memory > 0 and self.pcie > 0


@dataclass(frozen=True)
class Device:
    """A kind of device.

    Attributes:
        key: its name on the command line.
        name: its name in words.
        nbytes: bytes that ``torch.cuda.get_device_properties`` reports.
        source: the source of this figure.
        figures: its speed; None: unknown.
        kind: "cpu" if ranks compute on the host, whose memory they share.
        host_nbytes: bytes of the memory of a node's host, which the ranks of the node share; 0: unknown.
        node: devices of a node; 0: unknown, and then all ranks are taken to be on one node.
    """

    key: str
    name: str
    nbytes: int
    source: str
    figures: Figures | None = None
    kind: Kind = "cuda"
    host_nbytes: int = 0
    node: int = 0

    def ranks_of_node(self, ranks: int) -> int:
        """Return the largest number of ranks that share a host, in a job of ``ranks`` ranks."""
        return min(ranks, self.node or ranks)


def known_devices() -> dict[str, Device]:
    """Return the devices of this folder, by name."""
    files = (each for each in resources.files(__name__).iterdir() if each.name.endswith(".toml"))
    found = (_read(each.name.removesuffix(".toml"), each.read_text()) for each in files)
    return {device.key: device for device in sorted(found, key=lambda device: device.key)}


def parse_devices(text: str, local: Callable[[], Device]) -> tuple[int, Device]:
    """Return the number of devices and their kind in a text such as ``8xh100``, ``h100`` or ``2x./my-device.toml``.

    ``local``: finds the device that has the name ``local``, the GPU of this machine.

    Raises:
        DeviceError: one line that names the nearest devices.
    """
    match = re.fullmatch(r"(?:(\d+)x)?(.+)", text.strip())
    count, key = (match[1], match[2]) if match else (None, text)
    if count is not None and int(count) < 1:
        raise DeviceError(f"expected at least 1 device, found {text!r}")
    if key.endswith(".toml"):
        path = Path(key)
        try:
            return int(count or 1), _read(path.stem, path.read_text())
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise DeviceError(f"cannot read the device {key}: {error}") from error
    if key == "local":
        return int(count or 1), local()
    known = known_devices()
    device = known.get(key.lower())
    if device is None:
        near = difflib.get_close_matches(key.lower(), known, 1)
        if (swapped := re.fullmatch(r"(.+)x(\d+)", key)) and swapped[1].lower() in known:  # h100x8
            near, count = [swapped[1].lower()], swapped[2]
        number = f"{count}x" if count else ""
        hint = f"; did you mean {number}{near[0]}?" if near else ""
        raise DeviceError(
            f"expected NxDEVICE with a device of {', '.join(known)}, local (this machine's GPU), or the path of a "
            f".toml file (docs/planning.md, Devices), found {text!r}{hint}"
        )
    return int(count or 1), device


def _read(key: str, text: str) -> Device:
    values = tomllib.loads(text)
    like, names = values.get("like"), {key}
    while like is not None:  # the other device may be like a third one
        known = {each.name.removesuffix(".toml"): each for each in resources.files(__name__).iterdir()}
        if like not in known or like in names:
            raise DeviceError(f"device {key}: expected like, the name of another device, found {like!r}")
        names.add(like)
        base = tomllib.loads(known[like].read_text())
        values = {**base, **values, "speed": {**base.get("speed", {}), **values.get("speed", {})}}
        like = base.get("like")
    if unknown := values.keys() - _KEYS:
        raise DeviceError(f"device {key}: it has {min(unknown)!r}; expected {', '.join(sorted(_KEYS))}")
    gib = _number(key, values, "gib", "the device's memory in GiB", 1e6)
    speed = values.get("speed")
    kind = values.get("kind", "cuda")
    if kind not in ("cpu", "cuda"):
        raise DeviceError(f"device {key}: expected kind, cpu or cuda, found {kind!r}")
    figures = _figures(key, speed) if speed is not None else None
    if "measured" in values:
        if figures is None:
            raise DeviceError(f"device {key}: expected a table [speed] beside [measured], found none")
        try:
            all_figures = figures.generation != MEASURED and kind == "cuda"
            measured = read_measured(key, values["measured"], kind == "cpu", all_figures)
            figures = replace(figures, measured=measured)
        except MeasuredError as error:
            raise DeviceError(str(error)) from error
    elif kind == "cpu" and figures is not None:
        raise DeviceError(
            f"device {key}: the speed of a CPU is known only by measurement: shardwright calibrate"
        )
    elif figures is not None and figures.generation == MEASURED:
        raise DeviceError(f"device {key}: a generation {MEASURED!r} needs a table [measured], found none")
    name, source = str(values.get("name", key)), str(values.get("source", ""))
    host_gib = (
        _number(key, values, "host_gib", "the memory of a node's host in GiB", 1e6)
        if "host_gib" in values
        else 0
    )
    node = figures.node if figures is not None else 0
    return Device(key, name, int(gib * GIB), source, figures, kind, int(host_gib * GIB), node)


def _figures(key: str, values: Any) -> Figures:
    if not isinstance(values, dict):
        raise DeviceError(f"device {key}: expected a table [speed], found {values!r}")
    if unknown := values.keys() - _SPEED:
        raise DeviceError(f"device {key}: [speed] has {min(unknown)!r}; expected {', '.join(sorted(_SPEED))}")
    flops = values.get("tflops")
    if not isinstance(flops, dict) or "float32" not in flops:
        raise DeviceError(f"device {key}: expected tflops, a table of dtypes with float32, found {flops!r}")
    generation = values.get("generation") or _likely_generation(flops)
    if generation not in (*GENERATIONS, MEASURED):
        raise DeviceError(
            f"device {key}: expected a generation of {', '.join(GENERATIONS)}, found {generation!r}"
        )

    def number(name: str, what: str, most: float) -> float:
        return _number(key, values, name, what, most)

    def optional(name: str, what: str) -> float:
        return 1e9 * number(name, what, 1e6) if name in values else 0.0

    return Figures(
        generation,
        {name: 1e12 * _number(key, flops, name, "TFLOP/s of dense products", 1e6) for name in flops},
        1e9 * number("bandwidth", "GB/s of the device's memory", 1e6),
        int(number("units", "the number of its multiprocessors", 1e5)),
        _power(key, values),
        int(number("node", "the devices of a node", 1e4)),
        1e9 * number("within", "GB/s to the others of its node", 1e6),
        1e9 * number("across", "GB/s to other nodes", 1e6),
        str(values.get("source", "")),
        host_memory=optional("host_memory", "GB/s of the memory of a node's host"),
        pcie=optional("pcie", "GB/s between the host and a device"),
    )


def _likely_generation(flops: dict[str, Any]) -> str:
    """Return the generation of the known device with the most similar peaks, for a file that names none."""
    found = (device.figures for device in known_devices().values())
    known = [figures for figures in found if figures is not None]

    def distance(figures: Figures) -> float:
        names = [name for name in flops if name in figures.flops and isinstance(flops[name], int | float)]
        return sum(abs(math.log(max(1e12 * flops[n], 1.0) / figures.flops[n])) for n in names) / max(
            len(names), 1
        )

    return min(known, key=distance).generation


def _power(key: str, values: dict[str, Any]) -> float:
    """Return the share of its nominal power that a device may take."""
    power = _number(key, values, "power", "the share of its nominal power", 1) if "power" in values else 1.0
    if power <= OF_MEMORY:
        raise DeviceError(
            f"device {key}: expected power, the share of its nominal power, above {OF_MEMORY}, which its memory alone "
            f"takes, found {power}"
        )
    return power


#: The share of a device's power that its memory takes, and what else does not follow the clock.
OF_MEMORY = 0.2
#: Generations of which ``rates`` knows the share of these figures that programs reach.
GENERATIONS = ("ampere", "ada", "hopper", "blackwell")
MEASURED = "measured"  #: the generation of a device whose times are in its file
_KEYS = {"name", "gib", "host_gib", "source", "like", "kind", "speed", "measured"}
_SPEED = {
    "generation", "tflops", "bandwidth", "units", "power", "node", "within", "across", "source", "host_memory", "pcie",
}  # fmt: skip


def _number(key: str, values: dict[str, Any], name: str, what: str, most: float) -> float:
    value = values.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= most:
        raise DeviceError(f"device {key}: expected {name}, {what}, found {value!r}")
    return value
