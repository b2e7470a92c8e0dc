"""Causes in the content of a checkpoint that can be read."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace

from ckptkit.analysis.advice import WASTE
from ckptkit.core.errors import RUNS_CODE, coded
from ckptkit.core.text import argument, flatten, shell_command, without
from ckptkit.core.tree import Node, join, walk
from ckptkit.core.weights import as_tensor, is_optimizer
from ckptkit.diagnosis import codes, container, names
from ckptkit.diagnosis.cause import DROP_OBJECTS, ERROR, NOTE, WARNING, Cause, Fix, together
from ckptkit.diagnosis.facts import (
    DROPPED,
    WEIGHTS,
    Facts,
    alone,
    convert,
    edit,
    format_of,
    is_script,
    is_torch_file,
    is_wrapped,
    names_of,
    some,
)

BLOAT = 0.3  # share of an optimizer in the bytes from which on it is worth a line


def causes(facts: Facts) -> list[Cause]:
    """Return all causes that apply, those of the container first."""
    looks = (
        container.causes, codes.causes, _module, _wrapper, _refused, _step, names.causes,
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
    if format_of(facts).distributed:
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
