"""Read the weights and attributes of TorchScript (torch.jit.save), a program with its weights.

ckptkit does not read the program itself. The archive contains:

    <top>/data.pkl, data/              the pickled module. Each submodule is an object. The class
                                       of the object is __torch__.<class>. The state is a dict.
    <top>/code/__torch__/**.py         deflated code. The class declarations in the code list the
                                       parameters and buffers (see below).
    <top>/constants.pkl, constants/    a tuple. In the code, the items of the tuple are called
                                       CONSTANTS.c0, CONSTANTS.c1...
    <top>/bytecode.pkl, mobile_debug_handles.pkl
                                       ignored: code for the mobile runtime (.ptl)
    <top>/traced_inputs.pkl, traced_inputs/
                                       ignored: torch.jit.trace stores tensors without their bytes
    <top>/extra/<name>                 extra files of the user; read as metadata if they are UTF-8
    <top>/model.json                   before torch 1.3 instead of data.pkl (see below)

The archive has the same structure as in :mod:`torch_zip`. If constants.pkl exists, torch.load calls
torch.jit.load. Each pickle numbers its storages separately.
(torch/csrc/jit/serialization/export_module.cpp, import.cpp.)

ckptkit reads a module like a pickled nn.Module, and moves the attributes of the module to
``_parameters``, ``_buffers`` and ``_modules``. Therefore the state_dict equals the state_dict of
the module that ``torch.jit.load`` returns. The attribute CONSTANTS of the root module contains the
constants. In a frozen module, the constants are the only weights. Packed weights (see below), such
as ``CONSTANTS.c0.weight``, belong to the state_dict even if the module is not frozen.

ckptkit parses only the class declarations in the code, and executes no code.
``<top>/code/__torch__/torch/nn/modules/conv.py`` contains the classes of the module
``__torch__.torch.nn.modules.conv``, as torch/csrc/jit/serialization/python_print.cpp prints them:

    class Conv2d(Module):                     a class without a base class is not a module
      __parameters__ = ["weight", "bias", ]
      __buffers__ = []                        since torch 1.6; before, any other tensor is a buffer
      weight : Tensor                         an attribute
      bias : Optional[Tensor]                 an attribute
      __annotations__["0"] = __torch__.Foo    an attribute whose name is not an identifier
      groups : Final[int] = 1                 a constant; the pickle does not contain it
      def forward(self: ...) -> Tensor:       a method; __setstate__ interprets the pickled state

torch 1.0 to 1.2 write the modules as JSON and each storage as a record:

    <top>/model.json       {"protoVersion": "3", "mainModule": MODULE, "tensors": [TENSOR...], ...}
    MODULE                 {"name", "submodules": [MODULE...],
                           "parameters": [{"name", "tensorId", "isBuffer"}...],
                           "attributes": [{"name", "type", "id"}...],
                           "torchscriptArena": {"key": code}, ...}
    TENSOR                 {"dims": ["2", "3"], "strides": [...], "offset": "0",
                           "requiresGrad": true, "dataType": "FLOAT",
                           "data": {"key": "tensors/0"}, "device": "cpu"}. For a quantized tensor
                           also {"isQuantized": true, "scale": 0.5, "zeroPoint": "3"}.
    <top>/tensors/0        the bytes of a storage, which several tensors may share
    <top>/attributes.pkl   since torch 1.1: a tuple or list of values. The "id" of an attribute is
                           an index in this list. A negative id means that the attribute has no
                           value.

The JSON follows protobuf: 64-bit integers are strings, and fields with default values may be
missing. Sizes, strides and offsets are in elements. Tensors outside of modules are constants called
``CONSTANTS.c<id>``. (caffe2/proto/torch.proto; torch/csrc/jit/serialization/import_legacy.cpp.)

Packed weights are C++ objects that contain the tensors of one layer. ``optimize_for_mobile`` and
``freeze`` store such objects as constants, without names. The pickle contains the tensors in their
form before packing:

    xnnpack, metal, mkldnn    LinearOpContext, Conv2dOpContext...: (weight, bias, stride...)
    vulkan                    LinearPackedContext, Conv2dPackedContext...: [weight, bias, ...]
    quantized                 LinearPackedParamsBase of float16: (weight, bias)

(aten/src/ATen/native/xnnpack/RegisterOpContextClass.cpp.) ckptkit unpacks neither quantized tensors
nor the layers of a quantized module. ``--dequantize`` unpacks both, and names the unpacked tensors
after the modules.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from dataclasses import field as field_of
from typing import Any

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import AmbiguousError, CorruptError, FormatError, UnsupportedError
from ckptkit.core.limits import LIMITS
from ckptkit.core.tensor import Tensor, TypedStorage
from ckptkit.core.text import shown
from ckptkit.core.tree import Global, Node, Object, OrderedMapping, join, nodes, walk
from ckptkit.core.weights import as_tensor, module_state
from ckptkit.formats.format import Probe
from ckptkit.formats.strict_json import field
from ckptkit.formats.table import TORCHSCRIPT
from ckptkit.formats.torch_zip import Archive
from ckptkit.formats.zip_reader import ZipDirectory

_FROZEN = "the module is frozen: its weights are constants of its code, without their names"
_PACKED = "the names of layers with packed weights are missing: CONSTANTS.c0.weight..."
PARTS = ("_parameters", "_buffers", "_modules")
CONSTANTS = "CONSTANTS"
_Read = tuple[Object, tuple[Global, ...], list[str]]  # the module, globals, and warnings


def read(probe: Probe) -> Checkpoint:
    """Read the module and its constants.

    Raises an InputError if the archive is damaged, ambiguous or unsupported.
    """
    directory = probe.zip
    assert directory is not None
    archive = Archive(directory)
    if archive.has("data.pkl") or not archive.has(_MODEL):
        root, names, found = _pickled(archive)
    else:
        root, names, found = _Model(archive).read()
    texts, lost = _extra(archive)
    key, remarks = _weights_of_constants(root)
    warnings = (*archive.warnings, *found, *archive.unverified(), *lost, *remarks)
    return Checkpoint(root, TORCHSCRIPT.name, directory.source, texts, names, warnings, key=key)


def _weights_of_constants(root: Object) -> tuple[str | None, list[str]]:
    """Return the key of the weights and a list of warnings.

    The key is None if the module itself contains the weights.

    Packed constants become submodules. If the module is frozen, all tensor constants are weights.
    """
    constants: dict[Node, Node] = root.state.get(CONSTANTS, {})
    is_frozen = not module_state(root)
    tensors = [name for name, node in constants.items() if is_frozen and as_tensor(node)]
    if packed := unpack({CONSTANTS: constants}, of_modules=True):
        # Other tensor constants become buffers, so that one state_dict contains all weights.
        root.state["_modules"] |= packed
        root.state["_buffers"] |= {f"{CONSTANTS}.{name}": constants[name] for name in tensors}
        moved = {*tensors, *(place.split(".")[1] for place in packed)}
        root.state[CONSTANTS] = {
            name: node for name, node in constants.items() if name not in moved
        }
        return None, [_PACKED]
    return (CONSTANTS, [_FROZEN]) if tensors else (None, [])


def _pickled(archive: Archive) -> _Read:
    tree = archive.unpickle("data")
    root, names, warnings = tree.root, tree.globals, list(tree.warnings)
    if not _is_scripted(root):
        raise FormatError("data.pkl does not contain a TorchScript module")
    warnings += _arrange(root, ScriptSource(archive.directory))
    if archive.has("constants.pkl"):
        constants = archive.unpickle("constants")
        names += tuple(name for name in constants.globals if name not in names)
        warnings += constants.warnings
        if not isinstance(constants.root, tuple):
            raise FormatError("constants.pkl does not contain a tuple")
        if CONSTANTS in root.state:
            raise AmbiguousError(
                f"an attribute of its module is called {CONSTANTS}: this is the name of constants"
            )
        if constants.root:
            numbered = enumerate(constants.root)
            root.state[CONSTANTS] = {f"c{number}": each for number, each in numbered}
    return root, names, warnings


def _is_scripted(node: Node) -> bool:
    """Return whether the code in the archive defines the class of a node."""
    made = node.global_ if isinstance(node, Object) else None
    return made is not None and made.module.split(".")[0] == "__torch__" and not is_custom(node)


def _arrange(root: Object, code: ScriptSource) -> list[str]:
    """Move the attributes of all modules to the dicts of nn.Module. Return warnings."""
    found = {id(node): (node, code[node.callable]) for _, node in walk(root) if _is_scripted(node)}
    modules = {id(root), *map(id, unpack(root, of_modules=False).values())}
    modules.update(key for key, (_, each) in found.items() if each is None or each.is_module)
    warnings = [
        f"the code of {node.global_} is missing: its tensors are read as parameters if they "
        "require a gradient"
        for node, declared in found.values()
        if declared is None
    ][:1]
    for key, (node, declared) in found.items():
        is_own = key in modules and _split(node, declared, modules)
        if is_own and declared is not None and (declared.parameters or declared.buffers):
            warnings.append(
                f"cannot determine which tensors in the state of {node.global_} are parameters, "
                "because ckptkit does not run the code of this class"
            )
    return list(dict.fromkeys(warnings))


def _split(node: Object, declared: Declared | None, modules: Collection[int]) -> bool:
    """Split the attributes of a module into parameters, buffers and submodules.

    Return True if the class defines a state that is not a dict of its attributes.
    """
    state = node.state
    if [step for step, _ in node.steps] != ["build"]:
        raise FormatError(
            f"the pickled {node.global_} is not in the form that torch.jit.save writes"
        )
    is_own = not isinstance(state, dict) or (declared is not None and declared.has_setstate)
    attributes: dict[Node, Node] = {"state": state} if is_own else state
    if not attributes.keys().isdisjoint(PARTS):
        raise AmbiguousError(f"attributes of {node.global_} have names that nn.Module itself uses")
    parts: dict[str, dict[Node, Node]] = {part: {} for part in PARTS}
    rest: dict[Node, Node] = {}
    for name, value in attributes.items():
        tensor, part = as_tensor(value), None
        if id(value) in modules:
            part = "_modules"
        elif declared is None and tensor is not None:
            part = "_parameters" if tensor.requires_grad else "_buffers"
        elif declared is not None and (tensor is not None or value is None):
            part = declared.part(name)
        (rest if part is None else parts[part])[name] = value
    node.steps[:] = [("build", rest | parts)]
    return is_own


def _extra(archive: Archive) -> tuple[dict[str, str], list[str]]:
    """Return the extra files that are short UTF-8 strings, and a warning about the other files."""
    texts: dict[str, str] = {}
    lost: list[str] = []
    left = LIMITS.line_bytes
    for name, entry in archive.directory.entries.items():
        short = name.removeprefix(archive.folder)
        if not short.startswith("extra/"):
            continue
        try:
            if entry.length > left:
                raise ValueError
            texts[short] = archive.directory.read(name).decode()
            left -= entry.length
        except ValueError:
            lost.append(short)
    what = f"dropped extra files that are long or not UTF-8: {', '.join(map(shown, lost[:4]))}"
    return texts, [what] if lost else []


# Declarations in the code


_CLASS = re.compile(r"class (\w+)(?:\((\w*)\))?:")
_STRING = r'"(?:[^"\\]|\\.)*"'
_LISTED = re.compile(rf"  __(parameters|buffers)__ = \[((?:{_STRING}, ?)*)\]")
_TENSOR = re.compile(rf"  (?:(\w+) : |__annotations__\[({_STRING})\] = )Tensor")


@dataclass
class Declared:
    """The declaration of a class: base class, attributes, and whether it has __setstate__."""

    base: str | None = None
    parameters: frozenset[str] = frozenset()
    buffers: frozenset[str] | None = None
    tensors: set[str] = field_of(default_factory=set)  # attributes of type Tensor
    has_setstate: bool = False

    @property
    def is_module(self) -> bool:
        return self.base == "Module"

    def part(self, name: str) -> str | None:
        """Return "_parameters" or "_buffers" for the tensor called `name`.

        Return None if `name` is not a parameter or buffer.
        """
        if name in self.parameters:
            return "_parameters"
        is_buffer = self.buffers is None or name in self.buffers
        return "_buffers" if is_buffer and name in self.tensors else None


class ScriptSource:
    """The class declarations of an archive. Each code file is parsed when it is first needed."""

    def __init__(self, directory: ZipDirectory) -> None:
        self._directory = directory
        self._modules: dict[str, dict[str, Declared]] = {}

    def __getitem__(self, made: Global) -> Declared | None:
        """Return the declaration of a class, or None if the code of the class is missing."""
        if made.module not in self._modules:
            name = f"{self._directory.top}/code/{made.module.replace('.', '/')}.py"
            there = name in self._directory.entries
            self._modules[made.module] = parse(self._directory.read(name)) if there else {}
        return self._modules[made.module].get(made.name)


def parse(data: bytes) -> dict[str, Declared]:
    """Parse the class declarations in one code file.

    Raises FormatError if the file is not UTF-8, or if a list of parameters or buffers is malformed.
    """
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError as error:
        raise FormatError("its code is not UTF-8") from error
    found: dict[str, Declared] = {}
    current = Declared()
    for line in lines:
        if line.startswith("class ") and (head := _CLASS.fullmatch(line)):
            current = found[head[1]] = Declared(head[2])
        elif line.startswith("def "):
            current = Declared()
        elif line.startswith("   "):  # the body of a method
            continue
        elif line.startswith("  def __setstate__("):
            current.has_setstate = True
        elif tensor := _TENSOR.fullmatch(line):
            current.tensors.add(tensor[1] or _unquoted(tensor[2]))
        elif names := _LISTED.fullmatch(line):
            listed = frozenset(_unquoted(each) for each in re.findall(_STRING, names[2]))
            setattr(current, names[1], listed)
        elif line.startswith(("  __parameters__", "  __buffers__")):
            raise FormatError(
                f"its code has a malformed list of parameters or buffers: {line[:80]!r}"
            )
    return found


def _unquoted(quoted: str) -> str:
    try:
        return str(literal_eval(quoted))
    except (SyntaxError, ValueError) as error:
        raise FormatError(f"its code contains the malformed name {quoted[:40]}") from error


# torch 1.0 to 1.2


_DTYPES = {
    "FLOAT": "float32", "DOUBLE": "float64", "FLOAT16": "float16", "INT32": "int32",
    "INT64": "int64", "INT16": "int16", "INT8": "int8", "UINT8": "uint8",
    "BYTE": "uint8", "BOOL": "bool",
}  # fmt: skip
_MODEL = "model.json"
_QUANTIZED = {"uint8": "quint8", "int8": "qint8", "int32": "qint32"}
Json = dict[str, Any]


class _Model:
    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.tensors: list[Node] = []
        self.constants: dict[str, Node] = {}  # tensors outside of modules
        self.values: list[Node] = []

    def read(self) -> _Read:
        model = self.archive.json(_MODEL)
        self.tensors = [self._tensor(each) for each in _objects(model, "tensors")]
        self.constants = {f"c{number}": tensor for number, tensor in enumerate(self.tensors)}
        names: tuple[Global, ...] = ()
        warnings: list[str] = []
        if self.archive.has("attributes.pkl"):
            pickled = self.archive.unpickle("attributes")
            names, warnings = pickled.globals, list(pickled.warnings)
            if not isinstance(pickled.root, (list, tuple)):
                raise FormatError("attributes.pkl does not contain a tuple")
            self.values = list(pickled.root)
        root = self._module(field(model, "mainModule", dict, _MODEL))
        if self.constants:
            root.state[CONSTANTS] = self.constants
        return root, names, warnings

    def _tensor(self, parsed: Json) -> Node:
        name = _DTYPES.get(str(parsed.get("dataType")), "")
        is_quantized = parsed.get("isQuantized") is True
        dtype = BY_NAME.get(_QUANTIZED.get(name, "") if is_quantized else name)
        if dtype is None:
            raise UnsupportedError(
                f"a tensor of unsupported type {str(parsed.get('dataType'))[:40]} in model.json"
            )
        record = field(field(parsed, "data", dict, _MODEL), "key", str, _MODEL)
        storage = self.archive.storage(record, field(parsed, "device", str, _MODEL, "cpu"))
        shape, stride = (
            tuple(map(_integer, field(parsed, key, list, _MODEL, [])))
            for key in ("dims", "strides")
        )
        offset, grad = _integer(parsed.get("offset", 0)), parsed.get("requiresGrad") is True
        tensor = Tensor(storage, dtype, shape, stride, offset, grad)
        if not is_quantized:
            return tensor
        scale, zero = parsed.get("scale", 0.0), _integer(parsed.get("zeroPoint", 0))
        if type(scale) not in (int, float):
            raise FormatError("model.json has a quantized tensor whose scale is not a number")
        scheme = Global("torch", "per_tensor_affine"), float(scale), zero
        args = (TypedStorage(storage, dtype), offset, shape, stride, scheme, grad, OrderedMapping())
        return Object(Global("torch._utils", "_rebuild_qtensor"), args, tensor=tensor)

    def _module(self, parsed: Json) -> Object:
        """Return the object of a module.

        Recursion is safe: JSON is at most `LIMITS.json_depth` deep.
        """
        parts: dict[Node, dict[Node, Node]] = {part: {} for part in PARTS}
        for each in _objects(parsed, "parameters"):
            number = _integer(each.get("tensorId", 0))
            part = "_buffers" if each.get("isBuffer") is True else "_parameters"
            parts[part][_name(each)] = _at(self.tensors, number)
            self.constants.pop(f"c{number}", None)
        attributes = {_name(each): self._value(each) for each in _objects(parsed, "attributes")}
        for each in _objects(parsed, "submodules"):
            parts["_modules"][_name(each)] = self._module(each)
        taken = parts["_buffers"].keys() | parts.keys()
        rest = {name: value for name, value in attributes.items() if name not in taken}
        made = Object(
            Global("__torch__", field(parsed, "name", str, _MODEL, "") or "Module"), (), new=True
        )
        made.steps.append(("build", rest | parts))
        return made

    def _value(self, parsed: Json) -> Node:
        number = _integer(parsed.get("id", 0))
        value = _at(self.values, number) if number >= 0 else None
        if not isinstance(value, Object):
            return value
        if str(value.global_) == "torch.jit._pickle.build_tensor_from_id":
            return _at(self.tensors, _integer(value.args[0] if value.args else None))
        return value


def _at(table: list[Node], number: int) -> Node:
    if not 0 <= number < len(table):
        raise CorruptError(
            f"model.json refers to entry {number:,} of a list of {len(table):,} entries"
        )
    return table[number]


def _name(parsed: Json) -> str:
    return field(parsed, "name", str, _MODEL)


def _objects(parsed: Any, key: str) -> Iterator[Json]:
    for each in field(parsed, key, list, _MODEL, []):
        if not isinstance(each, dict):
            raise FormatError(
                f"the list {key!r} of model.json contains values that are not objects"
            )
        yield each


def _integer(parsed: Any) -> int:
    """Return an integer. protobuf may write an integer as a decimal string."""
    if type(parsed) is int:
        return parsed
    if not isinstance(parsed, str) or not re.fullmatch("-?[0-9]{1,19}", parsed):
        raise FormatError(f"model.json contains {str(parsed)[:40]!r} instead of an integer")
    return int(parsed)


# Packed weights


CUSTOM = "__torch__.torch.classes."  # prefix of the names of C++ classes
_OF_MODULES = "PackedParamsBase"  # suffix of the names of the C++ classes in quantized modules
_STATE = "state"
_NAMES = {(0,): "weight", (1,): "bias"}


def is_custom(node: Node) -> bool:
    return isinstance(node, Object) and str(node.global_).startswith(CUSTOM)


def unpack(root: Node, *, of_modules: bool) -> dict[str, Object]:
    """Turn each C++ object of packed weights in `root` into a module. Return these modules by path.

    If `of_modules` is true, include the layers of quantized modules.
    """
    found: dict[str, Object] = {}
    done: set[int] = set()
    for path, node in [*walk(root)]:
        if not is_custom(node) or (not of_modules and str(node.global_).endswith(_OF_MODULES)):
            continue
        if id(node) not in done:
            # The tensors of nested objects belong to these objects.
            own = walk(node.state, skip=lambda _, each: isinstance(each, Object))
            tensors = {place: each for place, each in own if as_tensor(each) is not None}
            if not tensors or any(map(_is_quantized, nodes(node))):
                continue
            rest = _without(node.state, {*map(id, tensors.values())})
            named = {_NAMES.get(place, join(place)): each for place, each in tensors.items()}
            parts = {"_parameters": named, "_buffers": {}, "_modules": {}, _STATE: rest}
            node.steps[:] = [("build", parts)]
            done.add(id(node))
        found[join(tuple([key for key in path if key != _STATE]))] = node
    return found


def _is_quantized(node: Node) -> bool:
    tensor = as_tensor(node)
    return tensor is not None and tensor.dtype.kind == "quantized"


def _without(state: Node, taken: Collection[int]) -> Node:
    """Return a nested tuple or list without the values whose ids are in `taken`.

    Recursion is safe, because `walk` has limited the depth.
    """
    if not isinstance(state, (tuple, list)):
        return state
    return type(state)(_without(each, taken) for each in state if id(each) not in taken)
