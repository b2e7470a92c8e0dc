"""Find the quantized weights of a checkpoint: by names and dtypes, then by the configuration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import flatten
from ckptkit.core.weights import Weights
from ckptkit.quantized import group as g
from ckptkit.quantized.fp8 import METHODS, OTHERS
from ckptkit.quantized.group import QuantizationMethod, QuantizedWeight, TensorView
from ckptkit.quantized.quantization import Quantization, is_marked, is_subclass, last_component

# Find the groups of a checkpoint: by names and dtypes first, by the configuration second.


# In the order in which they are asked: those with marks of their own before those without.
METHODS_OF = (
    "torchao_quanto.TORCHAO", "fp8.COMFY", "int4.BITSANDBYTES", "int4.HQQ",
    "torchao_quanto.QUANTO", "fp8.UNREAD", "int4.GPTQ", "int4.AWQ", "modelopt_mlx.MLX",
    "int4.GPT_OSS", "compressed_tensors.COMPRESSED_TENSORS", "modelopt_mlx.MODELOPT",
    "fp8.FP8_BLOCK",
)  # fmt: skip
# What serves quantized inference alone and belongs to no weight: last components of names.
SERVING = frozenset(
    {"k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point", "scaled_fp8", "kv_scale"}
)
_SERVING_FAMILIES = ("ct-", "modelopt", "fbgemm", "nvfp4", "mxfp", "fp8", "comfy")
_SMALL = 4096  # elements
_CONFIGURED = ("fp8", "modelopt", "compressed-tensors", "fbgemm_fp8")
_ELSEWHERE = "it may be in another shard: name the folder or the index"


@cache
def families() -> tuple[QuantizationMethod, ...]:
    """All families, in the order in which they are asked."""
    found: list[QuantizationMethod] = []
    for place in METHODS_OF:
        module, _, name = place.partition(".")
        each = getattr(import_module(f"ckptkit.quantized.{module}"), name)
        found += each if isinstance(each, tuple) else (each,)
    return tuple(found)


def find(ck: Checkpoint, weights: Weights) -> Quantization:
    """The groups in the weights. Reads tensors of at most 64 KiB, and only where names match."""
    marked = [name for name, node in weights.nodes.items() if is_marked(name) or is_subclass(node)]
    tensors = weights.tensors
    float8 = [name for name, tensor in tensors.items() if tensor.dtype.name in g.FLOAT8]
    view = TensorView(ck, weights.nodes, tensors)
    groups = [_measured(group, tensors) for group in _groups(view, marked)]
    taken = set(flatten(group.members for group in groups))
    groups += _incomplete(view, [name for name in float8 if name not in taken], taken, marked)
    order = {name: number for number, name in enumerate(weights.nodes)}
    groups.sort(key=lambda group: min(order[name] for name in group.members))
    return Quantization(tuple(groups), tuple(_serving(view, groups, tensors)), view)


def _measured(group: QuantizedWeight, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
    stored = sum([tensors[name].nbytes for name in group.members])
    if len(group.parts) == 1:  # a pickled subclass, perhaps: what it holds has no name
        stored = max(stored, sum([each.nbytes for each in group.inputs]))
    group.nbytes = stored
    return group


def _groups(view: TensorView, marked: list[str]) -> Iterator[QuantizedWeight]:
    from ckptkit.quantized.fp8 import METHODS

    taken: set[str] = set()
    by_last: dict[str, list[str]] = defaultdict(list)
    for name in marked:
        by_last[last_component(name)].append(name)
    for family in families():
        subclasses = (
            (name for name in marked if is_subclass(view.nodes[name])) if family.subclasses else ()
        )
        for name in (*_of_family(family, by_last), *subclasses):
            if name in taken:
                continue
            group = family.recognize(view, name)
            if group is None or not taken.isdisjoint(group.members):
                continue
            taken.update(group.members)
            unread = METHODS.get(view.method)
            if unread is not None:
                group = g.refused(replace(group, family=unread), f"{unread} is not read")
            yield group


def _of_family(family: QuantizationMethod, by_last: Mapping[str, list[str]]) -> Iterator[str]:
    for last, names in by_last.items():
        if last in family.marks or (family.endings and last.endswith(family.endings)):
            yield from names


def _incomplete(
    view: TensorView, float8: list[str], taken: set[str], marked: list[str]
) -> Iterator[QuantizedWeight]:
    """Codes without the scales that the configuration promises, and scales without codes."""
    if view.method not in _CONFIGURED:
        float8 = []
    for name in float8:
        tensor = view.tensors[name]
        group = QuantizedWeight(
            _family(view), "fp8", name, tensor.shape, (name,), nbytes=tensor.nbytes
        )
        yield g.refused(
            group, "its scale is missing, though the configuration says that it has one", _ELSEWHERE
        )
    for name in marked:
        for ending in ("_scale_inv", ".weight_scale"):
            weight = name.removesuffix(ending) + (".weight" if ending == ".weight_scale" else "")
            certain = ending == "_scale_inv" or view.method in _CONFIGURED
            if (
                name.endswith(ending)
                and name not in taken
                and weight not in view.tensors
                and certain
            ):
                group = QuantizedWeight(
                    _family(view), "fp8", weight, (), (name,), nbytes=view.tensors[name].nbytes
                )
                yield g.refused(group, "its scale is here, and the weight is not", _ELSEWHERE)


def _family(view: TensorView) -> str:
    return view.method if view.method not in ("", "fp8") else "fp8-block"


def _serving(
    view: TensorView, groups: list[QuantizedWeight], tensors: Mapping[str, Tensor]
) -> Iterator[str]:
    if not any(group.family.startswith(_SERVING_FAMILIES) for group in groups):
        return
    taken = set(flatten(group.members for group in groups))
    for name, tensor in tensors.items():
        last = last_component(name)
        if last in SERVING and name not in taken and tensor.numel <= _SMALL:
            yield name


# The table of families for the manual, made of what the families say of themselves.


_HEADER = ("family", "known by", "read", "written", "compared with")


def markdown() -> str:
    """The families that are read, and those that are named and refused, as Markdown."""
    return "\n".join((*_read(), "", *_refused())) + "\n"


def _read() -> Iterator[str]:
    yield f"| {' | '.join(_HEADER)} |"
    yield "|---|---|---|---|---|"
    for family in families():
        if family.read:
            marks = (*family.marks, *(f"*{ending}" for ending in family.endings))
            written = f"`--quantize {family.written}`" if family.written else ""
            known = ", ".join(f"`{mark}`" for mark in marks)
            yield f"| {family.title} | {known} | yes | {written} | {family.oracle} |"


def _refused() -> Iterator[str]:
    yield "| named and refused | known by | read by |"
    yield "|---|---|---|"
    seen: dict[str, None] = {}
    for other in OTHERS:
        if other.name not in seen:
            seen[other.name] = None
            marks = ", ".join(f"`{mark}`" for mark in (other.codes, *other.companions))
            yield f"| {other.name} | {marks} | {other.reader} |"
    for name in dict.fromkeys(METHODS.values()):
        if name not in seen:
            yield f"| {name} | `quant_method` | its own library |"
