"""Causes in the content of a checkpoint that can be read: in its tree, its names, its codes."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import replace
from glob import escape
from typing import Any

from ckptkit.analysis.advice import WASTE, prefix_options, wrappers
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
    alone,
    convert,
    edit,
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

BLOAT = 0.3  # share of an optimizer in the bytes from which on it is worth a line


def causes(facts: Facts) -> list[Cause]:
    """Return all causes that apply, those of the container first."""
    looks = (
        container.causes, _delta, _adapter, _quantized, _module, _wrapper, _refused, _step, _names,
        _devices, _optimizer, _slices, _inner,
    )  # fmt: skip
    return [_that_can_be_written(facts, cause) for cause in flatten(look(facts) for look in looks)]


def _that_can_be_written(facts: Facts, cause: Cause) -> Cause:
    """Return the cause with a fix that no writer of torch's files refuses, or without one."""
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
            "It is a delta: compressed differences of tensors, under their names.",
            "A model cannot load it. `delta apply` makes the new checkpoint of it and of its base.",
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
            yield Cause("adapter", ERROR, title, "Nothing of it can be loaded or merged.")
        return
    yield Cause(
        "adapter",
        NOTE,
        f"It is an adapter ({adapter_facts(adapter)}), and not a model.",
        "Its base model does not have these names. `lora merge BASE ADAPTER OUT` adds it to the "
        "base; peft's PeftModel.from_pretrained loads it beside the base.",
    )
    from ckptkit.lora.check import alone

    for each in alone(adapter):
        what = each.title if each.title.startswith(("'", "every")) else f"it {each.title}"
        step = f"{each.hint[0].upper()}{each.hint[1:]}. " if each.hint else ""
        why = f"{step}`lora check --base BASE` compares names and shapes with its base."
        yield Cause(each.code, each.level, f"It would not do what it should: {what}.", why)


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
            "Loading it imports the class from the module where it was defined (\"Can't get "
            'attribute", "No module named"), '
            "and torch.load(weights_only=True), the default since 2.6, refuses it. The weights "
            "are all that a model needs.",
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
    beside = f", beside {some(others)}" if others else ""
    yield Cause(
        "wrapper",
        NOTE if others else WARNING,  # as training loops save it
        f"The weights are in its entry {key!r}{beside}.",
        "load_state_dict takes that entry, not the dict around it, whose keys are not names of "
        "parameters: "
        '"Missing key(s) in state_dict ... Unexpected key(s)".',
        alone(facts, "weights"),
        {"weights": {}},
    )


def _refused(facts: Facts) -> Iterator[Cause]:
    """Yield the cause for values that weights_only=True refuses, unless another cause says so."""
    summary = facts.summary
    refused = summary.refused
    if not refused or not is_torch_file(facts) or summary.is_module:
        return
    harm = coded(summary.warnings, RUNS_CODE)
    what = f" {harm[0][:1].upper()}{harm[0][1:]}: do not load it." if harm else ""
    if not is_wrapped(facts) and not summary.rows and not summary.survives_dropping():
        what += " It holds nothing else, and no weights: without such values nothing would be left."
    yield Cause(
        "weights-only",
        ERROR,
        f"torch.load(weights_only=True) refuses it: it names {some(refused)}.",
        'It is the default since torch 2.6: "Weights only load failed". weights_only=False would '
        "run what the file names." + what,
        *_plain(facts),
    )


def _plain(facts: Facts) -> tuple[str | None, Fix | None]:
    """Return the command and fix that leave out Python objects, arrays of numpy included."""
    if any(row.inside for row in facts.summary.rows):
        return None, None  # tensor subclasses would go too, and they are weights
    arrays = [row.name is not None for row in facts.summary.rows if row.tensor.kind == "ndarray"]
    if any(arrays):
        return edit(facts, "convert", "weights", suffix=".safetensors"), None
    if is_wrapped(facts):
        return alone(facts, "weights"), {"weights": {}, **DROP_OBJECTS}
    if not facts.can_be_written(DROPPED):
        return convert(facts, "weights") if facts.form is WEIGHTS else None, None
    return convert(facts, "plain", "--objects", "drop"), DROP_OBJECTS


def _step(facts: Facts) -> Iterator[Cause]:
    """Yield the cause for a pickle that no torch.save writes by default: of another protocol."""
    if facts.step is not None:
        why = (
            ' "Unsupported operand": it reads pickle protocol 2, which torch.save writes unless '
            "pickle_protocol says otherwise."
        )
        yield Cause(
            "pickle",
            ERROR,
            f"torch.load(weights_only=True) refuses a step of its pickle: {facts.step}.",
            'It is the default since torch 2.6: "Weights only load failed".'
            + why * facts.step.startswith("opcode "),
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
            'torch.load puts tensors where they were: "Attempting to deserialize object on a CUDA '
            'device". '
            "map_location='cpu' does the same as this command, at each load.",
            edit(facts, "remap", "cpu", "--to", "cpu"),
            {"remap": {"devices": "cpu"}},
        )


def _lacks(facts: Facts) -> str:
    """Return the clause on this machine, empty in a report that is read on others."""
    if not facts.for_here:
        return ""
    if facts.devices is None:
        return ", and torch, which would know if this machine has it, is not installed"
    return ", which this machine does not have"


def _is_here(device: str, devices: Collection[str]) -> bool:
    return device in devices or any(each.startswith(f"{device}:") for each in devices)


def _optimizer(facts: Facts) -> Iterator[Cause]:
    """Yield a note if much of the file is the state of optimizers."""
    theirs, others = _storages(facts.root)
    everything = sum({**theirs, **others}.values())
    optimizers = sum(without(theirs, others).values())
    if facts.summary.rows and names_of(facts) and optimizers > max(BLOAT * everything, WASTE):
        yield Cause(
            "optimizer",
            NOTE,
            f"{optimizers / everything:.0%} of its bytes are the state of the optimizer.",
            f"{optimizers:,} of {everything:,} bytes, which training needs to go on, and nothing "
            "else does.",
            alone(facts, "weights"),
            {"weights": {}},
        )


def _storages(root: Node) -> tuple[dict[int, int], dict[int, int]]:
    """Return the bytes of storages by their ids: of those in optimizers, and of those outside.

    Optimizers may hold the weights themselves, which are then in both.
    """
    outside = sys.maxsize
    depth = outside  # that of an optimizer, while the walk is in it
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
    if totals.unused_nbytes > max(WASTE, totals.nbytes // 10):
        yield Cause(
            "slices",
            NOTE,
            f"{totals.unused_nbytes:,} bytes of its storages belong to no tensor.",
            "A slice of a larger tensor was saved, and torch.save keeps the whole storage of each "
            "tensor.",
            convert(facts, "compact", "--compact"),
            {"compact": {}},
        )


def _inner(facts: Facts) -> Iterator[Cause]:
    """Yield the causes for checkpoints in byte strings, as skorch pickles its nets."""
    inner = facts.summary.inner
    if inner:
        places = [f"{join(each.path)} ({each.kind}, {each.nbytes:,} bytes)" for each in inner]
        yield Cause(
            "inner",
            NOTE,
            f"Byte strings in it are files of their own: {some(places)}.",
            "Weights may be in there, which only the library that wrote the file unpacks; scan "
            "looks into them.",
            shell_command(("ckptkit", "scan", *argument(facts.path))),
        )


# The names of the weights: parts that a plain model does not have

ATTRIBUTE = "model."  # what many modules call the network inside


def _names(facts: Facts) -> Iterator[Cause]:
    """Yield the causes for wrappers before the names and inside them.

    With a model, `fit` finds them.
    """
    if not facts.with_model:
        yield from _prefix(facts)
        yield from _attribute(facts)
        yield from _inner_wrappers(facts)


def _prefix(facts: Facts) -> Iterator[Cause]:
    """Yield the cause for wrappers before most names, one inside the other perhaps."""
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
    """Return the cause for wrappers before most names."""
    having = sum(name.startswith(found[0]) for name in names)
    how_many = "All" if having == len(names) else f"{having:,} of {len(names):,}"
    why = "; ".join(WRAPPERS[each] for each in dict.fromkeys(found))
    return Cause(
        "prefix",
        ERROR,
        f"{how_many} keys start with {''.join(found)!r}.",
        f'{why[:1].upper()}{why[1:]}; a plain model has no such names: "Missing key(s) in '
        'state_dict".',
        edit(facts, "strip-module", "stripped", *prefix_options(found)),
        {"strip": {"prefix": tuple(found)}},
    )


def _network(facts: Facts, prefixes: tuple[str, ...]) -> Cause:
    """Return the note for a LightningModule that is its network and nothing else.

    `prefixes` are those to strip, that of the network last.
    """
    attribute = prefixes[-1]
    return Cause(
        "attribute",
        NOTE,
        f"All keys start with {attribute!r}, the name of the network in the LightningModule.",
        "Lightning loads the file as it is. The network alone has no such names; for it:",
        edit(
            facts,
            "strip-module",
            "network",
            *flatten(("--prefix", each) for each in prefixes),
        ),
        {"strip": {"prefix": (attribute,)}},
    )


def _first_part(names: list[str]) -> str:
    """Return the part before the first dot of all names, dot included, "" if they differ."""
    first = names[0].partition(".")[0] + "."
    return first if all(name.startswith(first) for name in names) else ""


def _attribute(facts: Facts) -> Iterator[Cause]:
    """Yield a note for a common first part: a network inside a module, or part of each network."""
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
            "Was the network an attribute of the module that was saved? The network alone has no "
            "such names, and --model tells which of the two yours is.",
            edit(facts, "strip-module", "stripped", "--prefix", ATTRIBUTE),
        )


def _network_and_others(facts: Facts, names: list[str]) -> Iterator[Cause]:
    """Yield a note for the network of a LightningModule that has other parts: metrics, losses."""
    first, count = Counter(name.partition(".")[0] for name in names).most_common(1)[0]
    if wrappers(names) or count == len(names) or 2 * count <= len(names):
        return
    prefix = f"{first}."
    words = ("--keep", f"{escape(prefix)}*", "--strip", prefix)
    yield Cause(
        "attribute",
        NOTE,
        f"{count:,} of {len(names):,} keys start with {prefix!r}.",
        "Is that what the LightningModule calls its network? The network alone has no such names, "
        "and --model tells if it is so.",
        edit(facts, "convert", "network", *words),
    )


def _inner_wrappers(facts: Facts) -> Iterator[Cause]:
    """Yield the cause for wrapped submodules: ``layers.0._orig_mod.weight``, or a few names."""
    parts = [each[:-1] for each in WRAPPERS if each != "module."]
    names = names_of(facts)
    if wrappers(names) and not _is_inside_too(names):
        return
    new = {name: short for name in names if (short := _without(name, parts)) != name}
    if not new or len({*(new.get(name, name) for name in names)}) != len(names):
        return
    inside = [part for part in parts if any(part in name.split(".") for name in new)]
    pattern = rf"(^|\.)(({'|'.join(inside)})\.)+=\1"  # several may follow each other
    yield Cause(
        "inner-prefix",
        ERROR,
        f"{len(new):,} of {len(names):,} keys have {some(inside)} inside them.",
        "Submodules were wrapped, by torch.compile, FSDP or activation checkpointing; a plain "
        "model has no such names.",
        edit(facts, "rename", "renamed", "--sub", pattern),
        {"rename": {"mapping": new}},
    )


def _is_inside_too(names: list[str]) -> bool:
    """Return whether names begin with a wrapper, not ``module.``, and have wrappers inside.

    FSDP does that; one edit then removes both.
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


# Quantized weights, and how to get floats

_RAGGED = (
    " Some have blocks that end short: transformers 5.23 derives the size of blocks from shapes, "
    "and then computes other values."
)


def _quantized(facts: Facts) -> Iterator[Cause]:
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
    is_gguf = format_of(facts) is GGUF  # of which another cause has the command
    fix: Fix = {"dequantize": {"dtype": "bfloat16"} if is_gguf else {}}
    return Cause(
        "quantized",
        ERROR if facts.needs_floats else NOTE,
        f"{len(groups):,} of its weights {are} quantized: {counts}.",
        "A model of floats cannot load them: codes are numbers together with their scales only. "
        + _read_as({group.family for group in groups})
        + (_RAGGED if any(map(_is_ragged, groups)) else ""),
        _command(facts, groups[0]) if all_are_read and not is_gguf else None,
        fix if all_are_read and (facts.needs_floats or is_gguf) else None,
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
    layout: Any = group.layout  # of this family, `Blocks`
    grid = layout.scales[0].grid
    return bool(layout.rows % grid.height or layout.columns % grid.width)
