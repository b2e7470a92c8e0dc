"""Several checkpoints as one: their mean, or all of their tensors; and averaged (EMA) weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptkit.compute import contiguous, has_mean, mean_record
from ckptkit.core import arguments
from ckptkit.core.checkpoint import Checkpoint, Source, opened, several
from ckptkit.core.errors import CollisionError, UsageError
from ckptkit.core.rebuilding import rebuild
from ckptkit.core.tensor import Storage, Tensor, contiguous_stride
from ckptkit.core.text import plural, quoted, shell_command
from ckptkit.core.tree import Node, OrderedMapping, find, join, module_versions, versions_state
from ckptkit.core.weights import Weights, as_tensor, locate
from ckptkit.transforms import groups
from ckptkit.transforms.groups import refuse_mixture
from ckptkit.transforms.structure import bare, extract

# Entries under which training loops keep an averaged copy of the weights (timm, ultralytics,
# diffusers, Lightning...).
AVERAGED = (
    "state_dict_ema", "ema_state_dict", "model_ema", "ema_model", "ema", "params_ema",
    "averaged_state_dict",
    "shadow", "shadow_params",
)  # fmt: skip


def average(checkpoints: Sequence[Source], shares: Sequence[float] | None = None) -> Checkpoint:
    """Return weights whose floating-point elements are the means of all checkpoints, in float64.

    ``shares`` are their weights, which need not add up to 1. What has no mean (integer and bool
    buffers, such as the number of batches) is that of the last checkpoint, as in
    torch.optim.swa_utils; so are dtypes, devices and order. Only the weights are kept. Raises
    UsageError where names or shapes differ.
    """
    checkpoints = several(checkpoints)
    shares = (
        tuple(arguments.numbers("shares", shares))
        if shares is not None
        else (1.0,) * len(checkpoints)
    )
    if (
        not checkpoints
        or len(shares) != len(checkpoints)
        or min(shares) < 0
        or not 0 < sum(shares) < float("inf")
    ):
        raise UsageError(
            f"{len(checkpoints)} checkpoints need as many weights, none negative, not all 0"
        )
    for each in checkpoints:
        groups.refuse(each, None, "codes and scales have no mean")
    last = bare(checkpoints[-1])
    names = [each.name or f"checkpoint {number}" for number, each in enumerate(checkpoints, 1)]
    rows = _rows([*map(_weights, checkpoints[:-1]), last.required], names)
    new = _Means(rows, shares)
    notes = [
        f"averaged {plural(new.averaged, 'tensor')} of {plural(len(checkpoints), 'checkpoint')}"
    ]
    if new.taken:
        notes.append(f"took {quoted(new.taken)} from the last")
    root = rebuild(last.root, lambda leaf: new.tensors.get(id(leaf), leaf))
    return last.with_root(root, notes=notes)


def _weights(ck: Checkpoint) -> Weights:
    return ck.whole().required


def _rows(all_weights: list[Weights], names: list[str]) -> dict[str, list[Tensor]]:
    """Return by name the tensors of all checkpoints.

    Raises UsageError where they do not go together.
    """
    *others, last = (weights.tensors for weights in all_weights)
    for other_name, other in zip(names, others, strict=False):
        odd = sorted(other.keys() ^ last.keys())
        odd += [
            name
            for name, tensor in last.items()
            if name in other and other[name].shape != tensor.shape
        ]
        if odd:
            raise UsageError(
                f"{other_name} and {names[-1]} differ in names or shapes: {quoted(odd)}",
                hint=f"`{shell_command(('ckptkit', 'diff', other_name, names[-1]))}` shows how",
            )
    return {name: [*(other[name] for other in others), tensor] for name, tensor in last.items()}


class _Means:
    """New tensors for those of the last checkpoint, by id.

    Weights that are tied in all of them stay tied.
    """

    def __init__(self, rows: Mapping[str, list[Tensor]], shares: tuple[float, ...]) -> None:
        self.tensors: dict[int, Tensor] = {}
        self.taken: list[str] = []  # names of what has no mean
        self._storages: dict[object, Storage] = {}
        for name, row in rows.items():
            if all(has_mean(tensor.dtype) and tensor.storage is not None for tensor in row):
                self.tensors[id(row[-1])] = self._mean(row, shares)
            else:
                self.taken.append(name)
        self.averaged = len(rows) - len(self.taken)

    def _mean(self, row: list[Tensor], shares: tuple[float, ...]) -> Tensor:
        last = row[-1]
        view = tuple(
            (id(each.storage), each.offset, each.shape, each.stride, each.conj, each.neg)
            for each in row
        )
        if view not in self._storages:
            types = tuple(each.dtype for each in row)
            self._storages[view] = Storage(
                mean_record(tuple(map(contiguous, row)), types, shares), last.device
            )
        stride = contiguous_stride(last.shape)
        return Tensor(
            self._storages[view], last.dtype, last.shape, stride, 0, last.requires_grad, last.kind
        )


def merge(checkpoints: Sequence[Source], *, last_wins: bool = False) -> Checkpoint:
    """The weights of all checkpoints in one state_dict, in order, with the ``_metadata`` of all.

    Raises CollisionError for a name that two of them have, unless ``last_wins``; UsageError for
    weights that are quantized in different ways.
    """
    checkpoints = several(checkpoints)
    arguments.flags(last_wins=last_wins)
    if not checkpoints:
        raise UsageError("there are no checkpoints to merge")
    refuse_mixture(checkpoints)
    parts = [bare(ck) for ck in checkpoints]
    merged: dict[Node, Node] = {}
    modules: dict[Node, Node] = {}
    twice: list[str] = []
    for part in parts:
        node = part.root
        assert isinstance(node, dict)
        twice += [str(name) for name in node if name in merged]
        merged.update(node)
        modules.update(module_versions(node) or {})
    if twice and not last_wins:
        raise CollisionError(
            f"{plural(len(twice), 'name')} in more than one of them: {quoted(twice)}",
            hint="--last-wins takes the last of each; `rename` gives them other names",
        )
    notes = [f"merged {plural(len(parts), 'checkpoint')}"]
    if twice:
        notes.append(f"{plural(len(set(twice)), 'name')} taken from the last that has it")
    state = versions_state(modules) if modules else None
    return parts[-1].with_root(OrderedMapping(merged, state), notes=notes)


def ema(ck: Source) -> Checkpoint:
    """Return the averaged weights that a training loop kept with the trained ones.

    A list of tensors (``shadow_params``) gets the names of the parameters beside it. Raises
    UsageError if there is no entry that training loops use for them.
    """
    ck = opened(ck)
    ck.whole()
    groups.refuse(ck, None, "its weights are not those that training has averaged")
    for name in AVERAGED:
        for path in (name, f"ema.{name}"):
            try:
                _, node = find(ck.root, path)
            except UsageError:
                continue
            if isinstance(node, list) and all(as_tensor(each) is not None for each in node):
                return _named(ck, path, node)
            if locate(node) is not None:
                found = bare(extract(ck.with_key(None), path))
                groups.refuse(found, None, "its weights are not those that training has averaged")
                return found
    raise UsageError(
        "holds no averaged weights under a name that training loops use for them",
        where=ck.name,
        hint="`ckptkit inspect --tree {where}` shows the entries; `extract --key` takes one",
    )


def _named(ck: Checkpoint, path: str, tensors: list[Node]) -> Checkpoint:
    """The tensors of a list under the names of the weights that are trained."""
    weights = ck.required
    trained = [
        name
        for name, tensor in weights.tensors.items()
        if tensor.requires_grad or tensor.kind == "parameter"
    ]
    names = next(
        (each for each in (trained, list(weights.nodes)) if len(each) == len(tensors)), None
    )
    if names is None:
        raise UsageError(
            f"{path} is a list of {plural(len(tensors), 'tensor')} without names, and the weights "
            f"at {join(weights.path) or 'the root'} have {len(weights.nodes):,}",
            where=ck.name,
        )
    shapes = weights.tensors
    odd = [
        n
        for n, node in zip(names, tensors, strict=True)
        if (t := as_tensor(node)) and t.shape != shapes[n].shape
    ]
    if odd:
        raise UsageError(
            f"{path} is in another order than the weights: {quoted(odd)} would change shape",
            where=ck.name,
        )
    new = {**weights.nodes, **dict(zip(names, tensors, strict=True))}
    notes = [
        f"took {plural(len(tensors), 'tensor')} out of {path!r}, under the names of the weights"
    ]
    if len(new) > len(tensors):
        notes.append(f"{plural(len(new) - len(tensors), 'buffer')} as in the weights")
    return ck.with_key(None).with_root(OrderedMapping(new), notes=notes)
