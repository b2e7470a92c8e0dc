"""Fuzz targets: a function for each part that reads.

They fail where something is wrong.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import NamedTuple

from ckptkit import formats
from ckptkit.api import convert, open_checkpoint
from ckptkit.cli import render
from ckptkit.compute.operation import stream
from ckptkit.core.bytesource import Folder, Memory, Range, journal_path, plain_name
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import CkptkitError, InputError
from ckptkit.core.plan import Segment
from ckptkit.core.tensor import Storage, Tensor
from ckptkit.core.tree import Node
from ckptkit.edits.devices import remap
from ckptkit.edits.keys import strip_prefix
from ckptkit.pickles.values import unpickle
from ckptkit.pickles.writer import write_pickle
from ckptkit.publish import in_place
from tests.formats.containers import tars
from tests.formats.containers.zips import Member, build
from tests.fuzz import seeds
from tests.fuzz.driving import (
    LARGE,
    check_lines,
    elements,
    look,
    output,
    quietly,
    rewrite,
    scan,
    show,
    tensors,
)
from tests.fuzz.mutations import mutated
from tests.fuzz.oracle import Oracle
from tests.fuzz.pickles import STORAGES, generate

SECONDS = 20.0  # of a processor, for an input of at most 64 KiB; the slowest known takes a tenth
MEMORY = 512 << 20  # bytes more than before
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")

Function = Callable[[bytes], None]


class Target(NamedTuple):
    """A function of bytes, what to begin with, words of its format, and how many inputs the tests
    have time for."""

    run: Function
    seeds: Callable[[], Sequence[bytes]]
    tokens: Sequence[bytes]
    count: int


def pickle(data: bytes) -> None:
    """The machine alone, the tracer, and the writer: what it writes it reads, and writes again."""
    source = Memory(data, "made.pkl")
    scan(source)
    read = quietly(unpickle, source, persistent_load=_as_text)
    pickled = None if read is None else quietly(write_pickle, read.root, lambda typed: ())
    if pickled is not None:
        again = unpickle(Memory(_bytes(pickled.data)), persistent_load=_as_text)
        assert _bytes(write_pickle(again.root, lambda typed: ()).data) == _bytes(pickled.data)


def _as_text(pid: Node) -> Node:
    """In place of what would need an archive."""
    return "persistent"


def _bytes(data: Segment) -> bytes:
    return data if isinstance(data, bytes) else b"".join(map(bytes, stream(data)))


def archive(data: bytes) -> None:
    """A pickle in a whole archive, and what torch makes of it."""
    made = _archive(data)
    checkpoint = look(Memory(made, "made.pth"))
    if checkpoint is not None:
        _against_torch(made)


def _archive(data: bytes) -> bytes:
    records = {f"data/{key}": bytes(range(nbytes)) for key, nbytes in STORAGES.items()}
    members = {"data.pkl": data, **records, "version": b"3\n"}
    return build(*(Member(f"a/{name}", content) for name, content in members.items()))


def plain(data: bytes) -> None:
    """A pickle of what weights_only may make: torch reads it as ckptkit does."""
    archive(generate(data, plain=True))


def odd(data: bytes) -> None:
    """A pickle of anything, in an archive; torch never sees it."""
    look(Memory(_archive(generate(data, plain=False)), "made.pth"))


def anything(data: bytes) -> None:
    """A file, whatever it is."""
    look(Memory(data, "made.bin"))


def whole(data: bytes) -> None:
    """A file, and torch's opinion of it."""
    if look(Memory(data, "made.pth")) is not None:
        _against_torch(data)


def _against_torch(data: bytes) -> None:
    """If torch reads the file, it reads the copy likewise."""
    with folder() as place:
        original, copy = place / "in.pth", place / "out.pth"
        original.write_bytes(data)
        if quietly(convert, original, copy) is not None:
            said = _oracle().compare(original, copy)
            assert said == "equal" or said.startswith(("refused", "died")), said


@cache
def _oracle() -> Oracle:
    made = Oracle()
    atexit.register(made.close)
    return made


def tar(data: bytes) -> None:
    """Try the data unchanged, and with correct checksums."""
    anything(data)
    anything(_summed(data))


def _summed(data: bytes) -> bytes:
    """With the checksum of each block that looks like a header."""
    blocks = [data[at : at + tars.BLOCK] for at in range(0, len(data), tars.BLOCK)]
    for number, block in enumerate(blocks):
        if block[257:262] == b"ustar" and len(block) == tars.BLOCK:
            total = sum(block[:148]) + 8 * 32 + sum(block[156:])
            blocks[number] = block[:148] + b"%06o\0 " % total + block[156:]
    return b"".join(blocks)


def safetensors(data: bytes) -> None:
    """Try the data unchanged, and with lengths that fit the header."""
    anything(data)
    header = data[8 : data.rfind(b"}") + 1]
    ends = [int(each) for each in re.findall(rb"(\d{1,5})\s*\]\s*}", header)]
    anything(struct.pack("<Q", len(header)) + header + bytes(min(max(ends, default=0), LARGE)))


def folders(data: bytes) -> None:
    """Files of a folder, names and all."""
    with folder() as place:
        _unpack(data, place)
        with closing(Folder(place)) as opened:
            look(opened)


def _unpack(data: bytes, place: Path) -> None:
    for part in data.split(seeds.BREAK)[:64]:
        name, _, content = part.partition(b"\n")
        parts = name.decode("utf-8", "replace").split("/")
        try:
            path = place.joinpath(*(plain_name(each, "") for each in parts[:6]))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except (CkptkitError, OSError, ValueError):  # no name for a file, or there is one already
            continue


@contextmanager
def folder() -> Iterator[Path]:
    """An empty one, in memory where there is such a place."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    place = Path(tempfile.mkdtemp(prefix="ckptkit-fuzz-", dir=memory))
    try:
        yield place
    finally:
        shutil.rmtree(place)


def geometry(data: bytes) -> None:
    """A tensor of any numbers is refused, or its elements are those that numpy finds."""
    numbers = [each[0] for each in struct.iter_unpack("<q", data[: len(data) // 8 * 8])][:20]
    if len(numbers) < 2:
        return
    nbytes, offset, *rest = numbers
    shape, stride = tuple(rest[0::2]), tuple(rest[1::2])
    dtype = BY_NAME[("uint8", "int16", "float32", "complex64")[nbytes % 4]]
    memory = bytes(index % 251 for index in range(nbytes % 4096 // dtype.itemsize * dtype.itemsize))
    storage = Storage(Range(Memory(memory), 0, len(memory)))
    tensor = quietly(Tensor, storage, dtype, shape, stride, offset)
    fits = len(shape) == len(stride) and min((offset, *shape, *stride)) >= 0
    last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=False))
    inside = 0 in shape or (last + 1) * dtype.itemsize <= len(memory)
    assert (tensor is not None) == (fits and inside), (tensor, shape, stride, offset)
    if tensor is not None and 0 < tensor.nbytes < LARGE and len(shape) <= 32:
        _check_elements(tensor, memory)


def _check_elements(tensor: Tensor, memory: bytes) -> None:
    checkpoint = _single(tensor)
    format = formats.by_name("safetensors")
    assert format is not None
    data = quietly(lambda: output(formats.layout(checkpoint, format, formats.Options())))
    assert data is not None and data.endswith(elements(memory, tensor))


def _single(tensor: Tensor) -> formats.Checkpoint:
    return formats.Checkpoint({"a": tensor}, "made", Memory(b""))


def text(data: bytes) -> None:
    """Any text is shown in one line of printable characters, and is itself again when it comes back
    from JSON."""
    try:
        shown = data.decode("utf-8", "surrogatepass" if len(data) % 2 else "surrogateescape")
    except UnicodeDecodeError:
        shown = ""
    codes = (int.from_bytes(data[at : at + 3], "little") for at in range(0, len(data), 3))
    for each in (shown, "".join(chr(code % 0x110000) for code in codes)):
        escaped = render.escape(each)
        check_lines([escaped, *render.table(["name", "n"], [[escaped, "1"]], ["n"])])
        assert json.loads("".join(render.json_pieces({"a": iter([each])}))) == {
            "a": [json.loads(json.dumps(each))]
        }
        tree = {each: {each: each, "b": [each]}}
        checkpoint = formats.Checkpoint(tree, "made", Memory(b"", "made"))
        show(checkpoint)
        rewrite(checkpoint, "torch-zip", False)


def journals(data: bytes) -> None:
    """A journal changes its file only if it is whole, of this file, and knows what is in there."""
    with folder() as place:
        path = place / "run.pth"
        path.write_bytes(seeds.EDITED)
        inode = b'"inode": %d' % os.stat(path).st_ino
        for each in (data, _signed(data.replace(b'"inode": 0', inode))):
            path.write_bytes(seeds.EDITED)
            _settled(path, each)


def _signed(data: bytes) -> bytes:
    return data[:-32] + hashlib.sha256(data[:-32]).digest()


def _settled(path: Path, data: bytes) -> None:
    """The journal is refused, and stays, and the file is as it was; or it is gone, and the file as
    it says."""
    beside = Path(journal_path(path))
    beside.write_bytes(data)
    known = quietly(in_place.parse, data)
    try:
        in_place.check_journals(str(path), undo=True)
    except CkptkitError as error:
        assert isinstance(error, InputError) and beside.exists(), error
        assert path.read_bytes() == seeds.EDITED
        beside.unlink()
    else:
        assert known is not None and not beside.exists()
        assert path.stat().st_size in (known.before, known.after)


def edits(data: bytes) -> None:
    """A change in place is that of a new file, or none at all."""
    with folder() as place:
        for name in ("run.pth", "run.safetensors"):
            _edited(place, name, data)


def _edited(place: Path, name: str, data: bytes) -> None:
    path, copy = place / name, place / f"copy-{name}"
    path.write_bytes(data)
    steps = (strip_prefix, partial(remap, devices="cpu"))
    if quietly(convert, path, None, *steps, in_place=True) is None:
        assert path.read_bytes() == data
        assert not any("ckptkit" in each for each in os.listdir(place))
        return
    (place / f"old-{name}").write_bytes(data)
    if quietly(convert, place / f"old-{name}", copy, *steps) is None:
        return  # what need not be read to change other bytes
    with closing(open_checkpoint(path)) as own, closing(open_checkpoint(copy)) as other:
        assert tensors(own) == tensors(other) or own.format != other.format


ZIP = (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\7\x08", b"\x01\0", b"FB", b"\x08\x08", b"data.pkl",
       b"data/0", b"archive/", b"constants.pkl", b"version", b"byteorder", b"../", b"\xff\xff\xff\xff")  # fmt: skip
JSON = (b'"', b"{", b"}", b"[", b"]", b",", b":", b"null", b"true", b"NaN", b"\\u0000", b"\\ud800", b'"__metadata__"',
        b'"dtype"', b'"shape"', b'"data_offsets"', b'"F32"', b'"F4"', b'"I64"', b'"C64"', b'"weight_map"', b"../",
        b'"a"', b"[" * 200)  # fmt: skip
PICKLE = (b"(", b".", b"0", b"1", b"2", b"N", b"}", b"]", b")", b"t", b"R", b"b", b"u", b"s", b"e", b"a", b"d", b"l",
          b"o", b"\x81", b"\x92", b"\x85", b"\x93", b"\x94", b"\x8f", b"\x90", b"\x91", b"Q", b"h\0", b"q\0", b"K\1",
          b"\x80\2", b"\x80\4", b"\x95\5\0\0\0\0\0\0\0", b"\x8a\x09" + b"\xff" * 9, b"J\xff\xff\xff\xff",
          b"ccollections\nOrderedDict\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nFloatStorage\n",
          b"c__builtin__\nset\n", b"ctorch\nSize\n", b"ccopy_reg\n_reconstructor\n", b"cos\nsystem\n",
          b"c_codecs\nencode\n", b"ctorch._tensor\n_rebuild_from_type_v2\n", b"ctorch._utils\n_rebuild_parameter\n",
          b"cnumpy.core.multiarray\n_reconstruct\n", b"\x8c\3abc", b"X\3\0\0\0abc", b"U\1\xff", b"V\\u0000\n", b"I1\n",
          b"L5L\n", b"Fnan\n", b"G\x7f\xf8\0\0\0\0\0\0", b"B\2\0\0\0ab", b"\x96\2\0\0\0\0\0\0\0ab")  # fmt: skip
TAR = (b"ustar\x0000", b"ustar  \0", b"sys_info", b"storages", b"tensors", b"pickle", b"11 path=a/b\n", b"x", b"g",
       b"\x80", b"0000000001", *PICKLE[:40])  # fmt: skip
NUMPY = (
    b"\x93NUMPY", b"'descr'", b"'fortran_order'", b"'shape'", b"'<f4'", b"'|O'", b"True", b"(1,)",
    b"(", b")",
)  # fmt: skip
FOLDER = (*JSON, *PICKLE, b".metadata", b"__0_0.distcp", b"latest", b"pytorch_model.bin.index.json", seeds.BREAK,
          b"model.safetensors.index.json")  # fmt: skip
NUMBERS = tuple(
    struct.pack("<q", each)
    for each in (0, 1, 2, 3, 4, 7, 12, 100, 1 << 31, 1 << 62, -1, (1 << 63) - 1)
)

TARGETS = {
    "pickle": Target(pickle, seeds.pickles, PICKLE, 1000),
    "archive": Target(archive, seeds.pickles, PICKLE, 150),
    "plain": Target(plain, seeds.noise, (), 250),
    "odd": Target(odd, seeds.noise, (), 375),
    "zip": Target(whole, seeds.zips, ZIP, 125),
    "legacy": Target(whole, seeds.legacy, PICKLE, 125),
    "tar": Target(tar, seeds.tar, TAR, 75),
    "safetensors": Target(safetensors, seeds.safetensors, JSON, 125),
    "numpy": Target(anything, seeds.numpys, NUMPY, 250),
    "hidden": Target(anything, seeds.packed_others, (*ZIP, *PICKLE), 100),
    "sharded": Target(folders, seeds.sharded, JSON, 75),
    "dcp": Target(folders, seeds.dcp, FOLDER, 50),
    "deepspeed": Target(folders, seeds.deepspeed, FOLDER, 40),
    "geometry": Target(
        geometry, lambda: [b"".join(NUMBERS[:n]) for n in (2, 4, 8, 12)], NUMBERS, 1000
    ),
    "text": Target(
        text,
        lambda: ["é\u202e\x1b[2J\ud800".encode("utf-8", "surrogatepass")],
        (b"\n", b"\x1b"),
        75,
    ),
    "journal": Target(journals, seeds.journals, (*JSON, b'"inode": 0'), 250),
    "edit": Target(edits, lambda: [*seeds.zips()[:4], *seeds.safetensors()], (*ZIP, *JSON), 50),
}


def inputs(name: str, seed: int, count: int | None = None) -> Iterator[bytes]:
    """The seeds of a target as they are, then mutations without end, or up to `count`."""
    target = TARGETS[name]
    seeds = target.seeds()
    yield from seeds[:count]
    number = len(seeds)
    while count is None or number < count:
        yield mutated(Random(f"{name}/{seed}/{number}"), seeds, target.tokens)
        number += 1


def attempt(target: Target, data: bytes) -> tuple[float, int]:
    """Seconds and bytes of memory that an input took. Raises what is wrong."""
    before = _reset_peak()
    start = time.process_time()
    target.run(data)
    seconds, nbytes = time.process_time() - start, _peak() - before
    assert seconds < SECONDS, f"took {seconds:.1f} s"
    assert nbytes < MEMORY, f"took {nbytes:,} bytes"
    return seconds, nbytes


def _reset_peak() -> int:
    """The bytes in use, from which the peak is counted; 0 where the system does not say."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return 0
    return _kilobytes("VmRSS")


def _peak() -> int:
    return _kilobytes("VmHWM") if _CLEAR.exists() else 0


def _kilobytes(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10
