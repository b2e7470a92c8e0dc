"""Select weights by globs, and keep the tensors of a quantized weight together.

Arithmetic on codes raises an error.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import translate
from typing import TYPE_CHECKING

from ckptkit import quantized
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import UsageError
from ckptkit.core.text import (
    entries,
    flatten,
    output_name,
    plural,
    quoted,
    shell_command,
    shell_word,
)
from ckptkit.quantized import Quantization

if TYPE_CHECKING:
    from ckptkit.quantized import QuantizedWeight

DROPPED_BY_NAME = 4  # maximum number of weights that a suggested command drops


def refuse(ck: Checkpoint, names: Iterable[str] | None, what: str) -> None:
    """Raise UsageError if a tensor in `names` belongs to a quantized weight.

    If `names` is None, check all tensors. The message ends with the reason `what`.
    """
    found = quantized.find(ck)
    group = next(found.touching(found.by_member if names is None else names), None)
    if group is not None:
        raise UsageError(
            f"{group.name!r} is quantized as {group.label} ({group.family}): {what}",
            where=ck.name,
            hint=dequantize_hint(ck),
        )


def dequantize_hint(ck: Checkpoint) -> str:
    """Return a hint with the command that dequantizes the checkpoint.

    The command drops the weights that ckptkit cannot dequantize.
    """
    unread = quantized.find(ck).unread
    if len(unread) > DROPPED_BY_NAME:
        return unread[0].hint or "`ckptkit help quantized` lists what ckptkit dequantizes"
    names = [name for group in unread for name in group.members]
    drops = shell_command(
        ("--dequantize", "bfloat16", *flatten(("--drop", each) for each in names))
    )
    new = "{new}"
    if ck.format == "gguf" and ck.name:  # one output file, even if `ck` is a folder
        new = shell_word(output_name(ck.name, "new", ".safetensors"))
    command = f"`ckptkit convert {{where}} {new} {drops}`"
    if unread:
        return f"{command} writes the other tensors"
    return f"dequantize it first: {command}"


def refuse_mixture(checkpoints: Sequence[Checkpoint]) -> None:
    """Raise UsageError for checkpoints that are not quantized in the same way.

    There are two cases: the checkpoints are quantized by different methods, or only one of two
    checkpoints quantizes a weight that both contain.
    """
    known: dict[str, tuple[Checkpoint, QuantizedWeight]] = {}
    owners: dict[str, QuantizedWeight | None] = {}
    for ck in checkpoints:
        found = quantized.find(ck)
        for group in found.groups:
            known.setdefault(group.family, (ck, group))
        here: dict[str, QuantizedWeight | None] = {
            **dict.fromkeys(ck.required.nodes),
            **found.by_member,
            **{each.name: each for each in found.groups},
        }
        for name, owner in here.items():
            before = owners.setdefault(name, owner)
            one = owner or before
            if one is not None and (before is None or owner is None):
                raise _mixed(
                    ck, f"only one checkpoint quantizes {name!r} as {one.label} ({one.family})"
                )
    if len(known) > 1:
        (_, first), (ck, second), *_ = known.values()
        raise _mixed(
            ck,
            f"one checkpoint has weights quantized as {first.family}, another "
            f"checkpoint has weights quantized as {second.family}",
        )


def _mixed(ck: Checkpoint, what: str) -> UsageError:
    return UsageError(
        f"{what}: a configuration describes only one quantization",
        where=ck.name,
        hint=dequantize_hint(ck),
    )


def rename_together(ck: Checkpoint, names: Mapping[str, str]) -> tuple[dict[str, str], Checkpoint]:
    """Rename all tensors of a quantized weight if `names` renames one of them.

    Return a dict from old to new names for all renamed tensors, and the checkpoint with the new
    names in its quantization metadata. Raises UsageError if the new names do not have the suffixes
    that mark a quantized weight.
    """
    found = quantized.find(ck)
    made = dict(names)
    if not found.groups:
        return made, ck
    moved: dict[str, str] = {}
    for group in found.touching(names):
        stem = group.name[: group.name.rfind(".") + 1]
        new = _stem(group, stem, names)
        made.update((member, new + member[len(stem) :]) for member in group.members)
        moved[group.name] = new + group.name[len(stem) :]
    return made, replace(ck, extras=_header(ck.extras, moved)) if moved else ck


def _stem(group: QuantizedWeight, stem: str, names: Mapping[str, str]) -> str:
    """Return the new module path of a quantized weight. Raises UsageError if `names` moves the
    tensors of the weight to different modules."""
    stems = set()
    for member in group.members:
        rest = member[len(stem) :]
        new = names.get(member)
        if new is not None and not new.endswith(rest):
            raise UsageError(
                f"{member!r} is a part of {group.name!r} ({group.family}) and cannot be renamed to "
                f"{new!r}",
                hint="rename whole modules, or dequantize first",
            )
        if new is not None:
            stems.add(new.removesuffix(rest))
    if len(stems) > 1:
        raise UsageError(
            f"the parts of {group.name!r} ({group.family}) would move to several modules: "
            f"{quoted(sorted(stems))}"
        )
    return stems.pop()


def _header(metadata: Mapping[str, str], moved: Mapping[str, str]) -> dict[str, str]:
    """Rename weights in the safetensors metadata that describes quantized weights."""
    import json

    new = {moved.get(key, key): text for key, text in metadata.items()}
    if "tensor_names" in new:
        names = json.loads(new["tensor_names"])
        new["tensor_names"] = json.dumps([moved.get(name, name) for name in names])
    if "_quantization_metadata" in new:
        recorded = json.loads(new["_quantization_metadata"])
        modules = {
            old.removesuffix(".weight"): name.removesuffix(".weight") for old, name in moved.items()
        }
        recorded["layers"] = {
            modules.get(key, key): value for key, value in recorded.get("layers", {}).items()
        }
        new["_quantization_metadata"] = json.dumps(recorded)
    return new


def matching(globs: Iterable[str], names: Collection[str]) -> dict[str, Collection[str]]:
    """Map each glob to the names that it matches, in the order of `names`.

    Raises UsageError for a glob without a name.
    """
    found: dict[str, Collection[str]] = {}
    for glob in globs:
        matches = re.compile(translate(glob)).match
        found[glob] = dict.fromkeys(filter(matches, names))  # fast to search, unlike a list
        if names and not found[glob]:
            hint = entries(glob, [*names], "weights")
            raise UsageError(f"no weight matches {glob!r}", hint=hint)
    return found


def with_members(found: Quantization, hits: set[str]) -> set[str]:
    """Return the names in `hits`.

    If `hits` contains the name of a quantized weight, or the name of the tensor with its codes,
    also return the names of all tensors of this weight.
    """
    whole = (group for group in found.groups if group.parts[0] in hits or group.name in hits)
    return hits.union(*(group.members for group in whole))


def incomplete_warning(found: Quantization, kept: set[str]) -> list[str]:
    """Return a warning if a selection keeps only some tensors of a quantized weight."""
    names = [
        group.name
        for group in found.groups
        if 0 < len(kept.intersection(group.parts)) < len(group.parts)
    ]
    count = plural(len(names), "quantized weight")
    what = f"only some tensors of {count} are kept, so these weights are incomplete and useless"
    return [f"{what}: {quoted(names)}"] if names else []
