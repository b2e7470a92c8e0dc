"""The class Checkpoint. Every reader returns a Checkpoint, and every writer takes a Checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias

from ckptkit.core import arguments, hooks
from ckptkit.core.bytesource import ByteSource, Folder
from ckptkit.core.errors import CkptkitError, UnknownNameError, UnsupportedError, UsageError
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import argument, escape, plural, shell_command, size
from ckptkit.core.tree import Global, Node, Object, children, find, join
from ckptkit.core.weights import (
    Weights,
    as_tensor,
    has_tensors,
    is_optimizer,
    locate,
    refuse_change,
)

if TYPE_CHECKING:
    from ckptkit.core.tensor import TypedStorage
    from ckptkit.core.tree import ByteString, Pairs, SetNode, StoredBytes, StoredList


@dataclass(frozen=True, slots=True)
class PartOf:
    """Facts about a file that contains one rank or one shard of a checkpoint.

    ``name`` describes the file ("rank 0 of 2 of an FSDP checkpoint"). ``detail`` describes the
    tensors in the file. ``folder`` is the folder with all files of the checkpoint, or None if this
    folder is unknown. ``alone`` is True if ckptkit can read the file without the other files
    (option `part_only`).
    """

    kind: str
    name: str
    detail: str = ""
    folder: str | None = None
    alone: bool = True

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}" if self.detail else self.name

    def refusal(self, what: str = "this requires the complete checkpoint") -> UnsupportedError:
        """Return the error for a command that requires the complete checkpoint."""
        return UnsupportedError(f"is {self}; {what}", hint=self.hint)

    @property
    def files(self) -> str:
        """The files of the complete checkpoint, for messages."""
        return "all files of the split model" if self.kind == "split" else "the files of all ranks"

    @property
    def hint(self) -> str:
        """A hint that names the command to use for the complete checkpoint."""
        complete = f"put {self.files} into one folder and pass the folder"
        if self.folder:
            command = shell_command(
                ("ckptkit", "convert", *argument(self.folder), "out.safetensors")
            )
            complete = f"the folder contains the complete checkpoint: `{command}`"
        return f"{complete}; --part-only reads only this file" if self.alone else complete


class NoOpWarning(str):
    """A warning that a step is a no-op. With --strict, the step fails."""


@dataclass(frozen=True, slots=True)
class Beside:
    """Entries from separate files, such as optimizer.pt in the folder of model.safetensors.

    ``files`` maps each entry to the name of its file. ``weights`` is the name of the entry that
    contains the weights. ``unordered`` is True if the order of the weights in their file may differ
    from the order of the model's parameters.
    """

    files: Mapping[str, str]
    weights: str
    unordered: bool


Entry: TypeAlias = (
    "Tensor | TypedStorage | dict[Any, Entry] | list[Entry] | tuple[Entry, ...] | str | bytes | "
    "bool | int | float | complex | Global | Object | SetNode | Pairs | ByteString | StoredBytes | "
    "StoredList | None"
)  # the values that a checkpoint can contain


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """A tree of plain values and tensors. ckptkit reads the elements of a tensor on demand.

    Contents:

    * ``root``: the tree.
    * ``extras``: strings that the file stores outside the tree (safetensors' ``__metadata__``).
    * ``globals``: all classes and functions that occur in the pickles of the file.
    * ``logical``: maps the id of each dequantized tensor to a pair (tensor, its quantized weight).
    * ``companions``: names and bytes of files that belong in the folder of the weights.

    Source:

    * ``format``: the name of the file format.
    * ``origin``: data that only the code of this file format uses.
    * ``key``: the path of the entry that contains the weights.
    * ``part_only``: True to accept a single rank's file.
    * ``part``: the rank or shard in the file, or None if the file seems complete.
    * ``folder``: the folder that the caller named, if the source is a file in this folder.
    * ``beside``: the entries that were separate files in the folder of the weights.
    * ``about``: a description of the layout of a folder, or of the compression of a file.
    * ``version``: the version of the file format, if `inspect` shows it.
    * ``model``: the architecture of the model, if the file names it.
    * ``words``: the options ``--parts`` and ``--copies`` with which the folder was read. The
      commands in messages repeat these options.

    Messages:

    * ``warnings``: the warnings of readers and transforms.
    * ``notes``: the changes that transforms made.
    * ``reports``: the changes that rule steps made.
    """

    root: Node
    format: str = ""
    source: ByteSource | Folder | None = None
    extras: Mapping[str, str] = field(default_factory=dict)
    globals: tuple[Global, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    origin: object = None
    key: str | None = None
    part_only: bool = False
    about: str = ""
    version: str = ""
    model: str = ""
    companions: tuple[tuple[str, bytes], ...] = ()
    logical: object = None
    folder: Folder | None = None
    beside: Beside | None = None
    words: tuple[str, ...] = ()
    reports: tuple[Any, ...] = ()
    part: PartOf | None = None

    @cached_property
    def selection(self) -> Weights | None:
        """The weights and their path in the tree. None if the checkpoint contains no weights.

        Raises AmbiguousError if several entries may be the weights. Raises UsageError if the entry
        `key` is not a mapping of tensors.
        """
        try:
            return locate(self.root, self.key)
        except CkptkitError as error:
            raise error.at(self.name or "") from error.__cause__

    def require_complete(self) -> Checkpoint:
        """Return this checkpoint if it is complete or `part_only` is set.

        Raises UnsupportedError otherwise.
        """
        if self.part is not None and not self.part_only:
            raise self.part.refusal().at(self.name or "")
        return self

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The state_dict: a read-only mapping from names to tensors, in the order of the file.

        Raises UsageError if the checkpoint has no state_dict.
        """
        return self.required.tensors

    @property
    def unordered(self) -> bool:
        """True if the order of the weights may differ from the order in the optimizer state."""
        return self.beside is not None and self.beside.unordered

    @property
    def required(self) -> Weights:
        """The weights and their path in the tree.

        Raises UsageError if the checkpoint contains no weights, or if the weights contain no
        tensors but other entries do.
        """
        if self.selection is None:
            if is_optimizer(self.root):
                raise UsageError(
                    "contains the state of an optimizer and no weights",
                    where=self.name,
                    hint="the weights are in another file",
                )
            if as_tensor(self.root) is not None:
                raise UsageError(
                    f"is one tensor{_class_of(self.root)}, not a mapping from names to tensors",
                    where=self.name,
                    hint="`ckptkit wrap --key weight {where} {new}` names the tensor 'weight'",
                )
            raise UsageError(
                "contains no mapping from names to tensors",
                where=self.name,
                hint="`ckptkit inspect {where}` shows what it contains",
            )
        if not self.selection.hold_tensors and has_tensors(self.root):
            raise UsageError(
                "the weights contain no tensors, but other entries do",
                where=self.name,
                hint="use --key to name the entry that contains the weights",
            )
        return self.selection

    @property
    def name(self) -> str | None:
        """The name of the file or folder, for messages."""
        return self.source.name if self.source is not None else None

    def with_root(
        self, root: Node, *, notes: Iterable[str] = (), warnings: Iterable[str] = ()
    ) -> Checkpoint:
        """Return this checkpoint with the tree `root` and additional notes and warnings."""
        return replace(
            self,
            root=root,
            notes=(*self.notes, *notes),
            warnings=(*self.warnings, *warnings),
        )

    def unchanged(self, why: str) -> Checkpoint:
        """Return this checkpoint with the warning `why` that a step is a no-op."""
        return self.with_root(self.root, warnings=[NoOpWarning(why)])

    @property
    def chosen(self) -> tuple[str, ...]:
        """The command-line options that select the weights of this checkpoint."""
        return (*(() if self.key is None else ("--key", self.key)), *self.words)

    def with_key(self, key: str | None) -> Checkpoint:
        """Return a checkpoint whose weights are the entry at the dotted path `key`."""
        return replace(self, key=key)

    def __getitem__(self, key: Any) -> Entry:
        """Return the entry with the key `key` at the root, or at the dotted path `key`.

        Raises UnknownNameError (a KeyError) if the entry does not exist.
        """
        try:
            if isinstance(self.root, dict) and isinstance(key, str) and key in self.root:
                return _plain_entry(self.root[key])
            for each, value in children(self.root):
                if each == key and type(each) is type(key):
                    return _plain_entry(value)
        except RecursionError:
            pass  # a key is nested too deep for CPython, which compares tuples recursively
        if not isinstance(key, str):
            raise UnknownNameError(f"there is no entry {key!r}", where=self.name)
        try:
            return _plain_entry(find(self.root, key)[1])
        except UnknownNameError as error:
            if self._has_weight(key):
                error.hint = f"ck.weights[{key!r}] is the weight of that name"
            raise error.at(self.name or "") from None

    def _has_weight(self, name: str) -> bool:
        try:
            return self.selection is not None and name in self.selection.nodes
        except CkptkitError:
            return False

    __setitem__ = __delitem__ = refuse_change

    def __contains__(self, key: object) -> bool:
        """Return True if `ck[key]` exists."""
        try:
            self[key]
        except UnknownNameError:
            return False
        return True

    def __iter__(self) -> Iterator[Any]:
        """Iterate over `keys`."""
        return iter(self.keys())

    def __len__(self) -> int:
        """Return the number of entries at the root."""
        return len(self.keys())

    def __bool__(self) -> bool:
        """Return True, even without entries."""
        return True

    def keys(self) -> list[Any]:
        """Return the keys of the root, in the order of the file."""
        return [key for key, _ in children(self.root)]

    def items(self) -> list[tuple[Any, Entry]]:
        """Return the entries at the root, each with its key."""
        return [(key, _plain_entry(value)) for key, value in children(self.root)]

    def get(self, key: Any, default: Entry = None) -> Entry:
        """Return `ck[key]`, or `default` if it does not exist."""
        try:
            return self[key]
        except UnknownNameError:
            return default

    def with_value(self, path: str, value: object) -> Checkpoint:
        """Return a checkpoint in which the entry at the dotted `path` is `value`.

        `value` is any value that `ckptkit.save` accepts: plain values, torch tensors, numpy arrays,
        tensors of checkpoints, and containers of these.
        """
        made: Checkpoint = hooks.with_value(self, path, value)
        return made

    def without(self, path: str) -> Checkpoint:
        """Return a checkpoint without the entry at the dotted `path`."""
        made: Checkpoint = hooks.drop_entry(self, arguments.text("path", path))
        return made

    def map(self, function: Callable[..., Any], keys: str | Iterable[str] = "*") -> Checkpoint:
        """Return a checkpoint with `function` applied to the weights that match a glob of `keys`.

        The argument of `function` is a torch tensor on the CPU. The result is a tensor or a numpy
        array. For each weight, ckptkit calls `function` twice, so `function` must return equal
        results for equal tensors. The first call finds the shape of the result. In the first call,
        the argument is a meta tensor, or the weight if `function` fails on meta tensors. The second
        call happens when the checkpoint is written. Only one weight at a time is in memory.
        """
        made: Checkpoint = hooks.map_weights(self, function, keys)
        return made

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Return one line that describes the checkpoint.

        The line contains no memory addresses. This method reads only headers and never raises.
        """
        return f"<Checkpoint {self.heading}>"

    def _repr_html_(self) -> str:
        """Return HTML for notebooks, with tables of the weights and the other entries."""
        html: str = hooks.html(self)
        return html

    @property
    def heading(self) -> str:
        """One line with name, format, number of tensors and parameters, and size. Never raises."""
        where = escape(": ".join(filter(None, (self.name, self.format))) or "made here")
        try:
            weights = self.selection
        except CkptkitError as error:
            return f"{where}: {escape(error.message)}"
        if weights is None:
            return f"{where}: no weights"
        tensors = weights.tensors.values()
        different = {
            (id(each.storage or each), each.offset, each.shape): each.numel for each in tensors
        }
        parameters, nbytes = sum(different.values()), sum(each.nbytes for each in tensors)
        place = f" in {escape(join(weights.path))}" if weights.path else ""
        count = plural(len(tensors), "tensor")
        return f"{where}: {count}, {parameters:,} parameters, {size(nbytes)}{place}"

    def close(self) -> None:
        """Close the files. Tensors that were not read before can no longer be read."""
        if self.source is not None:
            self.source.close()


Source: TypeAlias = (
    str | os.PathLike[str] | bytes | IO[bytes] | Mapping[Any, Any] | Checkpoint
)  # the types that functions accept as a checkpoint


def opened(source: Source) -> Checkpoint:
    """Return `source` if it is a Checkpoint. Otherwise, open `source` and return its checkpoint."""
    if isinstance(source, Checkpoint):
        return source
    made: Checkpoint = hooks.open_checkpoint(source)
    return made


P = ParamSpec("P")


def edit(
    function: Callable[Concatenate[Checkpoint, P], Checkpoint],
) -> Callable[Concatenate[Source, P], Checkpoint]:
    """Return a wrapper of `function` that accepts any Source and checks its arguments."""
    made: Any = arguments.checked(function, {"Checkpoint": lambda _, source: opened(source)})
    return made  # type: ignore[no-any-return]


def several(sources: Iterable[Source]) -> list[Checkpoint]:
    """Open several checkpoints. Raise ArgumentError if `sources` is a single checkpoint."""
    if isinstance(sources, (str, bytes, os.PathLike, Mapping, Checkpoint)) or not isinstance(
        sources, Iterable
    ):
        raise arguments.wrong("checkpoints", "a list of checkpoints", sources)
    return [opened(each) for each in sources]


def _plain_entry(node: Node) -> Entry:
    """Return the tensor or number that an Object constructs. Return other nodes unchanged."""
    entry: Entry = node
    if isinstance(node, Object):
        tensor = node.tensor
        if tensor is not None and tensor.layout == "strided" and tensor.dtype.kind != "quantized":
            return tensor
        entry = node if node.value is None else node.value
    return entry


def _class_of(node: Node) -> str:
    """Return `` of class C`` if a node calls ``_rebuild_from_type_v2(function, C, ...)``."""
    args = node.args if isinstance(node, Object) else ()
    made = args[1] if isinstance(args, tuple) and len(args) > 2 else None
    return f" of class {escape(str(made))}" if isinstance(made, Global) else ""
