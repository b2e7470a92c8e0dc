"""Change the number of rows of matrices, such as embeddings for a new vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

from ckptkit.compute.arranged import contiguous
from ckptkit.compute.filling import FILLS, MoreRows
from ckptkit.compute.numbers import FLOATS
from ckptkit.compute.operation import Concat, RecordSlice
from ckptkit.core.bytesource import Pending
from ckptkit.core.checkpoint import Checkpoint, edit
from ckptkit.core.errors import UnsupportedError, UsageError
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import flatten, plural, quoted
from ckptkit.core.tree import Node, rebuild
from ckptkit.edits import quantized_names
from ckptkit.edits.config_file import changes_of, config_of, with_changes


@edit
def resize(
    ck: Checkpoint, keys: str | Iterable[str], *, rows: int, fill: str = "mean", seed: int = 0
) -> Checkpoint:
    """Resize the weights that match `keys`, and tensors tied to them, to `rows` rows.

    `fill` determines the elements of new rows:

    - ``mean``: the mean of the old rows.
    - ``zeros``: zeros.
    - ``normal``: random numbers with the mean and standard deviation of each column. `seed` is the
      seed of the random numbers.

    If `rows` is smaller than the old number of rows, `resize` removes the last rows. If
    ``vocab_size`` in config.json equals the old number of rows, at the top or in ``text_config``,
    `resize` sets ``vocab_size`` to `rows`. Raises UsageError for a glob that matches nothing.
    Raises UnsupportedError for a tensor without rows and for a quantized tensor.
    """
    if fill not in FILLS:
        raise UsageError(f"cannot fill rows with {fill!r}", hint=f"use one of {', '.join(FILLS)}")
    if rows < 1:
        raise UsageError(f"rows must be at least 1, got {rows}")
    weights = ck.required.tensors
    chosen = set(flatten(quantized_names.matching(keys, weights).values()))
    quantized_names.refuse(ck, chosen, "ckptkit cannot add or remove rows of codes")
    views = {weights[name].elements_key for name in chosen}
    tied = {name: each for name, each in weights.items() if each.elements_key in views}
    made: dict[object, Tensor] = {}
    for name, tensor in tied.items():
        if not tensor.shape or tensor.storage is None or tensor.layout != "strided":
            raise UnsupportedError(f"{name!r} has no rows", where=ck.name)
        if rows > tensor.shape[0] and tensor.dtype.name not in FLOATS:
            what = f"cannot add rows to {name!r}: {tensor.dtype} is not a floating-point dtype"
            raise UnsupportedError(what, where=ck.name)
        if tensor.elements_key not in made and tensor.shape[0] != rows:
            made[tensor.elements_key] = _resized(tensor, rows, fill, seed)
    if not made:
        return ck.unchanged(f"all selected weights already have {rows:,} rows")
    sizes = {each.shape[0] for each in tied.values() if each.elements_key in made}

    def leaf(node: Node) -> Node:
        new = made.get(node.elements_key) if isinstance(node, Tensor) else None
        if new is None or not isinstance(node, Tensor):
            return node
        return replace(new, requires_grad=node.requires_grad, kind=node.kind)

    old = ", ".join(f"{each:,}" for each in sorted(sizes))
    names = [name for name, each in tied.items() if each.elements_key in made]
    notes = [f"{quoted(names)}: {old} -> {plural(rows, 'row')}"]
    done = ck.with_root(rebuild(ck.root, leaf), notes=notes)
    return with_changes(done, changes_of(config_of(done), "vocab_size", rows, instead_of=sizes))


def _resized(tensor: Tensor, rows: int, fill: str, seed: int) -> Tensor:
    """Return a contiguous copy of the tensor with `rows` rows."""
    shape = (rows, *tensor.shape[1:])
    unit = prod(tensor.shape[1:]) * tensor.dtype.itemsize
    old = contiguous(tensor)
    length = rows * unit
    if rows < tensor.shape[0]:
        record: RecordSlice | Pending = RecordSlice(old, 0, length)
    else:
        operation = MoreRows(tensor.dtype.name, prod(tensor.shape[1:]), fill, seed)
        more = Pending(operation, (old,), length - tensor.nbytes)
        record = Pending(Concat(), (old, more), length)
    return tensor.remade(record, shape=shape)
