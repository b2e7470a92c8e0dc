"""The work for a small file is bounded by its size: elements, opcodes, inflated bytes, other
files."""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
import time
import zipfile
from contextlib import closing
from pathlib import Path

import pytest
import torch

import ckptkit
from ckptkit.analysis.digests import digest
from ckptkit.compute import tallies
from ckptkit.compute.arranged import once, place, repeated
from ckptkit.compute.compare import compare
from ckptkit.compute.tallies import Tally, nonfinite, numbers, parts
from ckptkit.core.errors import LimitError, OutputError, TensorError
from ckptkit.core.tensor import Tensor
from ckptkit.run.batch import manifest
from ckptkit.scanning.files import scan
from tests.conftest import COMMAND, ENVIRONMENT, Run


def opened(folder: Path, tensor: torch.Tensor, name: str = "in.pth") -> Tensor:
    torch.save({"w": tensor}, folder / name)
    return ckptkit.open(folder / name).weights["w"]


# Elements


EXPANDED = [
    torch.tensor([1.0, math.nan, 0.0, 5.0]).reshape(1, 4).expand(3, 4),
    torch.tensor([[1.0], [math.inf], [-2.5]]).expand(3, 5),
    torch.tensor(2).expand(2, 3, 4),
    torch.arange(6).reshape(2, 1, 3).expand(2, 7, 3),
]


@pytest.mark.parametrize("tensor", EXPANDED)
def test_repeated_elements_count_as_often_as_they_are_there(
    tensor: torch.Tensor, tmp_path: Path
) -> None:
    ours = opened(tmp_path, tensor)
    assert once(ours, repeated(ours)).numel < ours.numel
    tally = Tally()
    for part in parts(ours):
        tally.add(tallies.tally(part))
    finite = tensor[torch.isfinite(tensor)].double()
    assert tally.count == tensor.numel()
    assert (tally.nan, tally.infinite) == (int(tensor.isnan().sum()), int(tensor.isinf().sum()))
    assert tally.zeros == int((tensor == 0).sum())
    assert tally.std == pytest.approx(finite.std().item())
    assert tally.norm == pytest.approx(finite.norm().item())
    assert sum(tally.histogram.counts) == len(finite)
    assert torch.equal(torch.tensor(numbers(ours).copy()).nan_to_num(), tensor.nan_to_num())
    if tensor.is_floating_point():
        assert nonfinite(ours) == (tally.nan, tally.infinite)


@pytest.mark.parametrize("tolerance", [None, 0.0])
def test_differences_of_expanded_tensors(tolerance: float | None, tmp_path: Path) -> None:
    a, b = torch.arange(6.0).reshape(2, 1, 3), torch.arange(6.0).reshape(2, 1, 3)
    b[1, 0, 1] += 1
    wide = [each.expand(2, 4, 3) for each in (a, b)]
    ours = [opened(tmp_path, each, f"{n}.pth") for n, each in enumerate(wide)]
    found = compare(*ours, atol=tolerance)
    differing = (wide[0] != wide[1]).flatten()
    assert found is not None
    assert (found.count, found.first) == (int(differing.sum()), int(differing.nonzero()[0]))
    plain = [opened(tmp_path, each.contiguous(), f"{n}.pth") for n, each in enumerate(wide)]
    assert found == compare(*plain, atol=tolerance)


def test_places_in_expanded_tensors() -> None:
    full = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    corner = full[:, :1, :, :1].flatten().tolist()
    assert [place(n, (2, 3, 4, 5), (1, 3)) for n in range(len(corner))] == corner


def test_digests_are_of_every_element_or_none(tmp_path: Path) -> None:
    wide, plain = (
        torch.tensor([[1.0], [2.0]]).expand(2, 50),
        torch.tensor([[1.0], [2.0]]).expand(2, 50).contiguous(),
    )
    torch.save({"w": wide}, tmp_path / "wide.pth")
    torch.save({"w": plain}, tmp_path / "plain.pth")
    assert digest(tmp_path / "wide.pth").ids == digest(tmp_path / "plain.pth").ids
    torch.save(
        {f"{n}": torch.zeros(1).expand(1 << 22) for n in range(9)}, tmp_path / "many.pth"
    )  # 16 MiB each
    found = digest(tmp_path / "many.pth")
    assert len(found.ids) == 4
    assert all("are not read" in why for why in found.without.values())


def test_windows_that_overlap_are_not_read_without_end(tmp_path: Path) -> None:
    ours = opened(tmp_path, torch.zeros(20_000).as_strided((10_000, 10_000), (1, 1)))
    for read in (
        lambda: list(parts(ours)),
        lambda: nonfinite(ours),
        lambda: compare(ours, ours),
    ):
        with pytest.raises(TensorError, match="expansion"):
            read()


# Inflated bytes, opcodes


def deflated(path: Path, *pickles: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, data in enumerate(pickles):
            archive.writestr("a/data.pkl" if not number else f"a/{number}.pkl", data)
    return path


def test_a_pickle_that_is_inflated_to_millions_of_values(tmp_path: Path, run: Run) -> None:
    path = deflated(tmp_path / "a.pth", b"\x80\x02]" + b"}a" * 20_000_000 + b".")
    started = time.monotonic()
    done = run("inspect", path)
    assert done.code == 3
    assert "inflated_free" in done.stderr
    assert time.monotonic() - started < 20


def test_the_pickles_of_a_file_share_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = deflated(tmp_path / "a.zip", *[b"\x80\x02" + b"N0" * 10_000 + b"N."] * 5)
    assert scan(path).verdict == "harmless"
    from tests.core.test_limits import limited

    limited(monkeypatch, trace_bytes=50_000)
    found = scan(path)
    assert found.verdict == "unknown"
    assert any(
        "trace_bytes" in str((each.trace.error, found.remarks))
        for each in (p.found for p in found.pickles)
    )


# Files beside


@pytest.mark.parametrize("reading", [True, False])
def test_a_manifest_that_is_none(reading: bool, tmp_path: Path) -> None:
    path = tmp_path / manifest.NAME
    with open(path, "wb") as file:
        file.truncate(3 << 30)
    with (
        pytest.raises(OutputError, match="manifest"),
        manifest.opened(str(tmp_path), reading=reading),
    ):
        pass
    path.unlink()
    os.mkfifo(path)
    with (
        pytest.raises(OutputError, match="not a regular file"),
        manifest.opened(str(tmp_path), reading=reading),
    ):
        pass


# Two at once

EDITING = """
import sys
from ckptkit.api import convert
from ckptkit.core.errors import CkptkitError
from ckptkit.transforms.keys import add_prefix, strip_prefix
steps = [lambda ck: add_prefix(ck, "b."), lambda ck: strip_prefix(ck, "b.")]
edits = 0
for number in range(int(sys.argv[2])):
    try:
        convert(sys.argv[1], None, steps[number % 2], in_place=True)
        edits += 1
    except CkptkitError as error:
        assert error.exit_code in (2, 3, 4), error
        assert "again" in str(error.hint) or "key" in str(error) or "prefix" in str(error), (str(error), error.hint)
print(edits)
"""


@pytest.fixture
def edited(tmp_path: Path) -> Path:
    """A file of 300 tensors."""
    path = tmp_path / "run.pth"
    torch.save({f"layer.{n}.weight": torch.full((50,), float(n)) for n in range(300)}, path)
    return path


def test_two_edit_and_others_read(edited: Path) -> None:
    """Whole answers, or that it is being changed: no bug, no advice to download it again."""
    program = [sys.executable, "-c", EDITING, str(edited), "60"]
    editors = [
        subprocess.Popen(program, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in "ab"
    ]
    said = set()
    while any(each.poll() is None for each in editors):
        for words in (("scan",), ("inspect", "--json"), ("verify",), ("digest",), ("stats",)):
            done = subprocess.run(
                [*COMMAND, *words, str(edited)], env=ENVIRONMENT, capture_output=True, text=True
            )
            said.add(done.returncode)
            if done.returncode:
                assert done.returncode == 3, (words, done)
                assert "chang" in done.stderr + done.stdout, (words, done)
                assert "download" not in done.stderr + done.stdout
    assert said <= {0, 3}
    ended = [each.communicate(timeout=60) for each in editors]
    assert [each.returncode for each in editors] == [0, 0], ended
    assert sum(int(out) for out, _ in ended) > 2  # edits; the others were refused
    with closing(ckptkit.open(edited)) as left:
        assert len(left.weights) == 300


def test_a_huge_pickle_is_refused_by_recover_too(tmp_path: Path) -> None:
    path = deflated(tmp_path / "a.pth", b"\x80\x02]" + b"Na" * 10_000_000 + b".")
    with pytest.raises(LimitError, match="inflated"):
        ckptkit.recover(path)


def test_a_pickle_that_deflates_well_is_read(tmp_path: Path) -> None:
    path = deflated(tmp_path / "a.pth", pickle.dumps({"epochs": [0] * 100_000}, 2), b"")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("a/version", "3\n")
    assert len(ckptkit.open(path).root["epochs"]) == 100_000
