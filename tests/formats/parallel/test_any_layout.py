"""Random checkpoints, cut by each layout for random grids: the parts make the whole again, and what
does not go together is refused, or makes the whole all the same.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptkit
from ckptkit.core.errors import CkptkitError, CorruptError
from tests.formats.parallel import making
from tests.formats.parallel.old_forms import (
    NEW,
    Plain,
    dtensor,
    mesh_of_axes,
    mesh_of_layout,
    mesh_of_tensor,
    save,
    shard,
)
from tests.formats.parallel.trees import assert_same

QUICK = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
REPLICATE = Plain(f"{NEW}.placement_types", "Replicate", {})


# Meshes of as many ranks: experts may be on another than the rest.
MESHES = {
    2: ((2,),), 3: ((3,),), 4: ((4,), (2, 2), (1, 4)), 5: ((5,),), 6: ((6,), (3, 2), (2, 3)),
    8: ((8,), (4, 2), (2, 2, 2)),
}  # fmt: skip


class Cut(NamedTuple):
    """A tensor on a mesh, and the dimension along which each dimension of the mesh cuts it; -1:
    none."""

    mesh: tuple[int, ...]
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    dtype: torch.dtype

    def at(self, rank: int) -> tuple[int, ...]:
        """Where a rank is in the mesh."""
        return tuple(map(int, np.unravel_index(rank, self.mesh)))


class Case(NamedTuple):
    """Ranks and the tensors on them; `form` is a mesh as a version of torch pickles it."""

    world: int
    form: str
    tensors: dict[str, Cut]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world = draw(st.sampled_from(sorted(MESHES)))
    tensors = {}
    for number in range(draw(st.integers(1, 4))):
        mesh = draw(st.sampled_from(MESHES[world]))
        rank = draw(st.integers(1, 3))
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=rank, max_size=rank)))
        dims = tuple(draw(st.integers(-1, rank - 1)) for _ in mesh)
        tensors[f"layers.{number}.weight"] = Cut(mesh, shape, dims, draw(st.sampled_from(DTYPES)))
    return Case(world, draw(st.sampled_from(["2.9", "2.10", "2.13", "2.15"])), tensors)


def mesh_of(form: str, cut: Cut, rank: int) -> Plain:
    ranks = torch.arange(prod(cut.mesh), dtype=torch.int32)
    steps = [prod(cut.mesh[n + 1 :]) for n in range(len(cut.mesh))]
    if form == "2.9":
        return mesh_of_tensor(ranks.reshape(cut.mesh), _coordinate_on_dim=list(cut.at(rank)))
    if form == "2.10":
        return mesh_of_layout(cut.mesh, tuple(steps), ranks, _rank=rank)
    axes = [((size,), (step,)) for size, step in zip(cut.mesh, steps, strict=True)]
    newer = {"_preserve_rank_order": False} if form == "2.15" else {}
    return mesh_of_axes(axes, ranks, _rank=rank, _coordinate_on_dim=cut.at(rank), **newer)


def placements(cut: Cut) -> tuple[Plain, ...]:
    """As FSDP over tensor parallelism makes them: all but the last cut of a dimension are
    strided."""
    found = []
    for n, dim in enumerate(cut.dims):
        after = [m for m in range(n + 1, len(cut.dims)) if cut.dims[m] == dim]
        factor = prod(cut.mesh[m] for m in after)
        if dim < 0:
            found.append(REPLICATE)
        elif after:
            state = {"dim": dim, "split_factor": factor}
            found.append(Plain(f"{NEW}.placement_types", "_StridedShard", state))
        else:
            found.append(shard(dim))
    return tuple(found)


def local(cut: Cut, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """What a rank holds, by torch.chunk from the last dimension of the mesh to the first."""
    at = cut.at(rank)
    for n in reversed(range(len(cut.mesh))):
        if cut.dims[n] >= 0:
            parts = whole.chunk(cut.mesh[n], cut.dims[n])
            empty = whole.narrow(cut.dims[n], 0, 0)
            whole = parts[at[n]] if at[n] < len(parts) else empty
    return whole


@contextmanager
def saved(case: Case) -> Iterator[tuple[list[Path], dict[str, torch.Tensor]]]:
    """The file of each rank, and the whole."""
    torch.manual_seed(0)
    whole = {
        key: torch.randint(-99, 99, cut.shape).to(cut.dtype) for key, cut in case.tensors.items()
    }
    with tempfile.TemporaryDirectory() as top:
        names = [f"model_world_size_{case.world}_rank_{rank}.pt" for rank in range(case.world)]
        for rank, name in enumerate(names):
            root: dict[str, Any] = {"steps": torch.tensor(7)}
            for key, cut in case.tensors.items():
                mesh = mesh_of(case.form, cut, rank)
                root[key] = dtensor(whole[key], local(cut, whole[key], rank), mesh, placements(cut))
            save(root, Path(top) / name)
        yield [Path(top) / name for name in names], {**whole, "steps": torch.tensor(7)}


@settings(QUICK, max_examples=60)
@given(cases(), st.integers(0, 99))
def test_rank_files_on_any_mesh(case: Case, number: int) -> None:
    """They make the whole; renamed ranks are refused; a rank may be missing if another has its
    rows."""
    with saved(case) as (files, whole):
        folder, first, second = (
            files[0].parent,
            files[number % case.world],
            files[number % case.world - 1],
        )
        assert_same(ckptkit.load(folder), whole)
        for old, new in ((first, folder / "spare"), (second, first), (folder / "spare", second)):
            shutil.move(old, new)
        with pytest.raises(CorruptError):
            ckptkit.open(folder)
        first.unlink()
        shutil.move(second, first)
        try:
            found = ckptkit.load(folder)
        except CkptkitError:
            return
        assert_same(found, whole)


@st.composite
def stages(draw: st.DrawFn) -> list[list[list[int]]]:
    """Layers of pipeline ranks and virtual stages, in the order in which Megatron counts them."""
    ranks, virtual = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    sizes = [[draw(st.integers(1, 2)) for _ in range(virtual)] for _ in range(ranks)]
    found: list[list[list[int]]] = [[[] for _ in range(virtual)] for _ in range(ranks)]
    at = 0
    for v in range(virtual):
        for p in range(ranks):
            found[p][v] = list(range(at, at + sizes[p][v]))
            at += sizes[p][v]
    return found


@settings(QUICK, max_examples=25)
@given(stages(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.booleans())
def test_any_grid_of_megatron_makes_the_whole(
    grid: list[list[list[int]]], tp: int, ep: int, gated: bool
) -> None:
    layers = sum(len(part) for stage in grid for part in stage)
    experts = 4 if ep > 1 else 0
    state = making.mcore(layers, experts=experts, gated=gated, bias=not experts)
    said: dict[str, Any] = {"num_experts": experts} if experts else {}
    with tempfile.TemporaryDirectory() as top:
        folder = making.megatron(Path(top) / "x", state, grid, tp=tp, ep=ep, swiglu=gated, **said)
        assert_same(ckptkit.load(folder), state)
        missing = sorted(folder.rglob("*.pt"))[-1]
        missing.unlink()
        if len(grid) * tp * ep > 1:
            with pytest.raises(CkptkitError):
                ckptkit.open(folder)
