"""Safetensors files by hand, and JSON with repeated names."""

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


class Pairs(list[tuple[str, object]]):
    """The entries of an object, names repeated and all."""


def json_of(value: object, space: str = "", *, ascii: bool = True) -> str:
    """JSON of dicts, lists and `Pairs`, with `space` after each comma."""
    if isinstance(value, dict):
        value = Pairs(value.items())
    if isinstance(value, Pairs):
        entries = (
            f"{json.dumps(k, ensure_ascii=ascii)}:{json_of(v, space, ascii=ascii)}"
            for k, v in value
        )
        return "{" + f",{space}".join(entries) + "}"
    if isinstance(value, list):
        return "[" + f",{space}".join(json_of(each, space, ascii=ascii) for each in value) + "]"
    return json.dumps(value, ensure_ascii=ascii)
