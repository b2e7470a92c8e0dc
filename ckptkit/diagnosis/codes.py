"""Causes in quantized checkpoints: quantized weights, missing tensors, and how to get floats."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Container, Iterator, Sequence

from ckptkit.core.text import plural
from ckptkit.diagnosis.cause import ERROR, NOTE, WARNING, Cause
from ckptkit.diagnosis.facts import Facts, convert, edit, some
from ckptkit.quantized import families
from ckptkit.quantized.group import QuantizedWeight
from ckptkit.quantized.quantization import default_dtype

_RAGGED = (
    " Some have blocks that end short: transformers 5.23 derives the size of blocks from shapes, "
    "and then computes other values."
)


def causes(facts: Facts) -> Iterator[Cause]:
    """Yield a cause for all weights that can be dequantized, and one for each reason against it."""
    found = facts.quantized
    groups = (
        [group for group in found.groups if group.layout is not None] if found is not None else []
    )
    if groups:
        yield _readable(facts, groups)
    reasons: dict[tuple[str, str, str | None], list[str]] = {}
    for group in found.unread if found is not None else ():
        reasons.setdefault((group.family, group.reason, group.hint), []).append(group.name)
    for (family, reason, hint), names in reasons.items():
        number = plural(len(names), "quantized weight")
        what = f"{number} ({family}) cannot be dequantized: {reason}."
        yield Cause(
            "quantized-unread",
            WARNING,
            what,
            f"{some(names)}. Codes without what they mean are not numbers: nothing is guessed."
            + (f" {hint[:1].upper()}{hint[1:]}." if hint else ""),
        )
    if facts.method and not (found and found.groups):
        yield Cause(
            "quantized-config",
            NOTE,
            f"config.json says that it is quantized ({facts.method}), and no tensor is.",
            "A library that believes it looks for scales in vain: take quantization_config out.",
        )


def _readable(facts: Facts, groups: Sequence[QuantizedWeight]) -> Cause:
    kinds = Counter(f"{group.label} ({group.family})" for group in groups)
    counts = ", ".join(f"{number:,} {kind}" for kind, number in kinds.items())
    all_are_read = facts.quantized is not None and not facts.quantized.unread
    are = "is" if len(groups) == 1 else "are"
    return Cause(
        "quantized",
        ERROR if facts.needs_floats else NOTE,
        f"{len(groups):,} of its weights {are} quantized: {counts}.",
        "A model of floats cannot load them: codes are numbers together with their scales only. "
        + _read_as({group.family for group in groups})
        + (_RAGGED if any(map(_is_ragged, groups)) else ""),
        _command(facts, groups[0]) if all_are_read else None,
        {"dequantize": {}} if facts.needs_floats and all_are_read else None,
    )


def _command(facts: Facts, group: QuantizedWeight) -> str | None:
    """Return the command that makes floats, in the dtype of the model; of a folder, a folder."""
    assert facts.quantized is not None and facts.quantized.view is not None
    dtype = default_dtype(facts.quantized.view, group).name
    if os.path.isdir(facts.path):
        return edit(facts, "convert", "float", "--dequantize", dtype, suffix="")
    return convert(facts, "float", "--dequantize", dtype)


def _read_as(used: Container[str]) -> str:
    """Name the libraries whose reading of the codes of some families is followed."""
    oracles = [each.oracle for each in families() if each.name in used and each.oracle]
    return f"Read as these do: {'; '.join(dict.fromkeys(oracles))}." if oracles else ""


def _is_ragged(group: QuantizedWeight) -> bool:
    """Return whether the last blocks of 8-bit floats are smaller than the others."""
    if group.family != "fp8-block":
        return False
    assert group.layout is not None
    grid = group.layout.scales[0].grid
    return bool(group.layout.rows % grid.height or group.layout.columns % grid.width)
