"""Dequantize weights to floating point, and quantize floating-point weights.

Quantization to block-wise FP8 and MXFP4 rounds to nearest, so no calibration data is needed.
torch's own quantized tensors are dequantized as scale * (code - zero point), per tensor or per
channel. A quantized layer of torch stores its weight and bias as a tuple:
``fc._packed_params._packed_params = (weight, bias)``. Dequantization writes ``fc.weight`` and
``fc.bias``, the names before quantization.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

from ckptkit import quantized
from ckptkit.compute.arranged import contiguous
from ckptkit.compute.dequantize import dequantized_record
from ckptkit.compute.numbers import cast_record
from ckptkit.compute.quantize import BLOCK, GROUP, quantized_records
from ckptkit.core.checkpoint import Checkpoint, edit
from ckptkit.core.dtypes import BY_NAME, DType, DTypeLike
from ckptkit.core.errors import CollisionError, TensorError, UnsupportedError, UsageError
from ckptkit.core.tensor import Storage, Tensor, contiguous_stride
from ckptkit.core.text import flatten, plural, quoted, shown, typed, without
from ckptkit.core.tree import Global, Node, Object, Path, key_text, nodes, rebuild, walk
from ckptkit.core.weights import Weights, as_tensor, plain_state_dict
from ckptkit.edits import keys, quantized_names
from ckptkit.edits.config_file import config_of
from ckptkit.edits.elements import parsed_dtype
from ckptkit.quantized import Quantization
from ckptkit.quantized.group import quantization_of, with_config
from ckptkit.quantized.quantization import TARGETS, default_dtype, exchanged, mapping_of

_HEADERS = ("tensor_names", "_quantization_metadata")
GGUF = "gguf"
_CONFIG = ("quantization_config", "quantization", "compression_config")


@edit
def dequantize(
    ck: Checkpoint, dtype: DTypeLike | None = None, missing_ok: bool = False
) -> Checkpoint:
    """Dequantize every quantized weight to `dtype`, with the same bits as the quantization library.

    The default dtype is the first of these that exists:

    - the dtype in the configuration of the model
    - the dtype that the file records
    - float16 for GPTQ and AWQ, bfloat16 for all other methods

    torch's own quantized tensors become float32. `dequantize` drops codes, scales, and tensors that
    only quantized inference needs. Raises UsageError if no weight is quantized, unless `missing_ok`
    is true. Raises UnsupportedError if ckptkit cannot dequantize a weight.
    """
    out_dtype = None if dtype is None else target(dtype)
    own = dequantized(ck, out_dtype or BY_NAME["float32"])
    found = quantized.find(own or ck)
    if found or own is not None:
        return _without_groups(own or ck, found, out_dtype) if found else own or ck
    if missing_ok:
        return ck
    raise UsageError(
        "has no quantized weights of a known layout",
        where=ck.name,
        hint=f"`ckptkit inspect {{where}}` lists its tensors; {typed('--cast float16', 'cast')}"
        " casts floats",
    )


def target(name: DTypeLike) -> DType:
    """Return the target dtype of dequantization. Raises UsageError for an unsupported dtype."""
    dtype = parsed_dtype(name)
    if dtype.name not in TARGETS:
        raise UsageError(
            f"cannot dequantize to {name!r}",
            hint=f"use one of {', '.join(TARGETS)}; {typed('--cast', 'cast')} casts the result "
            "to another dtype",
        )
    return dtype


def _without_groups(ck: Checkpoint, found: Quantization, out_dtype: DType | None) -> Checkpoint:
    read = tuple(group for group in found.groups if group.layout is not None)
    # Do not raise an error for GGUF weights yet, because a later step may drop these tensors. If no
    # step drops the tensors, writing raises the error.
    if any(group.family != GGUF for group in found.unread):
        refuse_unread(ck, found)
    found = replace(found, groups=read)
    weights, view = ck.required, found.view
    assert view is not None
    types = {id(group): out_dtype or default_dtype(view, group) for group in found.groups}
    made_of = {*found.by_member, *found.serving}
    names = {name for name in weights.nodes if name not in made_of}
    twice = next((group.name for group in found.groups if group.name in names), None)
    if twice is not None:
        both = f"a dequantized weight and another tensor would both be called {twice!r}"
        raise CollisionError(both, where=ck.name)
    root, _ = exchanged(ck, found, types)
    kinds = Counter((group.label, types[id(group)].name) for group in found.groups)
    notes = [
        f"dequantized {plural(number, 'weight')}: {label} -> {dtype}"
        for (label, dtype), number in kinds.items()
    ]
    parts = [name for name, group in found.by_member.items() if name != group.name]
    if parts:
        count = plural(len(parts), "tensor")
        notes.append(f"dropped {count} with codes and scales: {quoted(parts)}")
    if found.serving:
        notes.append(f"dropped tensors that only quantized inference uses: {quoted(found.serving)}")
    # Drop the safetensors metadata that describes quantized tensors.
    extras = without(ck.extras, {*_HEADERS, *(group.name for group in found.groups)})
    if "tensor_names" in ck.extras:
        extras = {key: text for key, text in extras.items() if '"_type"' not in text}
    if extras.get("format") == "mlx":
        extras["format"] = "pt"
    return _without_quantization(replace(ck.with_root(root, notes=notes), extras=extras))


def refuse_unread(ck: Checkpoint, found: Quantization) -> None:
    """Raise UnsupportedError if ckptkit cannot dequantize all weights. The message contains the
    name of the first weight that ckptkit cannot dequantize."""
    if not found.unread:
        return
    first = found.unread[0]
    more = f" ({len(found.unread):,} weights in total)" if len(found.unread) > 1 else ""
    raise UnsupportedError(
        f"cannot dequantize {first.name!r} ({first.family}): "
        f"{first.reason}{more}",
        where=ck.name, hint=first.hint,
    )  # fmt: skip


def _without_quantization(ck: Checkpoint) -> Checkpoint:
    """Remove the quantization settings from config.json and add a warning."""
    config = config_of(ck)
    if not quantization_of(config) and not any(key in config for key in _CONFIG):
        return ck
    inner = config.get("text_config")
    if isinstance(inner, dict):
        config["text_config"] = without(inner, _CONFIG)
    warning = (
        "config.json has a quantization_config: ckptkit removes this entry in an output folder; if "
        "you copy config.json next to a single file, remove the entry yourself"
    )
    made = with_config(ck, without(config, _CONFIG))
    return replace(made, warnings=(*made.warnings, warning))


KINDS = ("fp8-block", "mxfp4")
SOURCES = ("float32", "bfloat16", "float16", "float64")
# Names of embeddings, heads and routers. The quantization libraries do not quantize these modules.
KEPT = frozenset({
    "embed", "embed_tokens", "embeddings", "word_embeddings", "tok_embeddings", "wte", "wpe",
    "shared", "lm_head", "head", "output", "gate", "router", "classifier", "score",
})  # fmt: skip


@edit
def quantize(ck: Checkpoint, kind: str) -> Checkpoint:
    """Quantize the weight matrices of layers. `kind` is ``"fp8-block"`` or ``"mxfp4"``.

    For ``fp8-block``, ``X.weight`` becomes ``X.weight`` and ``X.weight_scale_inv``, as in DeepSeek
    and transformers. For ``mxfp4``, ``X.weight`` becomes ``X.weight_packed`` and
    ``X.weight_scale``, as in compressed-tensors. Embeddings, heads and routers stay unchanged.
    Matrices whose shape is not divisible by the block size also stay unchanged. Raises UsageError
    if a weight is already quantized, or if there is no matrix to quantize.
    """
    if kind not in KINDS:
        raise UsageError(f"cannot quantize to {kind!r}", hint=f"use one of {', '.join(KINDS)}")
    quantized_names.refuse(ck, None, "codes cannot be quantized again")
    weights = ck.required
    done: list[str] = []
    left: list[str] = []
    new: dict[Node, Node] = {}
    for key, node in mapping_of(weights).items():
        tensor = as_tensor(node)
        is_weight = isinstance(key, str) and key.endswith(".weight")
        if not is_weight or tensor is None or len(tensor.shape) != 2:
            new[key] = node
        elif _is_layer(key, tensor, kind):
            done.append(key)
            new.update(_quantized(key, tensor, kind))
        else:
            left.append(key)
            new[key] = node
    if not done:
        raise UsageError(f"has no matrix that can be quantized to {kind}", where=ck.name)
    node = keys.with_paths(mapping_of(weights), new)
    notes = [f"quantized {plural(len(done), 'weight')}: {kind}"]
    if left:
        notes.append(f"not quantized: {quoted(left)}")
    ck = ck.with_root(rebuild(ck.root, swap={id(weights.node): node}), notes=notes)
    config = config_of(ck)
    if not config:
        return ck
    return with_config(ck, {**config, "quantization_config": _settings(kind, left)})


def _is_layer(name: str, tensor: Tensor, kind: str) -> bool:
    rows, columns = tensor.shape
    fits = rows % BLOCK == columns % BLOCK == 0 if kind == "fp8-block" else columns % GROUP == 0
    kept = KEPT.intersection(name.split(".")) or "norm" in name
    is_float = tensor.dtype.name in SOURCES and tensor.storage is not None
    return bool(fits and tensor.numel and is_float and not kept)


def _quantized(name: str, tensor: Tensor, kind: str) -> Iterator[tuple[str, Tensor]]:
    """Quantize a matrix. Yield (name, tensor) for the codes, then (name, tensor) for the scales."""
    rows, columns = tensor.shape
    if kind == "fp8-block":
        parts = [
            (name, "float8_e4m3fn", (rows, columns)),
            (f"{name}_scale_inv", "float32", (rows // BLOCK, columns // BLOCK)),
        ]
    else:
        parts = [
            (f"{name}_packed", "uint8", (rows, columns // 2)),
            (f"{name}_scale", "uint8", (rows, columns // GROUP)),
        ]
    made = quantized_records(contiguous(tensor), kind, tensor.dtype, rows, columns, name)
    for (part, dtype, shape), record in zip(parts, made, strict=True):
        storage = Storage(record, tensor.device)
        yield part, Tensor(storage, BY_NAME[dtype], shape, contiguous_stride(shape))


def _settings(kind: str, left: list[str]) -> dict[str, Any]:
    """Return the quantization_config for config.json. `left` contains the names of the matrices
    that stay floating point."""
    modules = [name.removesuffix(".weight") for name in left]
    if kind == "fp8-block":
        return {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": modules,
        }  # fmt: skip
    scheme = {
        "num_bits": 4, "type": "float", "symmetric": True, "strategy": "group",
        "group_size": GROUP, "dynamic": False, "scale_dtype": "torch.uint8",
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed", "ignore": modules,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
    }  # fmt: skip


_MADE_BY = Global("torch._utils", "_rebuild_qtensor")
_AFFINE = {"per_tensor_affine": 3, "per_channel_affine": 4, "per_channel_affine_float_qparams": 4}
_STATE = "state"  # last component of the path of a pickled object's state
_PACKING = (
    "_packed_params",
    "_packed_weight",
    _STATE,
)  # in the path of a packed weight, the path of the layer ends before the first of these
_PACKER = "PackedParamsBase"


def dequantized(ck: Checkpoint, dtype: DType) -> Checkpoint | None:
    """Dequantize the quantized tensors of torch to `dtype`. Without such tensors, return None.

    The results equal torch's ``dequantize()``, rounded to `dtype`, bit-exactly. If a layer packs
    its weight and bias, the result contains both under the name of the layer. Tensors whose
    quantization is not affine stay unchanged, and a warning contains their number. Raises
    TensorError for an invalid scale or zero point. Raises CollisionError if two weights get the
    same name.
    """
    swap: dict[int, Node] = {}
    olds: Counter[str] = Counter()  # old dtype -> number of tensors
    left = 0
    for node in nodes(ck.root):
        if not isinstance(node, Object) or node.tensor is None or node.callable != _MADE_BY:
            continue
        scheme: Node = node.args[4] if len(node.args) == 7 else ()
        is_named = isinstance(scheme, tuple) and scheme and isinstance(scheme[0], Global)
        if not is_named or len(scheme) != _AFFINE.get(scheme[0].name):
            left += 1
            continue
        olds[node.tensor.dtype.name] += 1
        swap[id(node)] = _float(dtype, node.tensor, *scheme[1:])
    notes = [
        f"dequantized {plural(number, 'tensor')}: {old} -> {dtype}" for old, number in olds.items()
    ]
    weights = ck.selection
    layers = [] if weights is None else list(_layers(weights))
    if weights is not None and layers:
        swap[id(weights.node)] = _with_layers(weights, layers)
        names = quoted([layer.name or "(root)" for layer in layers])
        notes.append(f"unpacked {plural(len(layers), 'layer')}: {names}")
        if weights.is_module:
            notes.append(f"the module ({weights.node.global_}) is now its plain state_dict")
    warnings = []
    if left:
        count = plural(left, "quantized tensor")
        warnings.append(f"not dequantized, because the quantization is not affine: {count}")
    if not swap:
        return ck.with_root(ck.root, warnings=warnings) if left else None
    return ck.with_root(rebuild(ck.root, swap=swap), notes=notes, warnings=warnings)


def _float(dtype: DType, tensor: Tensor, scale: Node, zero_point: Node, axis: Node = 0) -> Tensor:
    if tensor.storage is None:
        raise TensorError(f"cannot dequantize a tensor of dtype {tensor.dtype}: it has no bytes")
    if type(axis) is not int:
        raise TensorError(
            f"cannot dequantize a tensor with axis {shown(repr(axis))}, not an integer"
        )
    scale, zero_point = (
        each if as_tensor(each) is None else as_tensor(each) for each in (scale, zero_point)
    )
    record = dequantized_record(tensor, scale, zero_point, axis)
    record = cast_record(record, BY_NAME["float32"], dtype, big_endian=False)
    storage, shape = Storage(record, tensor.storage.device), tensor.shape
    return Tensor(storage, dtype, shape, contiguous_stride(shape))


class _Layer(NamedTuple):
    """A layer that packs its weight and bias. ``path`` is the path of the tuple in the weights.
    ``named`` contains the weight and the bias, with their new names."""

    path: Path
    name: str
    named: dict[str, Node]


def _layers(weights: Weights) -> Iterator[_Layer]:
    """Yield the packed layers, each with a unique name."""
    found: list[tuple[Path, str, str, dict[str, Node]]] = []
    for path, tensors in _packed(weights.node):
        parts = [part for part in _parts(path) if part != "_modules"]
        # `before` is the layer's name before quantization. If another tensor also has this name,
        # the layer gets the name `unique`.
        before = ".".join(takewhile(lambda part: part not in _PACKING, parts))
        unique = ".".join(part for part in parts if part != _STATE)
        found.append((path, before, unique, tensors))
    count = Counter(before for _, before, _, _ in found)
    for path, before, unique, tensors in found:
        for name in (before, unique):
            named = {f"{name}.{each}".removeprefix("."): node for each, node in tensors.items()}
            if name == unique or (count[name] == 1 and weights.nodes.keys().isdisjoint(named)):
                yield _Layer(path, name, named)
                break


def _packed(root: Node) -> Iterator[tuple[Path, dict[str, Node]]]:
    """Yield (path, {"weight": ..., "bias": ...}) for each tuple that packs a weight and its bias.

    A tuple without a bias yields only the weight. A layer with several paths is yielded for each
    path.
    """
    inside: set[int] = set()
    holder: Object | None = None
    for path, node in walk(root):
        holder = node if isinstance(node, Object) else holder
        if not isinstance(node, tuple) or id(node) in inside:
            continue
        if not any(part in _PACKING for part in _parts(path)):
            continue
        tensors: list[tuple[Node, str]] = []  # with the kind of the dtype
        waiting: list[Node] = list(reversed(node))
        nested = {id(node)}
        while waiting:
            part = waiting.pop()
            tensor = as_tensor(part)
            if tensor is not None:
                tensors.append((part, tensor.dtype.kind))
            elif isinstance(part, (tuple, list)) and id(part) not in nested:
                nested.add(id(part))
                waiting.extend(reversed(part))
        inside |= nested - {id(node)}
        chosen = [number for number, (_, kind) in enumerate(tensors) if kind == "quantized"]
        # In the state of a packed parameter object, the first tensor is the weight, even if it is
        # not quantized.
        if not chosen and holder is not None and holder.state is node:
            is_packer = str(holder.global_).endswith(_PACKER)
            chosen = [0] if is_packer and tensors else []
        if len(chosen) == 1:
            biases = [part for part, kind in tensors[chosen[0] + 1 :] if kind == "float"]
            weight = tensors[chosen[0]][0]
            yield path, dict(zip(("weight", "bias"), (weight, *biases), strict=False))


def _parts(path: Path) -> Iterator[str]:
    """Split each dotted name of a path at the dots, and yield the components."""
    return flatten(key_text(key).split(".") for key in path)


def _with_layers(weights: Weights, layers: list[_Layer]) -> Node:
    """Return the weights, in which ``X.weight`` and ``X.bias`` replace each packed layer ``X``.

    For a pickled module, append the tensors to the state_dict.
    """
    if weights.is_module:
        packed = flatten(layer.named.items() for layer in layers)
        return plain_state_dict(_unique([*plain_state_dict(weights.nodes).items(), *packed]))
    by_key: dict[Node, list[tuple[str, Node]]] = defaultdict(list)
    for layer in layers:
        by_key[layer.path[0]] += layer.named.items()
    # Drop the entry fc._packed_params.dtype = torch.qint8 of each packed layer.
    dtypes = {f"{key.rpartition('.')[0]}.dtype" for key in by_key}
    pairs: list[tuple[str, Node]] = []
    for key, node in weights.node.items():
        if key in by_key:
            pairs += by_key[key]
        elif key not in dtypes or not isinstance(node, Global):
            pairs.append((key, node))
    return keys.with_paths(weights.node, _unique(pairs))


def _unique(pairs: list[tuple[str, Node]]) -> dict[str, Node]:
    new = dict(pairs)
    if len(new) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise CollisionError(f"a packed layer and another weight would both be called {twice!r}")
    return new
