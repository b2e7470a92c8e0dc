"""Check the content of a readable checkpoint: its objects, devices, names and quantized weights."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from glob import escape
from typing import Any

from ckptkit.analysis.advice import MIN_UNUSED, prefix_options, wrappers
from ckptkit.analysis.view_model import adapter_facts
from ckptkit.core.errors import DELTA, RUNS_CODE, CkptkitError, coded
from ckptkit.core.text import argument, flatten, plural, shell_command, without
from ckptkit.core.tree import Node, join, walk
from ckptkit.core.weights import WRAPPERS, as_tensor, is_optimizer
from ckptkit.diagnosis import container
from ckptkit.diagnosis.cause import (
    DROP_OBJECTS,
    DROPPED,
    ERROR,
    NOTE,
    WARNING,
    WEIGHTS,
    Cause,
    Facts,
    Fix,
    as_sentence,
    cause,
    some,
    together,
)  # fmt: skip
from ckptkit.formats.table import GGUF
from ckptkit.lora.reading import is_adapter, read_adapter
from ckptkit.quantized import families
from ckptkit.quantized.group import QuantizedWeight
from ckptkit.quantized.quantization import default_dtype

BLOAT = 0.3  # ckptkit yields a note if optimizer state is more than this fraction of a file


def causes(facts: Facts) -> list[Cause]:
    """Return all causes that apply to this checkpoint. Causes from `container` come first."""
    looks = container.causes, _adapter, _quantized, _objects, _names, _storage
    return [_with_writable_fix(facts, cause) for cause in flatten(look(facts) for look in looks)]


def _with_writable_fix(facts: Facts, cause: Cause) -> Cause:
    """Add edits to the fix of a cause, so that torch can load the result.

    If no edit makes the file loadable, set the fix to None.
    """
    if cause.fix is None:
        return cause
    form = facts.form
    if form is None or (form is WEIGHTS and not facts.are_weights_for_torch):
        return replace(cause, fix=None)
    return replace(cause, fix=together((cause, replace(cause, fix=form.fix))))


def _adapter(facts: Facts) -> Iterator[Cause]:
    """Yield the causes for deltas and adapters, which are no models."""
    if coded(facts.summary.warnings, DELTA):
        words = ("ckptkit", "delta", "inspect", *argument(facts.path))
        yield cause("delta", shell_command(words))
    adapter = facts.summary.adapter
    if adapter is None:
        try:
            if facts.checkpoint is not None and is_adapter(facts.checkpoint):
                read_adapter(facts.checkpoint)
        except CkptkitError as error:
            yield cause("adapter/unread", fault=error.message)
        return
    yield cause("adapter", facts=adapter_facts(adapter))
    from ckptkit.lora.check import alone

    for each in alone(adapter):
        what = each.title if each.title.startswith(("'", "every")) else f"it {each.title}"
        step = f"{as_sentence(each.hint)} ".lstrip()
        yield cause("adapter/base", code=each.code, level=each.level, what=what, step=step)


def _objects(facts: Facts) -> Iterator[Cause]:
    """Yield the causes for Python objects and for entries around the weights."""
    summary, root = facts.summary, facts.root
    is_special = summary.is_module or facts.is_script
    if summary.is_module and not facts.is_script:
        node = root
        for key in summary.weights or ():
            node = node[key] if isinstance(node, dict) else node
        kind = getattr(node, "global_", None) or "a class"
        command = facts.edit("convert", "weights", suffix=".safetensors")
        yield cause("module", command, {"weights": {}}, kind=kind)
    if facts.is_wrapped and not (is_special or facts.format.distributed or facts.format is GGUF):
        path = join(summary.weights or ())
        others = [str(name) for name in root if name != path] if isinstance(root, dict) else []
        yield cause(
            "wrapper",
            facts.extract_weights("weights"),
            {"weights": {}},
            # most training loops save other entries next to the weights
            level=NOTE if others else WARNING,
            key=path,
            beside=f", next to {some(others)}" if others else "",
        )
    if summary.refused and facts.is_torch_file and not summary.is_module:
        harm = coded(summary.warnings, RUNS_CODE)
        what = f" {harm[0][:1].upper()}{harm[0][1:]}: do not load the file." if harm else ""
        has_more = facts.is_wrapped or summary.rows or summary.survives_dropping()
        names = some(summary.refused)
        yield cause("weights-only", *_plain(facts), more=not has_more, names=names, harm=what)
    if facts.step is not None:
        # Most files with such opcodes have a pickle protocol other than 2.
        name = "pickle/opcode" if facts.step.startswith("opcode ") else "pickle"
        yield cause(name, facts.convert("protocol2"), {}, step=facts.step)


def _plain(facts: Facts) -> tuple[str | None, Fix | None]:
    """Return the command and the fix that drop Python objects, including NumPy arrays."""
    if any(row.inside for row in facts.summary.rows):
        return None, None  # dropping objects would also drop weights of a tensor subclass
    if any(row.tensor.kind == "ndarray" and row.name is not None for row in facts.summary.rows):
        return facts.edit("convert", "weights", suffix=".safetensors"), None
    if facts.is_wrapped:
        return facts.extract_weights("weights"), {"weights": {}, **DROP_OBJECTS}
    if not facts.can_be_written(DROPPED):
        return facts.convert("weights") if facts.form is WEIGHTS else None, None
    return facts.convert("plain", "--objects", "drop"), DROP_OBJECTS


def _storage(facts: Facts) -> Iterator[Cause]:
    """Yield the causes for devices, and notes about bytes that a model does not need."""
    summary = facts.summary
    here = ("cpu",) if facts.devices is None else facts.devices
    held = Counter(row.tensor.device for row in summary.rows)
    known = {"meta", *here, *(device.partition(":")[0] for device in here)}
    away = [device for device in held if device not in known]
    if away and facts.is_torch_file:
        lacks = ", which this machine does not have" if facts.for_here else ""
        if facts.for_here and facts.devices is None:
            lacks = "; torch is not installed, so ckptkit does not know the devices of this machine"
        command, fix = facts.edit("remap", "cpu", "--to", "cpu"), {"remap": {"devices": "cpu"}}
        yield cause("device", command, fix, devices=some(away), lacks=lacks)
    state, others = _storages(facts.root)
    everything = sum({**state, **others}.values())
    theirs = sum(without(state, others).values())
    if facts.names and theirs > max(BLOAT * everything, MIN_UNUSED):
        yield cause(
            "optimizer",
            facts.extract_weights("weights"),
            {"weights": {}},
            share=theirs / everything,
            theirs=theirs,
            everything=everything,
        )
    unused = summary.totals.unused_nbytes
    if unused > max(MIN_UNUSED, summary.totals.nbytes // 10):
        command = facts.convert("compact", "--compact")
        yield cause("slices", command, {"compact": {}}, unused=unused)
    if summary.inner:  # skorch saves its networks like this
        inner = (
            f"{join(each.path)} ({each.kind}, {each.nbytes:,} bytes)" for each in summary.inner
        )
        scan = shell_command(("ckptkit", "scan", *argument(facts.path)))
        yield cause("inner", scan, places=some(inner))


def _storages(root: Node) -> tuple[dict[int, int], dict[int, int]]:
    """Return two dicts that map the id of each storage to its size.

    The first dict contains storages of optimizer state. The second dict contains storages of other
    values. If an optimizer contains the weights, both dicts contain the storages of the weights.
    """
    outside = sys.maxsize
    depth = outside  # depth of the current optimizer
    theirs: dict[int, int] = {}
    others: dict[int, int] = {}
    for path, node in walk(root):
        if len(path) <= depth:
            depth = len(path) if path and is_optimizer(node) else outside
        tensor = as_tensor(node)
        if tensor is not None and tensor.storage is not None:
            side = others if depth == outside else theirs
            side[id(tensor.storage)] = tensor.storage.nbytes
    return theirs, others


# Causes for names with parts that a plain model does not have, such as wrapper prefixes

ATTRIBUTE = "model."  # usual attribute name of the network inside a wrapper module
# Wrappers of submodules, without their dots
INNER = [each[:-1] for each in WRAPPERS if each != "module."]


def _names(facts: Facts) -> Iterator[Cause]:
    """Yield the causes for keys that contain the name of a wrapper such as DataParallel.

    If the user gives a model, `fit` yields these causes instead.
    """
    names = facts.names
    if not names or facts.with_model:
        return
    found = wrappers(names)
    # FSDP saves names with wrappers at the start and inside. One edit removes all of them.
    is_inside_too = {each[:-1] for each in found[:1]} <= {*INNER} and any(
        not {*INNER}.isdisjoint(name.split(".")[2:]) for name in names
    )
    if not (found and is_inside_too):
        yield from _prefix(facts, names, found)
    if facts.is_torch_file and facts.is_lightning:
        first, count = Counter(name.partition(".")[0] for name in names).most_common(1)[0]
        if not found and len(names) < 2 * count < 2 * len(names):  # also contains metrics
            prefix = f"{first}."
            words = ("--keep", f"{escape(prefix)}*", "--strip", prefix)
            command = facts.edit("convert", "network", *words)
            yield cause("attribute/most", command, count=count, all=len(names), prefix=prefix)
    elif facts.is_torch_file and all(name.startswith(ATTRIBUTE) for name in names):
        command = facts.edit("strip-module", "stripped", "--prefix", ATTRIBUTE)
        yield cause("attribute", command, prefix=ATTRIBUTE)
    if not found or is_inside_too:
        yield from _inner_wrappers(facts, names)


def _prefix(facts: Facts, names: list[str], found: list[str]) -> Iterator[Cause]:
    """Yield the cause for wrapper prefixes such as ``module.`` at the start of most names.

    `found` lists the prefixes, outermost first. For a LightningModule whose only attribute is the
    network, also yield a note.
    """
    if found:
        count = sum(name.startswith(found[0]) for name in names)
        yield cause(
            "prefix",
            facts.edit("strip-module", "stripped", *prefix_options(found)),
            {"strip": {"prefix": tuple(found)}},
            how_many="All" if count == len(names) else f"{count:,} of {len(names):,}",
            prefix="".join(found),
            why=" ".join(WRAPPERS[each] for each in dict.fromkeys(found)),
        )
    rest = names
    for each in found:
        rest = [name.removeprefix(each) for name in rest]
    attribute = rest[0].partition(".")[0] + "."
    if facts.is_lightning and all(name.startswith(attribute) for name in rest):
        options = flatten(("--prefix", each) for each in (*found, attribute))
        command = facts.edit("strip-module", "network", *options)
        yield cause(
            "attribute/only", command, {"strip": {"prefix": (attribute,)}}, prefix=attribute
        )


def _inner_wrappers(facts: Facts, names: list[str]) -> Iterator[Cause]:
    """Yield the cause for wrapped submodules, such as ``layers.0._orig_mod.weight``."""
    shorter = {
        name: ".".join(part for part in name.split(".") if part not in INNER) for name in names
    }
    new = {name: short for name, short in shorter.items() if short != name}
    if new and len({*shorter.values()}) == len(names):
        parts = [part for part in INNER if any(part in name.split(".") for name in new)]
        pattern = rf"(^|\.)(({'|'.join(parts)})\.)+=\1"  # wrappers may be nested
        command, fix = facts.edit("rename", "renamed", "--sub", pattern), {"rename": {"map": new}}
        count, inside = len(new), some(parts)
        yield cause("inner-prefix", command, fix, count=count, all=len(names), parts=inside)


def _quantized(facts: Facts) -> Iterator[Cause]:
    """Yield one cause for the weights that ckptkit can dequantize.

    For the other weights, yield one cause per reason why ckptkit cannot dequantize them.
    """
    found = facts.quantized
    unread = found.unread if found is not None else ()
    groups = [each for each in found.groups if each.layout is not None] if found is not None else []
    if groups:
        yield _readable(facts, groups)
    reasons: dict[tuple[str, str, str | None], list[str]] = {}
    for group in unread:
        reasons.setdefault((group.family, group.reason, group.hint), []).append(group.name)
    for (family, reason, hint), names in reasons.items():
        yield cause(
            "quantized-unread",
            weights=plural(len(names), "quantized weight"),
            family=family,
            reason=reason,
            names=some(names),
            hint=as_sentence(hint),
        )
    if facts.method and not (found and found.groups):
        yield cause("quantized-config", method=facts.method)


def _readable(facts: Facts, groups: list[QuantizedWeight]) -> Cause:
    assert facts.quantized is not None
    kinds = Counter(f"{group.label} ({group.family})" for group in groups)
    used = {group.family for group in groups}
    # the libraries whose values ckptkit reproduces bit-exactly
    oracles = [each.oracle for each in families() if each.name in used and each.oracle]
    is_gguf = facts.format is GGUF  # for GGUF, the cause `not-torch` has the command
    command: str | None = None
    fix: Fix | None = None
    if not facts.quantized.unread:
        if facts.needs_floats or is_gguf:
            fix = {"dequantize": {"dtype": "bfloat16"} if is_gguf else {}}
        if not is_gguf:
            assert facts.quantized.view is not None
            words = ("float", "--dequantize", default_dtype(facts.quantized.view, groups[0]).name)
            is_folder = os.path.isdir(facts.path)  # the output is then a folder too
            command = (
                facts.edit("convert", *words, suffix="") if is_folder else facts.convert(*words)
            )
    return cause(
        "quantized",
        command,
        fix,
        level=ERROR if facts.needs_floats else NOTE,
        more=any(map(_is_ragged, groups)),
        count=len(groups),
        are="is" if len(groups) == 1 else "are",
        kinds=", ".join(f"{number:,} {kind}" for kind, number in kinds.items()),
        oracles=f"ckptkit dequantizes as {'; '.join(dict.fromkeys(oracles))}." if oracles else "",
    )


def _is_ragged(group: QuantizedWeight) -> bool:
    """Return whether the shape of an FP8 weight is not divisible by its block size."""
    if group.family != "fp8-block":
        return False
    layout: Any = group.layout  # for fp8-block, the layout is a `Blocks`
    grid = layout.scales[0].grid
    return bool(layout.rows % grid.height or layout.columns % grid.width)
