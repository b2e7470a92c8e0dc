"""Read the weights in torch.export.save archives (.pt2) and Stable-Baselines3 models.

ckptkit reads the weights and constants of an ExportedProgram, but not its graph.

Since about torch 2.8, a .pt2 is a zip archive with one top folder, as in :mod:`torch_zip`:

    <top>/archive_format                             "pt2"
    <top>/models/<model>.json                        the graph of a model; most archives contain
                                                     one model, called "model"
    <top>/data/weights/<model>_weights_config.json   {"config": {name: {"path_name": "weight_0",
                                                     "use_pickle": false, "is_param": true,
                                                     "tensor_meta": META}...}}
    <top>/data/weights/weight_0                      the bytes of a storage, which several tensors
                                                     may share
    <top>/data/constants/<model>_constants_config.json   the names of constants, as for weights
    <top>/data/constants/tensor_0                    the bytes of a storage of constants
    META    {"dtype": 7, "layout": 7, "sizes": [{"as_int": 4}...], "strides": [...],
            "storage_offset": {"as_int": 0}, "device": {"type": "cuda", "index": 1},
            "requires_grad": true}; strides and offset are in elements

Older versions of torch wrote a plain zip file:

    serialized_exported_program.json, version            the graph
    serialized_state_dict.pt, serialized_constants.pt    torch.save files (until torch 2.3 with the
                                                         suffix .json)

(torch/export/pt2_archive/_package.py; the numbers of dtypes: torch/_export/serde/schema.py.)

A Stable-Baselines3 model is a zip archive. ckptkit reads only policy.pth:

    policy.pth                    torch.save file of the policy's state_dict
    policy.optimizer.pth          torch.save file of the optimizer's state_dict
    pytorch_variables.pth         torch.save file of other tensors
    data                          JSON that contains pickles in Base64
    system_info.txt               plain text
    _stable_baselines3_version    the version of Stable-Baselines3

The members are not compressed. Source: stable_baselines3/common/save_util.py, `save_to_zip_file`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, product
from typing import Any

from ckptkit.core.bytesource import Range, Section
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME, UNKNOWN, unknown
from ckptkit.core.errors import FormatError, UnsupportedError
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import shown, some
from ckptkit.core.tree import Node, OrderedMapping
from ckptkit.formats import table
from ckptkit.formats.format import Probe
from ckptkit.formats.strict_json import field
from ckptkit.formats.torch_zip import Archive
from ckptkit.formats.zip_reader import ZipDirectory

_GRAPH = "serialized_exported_program.json"  # before 2.8
_DTYPES = dict(enumerate((
    "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex32",
    "complex64", "complex128", "bool", "bfloat16",
), 1)) | dict(enumerate((
    "uint16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu", "uint32", "uint64",
), 28))  # fmt: skip
_STRIDED = 7
_CONFIG = "a configuration of tensors"
_PARTS = (("state_dict", "weights"), ("constants", "constants"))  # names in the tree, folders


def matches(probe: Probe) -> bool:
    archive = probe.zip
    if archive is None:
        return False
    return f"{archive.top}/archive_format" in archive.entries or _GRAPH in archive.entries


def read(probe: Probe) -> Checkpoint:
    """Read the weights and constants of each model.

    The tree of a model is ``{"state_dict": {...}, "constants": {...}}``. If there are several
    models, the root maps model names to these trees. Raises an InputError if the archive is
    damaged, ambiguous or unsupported.
    """
    directory = probe.zip
    assert directory is not None
    if _GRAPH in directory.entries:
        return _read_parts(directory)
    return _ExportedArchive(directory).read()


class _ExportedArchive(Archive):
    """An archive of torch 2.8 or later."""

    def read(self) -> Checkpoint:
        kind = self.directory.read(f"{self.folder}archive_format")
        if kind != b"pt2":
            raise UnsupportedError(f"is an archive of format {kind[:40]!r}, not pt2")
        pickled: list[str] = []
        roots: dict[Node, Node] = {}
        for record in self.directory.entries:
            name = record.removeprefix(f"{self.folder}models/")
            if name == record or not name.endswith(".json"):
                continue
            model = name.removesuffix(".json")
            roots[model] = parts = {}
            for part, folder in _PARTS:
                config = f"data/{folder}/{model}_{folder}_config.json"
                if self.has(config):
                    parts[part] = self._tensors(f"data/{folder}/", config, pickled)
        if not any(roots.values()):
            raise UnsupportedError("is a .pt2 archive without weights of an exported program")
        warnings = [*self.warnings, *self.unverified()]
        if pickled:
            warnings.append(
                f"dropped tensors that are pickled: {', '.join(map(shown, pickled[:4]))}"
            )
        root: Node = roots if len(roots) > 1 else next(iter(roots.values()))
        return Checkpoint(root, table.PT2.name, self.directory.source, warnings=tuple(warnings))

    def _tensors(self, folder: str, config: str, pickled: list[str]) -> OrderedMapping:
        """Return the tensors that the member `config` lists. `pickled` gets the others' names."""
        made = OrderedMapping()
        for name, entry in field(self.json(config), "config", dict, _CONFIG).items():
            record = folder + field(entry, "path_name", str, _CONFIG)
            if entry.get("use_pickle"):
                pickled.append(name)
                continue
            meta = field(entry, "tensor_meta", dict, _CONFIG)
            number = field(meta, "dtype", int, _CONFIG)
            dtype = BY_NAME[_DTYPES[number]] if number in _DTYPES else unknown(f"number {number}")
            storage = self.storage(record, _device(field(meta, "device", dict, _CONFIG)))
            shape, stride = (
                tuple(map(_integer, field(meta, key, list, _CONFIG)))
                for key in ("sizes", "strides")
            )
            offset, layout = _integer(meta.get("storage_offset")), "strided"
            if dtype.kind == "unknown" or meta.get("layout") != _STRIDED:
                layout = UNKNOWN if dtype.kind == "unknown" else "not strided"
                stride, offset = (), 0
            grad = meta.get("requires_grad") is True
            kind = "parameter" if entry.get("is_param") is True else "tensor"
            made[name] = Tensor(storage, dtype, shape, stride, offset, grad, kind, layout)
        return made


def _integer(parsed: Any) -> int:
    """Return the integer n in ``{"as_int": n}``. The sizes of stored tensors are never symbolic."""
    return field(parsed, "as_int", int, _CONFIG)


def _device(parsed: dict[str, Any]) -> str:
    kind, index = field(parsed, "type", str, _CONFIG), parsed.get("index")
    return kind if index is None else f"{kind}:{field(parsed, 'index', int, _CONFIG)}"


def _read_parts(directory: ZipDirectory) -> Checkpoint:
    """Read an archive of torch before 2.8. Such an archive contains torch.save files."""
    held: dict[str, Checkpoint] = {}
    for part, suffix in product(("state_dict", "constants"), ("pt", "json")):
        name = f"serialized_{part}.{suffix}"
        if part not in held and name in directory.entries and directory.entries[name].length:
            held[part] = _inside(directory, name)
    if not held:
        raise UnsupportedError(
            "is an exported program without the members in which torch.export.save writes weights"
        )
    return Checkpoint(
        {part: each.root for part, each in held.items()},
        table.PT2.name,
        directory.source,
        globals=tuple(dict.fromkeys(chain.from_iterable(each.globals for each in held.values()))),
        warnings=tuple(chain.from_iterable(each.warnings for each in held.values())),
    )


def _inside(directory: ZipDirectory, name: str) -> Checkpoint:
    """Read a torch.save file in an archive."""
    extent = directory.locate(name)
    if not isinstance(extent, Range):
        raise UnsupportedError(f"its {name} is compressed", hint=f"unpack {name} and name it")
    inner = Probe(Section(*extent))
    for format in (table.TORCH_ZIP, table.TORCH_LEGACY):
        if format.matches(inner):
            return format.read(inner)
    raise FormatError(f"its {name} is not a torch.save file")


# Models of Stable-Baselines3


POLICY, VERSION = "policy.pth", "_stable_baselines3_version"


def matches_baselines(probe: Probe) -> bool:
    return probe.zip is not None and {POLICY, VERSION} <= probe.zip.entries.keys()


def read_baselines(probe: Probe) -> Checkpoint:
    """Read policy.pth. A warning lists the other members.

    Raises UnsupportedError if policy.pth is compressed. Raises FormatError if policy.pth is not a
    torch.save file. Also raises the errors of `torch_zip.read` and `torch_legacy.read`.
    """
    archive = probe.zip
    assert archive is not None
    found = _inside(archive, POLICY)
    others = [name for name in archive.entries if name != POLICY]
    left = f"only {POLICY} is read, not {some(others, 8)}"
    return replace(
        found, format=table.STABLE_BASELINES.name, source=probe.source, origin=None,
        warnings=(*found.warnings, left),
    )  # fmt: skip
