"""Hostile and damaged checkpoints, made from a seed: each a copy of a sound one in which something is wrong.

The indices of many of them have a right SHA-256, as an attacker would write it, so that other checks must notice.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import pickletools
import random
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

SEAL = '"sha256": "'
NUMBERS = (0, 1, -1, 7, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 10**30, 0.5, 1e308, -0.0)
TEXTS = (
    "",
    ".",
    "..",
    "../c",
    "/etc/passwd",
    "a/b",
    "a\0b",
    "é\u202e",
    "\ud800",
    "x" * 5000,
    "model.0.weight",
    "!",
)
PLANT = b"cos\nsystem\n(S'touch /tmp/shardwright-planted'\ntR"


class Sources(NamedTuple):
    """Sound checkpoints to spoil: ours, another step of it, and the same state by torch's writer."""

    ours: Path
    other: Path
    foreign: Path


class Case(NamedTuple):
    name: str
    must_equal: bool  #: a load that succeeds must give the saved values


Spoil = Callable[[random.Random, Path, Sources], bool]


def make(seed: int, number: int, place: Path, sources: Sources) -> Case:
    """Make the checkpoint of this number at ``place``."""
    rng = random.Random(f"{seed}:{number}")
    source, kinds = rng.choices(((sources.ours, OURS), (sources.foreign, FOREIGN)), (3, 2))[0]
    shutil.copytree(source, place)
    name = rng.choice(sorted(kinds))
    equal = kinds[name](rng, place, sources)
    return Case(f"{source.name}.{name}", equal)


# -- the index ---------------------------------------------------------------------------------------------------------


def read_index(place: Path) -> dict[str, Any]:
    content = json.loads((place / "index.json").read_text())
    del content["sha256"]
    return content  # type: ignore[no-any-return]


def seal(place: Path, text: str) -> None:
    """Write an index with a right SHA-256. The text ends after the comma behind its last member."""
    body = text.encode("utf-8", "surrogatepass")
    (place / "index.json").write_bytes(
        body + SEAL.encode() + hashlib.sha256(body).hexdigest().encode() + b'"}\n'
    )


def write_index(place: Path, content: Any) -> None:
    text = json.dumps(content)
    seal(place, text[:-1] + ", " if isinstance(content, dict) and content else '{"x": 1, ')


def repair(place: Path, content: dict[str, Any]) -> None:
    """Let digests and lengths of an index fit the files, as far as they can be computed."""
    names = sorted(content["files"])
    parts: dict[str, list[Any]] = {name: [] for name in names}
    for entry in content["tensors"].values():
        for part in entry[3:]:
            with_bytes = (place / names[part[2]]).open("rb")
            with with_bytes:
                with_bytes.seek(part[3])
                part[6] = hashlib.sha256(with_bytes.read(min(part[4], 1 << 20))).hexdigest()
            parts[names[part[2]]].append(part)
    for name, entry in content["files"].items():
        if entry[2]:
            mine = sorted(parts[name], key=lambda part: part[3])
            entry[0] = sum(part[4] for part in mine)
            entry[1] = hashlib.sha256(b"".join(bytes.fromhex(part[6]) for part in mine)).hexdigest()
        else:
            data = (place / name).read_bytes()
            entry[0], entry[1] = len(data), hashlib.sha256(data).hexdigest()


def nodes(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        for key, each in value.items():
            found += nodes(each, (*path, key))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            found += nodes(each, (*path, number))
    return found


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


def anything(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(9 if depth < 3 else 6)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice(TEXTS)
    if kind == 2:
        return rng.choice((None, True, False))
    if kind == 3:
        mark = rng.choice(
            ("float", "tuple", "Size", "dtype", "device", "bytes", "dict", "Counter", "OrderedDict", "os")
        )
        return {
            "!": mark,
            "is": rng.choice(
                (anything(rng, depth + 2), "nan", "cpu", "cuda:99999999999", [[1, 2]], [[[], 1]])
            ),
        }
    if kind == 4:
        depth = rng.choice((5, 100, 900, 5000))
        return Raw("[" * depth + "]" * depth)
    if kind == 5:
        return rng.randrange(-(2**70), 2**70)
    if kind == 6:
        return [anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(TEXTS): anything(rng, depth + 1) for _ in range(rng.randrange(4))}


class Raw(str):
    """Text that is put into JSON as it is."""


def text_of(value: Any) -> str:
    """JSON of a value, of any depth, with raw texts."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {text_of(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(text_of, value))}]"
    return json.dumps(value)


def put_index(place: Path, content: dict[str, Any]) -> None:
    seal(place, text_of(content)[:-1] + ", ")


def index_bytes(rng: random.Random, place: Path, sources: Sources) -> bool:
    damage_bytes(rng, place / "index.json")
    return True


def index_nodes(rng: random.Random, place: Path, sources: Sources) -> bool:
    content = read_index(place)
    for _ in range(rng.choice((1, 1, 2, 5))):
        path = rng.choice(nodes(content))
        parent, last = at(content, path[:-1]), path[-1]
        action = rng.randrange(6)
        if action == 0:
            del parent[last]
        elif action == 1:
            parent[last] = copy.deepcopy(at(content, rng.choice(nodes(content))))
        elif action == 2 and isinstance(parent, dict):
            parent[rng.choice(TEXTS)] = parent.pop(last)
        elif action == 3 and isinstance(parent, list):
            parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(rng.choice(parent)))
        elif action == 4 and isinstance(parent[last], int):
            parent[last] = parent[last] + rng.choice((-1, 1, 64, 2**32, 2**63))
        else:
            parent[last] = anything(rng)
    if rng.random() < 0.5:
        try:
            repair(place, content)
        except Exception:  # there is nothing that could fit
            pass
    put_index(place, content)
    return False


def index_text(rng: random.Random, place: Path, sources: Sources) -> bool:
    """Changes that a JSON writer would not make: keys twice, NaN, long numbers, comments, other encodings."""
    text = (place / "index.json").read_text().rpartition(SEAL)[0]
    kind = rng.randrange(6)
    if kind == 0:
        text = text.replace(
            '"ranks": 1', f'"ranks": {rng.choice(("NaN", "Infinity", "1e999", "9" * 5000, "0x1", "01"))}'
        )
    elif kind == 1:
        text += rng.choice(('"version": 1, ', '"files": {}, ', '"tensors": {}, '))
    elif kind == 2:
        start = rng.randrange(len(text))
        text = text[:start] + text[start + rng.randrange(40) :]
    elif kind == 3:
        text = text.replace('"version": 1', f'"version": {rng.choice((0, 2, -1, 1.0, "true", 10**40))}')
    elif kind == 4:
        depth = rng.choice((100, 900, 3000, 200_000))
        text += f'"more": {"[" * depth}{"]" * depth}, '
    else:
        text = rng.choice(("\ufeff", " " * 1000, "[", "\0")) + text
    seal(place, text)
    return False


def index_shapes(rng: random.Random, place: Path, sources: Sources) -> bool:
    """Tensors of other shapes and dtypes, with parts and digests that fit them."""
    content = read_index(place)
    name = rng.choice(sorted(content["tensors"]))
    entry = content["tensors"][name]
    kind = rng.randrange(7)
    nbytes = entry[3][4] if len(entry) > 3 else 0
    if kind == 0:  # more than any memory holds, in a sparse file
        count = rng.choice((2**30, 2**38, 2**61))
        names = sorted(content["files"])
        content["files"]["__sparse.distcp"] = [count * 8, "0" * 64, True]
        old = names
        names = sorted(content["files"])
        for each in content["tensors"].values():
            for part in each[3:]:
                part[2] = names.index(old[part[2]])
        content["tensors"][name] = [
            entry[0],
            "int64",
            [count],
            [[0], [count], names.index("__sparse.distcp"), 0, count * 8, 0, "0" * 64],
        ]
        content["files"]["__sparse.distcp"][1] = hashlib.sha256(bytes(32)).hexdigest()
        with open(place / "__sparse.distcp", "wb") as stream:
            stream.truncate(min(count * 8, 1 << 40))
        put_index(place, content)
        return False
    if kind == 1:
        entry[1] = rng.choice(
            ("float64", "bool", "complex128", "quint8", "bits8", "int4", "float8_e4m3fn", "str")
        )
    elif kind == 2:
        entry[2] = entry[2][::-1] or [1]
        for part in entry[3:]:
            part[1] = part[1][::-1] or [1]
            part[0] = part[0][::-1] or [0]
    elif kind == 3:
        entry[2] = [rng.choice((0, 2**62, 2**40)), 0, *entry[2]]
        del entry[3:]
    elif kind == 4 and len(entry) > 3:
        entry[3][5] += rng.choice((-8, 4, 64, nbytes))
    elif kind == 5:
        content["tensors"][name], other = content["tensors"][rng.choice(sorted(content["tensors"]))], entry
        del other
    else:
        entry[0] = rng.choice(
            ([name], [], name.split(".") * 2, [[1], *entry[0]], [*entry[0], "more"], ["a"] * 30_000)
        )
        content["tensors"][rng.choice((name, ".".join(map(str, entry[0]))))] = content["tensors"].pop(name)
    try:
        repair(place, content)
    except Exception:
        pass
    put_index(place, content)
    return False


def index_values(rng: random.Random, place: Path, sources: Sources) -> bool:
    """Values of other kinds, under a right digest: groups of the optimizer, schedules, states of generators."""
    content = read_index(place)
    name = rng.choice(sorted(content["values"]))
    path, value = content["values"][name]
    inner = nodes(value)
    if inner and rng.random() < 0.7:
        where = rng.choice(inner)
        if rng.random() < 0.3:
            del at(value, where[:-1])[where[-1]]
        else:
            at(value, where[:-1])[where[-1]] = anything(rng)
    elif rng.random() < 0.3:
        del content["values"][name]
    else:
        content["values"][name] = [path, anything(rng)]
    put_index(place, content)
    return False


def index_generators(rng: random.Random, place: Path, sources: Sources) -> bool:
    """States of generators that no generator has, in files whose digests are right."""
    content = read_index(place)
    names = sorted(content["files"])
    for name, entry in content["tensors"].items():
        if name.startswith("generators") and rng.random() < 0.7:
            part = entry[3]
            with open(place / names[part[2]], "r+b") as stream:
                stream.seek(part[5] + rng.choice((0, 0, 8, 16, 2000)))
                stream.write(rng.choice((rng.randbytes(100), bytes(400), b"\xff" * 8)))
            if rng.random() < 0.3:
                entry[1] = rng.choice(("int8", "uint8", "int16"))
    repair(place, content)
    put_index(place, content)
    return False


# -- files -------------------------------------------------------------------------------------------------------------


def damage_bytes(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    kind = rng.randrange(6)
    if kind == 0:
        for _ in range(rng.choice((1, 1, 8))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[rng.randrange(len(data)) :]
    elif kind == 2:
        start = rng.randrange(len(data))
        del data[start : start + rng.randrange(1, 64)]
    elif kind == 3:
        start = rng.randrange(len(data))
        data[start:start] = rng.randbytes(rng.randrange(1, 64))
    elif kind == 4:
        start = rng.randrange(len(data))
        end = min(len(data), start + rng.randrange(1, 4096))
        data[start:end] = bytes(end - start)
    else:
        data += rng.randbytes(rng.randrange(1, 100))
    path.write_bytes(data)


def some_file(rng: random.Random, place: Path) -> Path:
    return rng.choice(sorted(place.iterdir()))


def file_bytes(rng: random.Random, place: Path, sources: Sources) -> bool:
    damage_bytes(rng, some_file(rng, place))
    return True


def foreign_bytes(rng: random.Random, place: Path, sources: Sources) -> bool:
    damage_bytes(rng, some_file(rng, place))
    return False  # torch's folders have no digests


def file_swaps(rng: random.Random, place: Path, sources: Sources) -> bool:
    one = some_file(rng, place)
    if rng.random() < 0.5 and (sources.other / one.name).exists():
        shutil.copyfile(sources.other / one.name, one)
    else:
        another = some_file(rng, place)
        first, second = one.read_bytes(), another.read_bytes()
        one.write_bytes(second)
        another.write_bytes(first)
    return one.name not in ("index.json",)  # an index of another step may fit its file


def file_kinds(rng: random.Random, place: Path, sources: Sources) -> bool:
    """Links, pipes, folders, devices and huge files in place of a file."""
    path = some_file(rng, place)
    content = path.read_bytes()
    path.unlink()
    kind = rng.randrange(9)
    if kind == 0:
        (place.parent / "elsewhere").write_bytes(content)
        path.symlink_to(place.parent / "elsewhere")
    elif kind == 1:
        path.symlink_to(rng.choice(("/etc/passwd", "/dev/zero", path.name, "missing", "/proc/self/mem", ".")))
    elif kind == 2:
        os.mkfifo(path)
    elif kind == 3:
        path.mkdir()
    elif kind == 4:
        if os.geteuid() == 0:
            try:
                os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, rng.choice((3, 5, 8))))
            except OSError:
                os.mkfifo(path)
    elif kind == 5:
        path.write_bytes(content)
        os.truncate(path, rng.choice((1 << 31, 1 << 40)))
    elif kind == 6:
        with open(path, "wb") as stream:
            stream.truncate(len(content))
    elif kind == 7:
        path.touch()
    return kind != 6 or path.name != ".metadata"


def folder_kinds(rng: random.Random, place: Path, sources: Sources) -> bool:
    """Something else in place of the folder, or more in it."""
    kind = rng.randrange(6)
    if kind < 3:
        moved = place.parent / "moved"
        os.rename(place, moved)
        if kind == 0:
            place.symlink_to(moved)
        elif kind == 1:
            os.mkfifo(place)
        elif kind == 2:
            place.write_bytes(PLANT)
    elif kind == 3:
        for name in ("__0.metadata", "__1.metadata", "data.pkl", "conftest.py", "torch.py", "pickle.py"):
            (place / name).write_bytes(PLANT + b".")
    elif kind == 4:
        (place / "index.json").unlink(missing_ok=True)
        if rng.random() < 0.5:
            (place / ".metadata").unlink()
    else:
        for each in place.iterdir():
            each.write_bytes(PLANT + b".")
    return True


def planted(rng: random.Random, place: Path, sources: Sources) -> bool:
    """Code in each place that torch's reader would run, where the index has the right digests of it."""
    content = read_index(place)
    names = sorted(content["files"])
    part = rng.choice([each[3] for each in content["tensors"].values() if len(each) > 3])
    kind = rng.randrange(3)
    if kind == 0:
        path = place / names[part[2]]
        data = bytearray(path.read_bytes())
        head = data.find(b"\x80\x02", part[3])
        data[head : head + len(PLANT) + 1] = PLANT + b"."
        path.write_bytes(data)
    elif kind == 1:
        (place / "__values.distcp").write_bytes(PLANT + b".")
    else:
        (place / ".metadata").write_bytes(hostile_pickle(rng, (place / ".metadata").read_bytes()))
    before = {name: each[3][5] for name, each in content["tensors"].items() if len(each) > 3}
    repair(place, content)
    assert before
    put_index(place, content)
    return False


# -- pickles -----------------------------------------------------------------------------------------------------------


def operations(data: bytes) -> list[bytes]:
    places = [position for _, _, position in pickletools.genops(data)]
    return [data[a:b] for a, b in zip(places, [*places[1:], len(data)], strict=True)]


def bombs(rng: random.Random) -> bytes:
    """Short pickles that take memory, time or stack, or that call something. Each leaves one value on the stack."""
    kind = rng.randrange(16)
    if kind == 0:
        return PLANT
    if kind == 1:
        return b"\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R"
    if kind == 2:
        return b"N" + b"r" + struct.pack("<I", rng.choice((2**20, 2**28, 2**31, 2**32 - 1)))
    if kind == 3:
        return b"Np%d\n" % rng.choice((2**28, 2**40, 2**62))
    if kind == 4:
        return b"\x8e" + struct.pack("<Q", rng.choice((2**31, 2**40, 2**63 - 1, 2**64 - 1)))
    if kind == 5:
        return b"\x96" + struct.pack("<Q", rng.choice((2**31, 2**40)))
    if kind == 6:  # a tuple whose hash takes 2**60 steps, as a key
        return b"})" + b"q\xf0h\xf0\x86" * 60 + b"Ns"
    if kind == 7:  # deeper than the stack, as a key
        return b"})" + b"\x85" * rng.choice((1000, 100_000, 3_000_000)) + b"Ns"
    if kind == 8:
        return b"]" * 100_000 + b"a" * 99_999
    if kind == 9:
        return b"(" * 1_000_000 + b"t" * 1_000_000
    if kind == 10:
        return b"cbuiltins\nbytearray\n\x8a\x06\0\0\0\0\0\x01\x85R"
    if kind == 11:
        return b"Pos.system\n" if rng.random() < 0.5 else b"Nb0Q"[0:1] + b"Q"
    if kind == 12:
        return b"(S'true'\nios\nsystem\n"
    if kind == 13:
        return b"cos\nsystem\n(cos\nsystem\nS'true'\no0"
    if kind == 14:
        return b"I" + b"9" * rng.choice((4000, 100_000)) + b"\n"
    return rng.choice(
        (
            b"\x82\x01",
            b"\x84\xff\xff\xff\x7f",
            b"\x97",
            b"\x98",
            b"\x8f(K\x01\x90",
            b"(K\x01\x91",
            b"\x95" + b"\xff" * 8,
        )
    )


def hostile_pickle(rng: random.Random, data: bytes) -> bytes:
    """The pickle with operations that are lost, repeated, swapped or added."""
    try:
        whole = operations(data)
    except Exception:
        return bombs(rng) + b"."
    for _ in range(rng.choice((1, 1, 2, 6))):
        place = rng.randrange(len(whole))
        kind = rng.randrange(7)
        if kind == 0:
            del whole[place]
        elif kind == 1:
            whole.insert(place, rng.choice(whole))
        elif kind == 2:
            other = rng.randrange(len(whole))
            whole[place], whole[other] = whole[other], whole[place]
        elif kind == 3:
            whole[place] = changed_argument(rng, whole[place])
        elif kind == 4:
            whole.insert(place, bombs(rng))
        elif kind == 5:
            whole.insert(place, bombs(rng) + b"0")
        else:
            where = [n for n, each in enumerate(whole) if each[:1] in (b"K", b"\x8c", b"h", b"M", b"X")]
            n = rng.choice(where or [place])
            whole[n] = changed_argument(rng, whole[n])
        if not whole:
            break
    return b"".join(each for each in whole if each[:1] != b"\x95")


def changed_argument(rng: random.Random, operation: bytes) -> bytes:
    code = operation[:1]
    if code in (b"K", b"M", b"J", b"\x8a"):
        return b"\x8a\x08" + struct.pack("<q", rng.choice((0, 1, -1, 2**31, 2**62, -(2**62), 2**40)))
    if code in (b"\x8c", b"X"):
        text = rng.choice(TEXTS).encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(text)) + text
    if code == b"h":
        return b"h" + bytes([rng.randrange(256)])
    return bombs(rng) if rng.random() < 0.5 else operation[:1] + rng.randbytes(len(operation) - 1)


def metadata_operations(rng: random.Random, place: Path, sources: Sources) -> bool:
    path = place / ".metadata"
    (place / "index.json").unlink(missing_ok=True)
    path.write_bytes(hostile_pickle(rng, path.read_bytes()))
    return False


def metadata_alone(rng: random.Random, place: Path, sources: Sources) -> bool:
    (place / ".metadata").write_bytes(rng.choice((b"", b"\x80\x04")) + bombs(rng) + b".")
    return False


# -- containers of torch's writer --------------------------------------------------------------------------------------


def containers(rng: random.Random, place: Path, sources: Sources) -> bool:
    """Files of torch's writer in which records of a container are other than their metadata says."""
    path = rng.choice(sorted(place.glob("*.distcp")))
    data = path.read_bytes()
    starts = [n for n in range(len(data)) if data[n : n + 4] == b"PK\3\4"]
    if not starts:
        return False
    kind = rng.randrange(5)
    start = rng.choice(starts)
    changed = bytearray(data)
    if kind == 0:  # sizes of a record
        changed[start + 18 : start + 26] = struct.pack(
            "<II", *(rng.choice((0, 1, 2**31, 2**32 - 1)) for _ in range(2))
        )
    elif kind == 1:  # code in place of a description
        where = [n for n in range(len(data) - 1) if data[n : n + 2] == b"\x80\x02"]
        n = rng.choice(where or [0])
        bomb = bombs(rng)[:200] + b"."
        changed[n : n + len(bomb)] = bomb
    elif kind == 2:  # sizes in the directory
        where = [n for n in range(len(data)) if data[n : n + 4] == b"PK\1\2"]
        n = rng.choice(where)
        changed[n + 10 : n + 12] = struct.pack("<H", rng.choice((0, 8, 12)))
        changed[n + 20 : n + 28] = struct.pack(
            "<II", *(rng.choice((0, 64, 2**31, 2**32 - 1)) for _ in range(2))
        )
    elif kind == 3:
        where = [n for n in range(len(data)) if data[n : n + 4] == b"PK\5\6"]
        n = rng.choice(where)
        changed[n + 8 : n + 20] = rng.randbytes(12)
    else:
        return container_with(rng, place, path)
    path.write_bytes(changed[: max(len(data), 1)])
    return False


def container_with(rng: random.Random, place: Path, path: Path) -> bool:
    """A container of torch's zip form with compressed records that grow, or with a hostile description."""
    import io

    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        pickled = bytes(2**26) if rng.random() < 0.3 else b"\x80\x02" + bombs(rng) + b"."
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", bytes(rng.choice((64, 2**24, 2**29))))
        archive.writestr("archive/version", b"3\n")
    content = stream.getvalue()
    metadata = pickle.loads((place / ".metadata").read_bytes())
    for each in metadata.storage_data.values():
        if each.relative_path == path.name:
            each.offset, each.length = 0, len(content)
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    path.write_bytes(content)
    assert zlib.crc32(content) >= 0
    return False


OURS: dict[str, Spoil] = {
    each.__name__: each
    for each in (
        index_bytes, index_nodes, index_text, index_shapes, index_values, index_generators, file_bytes, file_swaps,
        file_kinds, folder_kinds, planted, metadata_operations,
    )
}  # fmt: skip
FOREIGN: dict[str, Spoil] = {
    each.__name__: each
    for each in (
        foreign_bytes, file_kinds, folder_kinds, metadata_operations, metadata_alone, containers,
    )
}  # fmt: skip
