"""Digests of tensors that are equal wherever their elements are, in whatever format.

``sha256`` is over the elements alone: contiguous, row-major, little-endian. ``tensor_id`` is
SHA-256 over one line of ASCII text, the dtype as torch calls it, a space, the sizes joined by
commas, a newline; and then those same bytes::

    (printf 'float32 16,3,3,3\\n'; cat elements.bin) | sha256sum
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ckptkit import compute
from ckptkit.core.errors import CkptkitError, TensorError
from ckptkit.core.tensor import Tensor

Named = tuple[str, Tensor]
R = TypeVar("R")


def sha256(tensor: Tensor, refusal: TensorError | None = None) -> str | None:
    """Return the hexadecimal SHA-256 of the elements, None where they have no plain bytes.

    Such are tensors on meta, in a sparse layout, with elements smaller than a byte that are out
    of order, or with a sign that their dtype does not have.
    """
    try:
        return _hash(tensor, b"", refusal)
    except TensorError:
        return None


def tensor_id(tensor: Tensor, refusal: TensorError | None = None) -> str:
    """Hexadecimal SHA-256 of dtype, shape and elements.

    Raises TensorError where there are no elements to read, or many more than the storage holds; and
    `refusal`, which says that there were too many before.
    """
    return _hash(tensor, f"{tensor.dtype} {','.join(map(str, tensor.shape))}\n".encode(), refusal)


def sha256_each(
    tensors: Iterable[Named], progress: Callable[[int], None] = lambda _: None
) -> Iterator[str | None]:
    """Yield `sha256` of each tensor, in order, several at a time.

    Errors name the tensor; `progress` gets bytes.
    """
    return _each(sha256, tensors, progress)


def tensor_id_each(
    tensors: Iterable[Named], progress: Callable[[int], None] = lambda _: None
) -> Iterator[str]:
    """`tensor_id` of each tensor, likewise."""
    return _each(tensor_id, tensors, progress)


def _each(
    function: Callable[[Tensor, TensorError | None], R],
    tensors: Iterable[Named],
    progress: Callable[[int], None],
) -> Iterator[R]:
    allowance = compute.Allowance()

    def digest(row: tuple[str, Tensor, TensorError | None]) -> tuple[R, int]:
        name, tensor, refusal = row
        try:
            return function(tensor, refusal), tensor.nbytes
        except CkptkitError as error:
            error.message = f"{name}: {error.message}"
            raise

    rows = ((name, tensor, allowance.refusal(tensor)) for name, tensor in tensors)
    for found, nbytes in compute.ordered(digest, rows, lambda row: row[1].nbytes):
        progress(nbytes)
        yield found


def _hash(tensor: Tensor, head: bytes, refusal: TensorError | None) -> str:
    refusal = refusal or compute.Allowance().refusal(tensor)
    if refusal is not None:
        raise refusal
    digest = hashlib.sha256(head)
    for chunk in compute.flow(compute.contiguous(tensor).locate()):
        digest.update(chunk)
    return digest.hexdigest()
