"""Checkpoint: the value that every format reads into and writes from."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, BinaryIO, Concatenate, ParamSpec, TypeAlias

from ckptkit.core import above, arguments
from ckptkit.core.bytesource import ByteSource, Folder
from ckptkit.core.errors import CkptkitError, UnknownNameError, UnsupportedError, UsageError
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import argument, escape, plural, shell_command, size
from ckptkit.core.tree import Global, Node, Object, children, find, join
from ckptkit.core.weights import Weights, as_tensor, has_tensors, is_optimizer, locate


@dataclass(frozen=True, slots=True)
class PartOf:
    """A file that is one part of a checkpoint.

    ``name`` is a phrase ("rank 0 of 2 of an FSDP checkpoint"), ``detail`` what of the tensors it
    holds, ``folder`` where the whole is, None if nothing tells. ``alone``: it can be read alone.
    """

    kind: str
    name: str
    detail: str
    folder: str | None
    alone: bool = True

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}" if self.detail else self.name

    def refusal(self, what: str = "this requires the complete checkpoint") -> UnsupportedError:
        """The error of a command that is for whole checkpoints."""
        return UnsupportedError(f"is {self}; {what}", hint=self.hint)

    @property
    def hint(self) -> str:
        """The command to use instead."""
        whole = "the whole is made of all parts, in one folder"
        if self.folder:
            command = shell_command(
                ("ckptkit", "convert", *argument(self.folder), "out.safetensors")
            )
            whole = f"the whole is the folder: `{command}`"
        return f"{whole}; --part-only takes this part alone" if self.alone else whole


class NoEffect(str):
    """A warning that something asked for changes nothing; an error with --strict."""


@dataclass(frozen=True, slots=True)
class Beside:
    """Entries of a checkpoint that were files: the name of each file, and the entry of the weights.

    ``unordered``: the file of the weights does not keep the order in which a model has them.
    """

    files: Mapping[str, str]
    weights: str
    unordered: bool


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """A tree of plain values with lazy tensors, and where it came from.

    ``format`` is the name of the format that it was read from; ``extras`` the strings that a
    container keeps beside the tree (safetensors' ``__metadata__``); ``globals`` every class and
    function that its pickles name; ``warnings`` what a reader or transform noticed; ``notes`` what
    transforms did; ``origin`` is opaque to all but the format that set it; ``key`` names the entry
    to take as the weights instead of looking for it. ``part_only`` says that a part of a checkpoint
    is meant as it is; ``about`` is a phrase on what a folder was made of; ``companions`` are files
    (name and bytes) that belong beside the weights where these are written as a folder; ``logical``
    are the tensors that stand for quantized weights, where somebody looks through these
    (:mod:`ckptkit.quantized`). ``folder`` is the folder that was named, where the source is one
    file of it; ``beside`` are the entries that were files of their own in that folder;
    ``words`` are the options of a command that reads the same folder alike.
    ``reports`` are those of steps of rules. ``part`` is the part of a checkpoint of several
    processes that the file is, None if the file is complete as far as it can be known.
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
    companions: tuple[tuple[str, bytes], ...] = ()
    logical: object = None
    folder: Folder | None = None
    beside: Beside | None = None
    words: tuple[str, ...] = ()
    reports: tuple[Any, ...] = ()
    part: PartOf | None = None

    @cached_property
    def selection(self) -> Weights | None:
        """Location of the weights in the tree, None if there are none.

        Raises AmbiguousError, and UsageError for a `key` that names none.
        """
        try:
            return locate(self.root, self.key)
        except CkptkitError as error:
            raise error.at(self.name or "") from error.__cause__

    def whole(self) -> Checkpoint:
        """Return this checkpoint. Raises UnsupportedError for a part of one, unless `part_only`."""
        if self.part is not None and not self.part_only:
            raise self.part.refusal().at(self.name or "")
        return self

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The state_dict: name -> Tensor, in the order of the file. It cannot be changed.

        Raises UsageError if there is none.
        """
        return self.required.tensors

    @property
    def unordered(self) -> bool:
        """Return whether an optimizer may number the weights in another order."""
        return self.beside is not None and self.beside.unordered

    @property
    def required(self) -> Weights:
        """`selection`, or UsageError: also where it is empty and tensors are elsewhere."""
        if self.selection is None:
            if is_optimizer(self.root):
                raise UsageError(
                    "holds the state of an optimizer, and no weights",
                    where=self.name,
                    hint="the model is in another file",
                )
            if as_tensor(self.root) is not None:
                raise UsageError(
                    f"is one tensor{_class_of(self.root)}, not a mapping from names to tensors",
                    where=self.name,
                    hint="`ckptkit wrap --key weight {where} {new}` gives it a name",
                )
            raise UsageError(
                "holds no mapping from names to tensors",
                where=self.name,
                hint="`ckptkit inspect {where}` shows what it contains",
            )
        if not self.selection.hold_tensors and has_tensors(self.root):
            raise UsageError(
                "its weights hold no tensors, and other entries do",
                where=self.name,
                hint="name the entry with --key",
            )
        return self.selection

    @property
    def name(self) -> str | None:
        """The file or folder, for messages."""
        return self.source.name if self.source is not None else None

    def with_root(
        self, root: Node, *, notes: Iterable[str] = (), warnings: Iterable[str] = ()
    ) -> Checkpoint:
        """Return this checkpoint with another tree, and notes and warnings about the change."""
        return replace(
            self,
            root=root,
            notes=(*self.notes, *notes),
            warnings=(*self.warnings, *warnings),
        )

    @property
    def chosen(self) -> tuple[str, ...]:
        """Return the options of a command that takes the same weights."""
        return (*(() if self.key is None else ("--key", self.key)), *self.words)

    def with_key(self, key: str | None) -> Checkpoint:
        """Return this checkpoint with the weights taken from the entry `key`."""
        return replace(self, key=key)

    def __getitem__(self, key: Any) -> Any:
        """Return an entry: one of `keys`, or the dotted path of a value inside of these.

        Raises UnknownNameError (a KeyError).
        """
        try:
            if isinstance(self.root, dict) and isinstance(key, str) and key in self.root:
                return _plain_entry(self.root[key])
            for each, value in children(self.root):
                if each == key and type(each) is type(key):
                    return _plain_entry(value)
        except RecursionError:
            pass  # a key that nests too deep to be compared
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

    def __contains__(self, key: object) -> bool:
        """Return whether `ck[key]` is there."""
        try:
            self[key]
        except UnknownNameError:
            return False
        return True

    def __iter__(self) -> Iterator[Any]:
        """Iterate over `keys`."""
        return iter(self.keys())

    def __len__(self) -> int:
        """Return how many entries are at the root."""
        return len(self.keys())

    def __bool__(self) -> bool:
        """Return True, also without entries: a checkpoint is there."""
        return True

    def keys(self) -> list[Any]:
        """Return the keys of the entries at the root, in the order of the file."""
        return [key for key, _ in children(self.root)]

    def items(self) -> list[tuple[Any, Any]]:
        """Return the entries at the root, each with its key."""
        return [(key, _plain_entry(value)) for key, value in children(self.root)]

    def get(self, key: Any, default: Any = None) -> Any:
        """Return `ck[key]`, or `default` where it is not there."""
        try:
            return self[key]
        except UnknownNameError:
            return default

    def with_value(self, path: str, value: object) -> Checkpoint:
        """Return this checkpoint with another value at the dotted `path`, or a new entry there.

        `value` is anything that `ckptkit.save` takes: plain values, torch tensors, numpy arrays,
        tensors of checkpoints, and containers of these.
        """
        made: Checkpoint = above.call("set", self, path, value)
        return made

    def without(self, path: str) -> Checkpoint:
        """Return this checkpoint without the entry at the dotted `path`."""
        made: Checkpoint = above.call("drop", self, arguments.text("path", path))
        return made

    def map(self, function: Callable[..., Any], keys: str | Iterable[str] = "*") -> Checkpoint:
        """Return this checkpoint with `function` applied to the weights that match a glob.

        `function` takes a torch tensor on the CPU and returns one (or a numpy array), and gives the
        same result for the same tensor each time: it is called on a tensor of the meta device for
        the shape (or on the weight, where it cannot do with that), and on each weight when this is
        written. One weight at a time is in memory.
        """
        made: Checkpoint = above.call("map", self, function, keys)
        return made

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Return one line for the prompt, without any address.

        Reads headers only, and never fails.
        """
        return f"<Checkpoint {self.heading}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the weights and the other entries."""
        html: str = above.call("html", self)
        return html

    @property
    def heading(self) -> str:
        """One line: name, format, number of tensors, parameters and bytes. Never raises."""
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
        """Close the files that tensors are read from."""
        if self.source is not None:
            self.source.close()


Source: TypeAlias = (
    str | os.PathLike[str] | bytes | BinaryIO | Mapping[Any, Any] | Checkpoint
)  # what every function takes for a checkpoint


def opened(source: Source) -> Checkpoint:
    """Return a checkpoint as it is, or open what else stands for one."""
    if isinstance(source, Checkpoint):
        return source
    made: Checkpoint = above.call("open", source)
    return made


P = ParamSpec("P")


def edit(
    function: Callable[Concatenate[Checkpoint, P], Checkpoint],
) -> Callable[Concatenate[Source, P], Checkpoint]:
    """Make a function from Checkpoint to Checkpoint take any Source, and check its arguments."""
    made: Any = arguments.checked(function, {"Checkpoint": lambda _, source: opened(source)})
    return made  # type: ignore[no-any-return]


def several(sources: Iterable[Source]) -> list[Checkpoint]:
    """Open several checkpoints. Raises ArgumentError for one alone."""
    if isinstance(sources, (str, bytes, os.PathLike, Mapping, Checkpoint)) or not isinstance(
        sources, Iterable
    ):
        raise arguments.wrong("checkpoints", "a list of checkpoints", sources)
    return [opened(each) for each in sources]


def _plain_entry(node: Node) -> Node:
    """Return the tensor or number that a call in the file makes; any other node as it is."""
    if not isinstance(node, Object):
        return node
    tensor = node.tensor
    if tensor is not None and tensor.layout == "strided" and tensor.dtype.kind != "quantized":
        return tensor
    return node if node.value is None else node.value


def _class_of(node: Node) -> str:
    """Return `` of class C`` for a ``_rebuild_from_type_v2(function, class, ...)``."""
    args = node.args if isinstance(node, Object) else ()
    made = args[1] if isinstance(args, tuple) and len(args) > 2 else None
    return f" of class {escape(str(made))}" if isinstance(made, Global) else ""
