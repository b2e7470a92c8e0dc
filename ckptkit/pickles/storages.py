"""Read persistent ids. In a pickle of torch, a persistent id refers to the storage of a tensor.

In zip archives, a persistent id is ``('storage', class, key, location, numel)``.
In legacy files, the persistent id also contains ``view_metadata`` as the last item.

Since torch 0.4, ``view_metadata`` is None. Older versions wrote ``(view_key, offset, view_size)``.
``offset`` and ``view_size`` are numbers of elements.

``numel`` is the number of elements in the complete storage. For an UntypedStorage, ``numel`` is the
number of bytes.

torch 0.1 to 1.5 also saved the source code of each class of a pickled module. The source code is in
the persistent id of the first use of the class. In tar files, the persistent id with the source
code is ``(class, source file, source text)``. In legacy files, the persistent id with the source
code is ``('module', class, source file, source text)``. If Python did not find the source code,
``source file`` and ``source text`` are None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptkit.core.dtypes import BY_STORAGE, TABLE, UINT8, DType
from ckptkit.core.errors import AmbiguousError, FormatError, TensorError
from ckptkit.core.limits import LIMITS, check
from ckptkit.core.tensor import Storage, TypedStorage
from ckptkit.core.tree import ByteString, Global, Node, StoredBytes

# A function that returns a Storage. The arguments are the key, the number of bytes and the device.
Opener = Callable[[str, int, str], Storage]


class StorageTable:
    """Contains one TypedStorage per storage of a pickle."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        # Maps each key to its TypedStorages. A key has several TypedStorages in two cases: the
        # pickle refers to the storage both as untyped and as uint8, or the storage is empty.
        self._known: dict[str, tuple[TypedStorage, ...]] = {}
        self._views: dict[str, tuple[TypedStorage, tuple[Node, ...]]] = {}

    def load(self, pid: Node) -> Node:
        """Return the TypedStorage of a persistent id. Equal ids return the same object."""
        if pid.__class__ is not tuple or not 5 <= len(pid) <= 6 or pid[0] != "storage":
            raise FormatError("pickle contains a persistent id that torch.save does not write")
        made, key, location, numel = pid[1:5]
        view = pid[5] if len(pid) == 6 else None
        if key.__class__ is not str or made.__class__ is not Global or numel.__class__ is not int:
            raise FormatError(
                "the persistent id of a storage must contain a class, a string and a number"
            )
        dtype = dtype_of_storage(made)
        nbytes = numel if dtype is None else numel * dtype.itemsize
        if location.__class__ is not str or numel < 0:
            raise FormatError(f"storage {key!r} has an invalid device or size")
        known = self._known.get(key)
        if known is not None:
            typed = self._again(key, known, dtype, nbytes, location)
        else:
            if len(key) + len(location) > LIMITS.name_bytes:
                check("name_bytes", len(key) + len(location), "characters of a storage's name")
            if key in self._views:
                raise _two_ways(key)
            typed = TypedStorage(self._opener(key, nbytes, location), dtype)
            self._known[key] = (typed,)
        return typed if view is None else self._view(typed, view)

    def __iter__(self) -> Iterator[str]:
        """Yield the key of each storage."""
        return iter(self._known)

    def itemsizes(self) -> dict[str, int]:
        """Map the key of each storage to the bytes per element. Untyped elements have 1 byte."""
        return {
            key: max(1 if typed.dtype is None else typed.dtype.itemsize for typed in known)
            for key, known in self._known.items()
        }

    def _again(
        self,
        key: str,
        known: tuple[TypedStorage, ...],
        dtype: DType | None,
        nbytes: int,
        device: str,
    ) -> TypedStorage:
        storage = known[0].storage
        if device != storage.device or nbytes != storage.nbytes:
            raise _two_ways(key)
        types = {typed.dtype: typed for typed in known}
        if dtype not in types:
            # torch.load uses the class of the first reference to a storage for all references. An
            # untyped storage and a uint8 storage contain the same elements.
            if nbytes and {dtype, *types} != {UINT8, None}:
                named = sorted("untyped" if each is None else each.name for each in (dtype, *types))
                raise AmbiguousError(
                    f"storage {key!r} has several element types: {', '.join(named)}"
                )
            types[dtype] = TypedStorage(storage, dtype)
            self._known[key] = tuple(types.values())
        return types[dtype]

    def _view(self, root: TypedStorage, metadata: Node) -> TypedStorage:
        """Return a view of a storage. Only torch 0.1 to 0.3 wrote such views."""
        if not isinstance(metadata, tuple) or len(metadata) != 3 or type(metadata[0]) is not str:
            raise FormatError("the metadata of a storage view is not (key, offset, size)")
        key, offset, size = metadata
        if (
            type(offset) is not int
            or type(size) is not int
            or not 0 <= offset <= offset + size <= root.elements
        ):
            raise TensorError(
                f"a storage view of {size} elements at offset {offset} exceeds the "
                f"{root.elements} elements of the storage"
            )
        view, seen = self._views.setdefault(
            key, (TypedStorage(root.storage, root.dtype, offset, offset + size), metadata)
        )
        if seen[1:] != metadata[1:] or view.storage is not root.storage or key in self._known:
            raise _two_ways(key)
        return view


def _two_ways(key: str) -> AmbiguousError:
    return AmbiguousError(f"the file contains two different descriptions of storage {key!r}")


def dtype_of_storage(made: Global) -> DType | None:
    """Return the element type of a storage class. Return None for an untyped storage class.

    Raises FormatError for a class that is not a storage class.
    """
    try:
        return _DTYPES[made.module, made.name]
    except KeyError:
        raise FormatError(f"{made} is not a storage class that ckptkit supports") from None


def storage_class(dtype: DType | None) -> Global:
    """Return the storage class that persistent ids contain for `dtype`."""
    return _CLASSES[None if dtype is None else dtype.storage]


def _scripted(dtype: DType) -> str:
    """Return the storage class name that TorchScript files contain for `dtype`.

    Python's torch has no storage class for this dtype.
    """
    name = "complexHalf" if dtype.name == "complex32" else dtype.name.replace("uint", "UInt")
    return name[0].upper() + name[1:] + "Storage"


_CLASSES = {name: Global("torch", name) for name in BY_STORAGE} | {
    None: Global("torch.storage", "UntypedStorage")
}
_DTYPES: dict[tuple[str, str], DType | None] = {
    **{("torch", name): dtype for name, dtype in BY_STORAGE.items()},
    **{("torch.cuda", name): dtype for name, dtype in BY_STORAGE.items()},
    **{("torch", _scripted(row)): row for row in TABLE if not row.storage},
    ("torch.storage", "UntypedStorage"): None,
    ("torch.storage", "_UntypedStorage"): None,
}


class ModuleSources:
    """Contains the source code of classes in one pickle. ckptkit never runs this code."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def load(self, made: Node, text: Node) -> Global:
        """Record the source of a class, and return the class.

        Raises FormatError if `made` is not a class or `text` is not a string.
        """
        if not isinstance(made, Global):
            raise FormatError("the pickle contains source code for a value that is not a class")
        if isinstance(text, StoredBytes):  # a str of Python 2
            check("string_bytes", text.extent.length, f"bytes of the source of {made}")
            from ckptkit.compute.operation import stream

            text = ByteString(b"".join(stream(text.extent)))
        if not isinstance(text, (str, ByteString, type(None))):
            raise FormatError(f"the source code of {made} is not a string")
        self._texts[str(made)] = "" if text is None else str(text)
        check("memo_sparse", len(self._texts), "classes with their source")
        return made

    @property
    def metadata(self) -> dict[str, str]:
        return {f"module_source:{name}": text for name, text in self._texts.items()}

    @property
    def warnings(self) -> tuple[str, ...]:
        if not self._texts:
            return ()
        return (
            f"ckptkit keeps the source code of {len(self._texts)} classes in the file as metadata",
        )


def endian_warning(system: Node) -> tuple[str, ...]:
    """Return a warning if the file was written on a big-endian machine."""
    if isinstance(system, dict) and system.get("little_endian") is False:
        return (
            "the file was written on a big-endian machine; like torch, ckptkit reads the elements "
            "as little-endian",
        )
    return ()
