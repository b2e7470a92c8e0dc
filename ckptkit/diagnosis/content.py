"""Check the content of a readable checkpoint: its objects, devices, names and quantized weights."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Collection, Container, Iterator, Sequence
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
    convert,
    edit,
    extract_weights,
    format_of,
    is_lightning,
    is_script,
    is_torch_file,
    is_wrapped,
    names_of,
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
    looks = (
        container.causes, _delta, _adapter, _quantized, _module, _wrapper, _refused, _step, _names,
        _devices, _optimizer, _slices, _inner,
    )  # fmt: skip
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


def _delta(facts: Facts) -> Iterator[Cause]:
    if coded(facts.summary.warnings, DELTA):
        yield Cause(
            "delta",
            ERROR,
            "It is a delta file, which contains the compressed differences of tensors.",
            "A model cannot load a delta. `delta apply` computes the new checkpoint from the delta "
            "and its base.",
            shell_command(("ckptkit", "delta", "inspect", *argument(facts.path))),
        )


def _adapter(facts: Facts) -> Iterator[Cause]:
    adapter = facts.summary.adapter
    if adapter is None:
        try:
            if facts.checkpoint is not None and is_adapter(facts.checkpoint):
                read_adapter(facts.checkpoint)
        except CkptkitError as error:
            title = f"It is an adapter that cannot be read: {error.message}."
            yield Cause("adapter", ERROR, title, "ckptkit and peft cannot load this adapter.")
        return
    yield Cause(
        "adapter",
        NOTE,
        f"It is an adapter ({adapter_facts(adapter)}), not a model.",
        "The base model has no keys with these names. `lora merge BASE ADAPTER OUT` merges the "
        "adapter into the base. PeftModel.from_pretrained of peft loads the adapter and the base.",
    )
    from ckptkit.lora.check import alone

    for each in alone(adapter):
        what = each.title if each.title.startswith(("'", "every")) else f"it {each.title}"
        step = f"{each.hint[0].upper()}{each.hint[1:]}. " if each.hint else ""
        why = f"{step}`lora check --base BASE` compares the names and shapes with a base model."
        yield Cause(
            each.code, each.level, f"The adapter would not work correctly on its base: {what}.", why
        )


def _module(facts: Facts) -> Iterator[Cause]:
    summary = facts.summary
    if summary.is_module and not is_script(facts):
        node = facts.root
        for key in summary.weights or ():
            node = node[key] if isinstance(node, dict) else node
        kind = str(getattr(node, "global_", None) or "a class")
        yield Cause(
            "module",
            ERROR,
            f"It is a whole pickled module ({kind}), not its state_dict.",
            "torch.load imports the class from the module where it was defined (\"Can't get "
            'attribute", "No module named"). '
            "torch.load(weights_only=True), the default since 2.6, rejects the file. A model needs "
            "only the weights.",
            edit(facts, "convert", "weights", suffix=".safetensors"),
            {"weights": {}},
        )


def _wrapper(facts: Facts) -> Iterator[Cause]:
    summary = facts.summary
    if not is_wrapped(facts) or summary.is_module or is_script(facts):
        return
    if format_of(facts).distributed or format_of(facts) is GGUF:
        return
    key = join(summary.weights or ())
    others = (
        [str(name) for name in facts.root if name != key] if isinstance(facts.root, dict) else []
    )
    beside = f", next to {some(others)}" if others else ""
    yield Cause(
        "wrapper",
        NOTE if others else WARNING,  # most training loops save other entries next to the weights
        f"The weights are in its entry {key!r}{beside}.",
        "load_state_dict needs this entry. For the complete dict, load_state_dict raises "
        '"Missing key(s) in state_dict ... Unexpected key(s)".',
        extract_weights(facts, "weights"),
        {"weights": {}},
    )


def _refused(facts: Facts) -> Iterator[Cause]:
    """Yield the cause for classes and functions that `torch.load(weights_only=True)` rejects.

    `_module` yields the cause for a pickled torch.nn.Module.
    """
    summary = facts.summary
    refused = summary.refused
    if not refused or not is_torch_file(facts) or summary.is_module:
        return
    harm = coded(summary.warnings, RUNS_CODE)
    what = f" {harm[0][:1].upper()}{harm[0][1:]}: do not load the file." if harm else ""
    if not is_wrapped(facts) and not summary.rows and not summary.survives_dropping():
        what += " The file contains no other values."
    yield Cause(
        "weights-only",
        ERROR,
        f"torch.load(weights_only=True) refuses it, because of {some(refused)}.",
        'weights_only=True is the default since torch 2.6. torch.load raises "Weights only load '
        'failed". With weights_only=False, torch.load would import and call these names.' + what,
        *_plain(facts),
    )


def _plain(facts: Facts) -> tuple[str | None, Fix | None]:
    """Return the command and the fix that drop Python objects, including NumPy arrays."""
    if any(row.inside for row in facts.summary.rows):
        return None, None  # dropping objects would also drop weights of a tensor subclass
    arrays = [row.name is not None for row in facts.summary.rows if row.tensor.kind == "ndarray"]
    if any(arrays):
        return edit(facts, "convert", "weights", suffix=".safetensors"), None
    if is_wrapped(facts):
        return extract_weights(facts, "weights"), {"weights": {}, **DROP_OBJECTS}
    if not facts.can_be_written(DROPPED):
        return convert(facts, "weights") if facts.form is WEIGHTS else None, None
    return convert(facts, "plain", "--objects", "drop"), DROP_OBJECTS


def _step(facts: Facts) -> Iterator[Cause]:
    """Yield the cause for opcodes and calls that `torch.load(weights_only=True)` rejects.

    Most such files have a pickle protocol other than 2.
    """
    if facts.step is not None:
        why = (
            ' or "Unsupported operand". weights_only=True supports pickle protocol 2, the default '
            "of torch.save. This file was saved with another pickle_protocol."
        )
        yield Cause(
            "pickle",
            ERROR,
            f"torch.load(weights_only=True) refuses its pickle: {facts.step}.",
            "weights_only=True is the default since torch 2.6. torch.load raises "
            '"Weights only load failed"' + (why if facts.step.startswith("opcode ") else "."),
            convert(facts, "protocol2"),
            {},
        )


def _devices(facts: Facts) -> Iterator[Cause]:
    held = Counter(row.tensor.device for row in facts.summary.rows)
    here = ("cpu",) if facts.devices is None else facts.devices
    away = [device for device in held if device != "meta" and not _is_here(device, here)]
    if away and is_torch_file(facts):
        yield Cause(
            "device",
            ERROR,
            f"It was saved on {some(away)}{_lacks(facts)}.",
            "torch.load puts each tensor on the device from which it was saved. Without this "
            'device, torch.load raises "Attempting to deserialize object on a CUDA device". '
            'map_location="cpu" loads all tensors on the CPU. This command changes the device in '
            "the file instead.",
            edit(facts, "remap", "cpu", "--to", "cpu"),
            {"remap": {"devices": "cpu"}},
        )


def _lacks(facts: Facts) -> str:
    """Return a clause that says that this machine does not have a device.

    Return "" in a report for other machines.
    """
    if not facts.for_here:
        return ""
    if facts.devices is None:
        return "; torch is not installed, so ckptkit does not know the devices of this machine"
    return ", which this machine does not have"


def _is_here(device: str, devices: Collection[str]) -> bool:
    return device in devices or any(each.startswith(f"{device}:") for each in devices)


def _optimizer(facts: Facts) -> Iterator[Cause]:
    """Yield a note if optimizer state takes a large part of the file."""
    theirs, others = _storages(facts.root)
    everything = sum({**theirs, **others}.values())
    optimizers = sum(without(theirs, others).values())
    if facts.summary.rows and names_of(facts) and optimizers > max(BLOAT * everything, MIN_UNUSED):
        yield Cause(
            "optimizer",
            NOTE,
            f"{optimizers / everything:.0%} of its bytes are optimizer state.",
            f"Only resuming training needs these {optimizers:,} of {everything:,} bytes.",
            extract_weights(facts, "weights"),
            {"weights": {}},
        )


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


def _slices(facts: Facts) -> Iterator[Cause]:
    totals = facts.summary.totals
    if totals.unused_nbytes > max(MIN_UNUSED, totals.nbytes // 10):
        yield Cause(
            "slices",
            NOTE,
            f"{totals.unused_nbytes:,} bytes of its storages belong to no tensor.",
            "Some tensor is a slice of a larger tensor. torch.save writes the complete storage of "
            "each tensor.",
            convert(facts, "compact", "--compact"),
            {"compact": {}},
        )


def _inner(facts: Facts) -> Iterator[Cause]:
    """Yield a note if byte strings contain complete files. skorch saves its networks like this."""
    inner = facts.summary.inner
    if inner:
        places = [f"{join(each.path)} ({each.kind}, {each.nbytes:,} bytes)" for each in inner]
        yield Cause(
            "inner",
            NOTE,
            f"Byte strings in it contain complete files: {some(places)}.",
            "The inner files may contain weights. Only the library that wrote the checkpoint can "
            "load the inner files. `scan` checks whether the inner files are harmless.",
            shell_command(("ckptkit", "scan", *argument(facts.path))),
        )


# Causes for names with parts that a plain model does not have, such as wrapper prefixes

ATTRIBUTE = "model."  # usual attribute name of the network inside a wrapper module


def _names(facts: Facts) -> Iterator[Cause]:
    """Yield the causes for keys that contain the name of a wrapper such as DataParallel.

    If the user gives a model, `fit` yields these causes instead.
    """
    if not facts.with_model:
        yield from _prefix(facts)
        yield from _attribute(facts)
        yield from _inner_wrappers(facts)


def _prefix(facts: Facts) -> Iterator[Cause]:
    """Yield the cause for wrapper prefixes such as ``module.`` at the start of most names."""
    names = names_of(facts)
    if not names or _is_inside_too(names):
        return
    found = wrappers(names)
    rest = names
    for each in found:
        rest = [name.removeprefix(each) for name in rest]
    if found:
        yield _wrappers(facts, names, found)
    if is_lightning(facts) and (attribute := _first_part(rest)):
        yield _network(facts, (*found, attribute))


def _wrappers(facts: Facts, names: list[str], found: list[str]) -> Cause:
    """Return the cause for wrapper prefixes. `found` lists the prefixes, outermost first."""
    count = sum(name.startswith(found[0]) for name in names)
    how_many = "All" if count == len(names) else f"{count:,} of {len(names):,}"
    why = " ".join(WRAPPERS[each] for each in dict.fromkeys(found))
    return Cause(
        "prefix",
        ERROR,
        f"{how_many} keys start with {''.join(found)!r}.",
        f"{why} A plain model does not have these names. load_state_dict raises "
        '"Missing key(s) in state_dict".',
        edit(facts, "strip-module", "stripped", *prefix_options(found)),
        {"strip": {"prefix": tuple(found)}},
    )


def _network(facts: Facts, prefixes: tuple[str, ...]) -> Cause:
    """Return the note for a LightningModule whose only attribute is the network.

    `prefixes` lists the prefixes to strip. The last prefix is the attribute name of the network.
    """
    attribute = prefixes[-1]
    return Cause(
        "attribute",
        NOTE,
        f"All keys start with {attribute!r}, the name of the network in the LightningModule.",
        "Lightning loads the file unchanged. To load the weights into the network itself, run:",
        edit(
            facts,
            "strip-module",
            "network",
            *flatten(("--prefix", each) for each in prefixes),
        ),
        {"strip": {"prefix": (attribute,)}},
    )


def _first_part(names: list[str]) -> str:
    """Return the first part that all names share, with its dot, such as ``model.``.

    Return "" if the first parts differ.
    """
    first = names[0].partition(".")[0] + "."
    return first if all(name.startswith(first) for name in names) else ""


def _attribute(facts: Facts) -> Iterator[Cause]:
    """Yield a note if all names start with ``model.``, possibly an attribute of a wrapper.

    For a LightningModule, yield the note of `_network_and_others`.
    """
    names = names_of(facts)
    if not is_torch_file(facts) or not names:
        return
    if is_lightning(facts):
        yield from _network_and_others(facts, names)
    elif _first_part(names) == ATTRIBUTE:
        yield Cause(
            "attribute",
            NOTE,
            f"All keys start with {ATTRIBUTE!r}.",
            "Perhaps the network was an attribute of the saved module. The names of the network "
            "itself do not have this prefix. --model checks which names your model has.",
            edit(facts, "strip-module", "stripped", "--prefix", ATTRIBUTE),
        )


def _network_and_others(facts: Facts, names: list[str]) -> Iterator[Cause]:
    """Yield a note for a LightningModule that contains a network and, for example, metrics."""
    first, count = Counter(name.partition(".")[0] for name in names).most_common(1)[0]
    if wrappers(names) or count == len(names) or 2 * count <= len(names):
        return
    prefix = f"{first}."
    words = ("--keep", f"{escape(prefix)}*", "--strip", prefix)
    yield Cause(
        "attribute",
        NOTE,
        f"{count:,} of {len(names):,} keys start with {prefix!r}.",
        "Perhaps the network is this attribute of the LightningModule. The names of the network "
        "itself do not have this prefix. --model checks which names your model has.",
        edit(facts, "convert", "network", *words),
    )


def _inner_wrappers(facts: Facts) -> Iterator[Cause]:
    """Yield the cause for wrapped submodules, such as ``layers.0._orig_mod.weight``."""
    parts = [each[:-1] for each in WRAPPERS if each != "module."]
    names = names_of(facts)
    if wrappers(names) and not _is_inside_too(names):
        return
    new = {name: short for name in names if (short := _without(name, parts)) != name}
    if not new or len({*(new.get(name, name) for name in names)}) != len(names):
        return
    inside = [part for part in parts if any(part in name.split(".") for name in new)]
    pattern = rf"(^|\.)(({'|'.join(inside)})\.)+=\1"  # wrappers may be nested
    yield Cause(
        "inner-prefix",
        ERROR,
        f"{len(new):,} of {len(names):,} keys have {some(inside)} inside them.",
        "torch.compile, FSDP or activation checkpointing wrapped submodules. A plain model does "
        "not have these names.",
        edit(facts, "rename", "renamed", "--sub", pattern),
        {"rename": {"map": new}},
    )


def _is_inside_too(names: list[str]) -> bool:
    """Return whether names contain wrappers such as ``_orig_mod.`` at the start and inside.

    FSDP saves such names. `_inner_wrappers` removes all these wrappers with one edit.
    """
    parts = {each[:-1] for each in WRAPPERS if each != "module."}
    begins = {each[:-1] for each in wrappers(names)[:1]}
    return (
        begins <= parts
        and bool(begins)
        and any(not parts.isdisjoint(name.split(".")[2:]) for name in names)
    )


def _without(name: str, parts: Collection[str]) -> str:
    return ".".join(part for part in name.split(".") if part not in parts)


# Causes for quantized weights

_RAGGED = (
    " Some shapes are not divisible by the block size. transformers 5.23 derives the block size "
    "from the shapes, so it computes other values for such weights."
)


def _quantized(facts: Facts) -> Iterator[Cause]:
    """Yield one cause for the weights that ckptkit can dequantize.

    For the other weights, yield one cause per reason why ckptkit cannot dequantize them.
    """
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
        what = f"ckptkit cannot dequantize {number} ({family}): {reason}."
        yield Cause(
            "quantized-unread",
            WARNING,
            what,
            f"{some(names)}. ckptkit cannot compute the values without knowing the layout."
            + (f" {hint[:1].upper()}{hint[1:]}." if hint else ""),
        )
    if facts.method and not (found and found.groups):
        yield Cause(
            "quantized-config",
            NOTE,
            f"config.json has a quantization_config ({facts.method}), but no tensor is quantized.",
            "Libraries then expect scales and fail. Remove quantization_config from config.json.",
        )


def _readable(facts: Facts, groups: Sequence[QuantizedWeight]) -> Cause:
    kinds = Counter(f"{group.label} ({group.family})" for group in groups)
    counts = ", ".join(f"{number:,} {kind}" for kind, number in kinds.items())
    all_are_read = facts.quantized is not None and not facts.quantized.unread
    are = "is" if len(groups) == 1 else "are"
    is_gguf = format_of(facts) is GGUF  # for GGUF, the cause `not-torch` has the command
    fix: Fix = {"dequantize": {"dtype": "bfloat16"} if is_gguf else {}}
    return Cause(
        "quantized",
        ERROR if facts.needs_floats else NOTE,
        f"{len(groups):,} of its weights {are} quantized: {counts}.",
        "A floating-point model cannot load quantized weights. "
        + _read_as({group.family for group in groups})
        + (_RAGGED if any(map(_is_ragged, groups)) else ""),
        _command(facts, groups[0]) if all_are_read and not is_gguf else None,
        fix if all_are_read and (facts.needs_floats or is_gguf) else None,
    )


def _command(facts: Facts, group: QuantizedWeight) -> str | None:
    """Return the command that dequantizes the weights to the default dtype of `group`.

    If the input is a folder, the output of the command is a folder too.
    """
    assert facts.quantized is not None and facts.quantized.view is not None
    dtype = default_dtype(facts.quantized.view, group).name
    if os.path.isdir(facts.path):
        return edit(facts, "convert", "float", "--dequantize", dtype, suffix="")
    return convert(facts, "float", "--dequantize", dtype)


def _read_as(used: Container[str]) -> str:
    """Return a sentence that names the libraries whose values ckptkit reproduces bit-exactly."""
    oracles = [each.oracle for each in families() if each.name in used and each.oracle]
    return f"ckptkit dequantizes as {'; '.join(dict.fromkeys(oracles))}." if oracles else ""


def _is_ragged(group: QuantizedWeight) -> bool:
    """Return whether the shape of an FP8 weight is not divisible by its block size."""
    if group.family != "fp8-block":
        return False
    layout: Any = group.layout  # for fp8-block, the layout is a `Blocks`
    grid = layout.scales[0].grid
    return bool(layout.rows % grid.height or layout.columns % grid.width)
