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

The steps are the edits in `ckptkit.edits`, and `config`, `rules` and `expect`. Recipes in this
folder are found by name (``lightning``).
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit import edits
from ckptkit.api import Step, open_checkpoint
from ckptkit.core.bytesource import LocalFile
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CollisionError, InputError, TensorError, UsageError
from ckptkit.core.text import nearest
from ckptkit.edits.expect import Expectations
from ckptkit.edits.rules import RuleOptions
from ckptkit.edits.rules import step as apply_step
from ckptkit.rules.notation import RuleError, in_step, is_word
from ckptkit.rules.planner import RuleSet, unused_argument
from ckptkit.run.recipes import model_config
from ckptkit.run.recipes.reversing import WrittenStep, backwards

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


def load(name: str, options: RuleOptions | None = None) -> Recipe:
    """The recipe in the file `name`, or the one that comes with ckptkit under that name.

    `options` are those of its rules: sizes, a configuration, the way back. Raises
    UsageError.
    """
    options = options or RuleOptions()
    if name in names():
        return _recipe(name, _parsed(FOLDER / f"{name}.yaml"), options)
    if not name.endswith(_SUFFIXES):
        close = nearest(name, names()) or names()
        raise UsageError(
            f"there is no recipe {name!r}",
            hint=f"did you mean {', '.join(close)}? or name a .yaml file",
        )
    return _recipe(name, _parsed(Path(name)), options)


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


def _recipe(name: str, content: Any, options: RuleOptions) -> Recipe:
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
        made = _made(known, options, defaults)
        _check_arguments(known, options, defaults)
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


def _made(
    known: list[WrittenStep], options: RuleOptions, defaults: dict[str, str | int]
) -> list[Step]:
    """The steps as functions, each read before any is applied."""
    forwards = [_step(number, each, options, defaults) for number, each in enumerate(known, 1)]
    if not options.reverse:
        return forwards
    back, notes = backwards(known)
    steps = [_step(number, each, options, defaults) for number, each in enumerate(back, 1)]
    return [*steps, lambda ck: ck.with_root(ck.root, notes=notes)]


def _check_arguments(
    known: list[WrittenStep], options: RuleOptions, defaults: dict[str, str | int]
) -> None:
    """Raise RuleError for an argument that no rule of any step uses."""
    if not options.args:
        return
    words: set[str] = set()
    for each in known:
        if each.word == "rules":
            words |= _parsed_rules(each, defaults).words()
    for word in options.args:
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
            given = {word: value for word, value in each.items() if word != "rules"}
            if given.keys() <= _RULE_OPTIONS:
                yield WrittenStep("rules", each["rules"], given)
                continue
            odd = ", ".join(sorted(map(repr, given.keys() - _RULE_OPTIONS)))
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


def _step(
    number: int, step: WrittenStep, options: RuleOptions, defaults: dict[str, str | int]
) -> Step:
    word = step.word
    if word not in (known := [*edits.BY_WORD, "config", "expect"]):
        close = nearest(_shown(word).strip("'"), known) or known
        raise _WrongError(
            f"step {number}: {_shown(word)} is not a step",
            hint=f"did you mean {', '.join(close)}?",
        )
    try:
        if word == "rules":
            return _rules(number, step, options, defaults)
        if word == "config":
            return _config(step.given, options)
        if word == "expect":
            return Expectations(_texts(step.given), options.config).check
        return _edited(edits.BY_WORD[word], step.given)
    except _WrongError as error:
        raise _WrongError(f"step {number} ({word}): {error}", hint=error.hint) from None
    except RuleError as error:
        raise in_step(number, error) from None


_RULE_OPTIONS = {"keep", "sizes", "keys"}


def _rules(
    number: int, step: WrittenStep, options: RuleOptions, defaults: dict[str, str | int]
) -> Step:
    rules = _parsed_rules(step, defaults)
    keep = _texts(step.options.get("keep", []))
    paths = _texts(step.options.get("keys", []))

    def step_of_rules(checkpoint: Checkpoint) -> Checkpoint:
        try:
            return apply_step(checkpoint, rules, keep, options, paths, number)
        except (RuleError, TensorError, CollisionError) as error:
            raise in_step(number, error) from None

    return step_of_rules


def _parsed_rules(step: WrittenStep, defaults: dict[str, str | int]) -> RuleSet:
    lines = _texts(step.given)
    if not lines:
        raise _WrongError("there is no rule")
    return RuleSet.parse(lines, _sizes(step.options.get("sizes", {})), defaults)


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


def _config(given: Any, options: RuleOptions) -> Step:
    if given not in model_config.TABLES:
        raise _WrongError(
            f"{_shown(given)} is not a table of arguments", hint=", ".join(model_config.TABLES)
        )
    table = model_config.TABLES[given]
    return lambda ck: model_config.with_config(ck, table, options)


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


def _true(given: Any) -> bool:
    if given is not True:
        raise _WrongError(f"{_shown(given)} is not true, the only possible value")
    return True


def _text_or_mapping(given: Any) -> str | dict[str, str]:
    return _mapping(given) if isinstance(given, dict) else _text(given)


# How the value of an argument of an edit is read, by `Option.kind`.
KINDS: dict[str, Callable[[Any], Any]] = {
    "text": _text,
    "choice": _text,
    "texts": _texts,
    "first": _texts,  # the first of several that exists
    "dtype": lambda given: None if given is True else _text(given),
    "casts": _text_or_mapping,
    "pairs": _text_or_mapping,
    "map": _mapping,
    "named": _mapping,
    "substitutions": lambda given: list(_mapping(given).items()),
    "flag": _true,
}


def _edited(edit: edits.Edit, given: Any) -> Step:
    """Return the step of an edit. Raises _WrongError for a value that is not of its kind."""
    if edit.several:
        others = _texts(given)

        def step(ck: Checkpoint) -> Checkpoint:
            found = [*map(open_checkpoint, others)]
            found.insert(0 if edit.several == "first" else len(found), ck)
            return edit.function(found)

        return step
    options = {each.recipe: each for each in edit.options if each.recipe is not None}
    if not options or not edit.options[0].parameter:
        _true(given)
        return edits.step(edit.word)
    values = {"": given} if "" in options else _table(given, {*options})
    read = {
        options[word].parameter: KINDS[options[word].kind](each) for word, each in values.items()
    }
    return edits.step(edit.word, **read, **(edit.fixed or {}))
