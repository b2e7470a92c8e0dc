"""Keep the tensors of a quantized weight together, and refuse to compute with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptkit import quantized
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import UsageError
from ckptkit.core.text import plural, quoted
from ckptkit.quantized import Quantization

if TYPE_CHECKING:
    from ckptkit.quantized import QuantizedWeight


def refuse(ck: Checkpoint, names: Iterable[str] | None, what: str) -> None:
    """Raise UsageError if some tensors (all, without names) are codes or scales: `what` is why."""
    found = quantized.find(ck)
    group = next(found.touching(found.by_member if names is None else names), None)
    if group is not None:
        raise UsageError(
            f"{group.name!r} is quantized as {group.label} ({group.family}): {what}",
            where=ck.name,
            hint=instead(ck),
        )


def instead(ck: Checkpoint) -> str:
    """Return the command that makes numbers of codes and scales."""
    return "dequantize it first: `ckptkit convert {where} {new} --dequantize bfloat16`"


def refuse_mixture(checkpoints: Sequence[Checkpoint]) -> None:
    """Raise UsageError for weights quantized in different ways, or floats under their names."""
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
                    ck, f"{name!r} is quantized as {one.label} ({one.family}) in one of them only"
                )
    if len(known) > 1:
        (_, first), (ck, second), *_ = known.values()
        raise _mixed(
            ck,
            f"weights are quantized as {first.family} in one of them, as {second.family} in "
            "another",
        )


def _mixed(ck: Checkpoint, what: str) -> UsageError:
    return UsageError(f"{what}: no configuration describes both", where=ck.name, hint=instead(ck))


def followed(ck: Checkpoint, names: Mapping[str, str]) -> tuple[dict[str, str], Checkpoint]:
    """Return names in which tensors of a weight stay together; the checkpoint that knows them.

    Where one tensor of a group gets another module, the others follow. Raises UsageError for a new
    name by which the weight would no longer be known for what it is.
    """
    found = quantized.find(ck)
    made = dict(names)
    moved: dict[str, str] = {}
    for group in found.touching(names):
        stem = group.name[: group.name.rfind(".") + 1]
        new = _stem(group, stem, names)
        made.update((member, new + member[len(stem) :]) for member in group.members)
        moved[group.name] = new + group.name[len(stem) :]
    return made, replace(ck, extras=_header(ck.extras, moved)) if moved else ck


def _stem(group: QuantizedWeight, stem: str, names: Mapping[str, str]) -> str:
    """Return the new stem if all new names agree on one."""
    stems = set()
    for member in group.members:
        rest = member[len(stem) :]
        new = names.get(member)
        if new is not None and not new.endswith(rest):
            raise UsageError(
                f"{member!r} is a part of {group.name!r} ({group.family}) and cannot be called "
                f"{new!r}",
                hint="rename modules as wholes, or dequantize first",
            )
        if new is not None:
            stems.add(new.removesuffix(rest))
    if len(stems) > 1:
        raise UsageError(
            f"the parts of {group.name!r} ({group.family}) would go to {quoted(sorted(stems))}"
        )
    return stems.pop()


def _header(metadata: Mapping[str, str], moved: Mapping[str, str]) -> dict[str, str]:
    """Return the strings of a container that describe quantized weights, with other names."""
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


def completed(found: Quantization, hits: set[str]) -> set[str]:
    """Return the names that were selected, with all tensors of the weights that they name."""
    whole = (group for group in found.groups if group.parts[0] in hits or group.name in hits)
    return hits.union(*(group.members for group in whole))


def torn(found: Quantization, kept: set[str]) -> list[str]:
    """Return a warning about weights of which only some tensors are kept."""
    names = [
        group.name
        for group in found.groups
        if 0 < len(kept.intersection(group.parts)) < len(group.parts)
    ]
    return (
        [
            f"kept in part only, and of no use so: {plural(len(names), 'quantized weight')}: "
            f"{quoted(names)}"
        ]
        if names
        else []
    )
