"""Apply tensor rules to a checkpoint, read config.json, and check names and shapes (``--like``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptkit import quantized
from ckptkit.compute.arranged import Arranged, contiguous, how
from ckptkit.compute.packing import Blocks
from ckptkit.compute.strided import ZEROS, StridedCopy, in_bytes, normal
from ckptkit.core.arguments import texts
from ckptkit.core.checkpoint import Checkpoint, edit
from ckptkit.core.errors import CollisionError, TensorError, UsageError
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import flatten, merge_all, plural, quoted, shell_word, typed
from ckptkit.core.text import shape as shape_text
from ckptkit.core.tree import Node, join, walk
from ckptkit.core.weights import as_tensor, is_optimizer
from ckptkit.edits import keys as names
from ckptkit.edits import quantized_names
from ckptkit.edits.config_file import is_beside, lazily
from ckptkit.quantized.group import CONFIG
from ckptkit.rules.names import Config
from ckptkit.rules.notation import NotReversibleError, about
from ckptkit.rules.planner import (
    RuleSet,
    RulesOutcome,
    Taken,
    Target,
    check_reversible,
    unused_argument,
)

if TYPE_CHECKING:
    from ckptkit.quantized import QuantizedWeight

ARCHITECTURE = "general.architecture"  # GGUF key; its value is a name such as "llama"


def metadata(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the GGUF metadata of the architecture. Remove the prefix (such as ``llama.``) of the
    keys."""
    root = checkpoint.root if isinstance(checkpoint.root, dict) else {}
    prefix = f"{root.get(ARCHITECTURE)}."
    return {
        key.removeprefix(prefix): value
        for key, value in root.items()
        if isinstance(key, str) and key.startswith(prefix)
    }


# With `--like`, the output must have the names and shapes of another checkpoint.


Shapes = Mapping[str, Shape | None]  # None for an unknown shape


class UnlikeError(TensorError):
    """The error for weights with other names or shapes than expected."""


def check_like(checkpoint: Checkpoint, expected: Shapes, name: str) -> Checkpoint:
    """Return the checkpoint if its weights have exactly the expected names and shapes.

    Raises UnlikeError for other names or shapes.
    """
    found = {key: tensor.shape for key, tensor in checkpoint.weights.items()}
    faults = []
    if missing := [key for key in expected if key not in found]:
        faults.append(f"{plural(len(missing), 'key')} missing: {quoted(missing)}")
    if more := [key for key in found if key not in expected]:
        faults.append(f"{plural(len(more), 'key')} unexpected: {quoted(more)}")
    shapes = [
        f"{key} {shape_text(found[key])} instead of {shape_text(shape)}"
        for key, shape in expected.items()
        if shape is not None and key in found and found[key] != shape
    ]
    if shapes:
        faults.append(f"different shapes: {', '.join(shapes[:4])}")
    if faults:
        raise UnlikeError(f"differs from {name}: {'; '.join(faults)}", hint="nothing was written")
    return checkpoint


# Rules for quantized weights. If a rule renames one tensor of a quantized weight, rename all
# tensors of the weight. If rules rearrange a quantized weight, each target must contain complete
# blocks, and must belong to a quantized weight of the same method.


def followers(ck: Checkpoint, outcome: RulesOutcome) -> tuple[dict[str, str], Checkpoint]:
    """Rename all tensors of a quantized weight if a rule renames one of them.

    Return a dict from old to new names of the tensors that no rule matches. Also return the
    checkpoint with the new names in its quantization metadata. Raises UsageError if the new names
    do not have the suffixes that mark a quantized weight.
    """
    moved = {made.sources[0]: name for name, made in outcome.made.items() if made.is_moved}
    names, known = quantized_names.rename_together(ck, moved)
    kept = set(outcome.kept)
    return {old: new for old, new in names.items() if old in kept and old != new}, known


def check_blocks(ck: Checkpoint, made: Checkpoint, relaid: Mapping[str, Target]) -> None:
    """Raise UsageError if a rule splits blocks of a quantized weight, or separates codes and
    scales."""
    found = quantized.find(ck)
    if not found:
        return
    known = quantized.find(made).by_member
    shapes = {name: tensor.shape for name, tensor in ck.required.tensors.items()}
    for name, target in relaid.items():
        for group in found.touching(target.sources):
            if not _is_whole(target, group, shapes):
                problem = "would cut its blocks"
            else:
                # The new tensors must be a quantized weight of the same method.
                new = known.get(name)
                is_same = new is not None and new.family == group.family
                has_layout = new is not None and new.layout is not None
                if is_same and (has_layout or group.layout is None):
                    continue
                problem = "separates codes and scales; the codes and the scales need a rule each"
            quantized_names.refuse(ck, group.parts, f"rule {target.rule} {problem}")


def _is_whole(target: Target, group: QuantizedWeight, shapes: Mapping[str, Shape]) -> bool:
    """Return True if `target` copies only complete blocks of the quantized weight."""
    if group.family == "gguf":  # `_new` already checked GGUF blocks
        return True
    sources = [name for name in target.sources if name in group.members]
    for copy in target.copies:
        source = None if copy.source == ZEROS else target.sources[copy.source]
        if source in sources and not _is_run(copy, shapes[source], target, _rows(group, source)):
            return False
    return True


def _rows(group: QuantizedWeight, source: str) -> int:
    """Return the number of rows in a block of the tensor `source`. If all rows must stay together,
    return 0."""
    layout = group.layout
    if not isinstance(layout, Blocks):
        return 0
    is_flat = layout.packing.kind == "flat" and all(
        numbers.grid.order == "rows" for numbers in layout.scales
    )
    if not is_flat or len(group.parts) > 2:
        return 0
    return max(numbers.grid.height for numbers in layout.scales) if source == group.parts[0] else 1


def _is_run(copy: StridedCopy, shape: Shape, target: Target, rows: int) -> bool:
    """Return True if a copy is contiguous and contains only complete matrices, or complete blocks
    of `rows` rows."""
    dims = normal(copy.dims)
    if len(dims) > 1 or any(read != written for _, read, written in dims):
        return False
    if target.shape[-2:] == shape[-2:]:
        return True
    if not rows or target.shape[-1:] != shape[-1:]:
        return False
    step = rows * shape[-1]
    count = dims[0][0] if dims else 1
    return not (copy.start % step or copy.place % step or count % step)


# Applying rules to a checkpoint.


@dataclass(slots=True)
class RulesReport:
    """The changes made by one ``rules`` step of a recipe."""

    step: int  # number of the step in the recipe, starting at 1
    keys: int
    kept: int
    made: int
    rules: list[Taken]
    reversible: str | None  # why the step is not reversible; None if the step is reversible
    pairs: list[tuple[str, str]]  # (old name, new name)


class RuleOptions(NamedTuple):
    """Options that all rule steps of a recipe share.

    - ``args`` contains sizes from the caller.
    - ``reports`` is true if each step adds a `RulesReport` to the checkpoint.
    - ``meta`` is the metadata of another file and replaces the metadata of the checkpoint.
    - ``dequantize`` is the dtype for the dequantize step.
    """

    args: Mapping[str, int] = MappingProxyType({})
    config: Config = None
    reverse: bool = False
    reports: bool = False
    meta: Config = None
    dequantize: str | None = None


@edit
def apply_rules(
    checkpoint: Checkpoint,
    rules: RuleSet | str | Sequence[str],
    *,
    keep: str | Sequence[str] = (),
    sizes: Mapping[str, str | int] | None = None,
    config: Config = None,
    args: Mapping[str, int] | None = None,
    reverse: bool = False,
    keys: str | Sequence[str] = (),
    reports: bool = False,
) -> Checkpoint:
    """Rename and rearrange the weights by `rules`: one line or several, each ``LEFT -> RIGHT``.

    `keep` contains globs. If a key matches a glob of `keep` and no rule, the key stays unchanged.
    With ``keep="rest"``, all keys that match no rule stay unchanged. If ckptkit cannot infer a size
    from the rules and shapes, it takes the size from `args`, `sizes` or `config`. `config` is the
    configuration of the model, by default the file config.json beside the checkpoint. With
    `reverse`, ckptkit applies the rules from right to left. `keys` are the paths of dicts to edit
    instead of the weights. With `reports`, the ``reports`` of the result describe the effect of
    each rule.

    Raises UsageError for an invalid rule. Raises TensorError if a shape does not fit a rule.
    """
    if not isinstance(rules, RuleSet):
        rules = texts("rules", rules)
        if not any(map(str.strip, rules)):
            raise UsageError("no rule given", hint="write, for example, 'model.{x} -> {x}'")
        rules = RuleSet.parse(rules, sizes or {})
    unused = (args or {}).keys() - rules.words()
    if unused:
        raise unused_argument(min(unused), rules.words())
    return step(checkpoint, rules, keep, RuleOptions(args or {}, config, reverse, reports), keys)


def step(
    checkpoint: Checkpoint,
    rules: RuleSet,
    keep: str | Sequence[str],
    options: RuleOptions,
    keys: Sequence[str] = (),
    number: int = 1,
) -> Checkpoint:
    """Apply the rules of one recipe step. `number` is the number of the step, starting at 1."""
    given = options.config
    if given is None:
        given = lazily(checkpoint)
    if options.meta is None:
        options = options._replace(meta=metadata(checkpoint))
    rules = rules.reversed() if options.reverse else rules
    asked = {"keep": keep, "config": given, "meta": options.meta, "args": options.args}
    builders = [
        _DictBuilder(checkpoint, rules, target, asked)
        for target in names.targets_of(checkpoint, keys)
    ]
    changes = [each.change() for each in builders]
    warnings = flatten(each.warnings for each in builders)
    made = names.applied(checkpoint, changes, warnings)
    for each in builders:
        checks = options.reverse or options.reports
        reason = each.not_reversible(options.reverse) if checks else None
        if options.reports:
            made = replace(made, reports=(*made.reports, each.report(number, reason)))
        if each.known is not checkpoint:
            made = replace(made, extras=each.known.extras)
    relaid = merge_all(each.outcome.made for each in builders)
    check_blocks(checkpoint, made, {n: each for n, each in relaid.items() if not each.is_moved})
    if any(each.is_relaid for each in builders):
        _check_optimizers(checkpoint)
        if is_beside(checkpoint.source):
            note = f"{CONFIG} next to the source describes the old layout"
            if note not in made.notes:
                made = made.with_root(made.root, notes=[note])
    return made


class _DictBuilder:
    """A builder for one dict. The targets of the rules become the new entries of the dict."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        rules: RuleSet,
        target: names.EditedDict,
        asked: Mapping[str, Any],
    ) -> None:
        self.target, self.rules, self.asked = target, rules, asked
        self.tensors = {
            name: tensor
            for name in target.names
            if (tensor := as_tensor(target.entries[name])) is not None
        }
        self.shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        self.outcome = rules.outcome(self.shapes, **asked)
        self.following, self.known = followers(checkpoint, self.outcome)
        self.done = {taken.number: taken for taken in self.outcome.taken}
        self.pairs: list[tuple[str, str]] = []  # (old name, new name)
        self.is_relaid = False
        self.warnings: list[str] = []
        self._storages: dict[object, Storage] = {}
        self._mixed: list[str] = []
        self._arrays: list[str] = []
        # The keys identify elements of source tensors. The values are the ids of the new nodes or
        # storages with these elements. If several source keys share the elements, and the value
        # contains several ids, these source keys are no longer tied.
        self._used: dict[object, set[int]] = {}

    def not_reversible(self, reverse: bool) -> str | None:
        """Return the reason why the step is not reversible, or None if the step is reversible.

        With `reverse`, raise NotReversibleError if the step is not reversible.
        """
        try:
            check_reversible(self.rules, self.shapes, self.outcome, **self.asked)
        except NotReversibleError as error:
            if reverse and not any(taken.dropped for taken in self.outcome.taken):
                raise NotReversibleError(f"not reversible: {error.message}") from error
            return error.message
        return None

    def report(self, number: int, reason: str | None) -> RulesReport:
        kept, done = len(self.outcome.kept), list(self.done.values())
        made = len(self.outcome.targets) - kept
        return RulesReport(number, len(self.shapes), kept, made, done, reason, self.pairs)

    def change(self) -> names.NameChange:
        target, entries = self.target, self.entries()
        lost: list[str] = []
        paths = names.moved_paths(names.paths_of(target.entries) or {}, self.pairs, lost)
        if lost:
            entry = plural(len(lost), "_metadata entry")
            reason = "of new modules, because the entries of the old modules differ"
            self.warnings.append(f"dropped {entry} {reason}: {quoted(lost)}")
        moved = {} if self.is_relaid else {old: new for old, new in self.pairs if old != new}
        node = names.with_paths(target.entries, entries, lambda _: paths)
        return names.NameChange(target, node, moved, [*self.notes()])

    def entries(self) -> dict[Node, Node]:
        """Return the new dict. The order of the new keys is the order of their source keys."""
        order = {key: number for number, key in enumerate(self.target.entries)}
        placed: list[tuple[int, Node, Node]] = []
        for name, made in self.outcome.targets.items():
            if made is None:
                new_name = self.following.get(name, name)
                if new_name != name and new_name in self.outcome.targets:
                    raise CollisionError(
                        f"{name} must be renamed to {new_name}, because its quantized weight is "
                        f"renamed, but {new_name} already exists"
                    )
                self.pairs.append((name, new_name))
                self._note_use([name], id(self.target.entries[name]))
                placed.append((order[name], new_name, self.target.entries[name]))
                continue
            node = self._node(name, made)
            placed.append((min(order[key] for key in made.sources), name, node))
        new = {name for _, name, _ in placed}
        for key, node in self.target.entries.items():
            if key not in self.tensors:
                if key in new:
                    raise CollisionError(f"a rule makes {key}, which already exists")
                placed.append((order[key], key, node))
        placed.sort(key=itemgetter(0))
        if self._mixed:
            self.warnings.append(
                "became plain tensors, because some of their sources are not parameters: "
                f"{quoted(self._mixed)}"
            )
        return {name: node for _, name, node in placed}

    def _node(self, name: str, made: Target) -> Node:
        done = self.done[made.rule]
        used = sorted({copy.source for copy in made.copies if copy.source != ZEROS})
        sources = [made.sources[number] for number in used] or [made.sources[0]]
        self.pairs += [(key, name) for key in sources]
        done.forms.add(f"{shape_text(made.shape)} {self.tensors[sources[0]].dtype}")
        done.bytes += sum(self.tensors[key].nbytes for key in sources[:1]) if made.is_moved else 0
        if made.is_moved and self.tensors[sources[0]].shape == made.shape:
            self._note_use(sources, id(self.target.entries[sources[0]]))
            return self.target.entries[sources[0]]
        self.is_relaid = True
        tensors = [self.tensors[key] for key in sources]
        first = tensors[0]
        self._check_alike(made.rule, sources)
        # If two targets copy the same elements in the same way, the targets share one storage.
        key = (tuple(self.tensors[source].elements_key for source in made.sources), made.copies)
        if key not in self._storages:
            self._storages[key] = self._new(made, first)
        storage = self._storages[key]
        self._note_use(sources, id(storage))
        if not made.is_moved:
            done.bytes += storage.nbytes
            done.how = max(done.how, how(made.copies, first.dtype.itemsize), key=_ORDER.index)
        if any(tensor.kind == "ndarray" for tensor in tensors):
            self._arrays.append(name)
        kinds = {"tensor" if tensor.kind == "ndarray" else tensor.kind for tensor in tensors}
        if len(kinds) > 1:
            self._mixed.append(name)
        kind = kinds.pop() if len(kinds) == 1 else "tensor"
        grad = all(tensor.requires_grad for tensor in tensors)
        stride = contiguous_stride(made.shape)
        return Tensor(storage, first.dtype, made.shape, stride, 0, grad, kind)

    def _check_alike(self, rule: int, sources: Sequence[str]) -> None:
        """Raise TensorError if a source is not strided, or if the sources differ in dtype or
        device."""
        first = self.tensors[sources[0]]
        for key in sources:
            tensor, node = self.tensors[key], self.target.entries[key]
            is_plain = isinstance(node, Tensor) or tensor.kind == "ndarray"
            if not is_plain or tensor.storage is None or tensor.layout != "strided":
                message = (
                    f"{key} can only be renamed: it is sparse, of a subclass, or without bytes"
                )
                hint = "a rule without [ ] renames it"
                raise about(rule, TensorError(message, hint=hint))
            if tensor.dtype != first.dtype:
                message = f"{sources[0]} is {first.dtype}, but {key} is {tensor.dtype}"
                word, dtype = "cast", "float32"
                if first.dtype.block > 1 or tensor.dtype.block > 1:
                    word, dtype = "dequantize", "bfloat16"
                asked = typed(f"--{word} {dtype}", word)
                hint = f"{word} first: {asked}; in a recipe, `- {word}: {dtype}`"
                raise about(rule, TensorError(message, hint=hint))
            if tensor.device != first.device:
                message = f"{sources[0]} is on {first.device}, but {key} is on {tensor.device}"
                hint = f"remap first: {typed('--to cpu', 'remap')}; in a recipe, `- remap: cpu`"
                raise about(rule, TensorError(message, hint=hint))

    def _new(self, made: Target, first: Tensor) -> Storage:
        dtype = first.dtype
        length = dtype.nbytes(prod(made.shape))
        whole = first.storage
        # If a contiguous tensor fills its storage, keep the storage.
        is_plain = first.is_contiguous and not (first.offset or first.conj or first.neg)
        if made.is_moved and whole is not None and is_plain and whole.nbytes == length:
            return whole
        records = tuple(contiguous(self.tensors[source]) for source in made.sources)
        copies, itemsize = made.copies, dtype.itemsize
        if dtype.bits % 8 or dtype.packed > 1 or dtype.block > 1:
            found = in_bytes(copies, dtype.bits, dtype.block)
            last = {self.tensors[source].shape[-1:] for source in made.sources}
            if found is None or last != {made.shape[-1:]}:
                hint = f"{dtype} packs elements along the last dimension: do not split it"
                message = f"the rule splits bytes of {made.sources[0]}"
                if dtype.block > 1:
                    message = f"the rule cuts blocks of {made.sources[0]} ({dtype})"
                    hint = f"dequantize first: {typed('--dequantize bfloat16', 'dequantize')}"
                raise about(made.rule, TensorError(message, hint=hint))
            copies, itemsize = found, 1
        # If a GGUF file is big-endian, the fields in moved blocks stay big-endian.
        is_swapped = dtype.block > 1 and whole is not None and whole.big_endian
        record = Arranged(records, copies, itemsize, length)
        return Storage(record, first.device, big_endian=is_swapped)

    def _note_use(self, sources: Iterable[str], storage: int) -> None:
        for source in sources:
            self._used.setdefault(self.tensors[source].elements_key, set()).add(storage)

    def notes(self) -> Iterable[str]:
        """Yield notes that describe the changes."""
        taken = self.done.values()
        matched, made = sum(each.matched for each in taken), sum(each.made for each in taken)
        kept = len(self.outcome.kept)
        keys = plural(len(self.tensors), "key")
        yield f"rules: {matched:,} of {keys} taken, {kept:,} kept; {made:,} written"
        for each in taken:
            if each.dropped:
                yield f"rule {each.number} dropped {each.dropped:,} elements"
            if each.zeros:
                yield f"rule {each.number} wrote {each.zeros:,} zeros"
        # Find source keys that were tied, and whose targets no longer share memory.
        by_view: dict[object, list[str]] = {}
        for key, tensor in self.tensors.items():
            by_view.setdefault(tensor.elements_key, []).append(key)
        apart = [
            key
            for view, held in by_view.items()
            if len(held) > 1 and len(self._used.get(view, ())) > 1
            for key in held
        ]
        if apart:
            yield f"no longer tied: {quoted(apart)}"
        if self._arrays:
            yield f"converted NumPy arrays to tensors: {quoted(self._arrays)}"


_ORDER = ("moved", "joined", "gathered", "transposed")


def _check_optimizers(ck: Checkpoint) -> None:
    """Raise UsageError if the tree contains optimizer state, because the state has the old
    layout."""
    for path, node in walk(ck.root):
        if not is_optimizer(node):
            continue
        state = node["state"] if isinstance(node, dict) else None
        if state:
            raise UsageError(
                "the optimizer state fits only the old order and shapes of the weights",
                hint=f"drop the optimizer: --drop-entry {shell_word(join(path))}; or "
                "`- weights: true` in a recipe",
            )
