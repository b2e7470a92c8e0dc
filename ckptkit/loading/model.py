"""Load weights into a model, and compare a checkpoint with a model."""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from glob import escape
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from ckptkit import quantized
from ckptkit.analysis import diff as reports
from ckptkit.analysis.matching import PrefixChange, Shapes, certain, fits, prefixes
from ckptkit.api import open_checkpoint
from ckptkit.compute.arranged import contiguous
from ckptkit.compute.torch_bridge import dtype_of, overflows
from ckptkit.compute.torch_bridge import fill as fill_tensors
from ckptkit.core import arguments
from ckptkit.core.checkpoint import Checkpoint, Source
from ckptkit.core.errors import CkptkitError, ModelError
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import plural, shell_word, some, without
from ckptkit.core.tree import Node, collector_paused
from ckptkit.core.weights import as_tensor
from ckptkit.edits import keys, quantized_names
from ckptkit.edits.keys import add_prefix, rename, strip_prefix
from ckptkit.formats.format import steady
from ckptkit.loading import building
from ckptkit.loading.tensors import PythonValues, TorchTensors, entries
from ckptkit.lora.reading import is_adapter
from ckptkit.quantized import dequantized_for_model

if TYPE_CHECKING:
    import torch
    from torch import nn


def against_model(
    ck: Checkpoint,
    model: nn.Module,
    name: str | None,
    *,
    stored: bool = False,
    matches: reports.Matches | None = None,
) -> reports.Diff:
    """Compare the weights of a checkpoint with the state_dict of a model.

    Dequantize weights that are floats in the model, unless `stored` is set.
    """
    shapes = building.model_shapes(model)
    ck = ck if stored else seen_by(ck, shapes)
    sides = reports.selected(ck.weights, matches), reports.selected(shapes, matches)
    ties = [[each for each in same if each in sides[1]] for same in building.model_ties(model)]
    return reports.against(*sides, ties, name=name, chosen=ck.chosen)


def seen_by(ck: Checkpoint, shapes: Mapping[str, tuple[str, Shape]]) -> Checkpoint:
    """Dequantize the weights that are floats in the model, and return the new checkpoint."""
    return dequantized_for_model(ck, {name: dtype for name, (dtype, _) in shapes.items()})


_NUMBERS = ("float", "int", "bool")  # kinds of dtypes that torch casts to each other


def fill(model: nn.Module, nodes: Mapping[str, Node]) -> set[str]:
    """Copy `nodes` to the contiguous parameters and buffers of `model`. Return the copied names.

    Modules with their own `_load_from_state_dict` are skipped. If a parameter has several names,
    the tensor with the last of these names is copied, as in torch. If parameters partly overlap in
    memory, no parameter is filled, because the result would depend on the order of the copies.
    """
    from torch.nn import Module

    filled: set[str] = set()
    pairs: dict[tuple[int, int], tuple[Tensor, torch.Tensor]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        # A module with its own loading function may transform tensors, so torch must load them.
        loading = getattr(module._load_from_state_dict, "__func__", None)
        if loading is not Module._load_from_state_dict:
            continue
        for part, value in (*module._parameters.items(), *module._buffers.items()):
            if value is None or part in module._non_persistent_buffers_set:
                continue
            name = f"{path}.{part}" if path else part
            node = nodes.get(name)
            if isinstance(node, Tensor) and _fits(node, value):
                filled.add(name)
                pairs[value.data_ptr(), value.data_ptr() + value.nbytes] = node, value
    if any(end > start for (_, end), (start, _) in pairwise(sorted(pairs))):
        return set()
    fill_tensors(pairs.values())
    return filled


def _fits(tensor: Tensor, value: torch.Tensor) -> bool:
    """Return whether ckptkit can copy the elements of a tensor to a parameter or buffer.

    The parameter or buffer must be a contiguous torch.Tensor or Parameter with the same shape as
    the tensor.
    """
    import torch
    from torch.nn import Parameter

    if (
        tensor.storage is None
        or tensor.layout != "strided"
        or tensor.kind == "ndarray"
        or tensor.shape != tuple(value.shape)
        or type(value) not in (torch.Tensor, Parameter)
        or value.layout is not torch.strided
        or value.is_quantized
        or value.is_conj()
        or value.is_neg()
        or value.is_inference()
        or not value.is_contiguous()
    ):
        return False
    both = tensor.dtype, dtype_of(value)
    if any(each.bits % 8 for each in both):
        return False
    # torch casts between dtypes of numbers. For any other dtype, the tensor and the parameter must
    # have the same dtype.
    plain = all(each.kind in _NUMBERS and each.packed == 1 for each in both)
    return plain or both[0] == both[1]


GROUP = 1 << 30  # approximate number of bytes that torch loads in one call


@dataclass(frozen=True, repr=False)
class LoadReport:
    """The result of :func:`load_into`.

    ``unexpected`` contains names in the file. ``loaded``, ``missing``, ``mismatched`` and
    ``narrowed`` contain names in the model.
    ``stripped`` is the prefix that was removed from the names in the file, and ``added`` the prefix
    that was added. ``mismatched`` maps a name to the shape in the file and the shape in the model.
    If a cast to the model's dtype would lose more than precision, ``narrowed`` maps the name to a
    description of the loss.
    """

    loaded: tuple[str, ...]
    stripped: str
    added: str
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: Mapping[str, tuple[Shape | None, Shape | None]]
    narrowed: Mapping[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """True if the file and the model have the same keys and shapes."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __repr__(self) -> str:
        return f"<LoadReport {'; '.join(str(self).splitlines())}>"

    def __str__(self) -> str:
        changes = [f"loaded {plural(len(self.loaded), 'entry')}"]
        if self.stripped:
            changes.append(f"stripped {self.stripped!r}")
        if self.added:
            changes.append(f"added {self.added!r}")
        return "\n".join(["; ".join(changes), *self.faults()])

    def faults(self) -> Iterator[str]:
        """Yield a line for each kind of difference between the file and the model."""
        if self.missing:
            yield f"missing in the file: {some(self.missing, 8)}"
        if self.unexpected:
            yield f"not in the model: {some(self.unexpected, 8)}"
        if self.mismatched:
            shapes = [f"{name} {a} instead of {b}" for name, (a, b) in self.mismatched.items()]
            yield f"different shapes: {some(shapes, 8)}"
        if self.narrowed:
            lost = [f"{name} ({how})" for name, how in self.narrowed.items()]
            yield f"values lost in the dtypes of the model: {some(lost, 8)}"


# Without the pause, the first call of `load_into` in a program usually triggers a full garbage
# collection.
@collector_paused()
def load_into(
    model: nn.Module,
    source: Source,
    *,
    strict: bool = True,
    key: str | None = None,
    assign: bool = False,
) -> LoadReport:
    """Copy the weights of `source` into `model`. Keep the devices and dtypes of the model.

    `source` is a checkpoint or a loaded dict. ckptkit strips or adds prefixes (``module.``,
    ``_orig_mod.``...) so that most names match the model. For tied weights of the model, the source
    needs only one of the names. If the load hooks of a module accept weights under other names,
    `load_into` passes these weights to the module.

    Several threads read bytes directly into contiguous parameters. torch copies all other tensors
    in groups of about 1 GiB. All tensors of a module are in one group. If the model has load hooks,
    or modules with their own loading code, torch copies all tensors at once, and the complete file
    is in memory. If `load_into` cannot read the rest of a file, the model stays partly filled.

    With `assign`, the tensors of the file replace the tensors of the model. The new tensors are on
    the CPU and have the dtypes of the file. Use `assign` to fill a model on the meta device.

    Raises ModelError in these cases:

    * With `strict`: A key is missing or unexpected, or a tensor has another shape.
    * With `strict`: A value does not fit the dtype of the model. Nothing is copied.
    * The model is on the meta device, and `assign` is false.
    * The file has quantized weights, and the model has float weights.
    """
    arguments.flags(strict=strict, assign=assign)
    arguments.module("model", model)
    if not assign and any(value.is_meta for value in (*model.parameters(), *model.buffers())):
        raise ModelError(
            "the model is on the meta device",
            hint="assign=True puts the tensors of the file into the model; "
            "model.to_empty(device='cpu') allocates memory",
        )
    ck = open_checkpoint(source, key=key)
    own: dict[str, Any] = model.state_dict()
    if hasattr(model, "peft_config") and is_adapter(ck):
        ck, own = _of_peft(model, ck, own)
    _refuse_codes(ck, own, model)
    theirs = {name: _shape(value) for name, value in own.items()}
    before = dict(entries(ck.required))
    way = prefixes({name: _shape(as_tensor(node)) for name, node in before.items()}, theirs)
    changed = _changed(ck, way, theirs)
    found = dict(entries(changed.required))
    versions = PythonValues(TorchTensors("cpu"))(keys.paths_of(changed.required.node))
    unchanged = dict(zip(found, before, strict=True))
    twins = _twins(model, found)
    needed = {name: shape for name, shape in theirs.items() if name not in twins}
    report = _report(found, unchanged, needed, versions or {}, way)
    passed = set(report.loaded)
    if not report.complete:
        report, passed = _as_torch_counts(model, found, versions, report, unchanged)
    nodes = {name: node for name, node in found.items() if name in passed}
    if not assign:
        report = replace(report, narrowed=dict(_narrowed(nodes, own)))
    if strict and (report.narrowed or not report.complete):
        kind = type(model)
        main = getattr(sys.modules["__main__"], "__file__", None) or "model.py"
        module = main if kind.__module__ == "__main__" else kind.__module__
        spec = shell_word(f"{module}:{kind.__qualname__}")
        raise ModelError(
            "; ".join([f"does not fit {kind.__name__}", *report.faults()]),
            where=ck.name,
            hint="`ckptkit inspect {where}` shows the adapter"
            if hasattr(model, "peft_config")
            else f"`ckptkit diff {{where}} --model {spec}` lists the differences",
        )
    try:
        with steady(ck.source, remote=True):
            if assign:
                _assign(model, nodes, versions, twins)
            else:
                _copy(model, nodes, versions)
    except CkptkitError as error:
        raise error.at(ck.name or "checkpoint") from error.__cause__
    return report


def _of_peft(
    model: nn.Module, ck: Checkpoint, own: dict[str, Any]
) -> tuple[Checkpoint, dict[str, Any]]:
    """Rename the tensors of an adapter to the names in a peft model.

    Return the renamed adapter, and the entries of the model's state_dict that the adapter can fill.
    An adapter file of peft does not contain the base model. The keys in the file do not contain the
    adapter's name.

    Source: set_peft_model_state_dict in utils/save_and_load.py of peft 0.21.2.
    """
    active: Any = getattr(model, "active_adapter", "default")
    adapter = active if isinstance(active, str) else next(iter(active))
    inside = re.compile(rf"(\.modules_to_save)?\.{re.escape(adapter)}(?=\.|$)")
    modules, names = dict(model.named_modules(remove_duplicate=False)), {}
    for name in own:
        for part in reversed([*inside.finditer(name)]):
            # peft stores adapters in dicts. Other modules may have the name of the adapter.
            if hasattr(modules.get(name[: part.start()] + (part[1] or "")), "keys"):
                saved = name[: part.start()] + name[part.end() :]
                saved = saved.replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")
                names[saved] = name
                break
    found = {old: names[old] for old in ck.required.nodes if old in names}
    # With `bias="all"`, peft saves the biases of modules_to_save twice: with and without
    # ``modules_to_save`` in the name.
    plain = {name: name.replace(".modules_to_save.", ".") for name in ck.required.nodes}
    both = [name for name in found.values() if name in plain]
    both += [name for name, own in plain.items() if name != own in found and name not in both]
    ck = keys.select(ck, drop=[*map(escape, both)]) if both else ck
    # peft does not save the number of ranks of AdaLoRA
    filled = {name for old, name in names.items() if not old.endswith(".ranknum")}
    filled |= {*found.values(), *ck.required.nodes}
    return rename(ck, found) if found else ck, {name: own[name] for name in own if name in filled}


def _refuse_codes(ck: Checkpoint, own: Mapping[str, Any], model: nn.Module) -> None:
    """Raise ModelError if a weight is quantized in the file, but floats in the model."""
    foreign = quantized.find(ck).foreign_to(own)
    if not foreign:
        return
    first = next(iter(foreign.unread or foreign.groups))
    raise ModelError(
        f"{first.name!r} is quantized as {first.label} ({first.family}), but "
        f"{type(model).__name__} has floats: {first.reason or 'dequantize it first'}",
        where=ck.name,
        hint=first.hint if first.reason else quantized_names.dequantize_hint(ck),
    )


def _rehearsed(
    model: nn.Module, nodes: Mapping[str, Node], versions: Any
) -> tuple[set[str], set[str]] | None:
    """Load `nodes` into a copy of the model. Return the missing and unexpected keys.

    Load hooks of the model may accept other names, so only torch can find these keys. The copy is
    on the meta device, and loads tensors without bytes. If hooks need the values of tensors, a copy
    on the CPU loads the tensors instead. Return None if torch cannot load the tensors, or if the
    model cannot be copied.
    """
    for device, copied in (("meta", _shell), ("cpu", lambda model: deepcopy(model).cpu())):
        if device == "cpu" and not _has_own_loading(model):
            continue
        values = PythonValues(TorchTensors(device))
        try:
            state: Any = OrderedDict((name, values(node)) for name, node in nodes.items())
            if versions is not None:
                state._metadata = versions
            result = copied(model).load_state_dict(state, strict=False)
        # The code of the model may raise any exception.
        except Exception:
            continue
        return {*result.missing_keys}, {*result.unexpected_keys}
    return None


def _has_own_loading(model: nn.Module) -> bool:
    """Return whether the model has load hooks, or modules with their own loading code."""
    from torch.nn import Module

    return type(model).load_state_dict is not Module.load_state_dict or any(
        each._load_state_dict_pre_hooks
        or each._load_state_dict_post_hooks
        or not type(each)._load_from_state_dict.__module__.startswith("torch.nn.")
        for each in model.modules()
    )


def _shell(model: nn.Module) -> nn.Module:
    """Copy the model. The parameters and buffers of the copy are on the meta device."""
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
    model: nn.Module,
    found: Mapping[str, Node],
    versions: Any,
    report: LoadReport,
    unchanged: Mapping[str, str],
) -> tuple[LoadReport, set[str]]:
    """Return a report that matches torch's report, and the names of the tensors to load.

    If torch accepts a tensor with another shape, remove the tensor from ``mismatched``: load hooks
    may reshape tensors.
    """
    left = {name: node for name, node in found.items() if name not in report.mismatched}
    for nodes in (found, left) if report.mismatched else (found,):
        answer = _rehearsed(model, nodes, versions)
        if answer is None:
            continue
        missing, unexpected = answer
        mismatched = report.mismatched if nodes is left else {}
        gained = [name for name in report.missing if name not in missing]
        gained += [name for name in report.mismatched if name not in mismatched]
        made = replace(
            report,
            loaded=tuple(dict.fromkeys((*report.loaded, *gained))),
            missing=tuple(name for name in report.missing if name in missing),
            unexpected=tuple(old for name, old in unchanged.items() if name in unexpected),
            mismatched=mismatched,
        )
        return made, nodes.keys() - unexpected
    return report, set(report.loaded)


def _twins(model: nn.Module, found: Mapping[str, Node]) -> dict[str, str]:
    """Map each tied name that the file lacks to a name of the same parameter in the file."""
    held = model.state_dict(keep_vars=True)
    places = {name: place for name, value in held.items() if (place := _place(value)) is not None}
    filled = {places[name]: name for name in reversed([*found]) if name in places}
    return {
        name: filled[place]
        for name, place in places.items()
        if name not in found and place in filled
    }


def _place(value: Any) -> tuple[object, ...] | None:
    """Return a key that is equal for two references to one tensor.

    Return None for values that are not plain strided tensors.
    """
    from torch import Tensor as TorchTensor
    from torch import strided
    from torch.nn import Parameter
    from torch.nn.parameter import is_lazy

    plain = type(value) in (TorchTensor, Parameter) and not is_lazy(value)
    if not plain or value.layout is not strided or not value.numel():
        return None
    if value.is_meta:
        return (id(value),)
    return (value.data_ptr(), tuple(value.shape), value.stride())


def _changed(ck: Checkpoint, way: PrefixChange, theirs: Shapes) -> Checkpoint:
    """Rename the weights to names of the model.

    Change prefixes, and undo renamings by torch, such as those of weight_norm.
    """
    ck = strip_prefix(ck, way.strip) if way.strip else ck
    ck = add_prefix(ck, way.add) if way.add else ck
    found = {name: _shape(as_tensor(node)) for name, node in entries(ck.required)}
    names = certain(without(found, theirs), without(theirs, found))
    return rename(ck, names) if names else ck


def _shape(value: Any) -> Shape | None:
    """Return the shape of a Tensor or torch.Tensor.

    Return None for nested tensors, lazy parameters, and values that are not tensors.
    """
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
    way: PrefixChange,
) -> LoadReport:
    both = [(name, node) for name, node in found.items() if name in theirs]
    shapes = {name: (_shape(as_tensor(node)), theirs[name]) for name, node in both}
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
    """Return whether torch adds the entry `name` if it is missing.

    torch adds `num_batches_tracked` of a batch norm module whose version in `versions` is below 2
    or missing.
    """
    module, _, parameter = name.rpartition(".")
    known = versions.get(module)
    version = known.get("version") if isinstance(known, dict) else None
    return parameter == "num_batches_tracked" and (not isinstance(version, int) or version < 2)


def _narrowed(nodes: Mapping[str, Node], own: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, description) of weights that lose more than precision in the model's dtype."""
    for name, node in nodes.items():
        value: Any = own.get(name)
        if not (isinstance(node, Tensor) and node.storage is not None and hasattr(value, "dtype")):
            continue
        target, lost = dtype_of(value), None
        kinds = node.dtype.kind, target.kind
        if kinds[0] == "complex" and kinds[1] in _NUMBERS:
            lost = "imaginary parts"
        elif kinds[0] == "float" and kinds[1] in ("int", "bool"):
            lost = "fractions"
        elif kinds in (("float", "float"), ("int", "int")) and (count := overflows(node, target)):
            lost = f"{plural(count, 'value')} too large"
        if lost:
            yield name, f"{node.dtype} to {value.dtype}: {lost}".replace("torch.", "")


def _copy(model: nn.Module, nodes: Mapping[str, Node], versions: Any) -> None:
    groups: Iterable[list[str]] = [list(nodes)]
    if not _has_own_loading(model):
        with _refusing(model):
            filled = fill(model, nodes)
        groups = _groups(without(nodes, filled))
    for group in groups:
        values = PythonValues(TorchTensors("cpu"))
        part: Any = OrderedDict((name, values(_compacted(nodes[name]))) for name in group)
        _load(model, part, versions)


def _assign(
    model: nn.Module, nodes: Mapping[str, Node], versions: Any, twins: Mapping[str, str]
) -> None:
    """Replace the tensors of the model by tensors of the file. Tied weights remain tied."""
    from torch.nn import Parameter

    held = model.state_dict(keep_vars=True)
    values = PythonValues(TorchTensors("cpu"))
    state: Any = OrderedDict((name, values(node)) for name, node in nodes.items())
    for new, old in twins.items():
        if isinstance(held[new], Parameter) and not isinstance(state[old], Parameter):
            state[old] = Parameter(state[old], held[new].requires_grad)
        state[new] = state[old]
    _load(model, state, versions, assign=True)


def _load(model: nn.Module, state: Any, versions: Any, **options: bool) -> None:
    if versions is not None:
        state._metadata = versions
    with _refusing(model):
        model.load_state_dict(state, strict=False, **options)


@contextmanager
def _refusing(model: nn.Module) -> Iterator[None]:
    """Convert RuntimeErrors of torch to ModelError."""
    try:
        yield
    except RuntimeError as error:
        raise ModelError(f"{type(model).__name__} refuses the weights: {error}") from error


def _groups(nodes: Mapping[str, Node]) -> Iterator[list[str]]:
    """Yield groups of names, in order. The tensors of a group have about `GROUP` bytes.

    All names of a module are in one group, because the module's loading code may need all of them.
    """
    group: list[str] = []
    size = 0
    for _, names in groupby(nodes, key=lambda name: name.rpartition(".")[0]):
        if size >= GROUP:
            yield group
            group, size = [], 0
        for name in names:
            tensor = as_tensor(nodes[name])
            size += tensor.nbytes if tensor is not None else 0
            group.append(name)
    if group:
        yield group


def _compacted(node: Node) -> Node:
    """If a tensor uses only some bytes of its storage, return a tensor with a smaller storage."""
    if (
        not isinstance(node, Tensor)
        or node.storage is None
        or node.nbytes >= node.storage.nbytes
        or node.dtype.bits % 8
    ):
        return node
    return Tensor(Storage(contiguous(node)), node.dtype, node.shape, contiguous_stride(node.shape))
