"""TorchScript of torch 1.0 to 1.2: the modules in JSON, the tensors in records of their own.

    <top>/model.json       {"protoVersion": "3", "mainModule": MODULE, "tensors": [TENSOR...], ...}
    MODULE                 {"name", "submodules": [MODULE...],
                           "parameters": [{"name", "tensorId", "isBuffer"}...],
                           "attributes": [{"name", "type", "id"}...],
                           "torchscriptArena": {"key": code}, ...}
    TENSOR                 {"dims": ["2", "3"], "strides": [...], "offset": "0",
                           "requiresGrad": true, "dataType": "FLOAT",
                           "data": {"key": "tensors/0"}, "device": "cpu"}, quantized also
                           {"isQuantized": true, "scale": 0.5, "zeroPoint": "3"}, of type UINT8...
    <top>/tensors/0        the bytes of a storage, which several tensors may share
    <top>/attributes.pkl   since 1.1: a tuple or list, to which the ids of attributes refer; an id
                           below 0 has no value

The text is protobuf's JSON: integers of 64 bits are strings, fields with default values may be
missing. Sizes, strides and offsets are in elements. Tensors outside of modules are constants,
``CONSTANTS.c<id>``. (caffe2/proto/torch.proto; torch/csrc/jit/serialization/import_legacy.cpp.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import CorruptError, FormatError, UnsupportedError
from ckptkit.core.limits import check
from ckptkit.core.tensor import Storage, Tensor, TypedStorage
from ckptkit.core.text import shown
from ckptkit.core.tree import Global, Node, Object, OrderedMapping
from ckptkit.formats.containers import strict_json
from ckptkit.formats.torch_zip.reader import Archive

_DTYPES = {
    "FLOAT": "float32", "DOUBLE": "float64", "FLOAT16": "float16", "INT32": "int32",
    "INT64": "int64", "INT16": "int16", "INT8": "int8", "UINT8": "uint8",
    "BYTE": "uint8", "BOOL": "bool",
}  # fmt: skip
_QUANTIZED = {"uint8": "quint8", "int8": "qint8", "int32": "qint32"}
Json = dict[str, Any]


def read(archive: Archive) -> tuple[Object, tuple[Global, ...], list[str]]:
    """Read the main module, the globals that its attributes name, and warnings.

    Raises FormatError, CorruptError, UnsupportedError, and what the pickle machine raises.
    """
    return _Model(archive).read()


class _Model:
    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.storages: dict[str, Storage] = {}
        self.constants: dict[str, Node] = {}  # tensors that no module has
        self.tensors: list[Node] = []
        self.values: list[Node] = []

    def read(self) -> tuple[Object, tuple[Global, ...], list[str]]:
        name = f"{self.archive.folder}model.json"
        check("index_bytes", self.archive.directory.entries[name].size, "bytes of model.json")
        model = strict_json.parse(self.archive.directory.read(name), "model.json")
        self.tensors = [self._tensor(each) for each in _objects(model, "tensors")]
        self.constants = {f"c{number}": tensor for number, tensor in enumerate(self.tensors)}
        names: tuple[Global, ...] = ()
        warnings: list[str] = []
        if f"{self.archive.folder}attributes.pkl" in self.archive.directory:
            pickled = self.archive.unpickle("attributes")
            names, warnings = pickled.globals, list(pickled.warnings)
            if not isinstance(pickled.root, (list, tuple)):
                raise FormatError("attributes.pkl does not hold a tuple")
            self.values = list(pickled.root)
        root = self._module(_object(model, "mainModule"))
        if self.constants:
            root.state["CONSTANTS"] = self.constants
        return root, names, warnings

    def _tensor(self, parsed: Json) -> Node:
        name = _DTYPES.get(str(parsed.get("dataType")), "")
        is_quantized = parsed.get("isQuantized") is True
        dtype = BY_NAME.get(_QUANTIZED.get(name, "") if is_quantized else name)
        if dtype is None:
            raise UnsupportedError(
                f"a tensor of type {str(parsed.get('dataType'))[:40]} in model.json"
            )
        storage = self._storage(parsed)
        shape, stride = (tuple(map(_integer, _list(parsed, key))) for key in ("dims", "strides"))
        offset, grad = _integer(parsed.get("offset", 0)), parsed.get("requiresGrad") is True
        tensor = Tensor(storage, dtype, shape, stride, offset, grad)
        if not is_quantized:
            return tensor
        scale = parsed.get("scale", 0.0)
        if type(scale) not in (int, float):
            raise FormatError("model.json has a quantized tensor whose scale is not a number")
        scheme = (
            Global("torch", "per_tensor_affine"),
            float(scale),
            _integer(parsed.get("zeroPoint", 0)),
        )
        args = (TypedStorage(storage, dtype), offset, shape, stride, scheme, grad, OrderedMapping())
        return Object(Global("torch._utils", "_rebuild_qtensor"), args, tensor=tensor)

    def _storage(self, parsed: Json) -> Storage:
        name = f"{self.archive.folder}{_text(_object(parsed, 'data'), 'key')}"
        if name not in self.archive.directory:
            raise CorruptError(f"model.json has a tensor in {shown(name)}, which is missing")
        device = _text(parsed, "device", "cpu")
        if name not in self.storages:
            self.storages[name] = self.archive.storage(name, device)
        if self.storages[name].device != device:
            raise CorruptError(f"the tensors in {shown(name)} are on two devices")
        return self.storages[name]

    def _module(self, parsed: Json) -> Object:
        """Make the object of a module.

        Recursive: JSON nested deeper than `LIMITS.json_depth` is not read.
        """
        parameters: dict[Node, Node] = {}
        buffers: dict[Node, Node] = {}
        for each in _objects(parsed, "parameters"):
            number = _integer(each.get("tensorId", 0))
            part = buffers if each.get("isBuffer") is True else parameters
            part[_text(each, "name")] = self._at(self.tensors, number)
            self.constants.pop(f"c{number}", None)
        attributes = {
            _text(each, "name"): self._value(each) for each in _objects(parsed, "attributes")
        }
        modules = {
            _text(each, "name"): self._module(each) for each in _objects(parsed, "submodules")
        }
        parts = {"_parameters": parameters, "_buffers": buffers, "_modules": modules}
        rest = {
            name: value
            for name, value in attributes.items()
            if name not in buffers and name not in parts
        }
        made = Object(Global("__torch__", _text(parsed, "name", "") or "Module"), (), new=True)
        made.steps.append(("build", rest | parts))
        return made

    def _value(self, parsed: Json) -> Node:
        number = _integer(parsed.get("id", 0))
        value = self._at(self.values, number) if number >= 0 else None
        if (
            isinstance(value, Object)
            and str(value.global_) == "torch.jit._pickle.build_tensor_from_id"
        ):
            return self._at(self.tensors, _integer(value.args[0] if value.args else None))
        return value

    def _at(self, table: list[Node], number: int) -> Node:
        if not 0 <= number < len(table):
            raise CorruptError(
                f"model.json refers to entry {number:,} of a table of {len(table):,}"
            )
        return table[number]


def _object(parsed: Any, key: str) -> Json:
    found = parsed.get(key) if isinstance(parsed, dict) else None
    if not isinstance(found, dict):
        raise FormatError(f"model.json has no object {key!r} where one must be")
    return found


def _list(parsed: Any, key: str) -> list[Any]:
    found = parsed.get(key, []) if isinstance(parsed, dict) else None
    if not isinstance(found, list):
        raise FormatError(f"model.json has no list {key!r} where one must be")
    return found


def _objects(parsed: Any, key: str) -> Iterator[Json]:
    for each in _list(parsed, key):
        if not isinstance(each, dict):
            raise FormatError(f"the list {key!r} of model.json holds something other than objects")
        yield each


def _text(parsed: Json, key: str, default: str | None = None) -> str:
    found = parsed.get(key, default)
    if not isinstance(found, str):
        raise FormatError(f"model.json has no text {key!r} where one must be")
    return found


def _integer(parsed: Any) -> int:
    """Parse a number, or the decimal text of one, as protobuf writes 64 bits."""
    if type(parsed) is int:
        return parsed
    if not isinstance(parsed, str) or not re.fullmatch("-?[0-9]{1,19}", parsed):
        raise FormatError(f"model.json holds {str(parsed)[:40]!r} where an integer must be")
    return int(parsed)
