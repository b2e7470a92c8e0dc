"""Merge models with the methods of mergekit, such as means, task vectors and stacked layers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from ckptkit.compute.arranged import contiguous
from ckptkit.compute.merging import (
    DARE_LINEAR,
    DARE_TIES,
    LINEAR,
    METHODS,
    OF_DIFFERENCES,
    PASSTHROUGH,
    SLERP,
    SPARSE,
    TASK,
    TIES,
    Merge,
)
from ckptkit.compute.mixing import has_mean
from ckptkit.core.arguments import checked
from ckptkit.core.bytesource import Pending
from ckptkit.core.checkpoint import Checkpoint, Source, opened, several
from ckptkit.core.dtypes import BY_NAME, DType, DTypeLike, parse
from ckptkit.core.errors import UnsupportedError, UsageError
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import matcher, plural, quoted, shown, some, typed
from ckptkit.core.tree import Node, OrderedMapping, module_versions, versions_state
from ckptkit.edits import quantized_names
from ckptkit.edits.combine import check_alike, refuse_adapter
from ckptkit.edits.config_file import config_of, with_changes
from ckptkit.edits.structure import bare

# A number, or a dict that maps globs for tensor names to numbers. "*" matches all other names.
Setting = float | Mapping[str, float]
# A function that returns the value of a setting. The first argument is "weight", "density" or
# "scale". The second argument is the name of the output tensor. The third argument is the position
# of the tensor's layer, from 0 (first) to 1 (last).
Numbers = Callable[[str, str, float], float]
_LAYER = re.compile(r"(.+?\.)(\d+)(\..+)")
_FIRST = re.compile(r"(^|[._])(embed\w*|wte|wpe|tok_embeddings|word_embeddings\w*)\.")
# Keys for the number of layers in configurations of transformers.
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


class Method(NamedTuple):
    """A merge method with its settings. If the method merges differences, `base` is the base
    model. If `normalize` or `rescale` is None, the default of mergekit applies."""

    name: str
    base: Checkpoint | None = None
    normalize: bool | None = None
    rescale: bool | None = None
    dtype: DType | None = None
    seed: int = 0

    @property
    def switches(self) -> tuple[bool, bool]:
        """The values of `normalize` and `rescale`."""
        defaults = self.name in (LINEAR, TIES), self.name in (DARE_TIES, DARE_LINEAR)
        given = self.normalize, self.rescale
        normalize, rescale = (
            default if each is None else each for each, default in zip(given, defaults, strict=True)
        )
        return normalize, rescale


class Use(NamedTuple):
    """An input of a merge: a model or a range of its layers, and a function that returns the
    settings for this input."""

    model: Checkpoint
    numbers: Numbers
    start: int = 0
    stop: int | None = None


@checked
def merge(
    checkpoints: Sequence[Source],
    *,
    method: str | None = None,
    base: Source | None = None,
    weight: Sequence[Setting] | None = None,
    density: Sequence[Setting] | None = None,
    scale: float | None = None,
    normalize: bool | None = None,
    rescale: bool | None = None,
    layers: str | Sequence[str] = (),
    dtype: DTypeLike | None = None,
    seed: int = 0,
) -> Checkpoint:
    """Merge models of one architecture with the methods of mergekit. `save` computes the values.

    - `method`: ``linear`` (the weighted mean), ``slerp``, ``task`` (differences from `base`),
      ``ties``, ``dare-ties``, ``dare-linear`` or ``passthrough`` (unchanged layers).
    - `base`: the base model from which the models were fine-tuned. For ``slerp``, the first of the
      two models.
    - `weight`: the weight of each checkpoint, a number or a mapping from globs to numbers. The
      default is 1.
    - `density`: the fraction of the differences to keep, for methods that drop differences.
    - `scale`: the factor of the sum of the differences. The default is 1. For ``slerp``, `scale` is
      the fraction of the second model, by default 0.5. For ``passthrough``, `scale` is a factor of
      all weights.
    - `normalize`: true to divide the weighted sum of the models or differences by the sum of the
      weights. The default is true for ``linear`` and ``ties``, and false for other methods, as in
      mergekit.
    - `rescale`: true to scale the kept differences so that the sum of their magnitudes equals the
      sum of the magnitudes of all differences.
    - `layers`: for ``passthrough``, a range of layers ``START:STOP`` for each checkpoint. A layer
      may occur twice.
    - `dtype`: the dtype of the computation. The default is the dtype of the tensors.
    - `seed`: the seed of the random choice of ``dare-ties`` and ``dare-linear``.

    Elements equal those of mergekit 0.1.5 within one unit in the last place. ``dare-ties`` and
    ``dare-linear`` are exceptions, because they choose other random elements than mergekit. Raises
    UsageError if names or shapes differ, and for an argument that the method does not use.
    """
    given = several(checkpoints)
    models = [model(each, given) for each in given]
    hint = f"use one of {', '.join(METHODS)}"
    if method is None:
        for other in models[1:]:
            check_alike(models[0], other)
        option = typed("--method METHOD", "method=...")
        raise UsageError(f"a method is required: {option}", hint=hint)
    if method not in METHODS:
        raise UsageError(f"{method!r} is not a method", hint=hint)
    if method in OF_DIFFERENCES and base is None:
        raise UsageError(f"{method} needs a base model: {typed('--base BASE', 'base=...')}")
    first = None if base is None else model(opened(base))
    if method == SLERP and first is not None:
        models, first = [first, *models], None
    ranges = [layers] if isinstance(layers, str) else list(layers)
    users = {
        "scale": (scale, (*OF_DIFFERENCES, SLERP, PASSTHROUGH)),
        "normalize": (normalize, (*OF_DIFFERENCES, LINEAR)),
        "rescale": (rescale, SPARSE),
        "a base": (first, OF_DIFFERENCES),
        "weight": (weight, (*OF_DIFFERENCES, LINEAR)),
        "density": (density, SPARSE),
    }
    count = plural(len(models), "model")
    range_option = typed("--layers START:STOP", "layers=[...]")
    wrong = {
        **{
            f"{method} does not use {name}": value is not None and method not in methods
            for name, (value, methods) in users.items()
        },
        "no models to merge": not models,
        f"slerp merges two models, got {len(models)}": method == SLERP and len(models) != 2,
        "only passthrough uses layers": bool(ranges) and method != PASSTHROUGH,
        f"got {plural(len(ranges), 'layer range')} for {count}": (
            len(ranges) not in (0, len(models))
        ),
        f"passthrough of several models needs a layer range for each: {range_option}": (
            method == PASSTHROUGH and not ranges and len(models) > 1
        ),
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise UsageError(what)
    share = scale
    if share is None:
        share = 0.5 if method == SLERP else 1.0
    by_word = {
        "weight": _settings("weight", weight, models),
        "density": _settings("density", density, models),
    }
    uses = []
    for place, each in enumerate(models):
        start, stop = _range(ranges[place], each) if ranges else (0, None)

        def numbers(word: str, name: str, _: float, place: int = place) -> float:
            return share if word == "scale" else by_word[word][place](name)

        uses.append(Use(each, numbers, start, stop))
    compute_dtype = None if dtype is None else parse(dtype)
    how = Method(method, first, normalize, rescale, compute_dtype, seed)
    if method == PASSTHROUGH:
        return stacked([[each] for each in uses], how)
    return alike(uses if first is None else [Use(first, uses[0].numbers), *uses], how)


def model(checkpoint: Checkpoint, others: Sequence[Checkpoint] = ()) -> Checkpoint:
    """Return only the weights of a checkpoint. Raises an error for adapters and quantized
    weights."""
    why = "`merge` merges whole models"
    refuse_adapter(checkpoint, why, others)
    quantized_names.refuse(checkpoint, None, "codes and scales cannot be merged")
    return bare(checkpoint.require_complete())


def _settings(
    what: str, given: Sequence[Setting] | None, models: Sequence[Checkpoint]
) -> list[Callable[[str], float]]:
    """Return a function for each model. The function takes a tensor name, and returns the value of
    the setting `what` for this tensor."""
    if given is None:
        return [lambda name: 1.0] * len(models)
    if isinstance(given, (str, Mapping)) or len(given) != len(models):
        raise UsageError(
            f"{what}: got {plural(len(given), 'value')}, but there are {len(models)} models"
        )

    def reader(setting: Setting) -> Callable[[str], float]:
        globs = setting if isinstance(setting, Mapping) else {"*": setting}
        others = float(globs.get("*", 1.0))
        tests = [(matcher([glob]), number) for glob, number in globs.items() if glob != "*"]
        return lambda name: next((float(number) for test, number in tests if test(name)), others)

    return [reader(each) for each in given]


def alike(uses: Sequence[Use], how: Method) -> Checkpoint:
    """Merge models with equal tensor names. If the method has a base model, this model is the first
    item of `uses`."""
    reference, *others = (each.model for each in uses)
    tensors = reference.required.tensors
    for other in others:
        check_alike(reference, other)
    inputs = [each.model.required.tensors for each in uses]
    places = _places(tensors)
    new = _Merged(how)
    for name in tensors:
        new.add(
            name, [held[name] for held in inputs], [each.numbers for each in uses], places(name)
        )
    return new.of(reference, len(uses) - (how.base is not None))


class _Merged:
    """A builder that merges tensors of the inputs, and collects the merged tensors."""

    def __init__(self, how: Method) -> None:
        self.how = how
        self.tensors: dict[Node, Node] = {}
        self.taken: list[str] = []  # names of tensors copied from the first input
        self.made: dict[object, Tensor] = {}  # (operation, input elements) -> new tensor

    def add(
        self, name: str, inputs: Sequence[Tensor], numbers: Sequence[Numbers], at: float
    ) -> None:
        """Merge `inputs` and add the resulting tensor. If the method has a base model, the tensor
        of this model is the first item of `inputs`. `numbers` contains the settings of each
        input."""
        how, old = self.how, inputs[0]
        scale = numbers[0]("scale", name, at)
        if any(each.shape != old.shape for each in inputs):
            shapes = some([str(list(each.shape)) for each in inputs])
            raise UsageError(f"{shown(name)} has different shapes: {shapes}")
        if not all(has_mean(each.dtype) and each.storage is not None for each in inputs):
            self.taken.append(name)
            self.tensors[name] = old
            return
        dtype = how.dtype or _common([each.dtype for each in inputs])
        if how.name == PASSTHROUGH and scale == 1 and dtype == old.dtype:
            self.tensors[name] = old
            return
        if any(each.dtype.kind == "complex" for each in inputs):
            raise UnsupportedError(
                f"{shown(name)} is complex: {how.name} computes with real numbers",
                hint="only `ckptkit average` combines complex tensors",
            )
        others = numbers if how.base is None else numbers[1:]
        operation = Merge(
            how.name, dtype.name, tuple(each.dtype.name for each in inputs),
            tuple(each("weight", name, at) for each in others),
            tuple(each("density", name, at) for each in others),
            *how.switches, scale, how.seed,
        )  # fmt: skip
        key = (operation, *(each.elements_key for each in inputs))
        if key not in self.made:
            length = prod(old.shape) * dtype.itemsize
            record = Pending(operation, tuple(map(contiguous, inputs)), length)
            self.made[key] = old.remade(record, dtype)
        made = self.made[key]
        self.tensors[name] = replace(made, requires_grad=old.requires_grad, kind=old.kind)

    def of(self, reference: Checkpoint, models: int) -> Checkpoint:
        """Return `reference` with the merged tensors instead of its own tensors."""
        count = plural(len(self.tensors) - len(self.taken), "tensor")
        notes = [f"merged {count} of {plural(models, 'model')} by {self.how.name}"]
        if self.taken:
            notes.append(f"copied {quoted(self.taken)} from {reference.name or 'the first model'}")
        root = reference.root
        versions = module_versions(root) if isinstance(root, dict) else None
        state = versions_state(versions) if versions and self.tensors.keys() == {*root} else None
        return reference.with_root(OrderedMapping(self.tensors, state), notes=notes)


def _common(types: Sequence[DType]) -> DType:
    """Return the widest dtype. For float16 and bfloat16 together, return float32 as torch does."""
    widest = max(types, key=lambda each: each.itemsize)
    others = {each.name for each in types if each.itemsize == widest.itemsize}
    return widest if len(others) == 1 else BY_NAME["float32"]


# Layers


def _stack(names: Iterable[str]) -> tuple[str, int]:
    """Return the prefix of the layers, such as ``model.layers.``, and the number of layers.

    If the model has no layers, or if several stacks of layers have the maximum length, the prefix
    is "" and the number is 0.
    """
    found: dict[str, set[int]] = {}
    for match in filter(None, map(_LAYER.fullmatch, names)):
        found.setdefault(match[1], set()).add(int(match[2]))
    most = max(map(len, found.values()), default=0)
    stacks = [prefix for prefix, numbers in found.items() if len(numbers) == most]
    return (stacks[0], 1 + max(found[stacks[0]])) if len(stacks) == 1 else ("", 0)


def layers_of(model: Checkpoint) -> tuple[str, int]:
    """Return (prefix, number of layers) of a model.

    Raises UsageError if the model has no layers, or if several stacks of layers have the maximum
    length.
    """
    found = _stack(model.required.tensors)
    if not found[0]:
        raise UsageError(
            "has no layers, or several stacks of layers of equal length", where=model.name
        )
    return found


def _places(names: Iterable[str]) -> Callable[[str], float]:
    """Return a function that maps a tensor name to the position of its layer.

    The first layer has the position 0, and the last layer has the position 1. For tensors outside
    the layers, the function returns 0.
    """
    prefix, count = _stack(names)

    def place(name: str) -> float:
        match = _LAYER.fullmatch(name)
        return _share(int(match[2]), count) if match and match[1] == prefix else 0.0

    return place


def _share(number: int, count: int) -> float:
    return number / (count - 1) if count > 1 else 1.0


def stacked(slices: Sequence[Sequence[Use]], how: Method) -> Checkpoint:
    """Stack layers of several models. If a slice has several layer ranges, merge the ranges first.

    Embeddings come from the first slice. All other tensors outside the layers come from the last
    slice.
    """
    new = _Merged(how)
    reference = how.base or slices[0][0].model
    target, _ = layers_of(slices[0][0].model)
    count = 0
    prefixes = {id(use.model): layers_of(use.model) for uses in slices for use in uses}
    for uses in slices:
        lengths = {(use.stop or prefixes[id(use.model)][1]) - use.start for use in uses}
        if len(lengths) > 1:
            raise UsageError(f"the ranges of a slice differ in length: {some(map(str, lengths))}")
        (length,) = lengths
        for number in range(length):
            inputs = [_layer(use, prefixes[id(use.model)][0], number) for use in uses]
            for rest in inputs[0]:
                row = [each[rest] for each in inputs if rest in each]
                if len(row) < len(inputs):
                    raise UsageError(
                        f"layer {number} lacks {shown(rest)}", where=uses[-1].model.name
                    )
                name = f"{target}{count + number}{rest}"
                new.add(name, row, [use.numbers for use in uses], _share(number, length))
        count += length
    outside: dict[str, list[str]] = {}  # model name -> names of tensors outside the layers
    for uses, is_first in ((slices[0], True), (slices[-1], False)):
        held = [use.model.required.tensors for use in uses]
        for name in held[0]:
            match = _LAYER.fullmatch(name)
            in_layer = match and match[1] == prefixes[id(uses[0].model)][0]
            if not in_layer and bool(_FIRST.search(name)) is is_first:
                new.add(name, [each[name] for each in held], [use.numbers for use in uses], 0.0)
                outside.setdefault(uses[0].model.name or "a model", []).append(name)
    made = new.of(reference, len(prefixes))
    taken = [f"{quoted(names)} of {model}" for model, names in outside.items()]
    notes = (*made.notes, "; ".join([plural(count, "layer"), *(taken if len(taken) > 1 else [])]))
    found = [word for word in _COUNTS if word in config_of(reference)]
    return with_changes(replace(made, notes=notes), dict.fromkeys(found[:1], count))


def _layer(use: Use, prefix: str, number: int) -> dict[str, Tensor]:
    """Return a dict from names to the tensors of a layer. The names contain neither the prefix nor
    the layer number."""
    start = f"{prefix}{use.start + number}."
    tensors = use.model.required.tensors
    return {name[len(start) - 1 :]: tensors[name] for name in tensors if name.startswith(start)}


def _range(text: str, model: Checkpoint) -> tuple[int, int]:
    have = layers_of(model)[1]
    match = re.fullmatch(r"(\d*):(\d*)", text)
    start, stop = (int(match[1] or 0), int(match[2] or have)) if match else (1, 0)
    if not start < stop <= have:
        raise UsageError(
            f"{text!r} is not a valid layer range",
            where=model.name,
            hint=f"the model has {plural(have, 'layer')}; 0:{have} selects all layers",
        )
    return start, stop


# A configuration file of mergekit (`mergekit.config` of version 0.1.5)


_NAMES = {name.replace("-", "_"): name for name in METHODS} | {"task_arithmetic": TASK}
_TOP = {"merge_method", "base_model", "models", "slices", "parameters", "dtype", "out_dtype",
        "tokenizer_source"}  # fmt: skip
_WORDS = {"weight": "weight", "density": "density", "lambda": "scale", "t": "scale",
          "scale": "scale"}  # fmt: skip
_SWITCHES = {"normalize", "rescale", "int8_mask"}  # in mergekit, int8_mask only saves memory
_DEFAULTS = {"weight": 1.0, "density": 1.0, "scale": 1.0}


def merge_config(config: Mapping[str, Any], folder: str | os.PathLike[str]) -> Checkpoint:
    """Return the merged model that a configuration describes. Read only the headers of the inputs.

    The configuration names each model by a path, relative to the working directory or to `folder`.
    A model ``org/name`` can also be at ``folder/name``. Raises UsageError for an invalid
    configuration. Raises UnsupportedError for a method, a setting or a ``tokenizer_source`` that
    ckptkit does not support.
    """
    _check_keys(config, _TOP, "a merge")
    method = _NAMES.get(str(config.get("merge_method")))
    if method is None:
        known = ", ".join(sorted(_NAMES))
        what = f"merge_method {shown(str(config.get('merge_method')))} is not supported"
        raise UnsupportedError(what, hint=f"use one of {known}")
    if config.get("tokenizer_source", "base") != "base":
        raise UnsupportedError(
            "tokenizer_source makes a new vocabulary, which is not supported",
            hint="remove the key, or set it to base to copy the tokenizer of the base model",
        )
    models: dict[str, Checkpoint] = {}

    def found(name: object) -> Checkpoint:
        key = str(name)
        if key not in models:
            models[key] = model(opened(_path(key, os.fspath(folder))))
        return models[key]

    base_name = config.get("base_model")
    base = None if base_name is None else found(base_name)
    if method in (*OF_DIFFERENCES, SLERP) and base is None:
        raise UsageError(f"merge_method {config['merge_method']} needs base_model")
    common = _table(config.get("parameters"))
    normalize, rescale = (common.get(word) for word in ("normalize", "rescale"))
    for word, switch in (("normalize", normalize), ("rescale", rescale)):
        if not isinstance(switch, (bool, type(None))):
            raise UsageError(f"parameters: {word} must be true or false, got {shown(str(switch))}")
    dtype = None if config.get("dtype") is None else parse(config["dtype"])
    subtracted = base if method in OF_DIFFERENCES else None
    how = Method(method, subtracted, normalize, rescale, dtype)
    if ("models" in config) == ("slices" in config):
        raise UsageError("the configuration needs either models or slices")
    if "models" in config:
        uses = [_use(each, "model", found, [common]) for each in _list(config["models"])]
        made = alike(_based(uses, base, [common], method), how)
    else:
        slices = []
        for each in _list(config["slices"]):
            _check_keys(each, {"sources", "parameters"}, "a slice")
            tables = [_table(each.get("parameters")), common]
            uses = [_use(source, "layer_range", found, tables) for source in _list(each["sources"])]
            slices.append(_based(uses, base, tables, method, is_slice=True))
        made = stacked(slices, how)
    if config.get("out_dtype") is None:
        return made
    from ckptkit.edits.elements import cast  # most merges cast nothing

    return cast(made, config["out_dtype"])


def _based(
    uses: list[Use],
    base: Checkpoint | None,
    tables: Sequence[Mapping[str, Any]],
    method: str,
    *,
    is_slice: bool = False,
) -> list[Use]:
    """Return the inputs, with the base model as the first input. If no input is the base model, add
    an input for the base model."""
    if method == PASSTHROUGH and len(uses) != 1:
        raise UsageError("passthrough needs exactly one model for each slice")
    if method == SLERP and len({id(each.model) for each in uses} | {id(base)}) != 2:
        raise UsageError("slerp needs base_model and exactly one other model")
    if base is None or method in (LINEAR, PASSTHROUGH):
        return uses
    ours = [each for each in uses if each.model is base]
    others = [each for each in uses if each.model is not base]
    if not ours and is_slice:
        raise UsageError("a slice must have base_model as one of its sources")
    return [*(ours or [Use(base, _of_tables([*tables]))]), *others]


def _use(each: Any, extra: str, found: Any, tables: Sequence[Mapping[str, Any]]) -> Use:
    _check_keys(each, {"model", "parameters", extra}, "an input")
    if "model" not in each:
        raise UsageError("an input lacks the key `model`")
    checkpoint = found(each["model"])
    numbers = _of_tables([_table(each.get("parameters")), *tables])
    if "layer_range" not in each:
        return Use(checkpoint, numbers)
    have, ends = layers_of(checkpoint)[1], each["layer_range"]
    is_pair = isinstance(ends, list) and [type(end) for end in ends] == [int, int]
    if not is_pair or not 0 <= ends[0] < ends[1] <= have:
        what = f"layer_range {shown(str(ends))} is invalid: the model has {have} layers"
        raise UsageError(what, where=checkpoint.name)
    return Use(checkpoint, numbers, *ends)


def _of_tables(tables: Sequence[Mapping[str, Any]]) -> Numbers:
    """Return a function that looks up a setting for a tensor name in `tables`. If several tables
    give a value, the first of these tables applies."""
    for table in tables:
        _check_keys(table, {*_WORDS, *_SWITCHES}, "parameters")

    def number(word: str, name: str, at: float) -> float:
        for table in tables:
            for key, meant in _WORDS.items():
                value = _value(table[key], name, at) if meant == word and key in table else None
                if value is not None:
                    return value
        return _DEFAULTS[word]

    return number


def _value(setting: Any, name: str, at: float) -> float | None:
    """Return the value of a setting for a tensor name, or None if no filter matches the name.

    `at` is the position of the layer, from 0 (first) to 1 (last). A setting is one of:

    - a number
    - a list of numbers, interpolated over the layers
    - a list of values with filters on the tensor name
    """
    if isinstance(setting, (int, float)):
        return float(setting)
    if isinstance(setting, list) and all(isinstance(each, (int, float)) for each in setting):
        place = at * (len(setting) - 1)
        first = int(place)
        after = min(len(setting) - 1, first + 1)
        return float((1 - (place - first)) * setting[first] + (place - first) * setting[after])
    for each in setting if isinstance(setting, list) else [setting]:
        if not isinstance(each, Mapping) or "value" not in each:
            raise UsageError(f"parameters: {shown(str(setting))} is not a number")
        if each.get("filter", "*") in (None, "*") or str(each["filter"]) in name:
            return _value(each["value"], name, at)
    return None


def _path(name: str, folder: str) -> str:
    """Return the path of a model. Raises UsageError if the model does not exist."""
    tried = [name, os.path.join(folder, name), os.path.join(folder, name.rpartition("/")[2])]
    for path in tried:
        if os.path.exists(path):
            return path
    raise UsageError(
        f"{shown(name)} does not exist, neither here nor in {folder}",
        hint=f"download the model first: huggingface-cli download {name} --local-dir {tried[-1]}",
    )


def _table(given: Any) -> Mapping[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise UsageError(f"parameters must be a mapping, got {shown(str(given))}")
    return given or {}


def _list(given: Any) -> list[Any]:
    if not isinstance(given, list) or not given:
        raise UsageError(f"{shown(str(given))} is not a list of inputs")
    return given


def _check_keys(given: Any, known: set[str], what: str) -> None:
    if not isinstance(given, Mapping):
        raise UsageError(f"{what} must be a mapping, got {shown(str(given))}")
    if odd := [key for key in map(str, given) if key not in known]:
        raise UnsupportedError(f"{what}: {quoted(odd)} is not supported")
