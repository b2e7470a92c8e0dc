"""Every limit: what lies below it or reaches it is read, what exceeds it is refused by name and
with what to type."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import pickle
import re
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptkit import formats
from ckptkit.analysis.summary import summarize
from ckptkit.compute.strided import check_cover
from ckptkit.core.bytesource import Derived, Folder, LocalFile, Memory, Range
from ckptkit.core.errors import LimitError, UsageError
from ckptkit.core.limits import (
    CEILINGS,
    INFLATED,
    LIMITS,
    MOST,
    PREFIX,
    UNPACKED,
    Limits,
    check,
    from_environment,
)
from ckptkit.core.plan import OutputFile, Plan
from ckptkit.core.tree import key_text
from ckptkit.formats import strict_json
from ckptkit.formats.dcp_metadata import Nest
from ckptkit.formats.distributed.table import RankFile, check_grid
from ckptkit.formats.tar import read_members
from ckptkit.formats.zip_reader import read_directory
from ckptkit.pickles.machine import FIRST_WINDOW
from ckptkit.pickles.values import unpickle
from ckptkit.publish.publish import publish
from ckptkit.rules.notation import parse_rule
from ckptkit.rules.planner import RuleSet
from tests.compute.arranging import view
from tests.conftest import Run as Command
from tests.formats.containers.tars import archive, header, member, record, records
from tests.formats.deepspeed.making import Run, edit_optims, small

Case = Callable[[Path], object]  # reads something that needs exactly as much as its table says

UNPACKED_FILE = (72).to_bytes(8, "little") + json.dumps(
    {"a": {"dtype": "U8", "shape": [1000000], "data_offsets": [0, 1000000]}}
).encode().ljust(72) + bytes(1_000_000)  # fmt: skip
PACKED_FILE = gzip.compress(UNPACKED_FILE)
FILLER = b"\x80\2" * FIRST_WINDOW  # the stack is looked at where a window ends


def machine(data: bytes) -> Case:
    return lambda folder: unpickle(Memory(data))


def read(path: Path) -> object:
    place = Folder(path) if path.is_dir() else LocalFile(path)
    try:
        return summarize(formats.read(place))
    finally:
        place.close()


def nested(levels: int, kind: type = list) -> object:
    node: object = 1
    for _ in range(levels):
        node = kind([node])
    return node


def saved(value: object) -> Case:
    def case(folder: Path) -> object:
        torch.save(value, folder / "a.pth")
        return read(folder / "a.pth")

    return case


def modules(number: int) -> Case:
    """A module with so many inside, itself included."""
    made = torch.nn.Sequential(
        torch.nn.Linear(1, 1), *(torch.nn.Identity() for _ in range(number - 2))
    )
    return saved(made)


def far(number: int) -> bytes:
    return (
        b"]"
        + b"".join(b"Nr" + struct.pack("<I", 1_000 * n) + b"a" for n in range(1, number + 1))
        + b"."
    )


def zipped(*names: str, data: bytes = b"", deflated: bool = False) -> Memory:
    file = io.BytesIO()
    with zipfile.ZipFile(
        file, "w", zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED
    ) as made:
        for name in names:
            made.writestr(name, data)
    return Memory(file.getvalue())


def zeros(ratio: int) -> bytes:
    """So many that deflate makes them smaller by that."""

    def deflated(size: int) -> int:
        machine = zlib.compressobj(wbits=-15)
        return len(machine.compress(bytes(size)) + machine.flush())

    return bytes(next(size for size in count(ratio) if size // deflated(size) == ratio))


def npy(length: int) -> Case:
    text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}".ljust(length - 1) + b"\n"

    def case(folder: Path) -> object:
        (folder / "a.npy").write_bytes(
            b"\x93NUMPY\x01\0" + struct.pack("<H", length) + text + bytes(4)
        )
        return read(folder / "a.npy")

    return case


def safetensors(length: int = 200, rank: int = 1) -> Case:
    text = (
        json.dumps({"a": {"dtype": "U8", "shape": [1] * rank, "data_offsets": [0, 1]}})
        .encode()
        .ljust(length)
    )

    def case(folder: Path) -> object:
        (folder / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"x")
        return read(folder / "a.safetensors")

    return case


def index(length: int) -> Case:
    text = json.dumps(
        {"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    ).ljust(length)

    def case(folder: Path) -> object:
        save_file({"a": torch.ones(1)}, folder / "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_text(text)
        return read(folder)

    return case


def text(length: int) -> bytes:
    """A string that takes so many bytes of a pickle."""
    return b"X" + struct.pack("<I", length - 5) + b"a" * (length - 5) + b"."


def gaps(number: int) -> Case:
    def case(folder: Path) -> object:
        nest = Nest()
        nest.put(("list", number), 1)
        return nest.finished()

    return case


def optimizer(number: int) -> Case:
    def case(folder: Path) -> object:
        tag = Run(small()).save(folder / f"run-{len(list(folder.iterdir()))}")
        state = {"state": {0: dict.fromkeys(range(number), 1)}, "param_groups": []}
        edit_optims(tag, lambda content: content.update(base_optimizer_state=state))
        return read(tag)

    return case


def written(plan: Plan) -> Case:
    def case(folder: Path) -> object:
        return publish(plan, folder / f"out-{len(list(folder.iterdir()))}")

    return case


LARGE = zipped("a", data=bytes(1_000_000), deflated=True)


def planned(line: str, shapes: dict[str, tuple[int, ...]], **given: str) -> Case:
    return lambda folder: RuleSet.parse([line]).plan(shapes, **given)


TAR_RECORD = record(b"comment", b"1" * 100)

# name -> how much is needed, and what needs it.
# Of one byte: four times as many are free.
EXPANDED = Derived(view(1, (1_004,), (0,)), (Range(Memory(b"x"), 0, 1),), 1_004)
CASES: dict[str, tuple[int, Case]] = {
    "pickle_bytes": (1_002, machine(b"]" + b"Na" * 500 + b".")),
    "pickle_stack": (50, machine(b"(" + b"N" * 50 + FILLER + b"t.")),
    "pickle_marks": (50, machine(b"(" * 50 + b"N" + FILLER + b"t" * 50 + b".")),
    "memo_entries": (50, machine(b"\x80\x04]" + b"N\x94a" * 50 + b".")),
    "memo_sparse": (50, machine(far(50))),
    "value_bytes": (1100, machine(b"]" + b"}a" * 5 + b".")),  # 11 values of 100 bytes
    "depth": (50, saved(nested(50))),
    "key_depth": (20, machine(pickle.dumps({nested(19, tuple): 1}, 2))),
    "odd_keys": (50, machine(pickle.dumps({n + 0.5: n for n in range(50)}, 2))),
    "key_values": (50, machine(pickle.dumps({(1,) * 50: 1}, 2))),
    "string_bytes": (3 * FIRST_WINDOW, machine(text(3 * FIRST_WINDOW))),
    "line_bytes": (3 * FIRST_WINDOW, machine(b"F" + b"0" * 3 * FIRST_WINDOW + b"\n.")),
    "name_bytes": (50, machine(b"cm\n" + b"a" * 49 + b"\n.")),
    "int_bytes": (50, machine(b"\x8a\x32" + b"\x01" * 50 + b".")),
    "revisits": (50, modules(50)),
    "zip_entries": (50, lambda folder: read_directory(zipped(*map(str, range(50))))),
    "zip_directory_bytes": (100, lambda folder: read_directory(zipped("a" * 54))),
    "record_bytes": (1_000, lambda folder: read_directory(zipped("a", data=bytes(1_000))).read("a")),
    "inflated_free": (1_000_000 - INFLATED * LARGE.size, lambda folder: read_directory(LARGE).read("a")),
    "unpacked_free": (
        len(UNPACKED_FILE) - UNPACKED * len(PACKED_FILE), lambda folder: formats.read(Memory(PACKED_FILE))
    ),
    "inflate_ratio": (50, lambda folder: read_directory(zipped("a", data=zeros(50), deflated=True)).locate("a")),
    "tar_members": (50, lambda folder: read_members(Memory(archive(*(header(str(n)) for n in range(50)))))),
    "tar_records_bytes": (
        len(TAR_RECORD),
        lambda folder: read_members(Memory(archive(records((b"comment", b"1" * 100)), member("a", b"data")))),
    ),
    "npy_header_bytes": (200, npy(200)),
    "safetensors_header_bytes": (1_000, safetensors(1_000)),
    "index_bytes": (1_000, index(1_000)),
    "json_depth": (50, lambda folder: strict_json.parse(b"[" * 50 + b"]" * 50, "text")),
    "json_values": (50, lambda folder: strict_json.parse(b"[" + b"1," * 49 + b"1]", "text")),
    "rank": (20, safetensors(rank=20)),
    "ranks": (6, lambda folder: check_grid([RankFile(f"{n}", {"tp": n % 3, "pp": n // 3}, {}) for n in range(6)],
                                           {"tp": 3, "pp": 2}, {})),
    "chunk_visits": (100, lambda folder: check_cover((50,), [((n,), (1,)) for n in range(50)])),
    "optimizer_values": (10, optimizer(10)),
    "list_gaps": (50, gaps(50)),
    "rule_bytes": (100, lambda folder: parse_rule("a -> b".ljust(100))),
    "rule_labels": (50, lambda folder: parse_rule("a.{p:" + "|".join(map(str, range(50))) + "} -> b.{p}")),
    "rule_variables": (4, lambda folder: parse_rule("a.{b}.{c}.{d}.{e} -> a.{b}.{c}.{d}.{e}")),
    "rule_terms": (20, lambda folder: parse_rule("a -> b with h=1" + "+1" * 20)),
    "rule_steps": (36, planned("{a:**}y{n} -> {a}{n}", {"y" * 99 + "1": ()})),
    "rule_targets": (50, planned("x [e] -> x.{e} []", {"x": (50,)})),
    "rule_copies": (50, planned("x.{a} [b] -> y.{b} [a]", {f"x.{n}": (10,) for n in range(5)})),
    "expansion_free": (1_000, written(Plan((OutputFile("", (EXPANDED,)),)))),
    "expansion": (7, written(Plan((OutputFile("", (Range(Memory(bytes(100)), 0, 100),) * 7),)))),
}  # fmt: skip
WITH_SCAN = ("trace_", "scan_")  # tested where scanning is


def limited(monkeypatch: pytest.MonkeyPatch, **changes: int) -> None:
    """Let these be the limits, wherever they are used."""
    changed = dataclasses.replace(LIMITS, **changes)
    for name, module in list(sys.modules.items()):
        if name.startswith("ckptkit") and getattr(module, "LIMITS", None) is LIMITS:
            monkeypatch.setattr(module, "LIMITS", changed)


def test_a_change_reaches_every_module() -> None:
    """One that is imported later takes the changed limits, and keeps them for other tests."""
    package = Path(formats.__file__).parents[1]
    users = [
        ".".join(("ckptkit", *path.relative_to(package).with_suffix("").parts))
        for path in package.rglob("*.py")
        if re.search(
            r"^\s*from ckptkit.core.limits import .*\bLIMITS\b", path.read_text("utf-8"), re.M
        )
    ]
    assert len(users) > 20
    assert not [name for name in users if name.removesuffix(".__init__") not in sys.modules]


def test_every_limit_is_tested() -> None:
    names = {
        field.name for field in dataclasses.fields(Limits) if not field.name.startswith(WITH_SCAN)
    }
    assert names == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_LM_below_at_and_above(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need, case = CASES[name]
    others = {"expansion_free": 0} if name == "expansion" else {}
    for limit in (need + 1, need):
        with monkeypatch.context() as patch:
            limited(patch, **{name: limit}, **others)
            case(tmp_path)
    with monkeypatch.context() as patch:
        limited(patch, **{name: need - 1}, **others)
        with pytest.raises(LimitError, match=rf"\b{name}\b") as caught:
            case(tmp_path)
    if name.startswith("expansion"):
        assert "allow_expand=True" in (caught.value.hint or "")
        return
    # What the hint says helps.
    variable, _, value = str(caught.value.hint).split()[-4].partition("=")
    assert variable == f"{PREFIX}{name.upper()}"
    limited(monkeypatch, **{name: getattr(from_environment({variable: value}), name)})
    case(tmp_path)


# The environment


def test_variables_change_limits() -> None:
    changed = from_environment(
        {"CKPTKIT_LIMIT_PICKLE_BYTES": "17", "CKPTKIT_LIMIT_DEPTH": "0", "CKPTKIT_OTHER": "x"}
    )
    assert changed == dataclasses.replace(Limits(), pickle_bytes=17, depth=0)
    assert from_environment({}) == Limits()
    assert from_environment({"CKPTKIT_LIMIT_DEPTH": str(MOST)}).depth == MOST


@pytest.mark.parametrize(
    "text",
    [
        "",
        " 1",
        *["-1", "+1", "1.5", "1e9", "1_000", "0x10", "1GB", "²", "٤"],
        str(MOST + 1),
        "9" * 5_000,
    ],
)
def test_values_that_are_none(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"CKPTKIT_LIMIT_DEPTH: expected an integer from 0 to .*, got "
    ):
        from_environment({"CKPTKIT_LIMIT_DEPTH": text})


@pytest.mark.parametrize("name", CEILINGS)
def test_ceilings(name: str) -> None:
    variable = PREFIX + name.upper()
    assert getattr(from_environment({variable: str(CEILINGS[name])}), name) == CEILINGS[name]
    with pytest.raises(UsageError, match=f"from 0 to {CEILINGS[name]:,}"):
        from_environment({variable: str(CEILINGS[name] + 1)})
    with pytest.raises(LimitError) as caught:
        check(name, CEILINGS[name] + 1, "things")
    assert caught.value.hint is None


def test_names_that_are_none() -> None:
    """Another version may have them: a warning, and the others count."""
    with pytest.warns(UserWarning, match="PICKEL_BYTES is ignored.* CKPTKIT_LIMIT_PICKLE_BYTES"):
        found = from_environment({"CKPTKIT_LIMIT_PICKEL_BYTES": "1", "CKPTKIT_LIMIT_DEPTH": "7"})
    assert found == dataclasses.replace(Limits(), depth=7)


def test_a_file_at_every_ceiling_is_no_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of Python do not become bugs of ours."""
    limited(monkeypatch, **CEILINGS)
    integer = b"\x8b" + struct.pack("<I", 1_780) + b"\x7f" * 1_780 + b"."
    assert len(key_text(unpickle(Memory(integer)).root)) > 4_000
    assert isinstance(unpickle(Memory(b"L" + b"9" * 3_560 + b"L\n.")).root, int)
    unpickle(Memory(pickle.dumps({nested(900, tuple): 1}, 2)))
    assert strict_json.parse(b"[" * 256 + b"]" * 256, "text")


def test_the_command_line(alone: Command, tmp_path: Path) -> None:
    torch.save(nested(40), tmp_path / "deep.pth")
    assert alone("inspect", tmp_path / "deep.pth").code == 0
    done = alone("inspect", tmp_path / "deep.pth", env={"CKPTKIT_LIMIT_DEPTH": "20"})
    assert done.code == 3
    assert "levels of values: 21 exceeds the limit of 20 (depth)" in done.stderr
    assert "hint: if you trust the file, CKPTKIT_LIMIT_DEPTH=40 raises the limit" in done.stderr
    assert alone("inspect", tmp_path / "deep.pth", env={"CKPTKIT_LIMIT_DEPTH": "40"}).code == 0
    wrong = alone("inspect", tmp_path / "deep.pth", env={"CKPTKIT_LIMIT_DEPTH": "many"})
    assert (wrong.code, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: CKPTKIT_LIMIT_DEPTH: expected an integer from 0 to")
    unknown = alone("inspect", tmp_path / "deep.pth", env={"CKPTKIT_LIMIT_DEEP": "1"})
    assert unknown.code == 0
    assert unknown.stderr.startswith("warning: CKPTKIT_LIMIT_DEEP is ignored: no limit has")


def test_far_deeper_than_python_goes(run: Command, tmp_path: Path) -> None:
    """A raised limit never leads to an error of Python."""
    depth = 5_000
    (tmp_path / "deep.pkl").write_bytes(
        b"\x80\x02}X\x01\0\0\0a" + b"]" * depth + b"a" * (depth - 1) + b"s."
    )
    done = run("inspect", "--json", tmp_path / "deep.pkl", env={"CKPTKIT_LIMIT_DEPTH": "100000"})
    assert done.code in (0, 3), done.stderr[-500:]
    assert "bug" not in done.stderr
