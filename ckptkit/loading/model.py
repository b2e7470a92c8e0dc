"""Weights and models: load into one, compare with one."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from ckptkit import compute
from ckptkit.analysis import diff as reports
from ckptkit.api import open_checkpoint
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import ModelError, UsageError
from ckptkit.core.tensor import Storage, Tensor, contiguous_stride
from ckptkit.core.tree import Node
from ckptkit.core.weights import as_tensor
from ckptkit.loading.tensors import Tensors
from ckptkit.loading.values import PathLike, Values, entries
from ckptkit.quantized import look_through_both
from ckptkit.transforms import module_versions
from ckptkit.transforms.keys import add_prefix, strip_prefix

if TYPE_CHECKING:
    from torch import nn

Shape = tuple[int, ...]
Shapes = Mapping[str, "Shape | None"]  # None: not a tensor, or one whose shape is not known yet

GROUP = 1 << 30  # bytes in memory at once, beside the model
_SAMPLE = 500  # names that are looked at to find the prefixes
_PREFIXES = 16  # of each side that are tried


@dataclass(frozen=True)
class LoadReport:
    """What `load_into` did: names are those of the model, those in `unexpected` of the file.

    ``stripped`` and ``added`` are the prefixes by which the names of the file had to be changed. ``mismatched`` maps a
    name to its shape in the file and in the model.
    """

    loaded: tuple[str, ...]
    stripped: str
    added: str
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: Mapping[str, tuple[Shape | None, Shape | None]]

    @property
    def complete(self) -> bool:
        """Whether file and model have the same entries."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        changes = [f"stripped {self.stripped!r}"] * bool(self.stripped) + [f"added {self.added!r}"] * bool(self.added)
        return "\n".join(["; ".join([f"loaded {len(self.loaded):,} entries", *changes]), *self.faults()])

    def faults(self) -> Iterator[str]:
        """A line for each way in which file and model differ."""
        if self.missing:
            yield f"missing in the file: {_some(self.missing)}"
        if self.unexpected:
            yield f"not in the model: {_some(self.unexpected)}"
        if self.mismatched:
            shapes = [f"{name} {a} instead of {b}" for name, (a, b) in self.mismatched.items()]
            yield f"of another shape: {_some(shapes)}"


def _some(names: Iterable[str], shown: int = 8) -> str:
    names = list(names)
    more = f" and {len(names) - shown:,} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def load_into(
    model: nn.Module, source: PathLike | Checkpoint, *, strict: bool = True, key: str | None = None
) -> LoadReport:
    """Copy the weights of a file, folder or Checkpoint into `model`, on the devices and in the dtypes that it has.

    Leading prefixes on either side (``module.``, ``_orig_mod.``...) are stripped and added as it takes for most names
    to meet; of tied weights of the model one name is enough. About 1 GiB of the file is in memory at once, more only if
    one module has more. Raises ModelError if `strict` and anything is missing, unexpected or of another shape (before
    anything is copied), and for a model on the meta device, which has nowhere to copy to.
    """
    ck = open_checkpoint(source, key=key)
    own: dict[str, Any] = model.state_dict()
    theirs = {name: _shape(value) for name, value in own.items()}
    if any(theirs[name] is not None and getattr(value, "is_meta", False) for name, value in own.items()):
        raise ModelError("the model is on the meta device", hint="model.to_empty(device='cpu') gives it memory")
    before = dict(entries(ck.required))
    stripped, added = prefixes({name: _shape(as_tensor(node)) for name, node in before.items()}, theirs)
    changed = _changed(ck, stripped, added)
    found = dict(entries(changed.required))
    versions = Values(Tensors("cpu"))(module_versions.of(changed.required.node))
    unchanged = dict(zip(found, before, strict=True))
    twins = _twins(own, found)
    needed = {name: shape for name, shape in theirs.items() if name not in twins}
    report = _report(found, unchanged, needed, versions or {}, stripped, added)
    if strict and not report.complete:
        raise _misfit(report, model, ck)
    _copy(model, {name: found[name] for name in report.loaded}, versions)
    return report


def _twins(own: Mapping[str, Any], found: Mapping[str, Node]) -> set[str]:
    """The names of the model that the file lacks and whose memory another one fills: tied weights."""
    places = {name: place for name, value in own.items() if (place := _place(value)) is not None}
    filled = {places[name] for name in places.keys() & found.keys()}
    return {name for name, place in places.items() if name not in found and place in filled}


def _place(value: Any) -> tuple[int, Shape, Shape] | None:
    """Where the elements of a plain tensor are in memory, and how."""
    from torch import Tensor as TorchTensor
    from torch import strided

    plain = type(value) is TorchTensor and value.layout is strided and value.numel()
    return (value.data_ptr(), tuple(value.shape), value.stride()) if plain else None


def _changed(ck: Checkpoint, stripped: str, added: str) -> Checkpoint:
    ck = strip_prefix(ck, stripped) if stripped else ck
    return add_prefix(ck, added) if added else ck


def _shape(value: Any) -> Shape | None:
    """The shape of a tensor of either kind, None where it has none (yet)."""
    if isinstance(value, Tensor):
        return value.shape if value.layout != "nested" else None
    from torch import Tensor as TorchTensor
    from torch.nn.parameter import is_lazy

    known = isinstance(value, TorchTensor) and not is_lazy(value) and not value.is_nested
    return tuple(value.shape) if known else None


def _report(
    found: Mapping[str, Node],
    unchanged: Mapping[str, str],
    theirs: Shapes,
    versions: Mapping[str, Any],
    stripped: str,
    added: str,
) -> LoadReport:
    shapes = {name: (_shape(as_tensor(node)), theirs[name]) for name, node in found.items() if name in theirs}
    mismatched = {name: pair for name, pair in shapes.items() if not _fits(*pair)}
    return LoadReport(
        loaded=tuple(name for name in shapes if name not in mismatched),
        stripped=stripped,
        added=added,
        missing=tuple(name for name in theirs if name not in found and not is_implied(name, versions)),
        unexpected=tuple(unchanged[name] for name in found if name not in theirs),
        mismatched=mismatched,
    )


def _fits(ours: Shape | None, theirs: Shape | None) -> bool:
    """Whether torch would take it. torch before 0.4 had no shape (): its scalars are of shape (1,)."""
    return ours is None or theirs is None or ours == theirs or (ours == (1,) and theirs == ())


def is_implied(name: str, versions: Mapping[str, Any]) -> bool:
    """Batch norm counts its batches since version 2; torch itself makes up the counter of older ones."""
    module, _, parameter = name.rpartition(".")
    known = versions.get(module)
    version = known.get("version") if isinstance(known, dict) else None
    return parameter == "num_batches_tracked" and (not isinstance(version, int) or version < 2)


def _misfit(report: LoadReport, model: nn.Module, ck: Checkpoint) -> ModelError:
    kind = type(model)
    module = "FILE.py" if kind.__module__ == "__main__" else kind.__module__
    return ModelError(
        "; ".join([f"does not fit {kind.__name__}", *report.faults()]),
        where=ck.name,
        hint=f"ckptkit diff {shlex.quote(ck.name or 'FILE')} --model {module}:{kind.__qualname__}",
    )


def _copy(model: nn.Module, nodes: Mapping[str, Node], versions: Any) -> None:
    for group in _groups(nodes):
        values = Values(Tensors("cpu"))
        part: Any = OrderedDict((name, values(_alone(nodes[name]))) for name in group)
        if versions is not None:
            part._metadata = versions
        try:
            model.load_state_dict(part, strict=False)
        except RuntimeError as error:
            raise ModelError(f"{type(model).__name__} refuses the weights: {error}") from error


def _groups(nodes: Mapping[str, Node]) -> Iterator[list[str]]:
    """Names in order, cut where `GROUP` bytes are reached; those of one module stay together: it may need them all."""
    group: list[str] = []
    size, module = 0, ""
    for name, node in nodes.items():
        if size >= GROUP and name.rpartition(".")[0] != module:
            yield group
            group, size = [], 0
        tensor = as_tensor(node)
        size += tensor.nbytes if tensor is not None else 0
        module = name.rpartition(".")[0]
        group.append(name)
    if group:
        yield group


def _alone(node: Node) -> Node:
    """A tensor that is part of a storage, without the rest of it."""
    if (
        not isinstance(node, Tensor)
        or node.storage is None
        or node.nbytes >= node.storage.nbytes
        or node.dtype.bits % 8
    ):
        return node
    return Tensor(Storage(compute.contiguous(node)), node.dtype, node.shape, contiguous_stride(node.shape))


def prefixes(ours: Shapes, theirs: Shapes) -> tuple[str, str]:
    """The prefixes to strip from our names and to add, so that most of them are theirs, with their shapes.

    Both are empty where nothing is better, or where two ways are equally good and give different tensors.
    """
    step = max(1, len(ours) // _SAMPLE)
    sample = dict(list(ours.items())[::step])
    ways = product(_leading(sample), _leading(theirs))
    best, most, certain = ("", ""), -1, True
    images: list[str | None] = []
    for strip, add in sorted(ways, key=lambda way: len(way[0]) + len(way[1])):
        made = [_image(name, shape, strip, add, theirs) for name, shape in sample.items()]
        hits = len(made) - made.count(None)
        if hits > most:
            best, most, certain, images = (strip, add), hits, True, made
        elif hits == most and made != images:
            certain = False
    return best if certain else ("", "")


def _leading(names: Iterable[str]) -> list[str]:
    """The empty prefix and the most common dotted beginnings of names."""
    sample = list(names)
    counts: Counter[str] = Counter()
    for name in sample[:: max(1, len(sample) // _SAMPLE)]:
        parts = name.split(".")[:_PREFIXES]
        counts.update(".".join(parts[:n]) + "." for n in range(1, len(parts)))
    return ["", *(prefix for prefix, _ in counts.most_common(_PREFIXES))]


def _image(name: str, shape: Shape | None, strip: str, add: str, theirs: Shapes) -> str | None:
    """What a name becomes, if it is then one of theirs."""
    new = add + name.removeprefix(strip)
    return new if new in theirs and _fits(shape, theirs[new]) else None


_SPEC = re.compile(r"(?:[^\W\d][\w.]*|.*\.py):[^\W\d][\w.]*")


def diff(
    checkpoint: PathLike | Checkpoint,
    other: PathLike | Checkpoint | nn.Module,
    *,
    key: str | None = None,
    values: bool = False,
    atol: float | None = None,
    rtol: float | None = None,
) -> reports.Diff:
    """How a checkpoint differs from another one, or from what a model expects.

    `other` is a checkpoint, a ``torch.nn.Module``, or names a model class: ``package.module:Class`` or
    ``path/to/file.py:Class``, which is imported and built. `values`, `atol` and `rtol` also compare the elements of
    two checkpoints (:func:`ckptkit.analysis.diff.compare`).
    """
    ck = open_checkpoint(checkpoint, key=key)
    name = ck.name or "FILE"
    if isinstance(other, str) and _SPEC.fullmatch(other) and not os.path.exists(other):
        other = compute.model_from(other)
    if isinstance(other, (str, os.PathLike, Checkpoint)):
        ours, theirs = look_through_both(ck, open_checkpoint(other, key=key))
        return reports.compare(ours.weights, theirs.weights, values=values, atol=atol, rtol=rtol, name=name)
    if values or atol is not None or rtol is not None:
        raise UsageError("the values of a model that is only built are not worth comparing")
    return reports.against(ck.weights, compute.model_shapes(other), name=name)
