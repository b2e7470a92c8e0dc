"""Merge models as described by a configuration file of mergekit (`mergekit.config` of version
0.1.5)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ckptkit.compute.merging import LINEAR, METHODS, OF_DIFFERENCES, PASSTHROUGH, SLERP, TASK
from ckptkit.core.checkpoint import Checkpoint, opened
from ckptkit.core.dtypes import parse
from ckptkit.core.errors import UnsupportedError, UsageError
from ckptkit.core.text import quoted, shown
from ckptkit.edits.elements import cast
from ckptkit.edits.merging import Method, Numbers, Use, alike, layers_of, model, stacked

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
    out_dtype = config.get("out_dtype")
    return made if out_dtype is None else cast(made, out_dtype)


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
    return [*(ours or [Use(base, _numbers([*tables]))]), *others]


def _use(each: Any, extra: str, found: Any, tables: Sequence[Mapping[str, Any]]) -> Use:
    _check_keys(each, {"model", "parameters", extra}, "an input")
    if "model" not in each:
        raise UsageError("an input lacks the key `model`")
    checkpoint = found(each["model"])
    numbers = _numbers([_table(each.get("parameters")), *tables])
    if "layer_range" not in each:
        return Use(checkpoint, numbers)
    have, ends = layers_of(checkpoint)[1], each["layer_range"]
    is_pair = isinstance(ends, list) and [type(end) for end in ends] == [int, int]
    if not is_pair or not 0 <= ends[0] < ends[1] <= have:
        what = f"layer_range {shown(str(ends))} is invalid: the model has {have} layers"
        raise UsageError(what, where=checkpoint.name)
    return Use(checkpoint, numbers, *ends)


def _numbers(tables: Sequence[Mapping[str, Any]]) -> Numbers:
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
