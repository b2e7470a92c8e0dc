"""Verdicts: on files that were made to do harm, on files that were not, and against what torch
itself accepts."""

from __future__ import annotations

import datetime
import decimal
import gzip
import os
import pathlib
import pickle
import subprocess
import sys
import zipfile
from collections import Counter, OrderedDict, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptkit
from ckptkit.core.errors import AmbiguousError
from ckptkit.core.limits import LIMITS
from ckptkit.scanning.files import Failure, scan, scan_all
from ckptkit.scanning.verdict import (
    CLASSES,
    CODE,
    HARMLESS,
    NONE,
    SAFE,
    UNKNOWN,
    FileVerdict,
    counts,
    findings,
)
from tests.conftest import ENVIRONMENT, Corpus
from tests.formats.containers.zips import Member, build
from tests.matrix import FOLDER
from tests.scanning.hostile_pickles import (
    CASES,
    DISGUISED,
    EVIL,
    PLAIN,
    archive,
    call,
    legacy,
    name,
    pickle2,
    pickle4,
    raw,
    text,
)

METHOD = FOLDER / "torch-zip/bound_method.pth"  # calls getattr
MODULES = [FOLDER / "torch-zip/module.pth", FOLDER / "torch-zip/sync_batch_norm.pth"]
SHARDS = sorted(FOLDER.glob("parallel/*/*.pt"))  # ShardedTensors of FSDP1
_OTHERS = (METHOD, *MODULES, *SHARDS)
FILES = sorted(
    path
    for path in FOLDER.rglob("*")
    if path.is_file() and path.suffix not in (".py", ".pyc") and path not in _OTHERS
)

# Scans all cases in a process that is watched: nothing of them may be imported, opened for writing,
# or run.
WATCHED = """
import sys, os
from ckptkit.scanning.files import scan
from ckptkit.analysis import json_facts
folder = sys.argv[1]
paths = sorted(os.path.join(folder, name) for name in os.listdir(folder))
json_facts.scanned(scan(paths[0]))
for path in paths: scan(path)  # whatever is imported when it is first needed is imported now
seen = []
def hook(event, args):
    if event in ("import", "exec", "compile", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen",
                 "socket.connect",
                 "pickle.find_class", "marshal.loads", "code.__new__", "function.__new__", "ctypes.dlopen"):
        seen.append((event, str(args)[:80]))
    if event == "open" and (args[1] not in ("r", "rb", None) or args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
        seen.append((event, str(args)[:80]))
modules = set(sys.modules)
sys.addaudithook(hook)
for path in paths: scan(path)
assert not seen, seen
assert set(sys.modules) == modules, set(sys.modules) - modules
"""


def put(folder: Path, data: bytes, suffix: str = ".pth") -> Path:
    path = folder / f"file{suffix}"
    path.write_bytes(data)
    return path


def verdict(folder: Path, data: bytes, suffix: str = ".pth") -> str:
    return scan(put(folder, data, suffix)).verdict


def test_PK_01_PK_02_PK_13_LG_02_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for case, (suffix, data, expected) in CASES.items():
        folder = tmp_path / case
        folder.mkdir()
        monkeypatch.chdir(folder)
        assert verdict(folder, data, suffix) == expected, case
        assert os.listdir(folder) == [f"file{suffix}"], case


def test_PK_01_nothing_is_run(tmp_path: Path) -> None:
    """A canary, and an audit hook over every import, call of the system, and file opened for
    writing."""
    cases = tmp_path / "cases"
    cases.mkdir()
    for each, (suffix, data, _) in CASES.items():
        (cases / f"{each}{suffix}").write_bytes(data)
    before = sorted(os.listdir(cases))
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(cases)], capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert os.listdir(tmp_path) == ["cases"] and sorted(os.listdir(cases)) == before


@pytest.mark.filterwarnings("ignore:'torch.load' received a zip file:UserWarning")
@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
def test_fixtures_are_no_findings_and_torch_agrees() -> None:
    assert len(FILES) > 100
    for path in FILES:
        found = scan(path)
        assert not counts(found, strict=False), (path, *findings(found, strict=True))
        if (
            path.suffix in (".pth", ".pt", ".bin", ".ckpt", ".pkl")
            and path.parent.parent.name != "sharded"
        ):
            assert loads(path) == (found.verdict == SAFE), path


def test_a_method_that_was_saved_is_a_finding() -> None:
    """Loading the file would call getattr."""
    found = scan(METHOD)
    assert counts(found, strict=False)
    assert not loads(METHOD)


@pytest.mark.parametrize("path", SHARDS, ids=lambda path: path.stem)
def test_shards_of_fsdp1_are_not_known_to_be_safe(path: Path) -> None:
    """Their classes ask for the process group when they are loaded; weights_only refuses them."""
    assert scan(path).verdict == UNKNOWN
    assert not loads(path)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_whole_modules_need_their_classes(path: Path) -> None:
    found = scan(path)
    assert found.verdict == CLASSES and counts(found, strict=False)
    assert not counts(scan(path, trust=["ckptkit.trainer.models"]), strict=False)


def loads(path: Path) -> bool:
    """Return whether torch.load takes a file with weights_only."""
    try:
        torch.load(path, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError):
        return False
    return True


class Own:
    """A class that nobody knows."""


SAVED: dict[str, tuple[Any, str]] = {
    "tensors": ({"a": torch.ones(2), "b": torch.arange(3).byte()}, SAFE),
    "module": (torch.nn.Linear(2, 2), HARMLESS),
    "state": (
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).state_dict(),
        SAFE,
    ),
    "optimizer": (torch.optim.Adam([torch.nn.Parameter(torch.ones(2))]).state_dict(), SAFE),
    "parameter": (torch.nn.Parameter(torch.ones(2)), SAFE),
    "sparse": (torch.eye(2).to_sparse(), SAFE),
    "containers": (
        (OrderedDict(a=1), Counter("ab"), {1, 2}, [1], (2,), b"x", bytearray(b"y"), 1j),
        SAFE,
    ),
    "dtype": ([torch.float16, torch.device("cpu"), torch.Size([1])], SAFE),
    "large": ([1 << 70, -(1 << 31), 0.5, None, True, "\u20ac"], SAFE),
    "path": (pathlib.PurePosixPath("a/b"), HARMLESS),
    "datetime": (datetime.datetime(2026, 1, 1), HARMLESS),
    "decimal": (decimal.Decimal("1.5"), HARMLESS),
    "numpy": ({"a": np.float64(1.5), "b": np.ones(2)}, HARMLESS),
    "own": (Own(), CLASSES),
    "defaultdict": (defaultdict(list, a=[1]), HARMLESS),
    "function": ({"activation": torch.nn.functional.relu}, HARMLESS),
    "type": (int, HARMLESS),
}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("case", SAVED)
def test_what_torch_saves_and_loads(case: str, zipped: bool, tmp_path: Path) -> None:
    value, expected = SAVED[case]
    path = tmp_path / "saved.pt"
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    found = scan(path)
    assert found.verdict == expected, [str(each) for each in findings(found, strict=True)]
    assert loads(path) == (expected == SAFE)


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_protocols_that_weights_only_does_not_read(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "saved.pt"
    torch.save({"a": torch.ones(2)}, path, pickle_protocol=protocol)
    assert loads(path) == (scan(path).verdict == SAFE)
    assert scan(path).verdict in (SAFE, HARMLESS)


def test_tensors_in_plain_pickles_are_files_of_their_own(tmp_path: Path) -> None:
    """Their storages are pickled as bytes that torch loads without weights_only: what these would
    do is what counts."""
    data = pickle.dumps({"a": torch.ones(2)})
    found = scan(put(tmp_path, data, ".pkl"))
    assert (
        found.verdict == HARMLESS
        and len(found.pickles) > 1
        and not any(each.found.nested for each in found.pickles)
    )
    evil = pickle2(call("torch.storage._load_from_bytes", raw(legacy(EVIL, pickle2(b"]")))))
    assert verdict(tmp_path, evil, ".pkl") == CODE
    assert (
        verdict(tmp_path, pickle2(call("torch.storage._load_from_bytes", b"]")), ".pkl") == UNKNOWN
    )


def test_trust_lets_calls_of_packages_pass_and_no_others(tmp_path: Path) -> None:
    path = put(tmp_path, archive(pickle2(call("mine.kinds.Kind", text("a")))))
    assert scan(path).verdict == CODE
    assert scan(path, trust=["other.*"]).verdict == CODE
    assert scan(path, trust=["min"]).verdict == CODE
    for trust in ("mine.*", "mine", "mine.kinds"):
        assert scan(path, trust=[trust]).verdict == HARMLESS
    assert scan(put(tmp_path, EVIL), trust=["*"]).verdict == CODE


@pytest.mark.parametrize("body", ["wrapper", "dict-keys", "append-of-a-call", "list-of-a-pipe"])
def test_nothing_of_python_or_torch_is_trusted(body: str, tmp_path: Path) -> None:
    path = put(tmp_path, pickle4(DISGUISED[body]), ".pkl")
    assert counts(scan(path, trust=["*"]), strict=False)


def test_classes_of_packages_are_trusted_by_name(tmp_path: Path) -> None:
    symbol = name("sympy.core.symbol.Symbol")
    for args, expected in ((b")", CLASSES), (text("x") + b"\x85", UNKNOWN)):
        path = put(tmp_path, pickle4(symbol + args + b"\x81"), ".pkl")
        assert scan(path).verdict == expected
        assert scan(path, trust=["sympy.*"]).verdict == HARMLESS


def test_ZP_04_a_reader_that_does_not_look_at_checksums_is_thought_of(tmp_path: Path) -> None:
    data = archive(EVIL).replace(b"touch canary", b"touch canarz")
    found = scan(put(tmp_path, data))
    assert found.verdict == CODE and "canarz" in found.pickles[0].runs[0].args


def test_ZP_01_all_members_of_one_name_are_looked_at(tmp_path: Path) -> None:
    for order in ((EVIL, PLAIN), (PLAIN, EVIL)):
        members = [Member("a/data.pkl", data) for data in order]
        found = scan(put(tmp_path, build(*members)))
        assert found.verdict == CODE and len(found.pickles) == 2 and found.remarks


def test_a_file_that_our_reader_refuses_cannot_be_told(tmp_path: Path) -> None:
    whole = archive(PLAIN)
    assert verdict(tmp_path, whole) == SAFE
    assert verdict(tmp_path, whole[:-5]) == UNKNOWN
    assert verdict(tmp_path, b"MZ" + whole) == UNKNOWN
    assert verdict(tmp_path, whole + b"more") == UNKNOWN


def test_bombs_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ckptkit.scanning.find.LIMITS", replace(LIMITS, scan_inflated_bytes=1 << 16, scan_depth=3)
    )
    assert verdict(tmp_path, gzip.compress(bytes(1 << 20)), ".gz") == UNKNOWN
    data = EVIL
    for _ in range(5):
        data = gzip.compress(data)
    assert verdict(tmp_path, data, ".gz") == UNKNOWN
    assert verdict(tmp_path, gzip.compress(gzip.compress(EVIL)), ".gz") == CODE


@pytest.mark.parametrize("head", [b"7z\xbc\xaf\x27\x1c", b"\x04\x22\x4d\x18", b"Rar!\x1a\x07\x00"])
def test_what_is_not_looked_into_is_said(head: bytes, tmp_path: Path) -> None:
    found = scan(put(tmp_path, head + bytes(100)))
    assert found.verdict == UNKNOWN and "not search" in found.remarks[0].reason


@pytest.mark.parametrize("head", [
    b"cos\nsystem\n(S'touch canary'\np0001\ntR.", b"I010\n0" + EVIL[2:], b"L 7L\n0" + EVIL[2:],
    b"F1_0.5\n0" + EVIL[2:], b"I7\0x\n0" + EVIL[2:], b"I" + b"7" * 3000 + b"\n0" + EVIL[2:],
    b"S'\\q'\n0" + EVIL[2:],
])  # fmt: skip
def test_what_cpython_may_read_is_never_passed_over(head: bytes, tmp_path: Path) -> None:
    """A stop of ckptkit's own says nothing about what follows, under any name and inside files."""
    for suffix in (".pth", ".txt", ".pkl"):
        assert verdict(tmp_path, head, suffix) == UNKNOWN
    assert verdict(tmp_path, archive(PLAIN, Member("archive/notes", head))) == UNKNOWN
    assert verdict(tmp_path, pickle4(raw(head)), ".pkl") == UNKNOWN


_MAGIC = 0x1950A86A20F9469CFC6C


@pytest.mark.parametrize("magic", [
    f"I{_MAGIC}\n.".encode(), f"L{_MAGIC}L\n.".encode(),
    b"NN00\x8a\x0a" + _MAGIC.to_bytes(10, "little") + b".",
    b"\x80\x04K\1\x85\x8b\x0a\0\0\0" + _MAGIC.to_bytes(10, "little") + b".",
    call("decimal.Decimal", text(str(_MAGIC))) + b".",
    call("fractions.Fraction", text(str(_MAGIC))) + b".",
])  # fmt: skip
def test_the_magic_number_of_legacy_files_is_a_value(magic: bytes, tmp_path: Path) -> None:
    """However it is spelled, torch.load reads four more pickles."""
    for more in (EVIL, b"I1001\n.}." + EVIL, b"I1001\n.(d." + PLAIN + EVIL[2:]):
        for suffix in (".pth", ".txt"):
            assert verdict(tmp_path, magic + more, suffix) == CODE


@pytest.mark.parametrize("name", ["a b", "a-b", "", "1", "os..path"])
def test_a_call_convinces_whatever_is_named_after_it(name: str, tmp_path: Path) -> None:
    data = EVIL[2:-1] + f"0c{name}\nc\n.".encode()
    for each in (data, archive(PLAIN, Member("archive/notes", data)), pickle4(raw(data))):
        assert verdict(tmp_path, each, ".txt") == CODE


def test_a_module_that_is_imported_is_told(tmp_path: Path) -> None:
    assert verdict(tmp_path, b"cantigravity\nx\n\xff", ".pth") == UNKNOWN


def test_texts_are_no_pickles(tmp_path: Path) -> None:
    for line in (
        b"I am\n", b"Floats 1 2 3\n", b"gone\n", b"Sum: 'a'\n", b"I 1st\n",
        b"iVBOR" + b"A" * (2 << 20),
    ):  # fmt: skip
        assert verdict(tmp_path, line + b"and more text\n", ".txt") == NONE


def test_random_tensors_are_no_pickles(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = tmp_path / "many.pt"
    torch.save([torch.randint(0, 256, (60,), dtype=torch.uint8) for _ in range(3_000)], path)
    found = scan(path)
    assert (found.verdict, len(found.pickles), found.remarks) == (SAFE, 1, ())
    small = tmp_path / "small.pt"
    torch.save(
        [torch.tensor(number) for number in range(1_024)], small
    )  # 0x280, 0x178 and others begin like files
    assert scan(small).verdict == SAFE


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_programs(tmp_path: Path) -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    path = tmp_path / "net.pt"
    torch.jit.save(torch.jit.script(Net()), path)
    found = scan(path)
    assert found.verdict == HARMLESS and sum(each.functions for each in found.programs) == 1
    code = b'class Net(Module):\n  def forward(self, x):\n    torch.save(x, "canary")\n'
    members = (
        Member("n/data.pkl", PLAIN),
        Member("n/constants.pkl", pickle2(b")")),
        Member("n/code/__torch__/n.py", code),
    )
    assert verdict(tmp_path, build(*members)) == CODE


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_program_with_objects_in_a_dict(tmp_path: Path) -> None:
    """The dict has its type beside it: a call that gives it back."""

    @torch.jit.script
    class Kind:
        def __init__(self, name: str) -> None:
            self.name = name

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kinds = {"energy": Kind("e")}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + len(self.kinds["energy"].name)

    Net.__annotations__ = {"kinds": dict[str, Kind]}
    path = tmp_path / "net.pt"
    torch.jit.save(torch.jit.script(Net()), path)
    with zipfile.ZipFile(path) as file:
        assert b"restore_type_tag" in file.read("net/data.pkl")
    assert scan(path).verdict == HARMLESS


def test_pickles_one_after_another(tmp_path: Path) -> None:
    """As several pickle.dump into one file leave them: each is looked at, and inspect says it."""
    plain, evil = pickle.dumps({"a": [1.5]}, 4), EVIL
    for data, verdict in ((plain * 3, HARMLESS), (plain * 2 + evil, CODE), (plain + b"x", UNKNOWN)):
        path = put(tmp_path, data, ".pkl")
        assert scan(path).verdict == verdict
    with pytest.raises(AmbiguousError, match="several pickles"):
        ckptkit.open(put(tmp_path, plain * 2, ".pkl"))


def test_a_pointer_of_git_lfs_is_no_pickle(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    assert scan(put(tmp_path, pointer, ".pkl")).verdict == NONE


def test_several_files_folders_and_workers(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    put(tmp_path, archive(PLAIN))
    put(inner, EVIL, ".pkl")
    (tmp_path / "link").symlink_to(inner)
    expected = [
        (str(tmp_path / "file.pth"), SAFE),
        (str(tmp_path / "link"), None),
        (str(inner / "file.pkl"), CODE),
    ]
    for workers in (None, 1, 3):
        results = list(scan_all([tmp_path, tmp_path / "missing"], workers=workers))
        shown = [
            (each.path, each.verdict if isinstance(each, FileVerdict) else None) for each in results
        ]
        assert shown == [*expected, (str(tmp_path / "missing"), None)]
        assert all(isinstance(each, Failure) for each in (results[1], results[3]))


def test_remote_files(tmp_path: Path) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    store = MemoryFileSystem()
    store.pipe("/scan/evil.pth", archive(EVIL))
    store.pipe("/scan/deeper/fine.pth", archive(PLAIN))
    results = {each.path.rsplit("/", 1)[1]: each for each in scan_all(["memory://scan"])}
    assert {each: getattr(result, "verdict", result) for each, result in results.items()} == {
        "evil.pth": CODE,
        "fine.pth": SAFE,
    }


def test_findings_of_a_verdict(tmp_path: Path) -> None:
    found = scan(put(tmp_path, archive(pickle2(call("pathlib.PosixPath", text("a"))))))
    assert not counts(found, strict=False) and counts(found, strict=True)
    assert [each.verdict for each in findings(found, strict=True)] == [HARMLESS]
    assert list(findings(found, strict=False)) == []
    assert scan(put(tmp_path, b"hello", ".txt")).verdict == NONE


def test_corpus(corpus: Corpus) -> None:
    """Real files are no findings, and torch loads those that are safe. The odd containers hold no
    pickles."""
    for each in scan_all([corpus.folder]):
        if isinstance(each, FileVerdict) and "containers" not in each.path:
            assert each.verdict in (NONE, SAFE, HARMLESS, CLASSES), each.path
            if each.verdict == SAFE and not each.path.endswith(".distcp"):
                assert loads(Path(each.path)), each.path


def test_names_that_hide(tmp_path: Path) -> None:
    found = scan(put(tmp_path, pickle4(name("os\u200b.system") + b")R"), ".pkl"))
    assert found.verdict == CODE
