"""Devices and their memory: a file for each, ``NAME.toml``, with a source for its figure."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

GIB = 1 << 30


class DeviceError(ValueError):
    """A text names no device."""


@dataclass(frozen=True)
class Device:
    """A kind of device.

    Attributes:
        key: its name on the command line.
        name: its name in words.
        nbytes: bytes that ``torch.cuda.get_device_properties`` reports.
        source: the source of this figure.
    """

    key: str
    name: str
    nbytes: int
    source: str


def known_devices() -> dict[str, Device]:
    """The devices of this folder, by name."""
    files = (each for each in resources.files(__name__).iterdir() if each.name.endswith(".toml"))
    found = (_read(each.name.removesuffix(".toml"), each.read_text()) for each in files)
    return {device.key: device for device in sorted(found, key=lambda device: device.key)}


def parse_devices(text: str, local: Callable[[], Device]) -> tuple[int, Device]:
    """The number of devices and their kind in a text such as ``8xh100``, ``h100`` or ``2x./my-device.toml``.

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
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DeviceError(
            f"expected NxDEVICE with a device of {', '.join(known)}, or the path of a .toml file, found "
            f"{text!r}{hint}"
        )
    return int(count or 1), device


def _read(key: str, text: str) -> Device:
    values = tomllib.loads(text)
    gib = values.get("gib")
    if not isinstance(gib, int | float) or isinstance(gib, bool) or not 0 < gib < 1e6:
        raise DeviceError(f"device {key}: expected gib, the device's memory in GiB, found {gib!r}")
    return Device(key, str(values.get("name", key)), int(gib * GIB), str(values.get("source", "")))
