"""The dtypes of torch and the names of their tensors on the CPU and on a GPU.

``python -m ckptkit.trainer.examples.tensor_types``; the GPU column is asked of a GPU where there
is one, and else derived from the name on the CPU.
"""

from __future__ import annotations

import torch

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip


def rows() -> list[tuple[str, str, str]]:
    """Return dtype, type of a tensor on the CPU, and on a GPU."""
    return [(str(dtype), type_on(dtype, "cpu"), type_on(dtype, "cuda")) for dtype in DTYPES]


def type_on(dtype: torch.dtype, device: str) -> str:
    """Return what ``tensor.type()`` says."""
    if device == "cuda" and not torch.cuda.is_available():
        return type_on(dtype, "cpu").replace("torch.", "torch.cuda.")
    name: str = torch.empty(0, dtype=dtype, device=device).type()
    return name


def main() -> None:
    for row in (("dtype", "on the CPU", "on a GPU"), *rows()):
        print("{:18}{:26}{}".format(*row))


if __name__ == "__main__":
    main()
