"""What a tensor weighs: digests that are equal wherever its elements are, in whatever format.

``sha256`` is over the elements alone: contiguous, row-major, little-endian. ``tensor_id`` is SHA-256 over one line of
ASCII text, the dtype as torch calls it, a space, the sizes joined by commas, a newline; and then those same bytes::

    (printf 'float32 16,3,3,3\\n'; cat elements.bin) | sha256sum
"""

from __future__ import annotations

import hashlib

from ckptkit import bridge
from ckptkit.errors import TensorError
from ckptkit.tensor import Tensor


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


def _hash(tensor: Tensor, head: bytes) -> str:
    digest = hashlib.sha256(head)
    for chunk in bridge.stream(bridge.contiguous(tensor).locate()):
        digest.update(chunk)
    return digest.hexdigest()
