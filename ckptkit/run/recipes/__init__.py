"""Recipes: the steps from one kind of checkpoint to another, written down once.

A recipe is a YAML or TOML file:

    about: One sentence.
    steps:                          # in this order
      - extract: [ema, model]       # the first of these entries that exists
      - strip: module.
      - config: megatron-llama          # makes config.json of the arguments of the training
      - cast: {"*": bfloat16, "*norm*": float32}
      - rules: ["a.{l}.w{p:1|3} [o i] -> b.{l} [(p o) i]"]      # the notation of ckptkit.rules
        keep: rest                  # what no rule takes: globs, or all
        sizes: {h: config.num_attention_heads}
    args: {heads: 32}               # defaults of --arg
    output: {format: safetensors, shard_size: 5GB}      # unless the command line says otherwise

`STEPS` lists the possible steps. Recipes in this folder are found by name (``lightning``).
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ckptkit.api import Step, open_checkpoint
from ckptkit.core.bytesource import LocalFile
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CollisionError, InputError, TensorError, UsageError
from ckptkit.core.text import nearest
from ckptkit.core.tree import find
from ckptkit.rules.applying import Asked
from ckptkit.rules.applying import step as apply_step
from ckptkit.rules.errors import RuleError, in_step
from ckptkit.rules.expecting import Expectations
from ckptkit.rules.parsing import is_word
from ckptkit.rules.planner import Rules, unused_argument
from ckptkit.run.recipes import model_config
from ckptkit.run.recipes.reversing import WrittenStep, backwards
from ckptkit.transforms import (
    combine,
    devices,
    elements,
    keys,
    optimizer_keys,
    quantized,
    quantizing,
    structure,
)

FOLDER = Path(__file__).parent
_SUFFIXES = (".yaml", ".yml", ".toml")
_BYTES = 1 << 20  # of a recipe
_SHOWN = 120  # characters of a value in a message
_PARTS = {"about", "steps", "output", "args", "source", "checked"}
_OUTPUT = {"format": str, "shard_size": str, "all": bool, "objects": str, "ties": str}


@dataclass(frozen=True, slots=True)
class Recipe:
    """The content of a recipe file: its steps as functions, and how to write the result.

    ``written`` are the steps as in the file, ``source`` is where the facts of a layout come from,
    ``checked`` the library that it was compared with, empty if there is none.
    """

    name: str
    about: str
    steps: tuple[Step, ...]
    output: Mapping[str, Any]
    written: tuple[WrittenStep, ...] = ()
    source: str = ""
    checked: str = ""


def names() -> list[str]:
    """Return the names of the built-in recipes."""
    return sorted(path.stem for path in FOLDER.iterdir() if path.suffix in _SUFFIXES)


def load(name: str, asked: Asked | None = None) -> Recipe:
    """The recipe in the file `name`, or the one that comes with ckptkit under that name.

    `asked` is what its rules are asked for: sizes, a configuration, the way back. Raises
    UsageError.
    """
    asked = asked or Asked()
    if name in names():
        return _recipe(name, _parsed(FOLDER / f"{name}.yaml"), asked)
    if not name.endswith(_SUFFIXES):
        close = nearest(name, names()) or names()
        raise UsageError(
            f"there is no recipe {name!r}",
            hint=f"did you mean {', '.join(close)}? or name a .yaml file",
        )
    return _recipe(name, _parsed(Path(name)), asked)


def _parsed(path: Path) -> Any:
    """Return the plain values in a file. Raises UsageError."""
    where = os.fspath(path)
    try:
        with closing(LocalFile(path)) as source:
            if source.size > _BYTES:
                raise UsageError(
                    f"is larger than {_BYTES:,} bytes: too large for a recipe", where=where
                )
            data = source.read(0, source.size)
    except InputError as error:
        raise UsageError(error.message, where=where, hint=error.hint) from error
    try:
        return _from_toml(data) if path.suffix == ".toml" else _from_yaml(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"is not valid: {_line(str(error))}", where=where) from error


def _from_toml(data: bytes) -> Any:
    import tomllib

    return tomllib.loads(data.decode())


def _from_yaml(data: bytes) -> Any:
    import yaml

    from ckptkit.run.recipes.plain_yaml import PlainLoader

    try:
        return PlainLoader(data).get_single_data()
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _line(text: str) -> str:
    """Return at most a line of a text, which may come from the file."""
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _shown(value: Any) -> str:
    """Return at most a line of a value."""
    try:
        return _line(reprlib.repr(value))
    except ValueError:  # an integer of thousands of digits
        return "a huge number"


def _recipe(name: str, content: Any, asked: Asked) -> Recipe:
    try:
        parts = _table(content, _PARTS)
        steps = parts.get("steps")
        if not isinstance(steps, list) or not steps:
            raise _WrongError("has no list of steps")
        output = _table(parts.get("output", {}), set(_OUTPUT))
        for key, value in output.items():
            if not isinstance(value, _OUTPUT[key]):
                raise _WrongError(f"output: {key} is {_shown(value)}")
        about, facts, checked = (_optional(parts, word) for word in ("about", "source", "checked"))
        known = list(_written(steps))
        defaults = _sizes(parts.get("args", {}))
        made = _made(known, asked, defaults)
        _check_arguments(known, asked, defaults)
        return Recipe(name, about, tuple(made), output, tuple(known), facts, checked)
    except _WrongError as error:
        raise UsageError(str(error), where=name, hint=error.hint) from None
    except RuleError as error:
        raise error.at(name) from None


def _optional(parts: Mapping[str, Any], word: str) -> str:
    text = parts.get(word, "")
    if not isinstance(text, str):
        raise _WrongError(f"{word} is {text!r}")
    return text


def _made(known: list[WrittenStep], asked: Asked, defaults: dict[str, str | int]) -> list[Step]:
    """The steps as functions, each read before any is applied."""
    forwards = [_step(number, each, asked, defaults) for number, each in enumerate(known, 1)]
    if not asked.reverse:
        return forwards
    back, notes = backwards(known)
    steps = [_step(number, each, asked, defaults) for number, each in enumerate(back, 1)]
    return [*steps, lambda ck: ck.with_root(ck.root, notes=notes)]


def _check_arguments(
    known: list[WrittenStep], asked: Asked, defaults: dict[str, str | int]
) -> None:
    """Raise RuleError for an argument that no rule of any step uses."""
    if not asked.args:
        return
    words: set[str] = set()
    for each in known:
        if each.word == "rules":
            words |= _parsed_rules(each, defaults).words()
    for word in asked.args:
        if word not in words:
            raise unused_argument(word, words)


class _WrongError(ValueError):
    """A recipe is malformed; the message names the place."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def _written(steps: list[Any]) -> Iterator[WrittenStep]:
    for number, each in enumerate(steps, 1):
        if isinstance(each, dict) and "rules" in each:
            options = {word: given for word, given in each.items() if word != "rules"}
            if options.keys() <= _RULE_OPTIONS:
                yield WrittenStep("rules", each["rules"], options)
                continue
            odd = ", ".join(sorted(map(repr, options.keys() - _RULE_OPTIONS)))
            raise _WrongError(
                f"step {number} (rules): {odd} is nothing that rules have", "keep, sizes, keys"
            )
        if not isinstance(each, dict) or len(each) != 1:
            raise _WrongError(
                f"step {number} is not one word with its argument",
                hint="e.g. `- strip: module.`",
            )
        ((word, given),) = each.items()
        yield WrittenStep(word, given, {})


def _step(number: int, step: WrittenStep, asked: Asked, defaults: dict[str, str | int]) -> Step:
    word = step.word
    if word not in (known := [*STEPS, "config", "rules", "expect"]):
        close = nearest(_shown(word).strip("'"), known) or known
        raise _WrongError(
            f"step {number}: {_shown(word)} is not a step",
            hint=f"did you mean {', '.join(close)}?",
        )
    try:
        if word == "rules":
            return _rules(number, step, asked, defaults)
        if word == "config":
            return _config(step.given, asked)
        if word == "expect":
            return Expectations(_texts(step.given), asked.config).check
        return STEPS[word](step.given)
    except _WrongError as error:
        raise _WrongError(f"step {number} ({word}): {error}", hint=error.hint) from None
    except RuleError as error:
        raise in_step(number, error) from None


_RULE_OPTIONS = {"keep", "sizes", "keys"}


def _rules(number: int, step: WrittenStep, asked: Asked, defaults: dict[str, str | int]) -> Step:
    rules = _parsed_rules(step, defaults)
    keep = _texts(step.options.get("keep", []))
    paths = _texts(step.options.get("keys", []))

    def step_of_rules(checkpoint: Checkpoint) -> Checkpoint:
        try:
            return apply_step(checkpoint, rules, keep, asked, paths, number)
        except (RuleError, TensorError, CollisionError) as error:
            raise in_step(number, error) from None

    return step_of_rules


def _parsed_rules(step: WrittenStep, defaults: dict[str, str | int]) -> Rules:
    lines = _texts(step.given)
    if not lines:
        raise _WrongError("there is no rule")
    return Rules.parse(lines, _sizes(step.options.get("sizes", {})), defaults)


def _sizes(given: Any) -> dict[str, str | int]:
    """Return the sizes of words, as a recipe gives them."""
    if not isinstance(given, dict):
        raise _WrongError(f"{_shown(given)} is not a table of sizes")
    for word, size in given.items():
        if not is_word(str(word)) or type(size) not in (int, str):
            raise _WrongError(
                f"{word}: {_shown(size)} is not a size", hint="h: 32, h: config.num_attention_heads"
            )
    return {str(word): size for word, size in given.items()}


# The arguments of a step


def _config(given: Any, asked: Asked) -> Step:
    if given not in model_config.TABLES:
        raise _WrongError(
            f"{_shown(given)} is not a table of arguments", hint=", ".join(model_config.TABLES)
        )
    table = model_config.TABLES[given]
    return lambda ck: model_config.with_config(ck, table, asked)


def _text(given: Any) -> str:
    if not isinstance(given, str) or not given:
        raise _WrongError(f"{_shown(given)} is not text")
    return given


def _texts(given: Any) -> list[str]:
    return [_text(each) for each in (given if isinstance(given, list) else [given])]


def _table(given: Any, known: set[str]) -> dict[str, Any]:
    if not isinstance(given, dict) or not given.keys() <= known:
        odd = [_shown(given)]
        if isinstance(given, dict):
            odd = sorted(map(_shown, given.keys() - known))
        raise _WrongError(f"{', '.join(odd)[:200]}: it may have {', '.join(sorted(known))}")
    return given


def _mapping(given: Any) -> dict[str, str]:
    if not isinstance(given, dict):
        raise _WrongError(f"{_shown(given)} is not a table of texts")
    return {
        _text(key): value if isinstance(value, str) else _text(value)
        for key, value in given.items()
    }


def _plain(step: Step) -> Callable[[Any], Step]:
    """Make the parser of a step whose only argument is ``true``."""

    def made(given: Any) -> Step:
        if given is not True:
            raise _WrongError(f"{_shown(given)} is not true, the only possible value")
        return step

    return made


# The steps


def _extract(given: Any) -> Step:
    wanted = _texts(given)

    def step(ck: Checkpoint) -> Checkpoint:
        for key in wanted:
            try:
                find(ck.root, key)
            except UsageError:
                continue
            return structure.extract(ck, key)
        raise UsageError(
            f"has no entry {' or '.join(wanted)}",
            hint="`ckptkit inspect --tree {where}` shows its entries",
        )

    return step


def _select(given: Any) -> Step:
    globs = _table(given, {"keep", "drop"})
    keep, drop = _texts(globs.get("keep", [])), _texts(globs.get("drop", []))

    def step(ck: Checkpoint) -> Checkpoint:
        """Select the tensors.

        A recipe's drop patterns need not match: not every checkpoint of a kind has them.
        """
        names = ck.required.nodes
        matching = [glob for glob in drop if any(fnmatchcase(name, glob) for name in names)]
        return keys.select(ck, keep, matching) if keep or matching else ck

    return step


def _strip(given: Any) -> Step:
    prefixes = _texts(given)
    return lambda ck: keys.strip_prefix(ck, *prefixes)


def _add(given: Any) -> Step:
    prefix = _text(given)
    return lambda ck: keys.add_prefix(ck, prefix)


def _rename(given: Any) -> Step:
    tables = _table(given, {"map", "sub"})
    mapping = _mapping(tables.get("map", {}))
    substitutions = list(_mapping(tables.get("sub", {})).items())
    return lambda ck: keys.rename(ck, mapping, substitutions)


def _cast(given: Any) -> Step:
    dtypes = _mapping(given) if isinstance(given, dict) else _text(given)
    return lambda ck: elements.cast(ck, dtypes)


def _dequantize(given: Any) -> Step:
    dtype = None if given is True else _text(given)
    return lambda ck: quantized.dequantize(ck, dtype)


def _quantize(given: Any) -> Step:
    kind = _text(given)
    return lambda ck: quantizing.quantize(ck, kind)


def _remap(given: Any) -> Step:
    where = _mapping(given) if isinstance(given, dict) else _text(given)
    return lambda ck: devices.remap(ck, where)


def _wrap(given: Any) -> Step:
    name = _text(given)
    return lambda ck: structure.wrap(ck, name)


def _merge(given: Any) -> Step:
    others = _texts(given)
    return lambda ck: combine.merge([ck, *map(open_checkpoint, others)])


def _average(given: Any) -> Step:
    others = _texts(given)
    return lambda ck: combine.average([*map(open_checkpoint, others), ck])


def _tie(given: Any) -> Step:
    names_ = _mapping(given)
    return lambda ck: keys.tie(ck, names_)


def _untie(given: Any) -> Step:
    names_ = _mapping(given)
    return lambda ck: keys.untie(ck, names_)


def _optimizer_keys(given: Any) -> Step:
    by = _text(given)
    return lambda ck: optimizer_keys.key_optimizer(ck, by)


def _drop_entry(given: Any) -> Step:
    paths = _texts(given)

    def step(ck: Checkpoint) -> Checkpoint:
        for path in paths:
            ck = structure.drop(ck, path)
        return ck

    return step


STEPS: dict[str, Callable[[Any], Step]] = {
    "extract": _extract,  # a dotted path, or several: the first that exists
    "weights": _plain(structure.bare),
    "ema": _plain(combine.ema),
    "select": _select,  # keep, drop: globs; those of drop need not match
    "strip": _strip,  # prefixes
    "add": _add,  # a prefix
    "rename": _rename,  # map: old name to new one; sub: regular expression to replacement
    "dequantize": _dequantize,  # true, or a dtype
    "cast": _cast,  # a dtype, or glob to dtype
    "quantize": _quantize,  # fp8-block or mxfp4
    "remap": _remap,  # a device, or device to device
    "compact": _plain(elements.compact),
    "merge": _merge,  # files whose weights come after
    "average": _average,  # files with the same names
    "wrap": _wrap,  # the name of the entry
    "tie": _tie,  # new name to the name that it stands for as well
    "untie": _untie,  # the same, taken away again
    "optimizer-keys": _optimizer_keys,  # names or numbers
    "drop-entry": _drop_entry,  # dotted paths, such as optimizer; they need not be there
}
