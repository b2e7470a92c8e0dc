"""What a tensor weighs: digests that are equal wherever its elements are, in whatever format.

``sha256`` is over the elements alone: contiguous, row-major, little-endian. ``tensor_id`` is SHA-256 over one line of
ASCII text, the dtype as torch calls it, a space, the sizes joined by commas, a newline; and then those same bytes::

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


def sha256(tensor: Tensor) -> str | None:
    """Hexadecimal SHA-256 of the elements; None where they have no plain bytes: on meta, in a sparse layout, with
    elements smaller than a byte that are out of order, with a sign that their dtype does not have."""
    try:
        return _hash(tensor, b"")
    except TensorError:
        return None


def tensor_id(tensor: Tensor) -> str:
    """Hexadecimal SHA-256 of dtype, shape and elements. Raises TensorError where there are no elements to read."""
    return _hash(tensor, f"{tensor.dtype} {','.join(map(str, tensor.shape))}\n".encode())


def sha256_each(tensors: Iterable[Named], progress: Callable[[int], None] = lambda _: None) -> Iterator[str | None]:
    """`sha256` of each tensor, in order, several at a time. Errors name the tensor; `progress` gets bytes."""
    return _each(sha256, tensors, progress)


def tensor_id_each(tensors: Iterable[Named], progress: Callable[[int], None] = lambda _: None) -> Iterator[str]:
    """`tensor_id` of each tensor, likewise."""
    return _each(tensor_id, tensors, progress)


def _each(function: Callable[[Tensor], R], tensors: Iterable[Named], progress: Callable[[int], None]) -> Iterator[R]:
    def digest(named: Named) -> tuple[R, int]:
        name, tensor = named
        try:
            return function(tensor), tensor.nbytes
        except CkptkitError as error:
            error.message = f"{name}: {error.message}"
            raise

    for found, nbytes in compute.ordered(digest, tensors, lambda named: named[1].nbytes):
        progress(nbytes)
        yield found


def _hash(tensor: Tensor, head: bytes) -> str:
    digest = hashlib.sha256(head)
    for chunk in compute.flow(compute.contiguous(tensor).locate()):
        digest.update(chunk)
    return digest.hexdigest()
