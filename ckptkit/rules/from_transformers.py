"""Generate rules from the conversions that transformers defines for a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from ckptkit.core.errors import CkptkitError, UnsupportedError, UsageError
from ckptkit.core.tensor import Shape
from ckptkit.core.text import flatten, owners
from ckptkit.rules.planner import REST, RuleSet

# Reading the registry of conversions in transformers.
#
# First, ckptkit builds the model on the meta device, without weights. Then ckptkit converts the
# keys of the model to the keys in the model's files, as `save_pretrained` does. No code from
# checkpoints runs.


_CLASSES = (
    "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM", "AutoModel", "AutoModelForMultimodalLM", "AutoModelForObjectDetection",
    "AutoModelForDepthEstimation", "AutoModelForPreTraining",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Moved:
    """A conversion of tensors in the files to tensors of the model.

    ``old`` contains the names in the files, as one tuple for each pattern of the converter. ``new``
    contains the names in the model. Each of the ``operations`` is (name, parameters). If there are
    no operations, the conversion renames one tensor.
    """

    old: tuple[tuple[str, ...], ...]
    new: tuple[str, ...]
    operations: tuple[tuple[str, Mapping[str, Any]], ...] = ()


@dataclass(slots=True)
class Layouts:
    """Tensor names and shapes in the files and in the model, and the conversions between both.

    ``old`` describes the files, and ``new`` describes the model.
    """

    model_type: str
    version: str
    old: dict[str, tuple[int, ...]] = field(default_factory=dict)
    new: dict[str, tuple[int, ...]] = field(default_factory=dict)
    moved: list[Moved] = field(default_factory=list)
    tied: frozenset[str] = frozenset()  # names of tied parameters, which files may lack


def layouts_of(model_type: str, config: Mapping[str, Any] | None = None) -> Layouts:
    """Return the layouts of a model type that the installed transformers supports.

    Raises UsageError if the model type is unknown, or if transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        hint = "pip install transformers"
        raise UsageError("transformers is not installed", hint=hint) from error
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if model_type not in CONFIG_MAPPING_NAMES:
        from ckptkit.core.text import nearest

        close = nearest(model_type, CONFIG_MAPPING_NAMES)
        near = f"did you mean {', '.join(close)}?" if close else None
        raise UsageError(f"transformers has no model type {model_type!r}", hint=near)
    settings = {name: value for name, value in (config or {}).items() if name != "model_type"}
    try:
        made = transformers.AutoConfig.for_model(model_type, **settings)
    except Exception as error:  # the class of a configuration may raise any exception
        message = f"transformers rejects the configuration of {model_type}"
        raise UsageError(f"{message}: {str(error)[:200]}") from error
    return layouts_of_model(_built(transformers, made), model_type)


def _built(transformers: Any, config: Any) -> Any:
    import torch

    first: Exception | None = None
    for name in _CLASSES:
        try:
            with torch.device("meta"):
                return getattr(transformers, name).from_config(config)
        except Exception as error:  # the class of a model may raise any exception
            first = first or error
    raise UnsupportedError(f"transformers cannot build the model: {str(first)[:200]}") from first


def layouts_of_model(model: Any, model_type: str) -> Layouts:
    """Return the layouts of a model object. The model can be on any device.

    Convert the keys of the model to keys of the files, as `revert_weight_conversion` does.
    """
    import torch
    import transformers
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        PrefixChange,
        WeightConverter,
        WeightRenaming,
        apply_converters,
        apply_renamings,
        dot_natural_key,
    )

    mapping = get_model_conversion_mapping(model, add_legacy=False)
    forward = [each for each in mapping if not isinstance(each, PrefixChange)][::-1]
    back = [each.reverse_transform() for each in forward]
    renamings = [each for each in back if isinstance(each, WeightRenaming)]
    converters = [each for each in back if isinstance(each, WeightConverter)]
    tied = frozenset(getattr(model, "all_tied_weights_keys", None) or ())
    found = Layouts(model_type, transformers.__version__, tied=tied)
    state = {
        name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items()
    }
    found.new = {name: tuple(tensor.shape) for name, tensor in state.items()}
    by_pattern = owners((each, each.source_patterns) for each in converters)
    groups: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for key in sorted(state, key=dot_natural_key):
        renamed, pattern = apply_converters(key, converters)
        if pattern is None:
            old = apply_renamings(key, renamings)
            found.old[old] = tuple(state[key].shape)
            found.moved.append(Moved(((old,),), (key,)))
        else:
            group = renamed, id(by_pattern[pattern])
            groups.setdefault(group, []).append((key, pattern))
    for (renamed, _), members in groups.items():
        converter = by_pattern[members[0][1]]
        copy = deepcopy(converter)
        for key, pattern in members:
            copy.add_tensor(renamed, key, pattern, state[key])
        names = []
        for name, made in copy.convert(renamed, model=model, config=model.config).items():
            old = apply_renamings(name, renamings)
            tensor = made[0] if isinstance(made, list) else made
            found.old[old] = tuple(tensor.shape)
            names.append(old)
        original = next(f for f, b in zip(forward, back, strict=True) if b is converter)
        order = {pattern: number for number, pattern in enumerate(original.target_patterns)}
        rank = {pattern: number for number, pattern in enumerate(converter.source_patterns)}
        members.sort(key=lambda member: order.get(member[1], rank.get(member[1], 0)))
        count = len(original.source_patterns)
        each = len(names) // count
        old_names = tuple(tuple(names[n * each : (n + 1) * each]) for n in range(count))
        operations = tuple(
            (type(op).__name__, {**vars(op), "heads": _heads(op, model.config)})
            for op in original.operations
        )
        found.moved.append(Moved(old_names, tuple(key for key, _ in members), operations))
    return found


def _heads(operation: Any, config: Any) -> str:
    """Return the path of the number of heads, such as ``config.num_attention_heads``.

    The path is written as in rules. If the configuration has no number of heads, return "1".
    """
    key = getattr(operation, "subconfig_key", None)
    part = getattr(config, key, None) if key else None
    path = "config" if part is None else f"config.{key}"
    holder = config if part is None else part
    name = "num_attention_heads"
    if not hasattr(holder, name):
        return "1"
    return f"{path}.{getattr(holder, 'attribute_map', {}).get(name, name)}"


# Generating rules from the layouts


_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")  # a number between the dots of a name
_AXES = "abcdfgijk"


class Unsayable(Exception):
    """An operation that rules cannot express."""


@dataclass(slots=True)
class Generated:
    """Generated rules for one model type, as a list of steps.

    `left` contains a message for each conversion that rules cannot express.
    """

    steps: list[list[str]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def generated(layouts: Layouts) -> Generated:
    """Generate rules that convert tensors in the files to tensors of the model.

    Check the rules and the reversed rules with the names and shapes of both layouts.
    """
    found = Generated()
    steps: tuple[Families, Families] = {}, {}
    for moved in layouts.moved:
        if not moved.operations and moved.old[0][0] == moved.new[0]:
            continue
        try:
            pairs = [(number, _pair(part, layouts)) for number, part in _in_steps(moved)]
        except Unsayable as error:
            found.left.append(f"{moved.new[0]}: {error}")
            continue
        for number, pair in pairs:
            steps[number].setdefault(pair.family, []).append(pair)
    for families in filter(None, steps):
        lines = []
        for pairs_alike in families.values():
            arrow = "->?" if all(pair.new in layouts.tied for pair in pairs_alike) else "->"
            lines += _lines(pairs_alike, arrow)
        # Rules without variables come first, because the first rule that matches a key is used.
        found.steps.append(sorted(lines, key=lambda line: "{" in line.partition(" ->")[0]))
    found.left += _faults(found.steps, layouts)
    return found


def _in_steps(moved: Moved) -> Iterator[tuple[int, Moved]]:
    """Yield pairs: the index of a step, and a conversion for this step.

    Usually, the index is 0. If a conversion splits a fused tensor and permutes only some of its
    parts, the permutation has the index 1.
    """
    name, given = moved.operations[-1] if moved.operations else ("", {})
    names = given.get("permute_layer_names")
    if name != "PermuteForRope" or not names or len(moved.new) == 1:
        yield 0, moved
        return
    yield 0, Moved(moved.old, moved.new, moved.operations[:-1])
    alone = (name, {**given, "permute_layer_names": None})
    for new in moved.new:
        if any(part in new for part in names):
            yield 1, Moved(((new,),), (new,), (alone,))


def _faults(steps: list[list[str]], layouts: Layouts) -> Iterator[str]:
    """Apply the rules and the reversed rules to the layouts.

    Yield a message if names or shapes of the result are wrong.
    """
    ready = [RuleSet.parse(lines) for lines in steps]
    back = [rules.reversed() for rules in reversed(ready)]
    for way, given, wanted in ((ready, layouts.old, layouts.new), (back, layouts.new, layouts.old)):
        made = given
        try:
            for rules in way:
                made = _shapes_of(rules, made)
        except CkptkitError as error:
            yield error.message
            return
        odd = sorted(made.keys() ^ wanted.keys()) or [n for n in made if made[n] != wanted[n]]
        if ready and odd:
            yield f"the rules produce wrong names or shapes: {', '.join(odd[:3])}"


def _shapes_of(rules: RuleSet, given: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes that rules produce from the given shapes."""
    targets = rules.outcome(given, keep=REST, config=_Anything()).targets
    return {name: given[name] if made is None else made.shape for name, made in targets.items()}


class _Anything(dict[str, Any]):
    """A configuration in which each entry is 1.

    Names and shapes do not depend on the number of heads, so any configuration is sufficient to
    compute names and shapes.
    """

    def get(self, key: str, default: Any = None) -> Any:
        return self if key.endswith("config") else 1


@dataclass(slots=True)
class _Pair:
    """Both sides and the sizes of a rule, in the notation of rules."""

    old: str
    new: str
    old_dims: str
    new_dims: str
    sizes: str

    @property
    def family(self) -> tuple[object, ...]:
        names = (_NUMBER.sub("#", each) for each in (self.old, self.new))
        return (*names, self.old_dims, self.new_dims, self.sizes)


Families = dict[tuple[object, ...], list[_Pair]]


def _pair(moved: Moved, layouts: Layouts) -> _Pair:
    if not moved.operations:
        return _Pair(moved.old[0][0], moved.new[0], "", "", "")
    first = moved.old[0][0]
    rank = len(layouts.old[first] if first in layouts.old else layouts.new[first])
    work = _Symbolic(rank, len(moved.old), len(moved.new))
    for name, given in moved.operations:
        work.apply(name, given)
    old = _labelled([_indexed(names, "{e}") for names in moved.old], work.label)
    new = _labelled(list(moved.new), work.label)
    work.sizes |= _uneven(work, moved, layouts)
    sizes = "".join(f" {word}={size}" for word, size in work.sizes.items())
    return _Pair(old, new, _dims(work.old), _dims(work.new), " with" * bool(sizes) + sizes)


def _uneven(work: _Symbolic, moved: Moved, layouts: Layouts) -> dict[str, str]:
    """Return the sizes of the parts of a concatenated or split tensor.

    The key of the result is the axis of the concatenation or split, as in ``{"a": "64|16|16"}``. If
    the sizes do not follow from the shapes, return "_" for each part. If all parts have the same
    shape, return {}.
    """
    old = [layouts.old.get(each[0], ()) for each in moved.old]
    new = [layouts.new[name] for name in moved.new]
    for dims, shapes in ((work.old, old), (work.new, new)):
        if len({*shapes}) > 1:
            cut = work.cut or "a"
            number = dims.index([cut]) if [cut] in dims else None
            parts = ("_" if number is None else str(shape[number]) for shape in shapes)
            return {cut: "|".join(parts)}
    return {}


def _dims(dims: list[list[str]]) -> str:
    words = ("".join(axes) if len(axes) == 1 else f"({' '.join(axes)})" for axes in dims)
    return f" [{' '.join(words)}]"


class _Symbolic:
    """Applies operations to the dimensions of a tensor in the files.

    ``old`` contains the axes of the tensor in the files, and ``new`` the axes in the model.
    """

    def __init__(self, rank: int, sources: int, targets: int) -> None:
        self.old = [[_AXES[n]] for n in range(rank)]
        self.new = [list(dim) for dim in self.old]
        self.sources, self.targets = sources, targets
        self.label = "m"
        self.cut: str | None = None  # axis whose size depends on the label
        self.sizes: dict[str, str] = {}

    def apply(self, name: str, given: Mapping[str, Any]) -> None:
        act = getattr(self, f"_{name.lower()}", None)
        if act is None or given.get("check_dims") or given.get("num_shards_attribute"):
            raise Unsayable(f"rules cannot express the operation {name}")
        act(given)

    def _mergemodulelist(self, given: Mapping[str, Any]) -> None:
        self.new.insert(given["dim"], ["e"])

    def _concatenate(self, given: Mapping[str, Any]) -> None:
        dim = self.new[given["dim"]]
        self.cut = dim[0]
        dim.insert(0, "m")

    def _chunk(self, given: Mapping[str, Any]) -> None:
        dim = self.new[given["dim"]]
        if dim[0] == "two" and self.targets == 2:
            self.label = "two"
            self.sizes.pop("two", None)
            dim.pop(0)
            return
        self._split_axis(dim, ["m", dim[0]])
        dim.pop(0)

    def _split(self, given: Mapping[str, Any]) -> None:
        dim = self.new[given["dim"]]
        self.cut = dim[0]
        self._split_axis(dim, ["m", dim[0]])
        dim.pop(0)

    def _transpose(self, given: Mapping[str, Any]) -> None:
        one, other = given["dim0"], given["dim1"]
        self.new[one], self.new[other] = self.new[other], self.new[one]

    def _interleave(self, given: Mapping[str, Any]) -> None:
        dim = self.new[given["dim"]]
        axis = dim[0]
        parts = ["two", axis] if given["inverse"] else [axis, "two"]
        self._split_axis(dim, parts)
        dim[:2] = parts[::-1]
        self.sizes["two"] = "2"

    def _permuteforrope(self, given: Mapping[str, Any]) -> None:
        if given["permute_layer_names"] and self.sources + self.targets > 2:
            raise Unsayable("one rule cannot permute only some parts: write two steps")
        dim = self.new[0]
        axis = dim[0]
        parts = ["h", "two", axis] if given["inverse"] else ["h", axis, "two"]
        self._split_axis(dim, parts)
        dim[:3] = [parts[0], parts[2], parts[1]]
        self.sizes["h"] = given["heads"]
        self.sizes["two"] = "2"

    def _split_axis(self, dim: list[str], parts: list[str]) -> None:
        """Split the first axis of `dim` into several axes, in both layouts."""
        axis = dim[0]
        taken = set(flatten(self.old))
        if len({*parts}) < len(parts) or not taken.isdisjoint({*parts} - {axis}):
            raise Unsayable("rules cannot split an axis twice")
        for each in self.old:
            if axis in each:
                at = each.index(axis)
                each[at : at + 1] = parts
        dim[0:1] = parts


def _indexed(names: Sequence[str], index: str) -> str:
    """Return one name for names that differ in one number, with `index` in place of the number."""
    if len(names) == 1:
        return names[0]
    parts = [name.split(".") for name in names]
    differing = [n for n, column in enumerate(zip(*parts, strict=False)) if len(set(column)) > 1]
    if len(differing) != 1 or any(not each[differing[0]].isdigit() for each in parts):
        raise Unsayable(f"names must differ in exactly one number: {names[0]}, {names[1]}")
    first = list(parts[0])
    first[differing[0]] = index
    return ".".join(first)


def _labelled(names: list[str], word: str) -> str:
    """Return one name for names that differ in one place, with labels in this place."""
    if len(names) == 1:
        return names[0]
    low = _alike(names)
    high = _alike([name[low:][::-1] for name in names])
    labels = [name[low : len(name) - high] for name in names]
    if any(set("{}|*") & set(label) for label in labels) or len(set(labels)) < len(labels):
        raise Unsayable(f"one pattern with labels cannot match {', '.join(names)}")
    return f"{names[0][:low]}{{{word}:{'|'.join(labels)}}}{names[0][len(names[0]) - high :]}"


def _alike(names: Sequence[str]) -> int:
    """Return the length of the prefix that all names have in common."""
    columns = map(set, zip(*names, strict=False))
    return sum(1 for _ in takewhile(lambda column: len(column) == 1, columns))


def _lines(pairs: list[_Pair], arrow: str) -> list[str]:
    """Return one rule for all pairs. Variables in the rule replace the numbers in the names.

    If such a rule is impossible, return one rule for each pair.
    """
    old = [list(map(int, _NUMBER.findall(_bare(pair.old)))) for pair in pairs]
    new = [list(map(int, _NUMBER.findall(_bare(pair.new)))) for pair in pairs]
    carried = _carried(old, new)
    if carried is None:
        return [f"{p.old}{p.old_dims} {arrow} {p.new}{p.new_dims}{p.sizes}" for p in pairs]
    first = pairs[0]
    left = _numbered(
        first.old, [f"l{n}" if n in carried.values() else None for n in range(len(old[0]))]
    )
    right = _numbered(
        first.new, [f"l{carried[n]}" if n in carried else None for n in range(len(new[0]))]
    )
    return [f"{left}{first.old_dims} {arrow} {right}{first.new_dims}{first.sizes}"]


def _carried(old: list[list[int]], new: list[list[int]]) -> dict[int, int] | None:
    """Find the numbers that every new name has in common with its old name.

    Each row of `old` and `new` contains the numbers of one name. Return a dict that maps the column
    of each common number in `new` to its column in `old`. All other columns must be constant: if
    the numbers in such a column differ, return None.
    """
    carried: dict[int, int] = {}
    for n in range(len(new[0])):
        column = [row[n] for row in new]
        free = [m for m in range(len(old[0])) if m not in carried.values()]
        hit = next((m for m in free if [row[m] for row in old] == column), None)
        if hit is not None:
            carried[n] = hit
        elif len(set(column)) > 1:
            return None
    others = [m for m in range(len(old[0])) if m not in carried.values()]
    if any(len({row[m] for row in old}) > 1 for m in others):
        return None
    return carried


def _bare(name: str) -> str:
    """Remove labels from a name, because labels may be numbers."""
    return re.sub(r"\{[^}]*\}", "{}", name)


def _numbered(name: str, words: list[str | None]) -> str:
    """Replace numbers in a name by the variables in `words`. None in `words` keeps a number."""
    pieces = re.split(r"(\{[^}]*\})", name)
    numbers = iter(words)

    def variable(found: re.Match[str]) -> str:
        word = next(numbers)
        return found[0] if word is None else f"{{{word}}}"

    marked = "\0".join(pieces[::2])
    done = _NUMBER.sub(variable, marked).split("\0")
    return "".join(flatten(zip(done, [*pieces[1::2], ""], strict=True)))


def recipe_text(layouts: Layouts, found: Generated) -> str:
    """Return the rules as a recipe in YAML. Comments list operations that rules cannot express."""
    import json

    steps = []
    for step in found.steps:
        lines = [json.dumps(line) if line[0] in "{[*" else line for line in step]
        rules = "".join(f"      - {line}\n" for line in lines)
        steps.append(f"  - rules:\n{rules}    keep: rest\n")
    comments = "".join(f"# cannot express: {each}\n" for each in found.left)
    return (
        f"{comments}about: Convert the files of {layouts.model_type} to the layout of its "
        f"transformers model.\n"
        f"source: the conversion registry of transformers {layouts.version}\n"
        f"checked: {'names and shapes, in both directions' if not found.left else ''}\n"
        f"steps:\n{''.join(steps)}"
    )
