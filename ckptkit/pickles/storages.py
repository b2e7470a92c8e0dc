"""Persistent ids: the references of torch's pickles to storages outside the pickle.

    ('storage', class, key, location, numel)                    zip archives
    ('storage', class, key, location, numel, view_metadata)     legacy streams

``view_metadata`` is None since torch 0.4; before, it was (view_key, offset, view_size) in elements.

`numel` counts elements of the class's type; for a view, the elements of the root storage. For an
UntypedStorage, `numel` counts bytes.

torch 0.1 to 1.5 also kept the source code of each class of a pickled module. At the first use of a
class, the persistent id is ``(class, source file, source text)`` in tar files, and ``('module',
class, source file, source text)`` in legacy streams. Both strings are None if Python did not find
the source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptkit.core.dtypes import BY_STORAGE, TABLE, UINT8, DType
from ckptkit.core.errors import AmbiguousError, FormatError, TensorError
from ckptkit.core.limits import LIMITS, check
from ckptkit.core.tensor import Storage, TypedStorage
from ckptkit.core.tree import ByteString, Global, Node, StoredBytes

# Makes a Storage from key, bytes and device.
Opener = Callable[[str, int, str], Storage]


class StorageTable:
    """The storages of one pickle, one object for each key."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        # By key. A key has several classes if one of them is untyped, or if all storages are empty.
        self._known: dict[str, tuple[TypedStorage, ...]] = {}
        self._views: dict[str, tuple[TypedStorage, tuple[Node, ...]]] = {}

    def load(self, pid: Node) -> Node:
        """Return the TypedStorage of a persistent id: the same object for the same id."""
        if pid.__class__ is not tuple or not 5 <= len(pid) <= 6 or pid[0] != "storage":
            raise FormatError("pickle refers to a storage, but not by a persistent id of torch")
        made, key, location, numel = pid[1:5]
        view = pid[5] if len(pid) == 6 else None
        if key.__class__ is not str or made.__class__ is not Global or numel.__class__ is not int:
            raise FormatError(
                "the persistent id of a storage is not made of a class, a string and a number"
            )
        known = self._known.get(key)
        if known is not None:
            typed = self._again(key, known, made, location, numel)
        else:
            dtype = dtype_of_storage(made)
            if location.__class__ is not str or numel < 0:
                raise FormatError(f"storage {key!r} lacks its device or its size")
            if len(key) + len(location) > LIMITS.name_bytes:
                check("name_bytes", len(key) + len(location), "characters of a storage's name")
            if key in self._views:
                raise _two_ways(key)
            nbytes = numel if dtype is None else numel * dtype.itemsize
            typed = TypedStorage(self._opener(key, nbytes, location), dtype)
            self._known[key] = (typed,)
        return typed if view is None else self._view(typed, view)

    def __iter__(self) -> Iterator[str]:
        """Yield the key of each storage."""
        return iter(self._known)

    def itemsizes(self) -> dict[str, int]:
        """Map each key to the bytes per element, 1 if the storage is only used untyped."""
        return {
            key: max(1 if typed.dtype is None else typed.dtype.itemsize for typed in known)
            for key, known in self._known.items()
        }

    def _again(
        self, key: str, known: tuple[TypedStorage, ...], made: Global, location: Node, numel: int
    ) -> TypedStorage:
        dtype = dtype_of_storage(made)
        storage = known[0].storage
        nbytes = numel if dtype is None else numel * dtype.itemsize
        if location.__class__ is not str or location != storage.device or nbytes != storage.nbytes:
            raise _two_ways(key)
        types = {typed.dtype: typed for typed in known}
        if dtype not in types:
            # torch uses the first class for all references, except that untyped equals uint8
            if nbytes and {dtype, *types} != {UINT8, None}:
                named = sorted("untyped" if each is None else each.name for each in (dtype, *types))
                raise AmbiguousError(
                    f"storage {key!r} has several element types: {', '.join(named)}"
                )
            types[dtype] = TypedStorage(storage, dtype)
            self._known[key] = tuple(types.values())
        return types[dtype]

    def _view(self, root: TypedStorage, metadata: Node) -> TypedStorage:
        """Return a view of a storage (torch 0.1 to 0.3)."""
        if not isinstance(metadata, tuple) or len(metadata) != 3 or type(metadata[0]) is not str:
            raise FormatError("a view of a storage is not described by (key, offset, size)")
        key, offset, size = metadata
        if (
            type(offset) is not int
            or type(size) is not int
            or not 0 <= offset <= offset + size <= root.elements
        ):
            raise TensorError(
                f"a view of {size} elements from {offset} exceeds its storage of {root.elements}"
            )
        view, seen = self._views.setdefault(
            key, (TypedStorage(root.storage, root.dtype, offset, offset + size), metadata)
        )
        if seen[1:] != metadata[1:] or view.storage is not root.storage or key in self._known:
            raise _two_ways(key)
        return view


def _two_ways(key: str) -> AmbiguousError:
    return AmbiguousError(f"the file describes storage {key!r} in two ways")


def dtype_of_storage(made: Global) -> DType | None:
    """Return the element type of a storage class, None for an untyped one.

    Raises FormatError for other classes.
    """
    try:
        return _DTYPES[made.module, made.name]
    except KeyError:
        raise FormatError(f"{made} is not a storage class that ckptkit supports") from None


def storage_class(dtype: DType | None) -> Global:
    """Return the storage class of a persistent id for `dtype`: the same object each time."""
    return _CLASSES[None if dtype is None else dtype.storage]


def _scripted(dtype: DType) -> str:
    """Return TorchScript's name of the storage of a type without a storage class in torch."""
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
    """The source code of the classes in one pickle: shown as metadata, never executed."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def load(self, made: Node, text: Node) -> Global:
        """Record the source of a class, and return the class.

        Raises FormatError if `made` is not a class or `text` is not text.
        """
        if not isinstance(made, Global):
            raise FormatError("the pickle gives the source of something other than a class")
        if isinstance(text, StoredBytes):  # a str of Python 2
            check("string_bytes", text.extent.length, f"bytes of the source of {made}")
            from ckptkit.compute.operation import stream

            text = ByteString(b"".join(stream(text.extent)))
        if not isinstance(text, (str, ByteString, type(None))):
            raise FormatError(f"the source of {made} is not text")
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
            f"the file contains the source code of {len(self._texts)} classes; kept as metadata",
        )


def endian_warning(system: Node) -> tuple[str, ...]:
    """Return a warning if the file was written on a big-endian machine."""
    if isinstance(system, dict) and system.get("little_endian") is False:
        return ("written on a big-endian machine; its data is read as little-endian, as in torch",)
    return ()
