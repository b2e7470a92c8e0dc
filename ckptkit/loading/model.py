"""Weights and models: load into one, compare with one."""

from __future__ import annotations

import os
import re
import shlex
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptkit import compute
from ckptkit.analysis import diff as reports
from ckptkit.analysis.pairing import Shapes, Way, certain, fits, prefixes
from ckptkit.api import open_checkpoint
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import ModelError, UsageError
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import some
from ckptkit.core.tree import Node
from ckptkit.core.weights import as_tensor
from ckptkit.loading import building
from ckptkit.loading.tensors import Tensors
from ckptkit.loading.values import PathLike, Values, entries
from ckptkit.quantized import look_through_both
from ckptkit.transforms import module_versions
from ckptkit.transforms.keys import add_prefix, rename, strip_prefix

if TYPE_CHECKING:
    from torch import nn

GROUP = 1 << 30  # bytes in memory at once, beside the model


@dataclass(frozen=True, repr=False)
class LoadReport:
    """The result of `load_into`: names are those of the model, those in `unexpected` of the file.

    ``stripped`` and ``added`` are the prefixes by which the names of the file had to be changed.
    ``mismatched`` maps a name to its shape in the file and in the model.
    """

    loaded: tuple[str, ...]
    stripped: str
    added: str
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: Mapping[str, tuple[Shape | None, Shape | None]]

    @property
    def complete(self) -> bool:
        """Return whether file and model have the same entries."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __repr__(self) -> str:
        return f"<LoadReport {'; '.join(str(self).splitlines())}>"

    def __str__(self) -> str:
        changes = [f"stripped {self.stripped!r}"] * bool(self.stripped) + [
            f"added {self.added!r}"
        ] * bool(self.added)
        return "\n".join(
            ["; ".join([f"loaded {len(self.loaded):,} entries", *changes]), *self.faults()]
        )

    def faults(self) -> Iterator[str]:
        """Return a line for each way in which file and model differ."""
        if self.missing:
            yield f"missing in the file: {some(self.missing, 8)}"
        if self.unexpected:
            yield f"not in the model: {some(self.unexpected, 8)}"
        if self.mismatched:
            shapes = [f"{name} {a} instead of {b}" for name, (a, b) in self.mismatched.items()]
            yield f"of another shape: {some(shapes, 8)}"


def load_into(
    model: nn.Module, source: PathLike | Checkpoint, *, strict: bool = True, key: str | None = None
) -> LoadReport:
    """Copy the weights of a file, folder or Checkpoint into `model`, on its devices, in its dtypes.

    Leading prefixes on either side (``module.``, ``_orig_mod.``...) are stripped and added as it
    takes for most names to meet; of tied weights of the model one name is enough; what hooks of
    modules take under other names, they get. About 1 GiB of the file is in memory at once, more
    only if one module has more. Raises ModelError if `strict` and anything is missing, unexpected
    or of another shape (before anything is copied), and for a model on the meta device, which has
    nowhere to copy to.
    """
    ck = open_checkpoint(source, key=key)
    own: dict[str, Any] = model.state_dict()
    theirs = {name: _shape(value) for name, value in own.items()}
    if any(
        theirs[name] is not None and getattr(value, "is_meta", False) for name, value in own.items()
    ):
        raise ModelError(
            "the model is on the meta device", hint="model.to_empty(device='cpu') gives it memory"
        )
    before = dict(entries(ck.required))
    way = prefixes({name: _shape(as_tensor(node)) for name, node in before.items()}, theirs)
    changed = _changed(ck, way, theirs)
    found = dict(entries(changed.required))
    versions = Values(Tensors("cpu"))(module_versions.of(changed.required.node))
    unchanged = dict(zip(found, before, strict=True))
    twins = _twins(own, found)
    needed = {name: shape for name, shape in theirs.items() if name not in twins}
    report = _report(found, unchanged, needed, versions or {}, way)
    handed = set(report.loaded)
    if report.missing or report.unexpected:
        left = {name: node for name, node in found.items() if name not in report.mismatched}
        answer = _rehearsed(model, left, versions)
        if answer is not None:
            handed = left.keys() - answer.unexpected
            report = _as_torch_counts(report, answer, unchanged)
    if strict and not report.complete:
        raise _misfit(report, model, ck)
    _copy(model, {name: node for name, node in found.items() if name in handed}, versions)
    return report


class _Answer(NamedTuple):
    """The answer of torch to a state_dict: names that it lacks, and those that no module takes."""

    missing: frozenset[str]
    unexpected: frozenset[str]


def _rehearsed(model: nn.Module, nodes: Mapping[str, Node], versions: Any) -> _Answer | None:
    """Return torch's answer to all of `nodes`: hooks of modules take names that are not their own.

    Nothing is loaded: a copy of the model on the meta device takes tensors without bytes. None
    where that cannot be had: a module that cannot be copied, a hook that looks at values.
    """
    values = Values(Tensors("meta"))
    try:
        state: Any = OrderedDict((name, values(node)) for name, node in nodes.items())
        if versions is not None:
            state._metadata = versions
        result = _shell(model).load_state_dict(state, strict=False)
    except Exception:  # whatever the code of a model raises; our own count stands then
        return None
    return _Answer(frozenset(result.missing_keys), frozenset(result.unexpected_keys))


def _shell(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters and buffers are on the meta device."""
    from copy import deepcopy

    from torch.nn import Parameter
    from torch.nn.parameter import is_lazy

    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if not is_lazy(tensor):
            meta = tensor.detach().to("meta")
            is_parameter = isinstance(tensor, Parameter)
            memo[id(tensor)] = Parameter(meta, tensor.requires_grad) if is_parameter else meta
    return deepcopy(model, memo)


def _as_torch_counts(
    report: LoadReport, answer: _Answer, unchanged: Mapping[str, str]
) -> LoadReport:
    return replace(
        report,
        loaded=(*report.loaded, *(n for n in report.missing if n not in answer.missing)),
        missing=tuple(name for name in report.missing if name in answer.missing),
        unexpected=tuple(old for name, old in unchanged.items() if name in answer.unexpected),
    )


def _twins(own: Mapping[str, Any], found: Mapping[str, Node]) -> set[str]:
    """Return the tied names of the model that the file lacks: another one fills their memory."""
    places = {name: place for name, value in own.items() if (place := _place(value)) is not None}
    filled = {places[name] for name in places.keys() & found.keys()}
    return {name for name, place in places.items() if name not in found and place in filled}


def _place(value: Any) -> tuple[int, Shape, Shape] | None:
    """Return where the elements of a plain tensor are in memory, and their layout."""
    from torch import Tensor as TorchTensor
    from torch import strided

    plain = type(value) is TorchTensor and value.layout is strided and value.numel()
    return (value.data_ptr(), tuple(value.shape), value.stride()) if plain else None


def _changed(ck: Checkpoint, way: Way, theirs: Shapes) -> Checkpoint:
    """Return the names of the file as the model has them, as far as that is certain."""
    ck = strip_prefix(ck, way.strip) if way.strip else ck
    ck = add_prefix(ck, way.add) if way.add else ck
    found = {name: _shape(as_tensor(node)) for name, node in entries(ck.required)}
    rest = {name: shape for name, shape in found.items() if name not in theirs}
    names = certain(rest, {name: shape for name, shape in theirs.items() if name not in found})
    return rename(ck, names) if names else ck


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
    way: Way,
) -> LoadReport:
    shapes = {
        name: (_shape(as_tensor(node)), theirs[name])
        for name, node in found.items()
        if name in theirs
    }
    mismatched = {name: pair for name, pair in shapes.items() if not fits(*pair)}
    return LoadReport(
        loaded=tuple(name for name in shapes if name not in mismatched),
        stripped=way.strip,
        added=way.add,
        missing=tuple(
            name for name in theirs if name not in found and not is_implied(name, versions)
        ),
        unexpected=tuple(unchanged[name] for name in found if name not in theirs),
        mismatched=mismatched,
    )


def is_implied(name: str, versions: Mapping[str, Any]) -> bool:
    """Return whether torch makes the entry up: the batch counter of batch norm before version 2."""
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
    """Yield names in order, cut where `GROUP` bytes are reached.

    Those of one module stay together: it may need them all.
    """
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
    return Tensor(
        Storage(compute.contiguous(node)), node.dtype, node.shape, contiguous_stride(node.shape)
    )


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
    """Return how a checkpoint differs from another one, or from what a model expects.

    `other` is a checkpoint, a ``torch.nn.Module``, or names a model class: ``package.module:Class``
    or ``path/to/file.py:Class``, which is imported and built. `values`, `atol` and `rtol` also
    compare the elements of two checkpoints (:func:`ckptkit.analysis.diff.compare`).
    """
    ck = open_checkpoint(checkpoint, key=key)
    name = ck.name or "FILE"
    if isinstance(other, str) and _SPEC.fullmatch(other) and not os.path.exists(other):
        other = building.model_from(other)
    if isinstance(other, (str, os.PathLike, Checkpoint)):
        ours, theirs = look_through_both(ck, open_checkpoint(other, key=key))
        return reports.compare(
            ours.weights, theirs.weights, values=values, atol=atol, rtol=rtol, name=name
        )
    if values or atol is not None or rtol is not None:
        raise UsageError("the values of a model that is only built are not worth comparing")
    return reports.against(ck.weights, building.model_shapes(other), name=name)
