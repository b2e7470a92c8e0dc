"""Safetensors files by hand."""

from __future__ import annotations

import json


def file_of(header: object, data: bytes = b"", *, pad: str = "") -> bytes:
    """A safetensors file; `header` is JSON text, or what to make it of."""
    text = (header if isinstance(header, str) else json.dumps(header)) + pad
    raw = text.encode("utf-8", "surrogatepass")
    return len(raw).to_bytes(8, "little") + raw + data


def entry(
    begin: int, end: int, dtype: str = "U8", shape: list[int] | None = None, **more: object
) -> dict[str, object]:
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}
