"""Average weights of several checkpoints, join their tensors, or extract averaged (EMA) weights.

`average`, `join` and `ema` raise UnsupportedError for an adapter. An adapter (LoRA, LoHa, LoKr...)
contains no weights of a model. An adapter contains factors, and products of these factors are
updates to the weights of a base model. The mean of the factors is not the mean of the updates.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from ckptkit.compute.arranged import contiguous
from ckptkit.compute.mixing import has_mean, mean_record
from ckptkit.core import hooks
from ckptkit.core.arguments import checked
from ckptkit.core.bytesource import ByteSource
from ckptkit.core.checkpoint import Checkpoint, Source, edit, several
from ckptkit.core.errors import CkptkitError, CollisionError, UnsupportedError, UsageError
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import plural, quoted, shell_word, some, typed
from ckptkit.core.tree import Node, OrderedMapping, find, module_versions, rebuild, versions_state
from ckptkit.core.tree import join as path_text
from ckptkit.core.weights import WRAPPERS, as_tensor, locate
from ckptkit.edits import quantized_names
from ckptkit.edits.keys import select, strip_prefix
from ckptkit.edits.quantized_names import refuse_mixture
from ckptkit.edits.structure import bare, extract

CONFIG = "adapter_config.json"  # configuration file of peft
# Names of adapter factors in peft, diffusers, kohya and LyCORIS. A name starts with the name of the
# module.
_FACTOR = re.compile(
    r"(.*?)[._](lora_(A|B|down|up|mid|embedding_A|embedding_B|magnitude_vector)"
    r"|lora(_linear_layer)?\.(down|up)|hada_[wt][12](_[ab])?|lokr_[wt][12](_[ab])?)"
    r"(\.[^.]+)?(\.weight|\.bias)?"
)


def refuse_adapter(ck: Checkpoint, why: str, others: Sequence[Checkpoint] = ()) -> None:
    """Raise UnsupportedError if `ck` is an adapter. The message ends with `why`.

    The hint contains a command that merges the adapter. If `others` contains the base model, the
    command names this model.
    """
    names = ck.required.nodes
    seen = None  # evidence that the checkpoint is an adapter
    for name in names:
        found = _FACTOR.fullmatch(name)
        bases = (f"{found[1]}.base_layer.weight", f"{found[1]}.weight") if found else ()
        if found and not any(base in names for base in bases):
            seen = f"it has {name!r}"
            break
    else:
        # peft writes adapter_model.* next to adapter_config.json.
        place = ck.source.folder_and_name() if isinstance(ck.source, ByteSource) else None
        with suppress(CkptkitError):  # raised for a URL, because web servers cannot list folders
            if place is not None and place[1].startswith("adapter_") and CONFIG in place[0]:
                seen = f"{CONFIG} is beside it"
    if seen is not None:
        raise UnsupportedError(
            f"is an adapter of a model, such as LoRA ({seen}): {why}",
            where=ck.name,
            hint=hooks.lora_hint(ck, others),
        )


# Entries under which training loops keep an averaged copy of the weights (timm, ultralytics,
# diffusers, Lightning...).
AVERAGED = (
    "state_dict_ema", "ema_state_dict", "model_ema", "ema_model", "ema", "params_ema",
    "averaged_state_dict",
    "shadow", "shadow_params",
)  # fmt: skip


@checked
def average(checkpoints: Sequence[Source], weight: Sequence[float] | None = None) -> Checkpoint:
    """Return the mean of the floating-point weights of all checkpoints, computed in float64.

    ``weight`` contains one factor for each checkpoint. ckptkit divides the sum of the weighted
    tensors by the sum of the factors. Integer and bool buffers, such as ``num_batches_tracked``,
    come from the last checkpoint, as in torch.optim.swa_utils. Dtypes, devices and order come from
    the last checkpoint too. The result contains only weights. Raises UsageError if names or shapes
    differ.
    """
    checkpoints = several(checkpoints)
    weight = (1.0,) * len(checkpoints) if weight is None else tuple(weight)
    count, total = len(checkpoints), sum(weight)
    if len(weight) != count or not 0 < total < float("inf") or min(weight) < 0:
        what = f"{count} checkpoints need {count} weights, not negative and not all 0"
        raise UsageError(what)
    for each in checkpoints:
        refuse_adapter(each, _NO_MEAN, checkpoints)
        quantized_names.refuse(each, None, "codes and scales have no mean")
    last = bare(checkpoints[-1])
    for other in checkpoints[:-1]:
        check_alike(other.require_complete(), last)
    taken: list[str] = []  # names of tensors that are not averaged
    new: dict[int, Tensor] = {}  # keys: ids of tensors of the last checkpoint
    # If two weights are tied in all inputs, they have the same key, so they get the same mean.
    means: dict[object, Tensor] = {}
    inputs = [each.weights for each in (*checkpoints[:-1], last)]
    for name in inputs[-1]:
        row = [each[name] for each in inputs]
        if not all(has_mean(tensor.dtype) and tensor.storage is not None for tensor in row):
            taken.append(name)
            continue
        old, key = row[-1], tuple(each.elements_key for each in row)
        if key not in means:
            types = tuple(each.dtype for each in row)
            means[key] = old.remade(mean_record(tuple(map(contiguous, row)), types, weight))
        new[id(old)] = replace(means[key], requires_grad=old.requires_grad, kind=old.kind)
    made = plural(len(inputs[-1]) - len(taken), "tensor")
    notes = [f"averaged {made} of {plural(count, 'checkpoint')}"]
    if taken:
        notes.append(f"took {quoted(taken)} from the last checkpoint")
    return last.with_root(rebuild(last.root, lambda leaf: new.get(id(leaf), leaf)), notes=notes)


def check_alike(one: Checkpoint, other: Checkpoint) -> None:
    """Raise UsageError if the names or shapes of two models differ."""
    ours, theirs = one.weights, other.weights
    odd = sorted(ours.keys() ^ theirs.keys())
    odd += [name for name in ours if name in theirs and ours[name].shape != theirs[name].shape]
    if not odd:
        return
    hint = None
    if other.name and ours.keys().isdisjoint(theirs):
        hint = f"`ckptkit join {{where}} {shell_word(other.name)} {{new}}` joins parts of one model"
    elif other.name:
        hint = f"`ckptkit diff {{where}} {shell_word(other.name)}` shows the differences"
    raise UsageError(
        f"differs in names or shapes from {other.name or 'another model'}: {quoted(odd)}",
        where=one.name,
        hint=hint,
    )


def _title(checkpoints: Sequence[Checkpoint], number: int) -> str:
    return checkpoints[number].name or f"checkpoint {number + 1}"


@checked
def join(checkpoints: Sequence[Source], *, last_wins: bool = False) -> Checkpoint:
    """Join the weights of all checkpoints in one state_dict, in order, with all ``_metadata``.

    If two checkpoints contain the same name, `join` raises CollisionError. With ``last_wins``,
    `join` uses the tensor of the last checkpoint instead. Raises UsageError if the checkpoints are
    quantized by different methods, or if only one of two checkpoints quantizes a weight that both
    contain.
    """
    checkpoints = several(checkpoints)
    if not checkpoints:
        raise UsageError("no checkpoints to join")
    for ck in checkpoints:
        why = "`join` joins the tensors of models; it does not apply adapters"
        refuse_adapter(ck, why, checkpoints)
    refuse_mixture(checkpoints)
    parts = [bare(ck) for ck in checkpoints]
    joined: dict[Node, Node] = {}
    modules: dict[Node, Node] = {}
    owners: dict[str, list[int]] = {}  # name -> indices of the checkpoints that contain the name
    for number, part in enumerate(parts):
        node = part.root
        assert isinstance(node, dict)
        joined.update(node)
        modules.update(module_versions(node) or {})
        for name in map(str, node):
            owners.setdefault(name, []).append(number)
    alike: dict[tuple[int, ...], list[str]] = {}  # checkpoint indices -> shared names
    for name, numbers in owners.items():
        if len(numbers) > 1:
            alike.setdefault(tuple(numbers), []).append(name)
    notes = [f"joined {plural(len(parts), 'checkpoint')}"]
    for several_of, shared in alike.items():
        *files, last = (_title(checkpoints, each) for each in several_of)
        names, others = f"{plural(len(shared), 'name')} ({quoted(shared)})", some(files)
        if not last_wins:
            raise CollisionError(
                f"{last} and {others} both have {names}",
                hint=f"{typed('--last-wins', 'last_wins=True')} keeps the last tensor of each "
                "name; `rename` changes names",
            )
        notes.append(f"took {names} from {last}, not from {others}")
    state = versions_state(modules) if modules else None
    return parts[-1].with_root(OrderedMapping(joined, state), notes=notes)


@edit
def ema(ck: Checkpoint) -> Checkpoint:
    """Return the averaged weights (EMA) that a training loop stored beside the trained weights.

    For torch's ``AveragedModel``, `ema` removes the counter and the prefix ``module.``. For
    averaged weights of other programs, `ema` removes wrapper prefixes if the trained weights do not
    have these prefixes. If the averaged weights are a list (``shadow_params``), `ema` gives the
    tensors the names of the trained parameters. Raises UsageError if the file has no averaged
    weights.
    """
    ck.require_complete()
    quantized_names.refuse(ck, None, _NOT_AVERAGED)
    for name in AVERAGED:
        for path in (name, f"ema.{name}"):
            try:
                _, node = find(ck.root, path)
            except UsageError:
                continue
            if isinstance(node, list) and all(as_tensor(each) is not None for each in node):
                refuse_adapter(ck, _NO_MODEL)
                return _named(ck, path, node)
            if locate(node) is not None:
                found = bare(extract(ck.with_key(None), path))
                refuse_adapter(found, _NO_MODEL)
                quantized_names.refuse(found, None, _NOT_AVERAGED)
                return _unwrapped(found, ck)
    raise UsageError(
        "has no averaged weights under any name that training loops use",
        where=ck.name,
        hint="`ckptkit inspect --tree {where}` shows the entries; "
        "`extract --key` extracts an entry",
    )


_NO_MEAN = "the mean of adapter factors is not the mean of the weight updates"
_NO_MODEL = "`ema` extracts the weights of whole models"
_NOT_AVERAGED = "training averages only floats, so these are not averaged weights"
_COUNTER = "n_averaged"  # a buffer of torch.optim.swa_utils.AveragedModel


def _unwrapped(found: Checkpoint, ck: Checkpoint) -> Checkpoint:
    """Drop the counter of torch's AveragedModel, and remove prefixes of wrappers from the names of
    averaged weights."""
    is_model = _COUNTER in found.weights and any(
        name.startswith("module.") for name in found.weights
    )
    if is_model:
        found = select(found, drop=_COUNTER)
    try:
        trained = set(ck.weights)
    except CkptkitError:
        trained = set()
    while True:
        names = found.weights
        # Find a wrapper prefix, such as "module.", that is common to all names.
        prefix = next((p for p in WRAPPERS if all(name.startswith(p) for name in names)), None)
        if prefix is None:
            return found
        if not is_model and trained.isdisjoint(name.removeprefix(prefix) for name in names):
            return found
        found = strip_prefix(found, prefix)


def _named(ck: Checkpoint, path: str, tensors: list[Node]) -> Checkpoint:
    """Return a checkpoint in which the tensors of a list have the names of the trained weights."""
    weights = ck.required
    shapes = {name: tensor.shape for name, tensor in weights.tensors.items()}
    trained = [
        name
        for name, tensor in weights.tensors.items()
        if tensor.requires_grad or tensor.kind == "parameter"
    ]
    fitting = (each for each in (trained, list(weights.nodes)) if len(each) == len(tensors))
    names = next(fitting, None)
    if names is None:
        raise UsageError(
            f"{path} is a list of {plural(len(tensors), 'tensor')} without names, but there are "
            f"{len(weights.nodes):,} weights at {path_text(weights.path) or 'the root'}",
            where=ck.name,
        )
    pairs = [(name, as_tensor(node)) for name, node in zip(names, tensors, strict=True)]
    odd = [name for name, tensor in pairs if tensor and tensor.shape != shapes[name]]
    if odd:
        raise UsageError(
            f"cannot name the tensors of {path}, because they are not in the order of the weights: "
            f"the shapes differ for {quoted(odd)}",
            where=ck.name,
        )
    new = {**weights.nodes, **dict(zip(names, tensors, strict=True))}
    notes = [f"extracted {plural(len(tensors), 'tensor')} from {path!r}, named like the weights"]
    if len(new) > len(tensors):
        notes.append(f"added {plural(len(new) - len(tensors), 'buffer')} from the trained weights")
    return ck.with_key(None).with_root(OrderedMapping(new), notes=notes)
