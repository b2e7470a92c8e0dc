"""Recipes: the steps from one kind of checkpoint to another, written down once.

A recipe is a YAML or TOML file:

    about: One sentence.
    steps:                          # in this order
      - extract: [ema, model]       # the first of these entries that exists
      - strip: module.
      - cast: {"*": bfloat16, "*norm*": float32}
    output: {format: safetensors, shard_size: 5GB}      # unless the command line overrides it

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
from ckptkit.core.errors import InputError, UsageError
from ckptkit.core.text import nearest
from ckptkit.core.tree import find
from ckptkit.transforms import combine, devices, elements, keys, quantized, structure

FOLDER = Path(__file__).parent
_SUFFIXES = (".yaml", ".yml", ".toml")
_BYTES = 1 << 20  # of a recipe
_SHOWN = 120  # characters of a value in a message
_PARTS = {"about", "steps", "output"}
_OUTPUT = {"format": str, "shard_size": str, "all": bool, "objects": str, "ties": str}


@dataclass(frozen=True, slots=True)
class Recipe:
    """The contents of a recipe file: its steps as functions, and how to write their result."""

    name: str
    about: str
    steps: tuple[Step, ...]
    output: Mapping[str, Any]


def names() -> list[str]:
    """Return the names of the built-in recipes."""
    return sorted(path.stem for path in FOLDER.iterdir() if path.suffix in _SUFFIXES)


def load(name: str) -> Recipe:
    """Return the recipe in the file `name`, or the built-in one of that name. Raises UsageError."""
    if name in names():
        return _recipe(name, _parsed(FOLDER / f"{name}.yaml"))
    if not name.endswith(_SUFFIXES):
        close = nearest(name, names()) or names()
        raise UsageError(
            f"there is no recipe {name!r}",
            hint=f"did you mean {', '.join(close)}? or name a .yaml file",
        )
    return _recipe(name, _parsed(Path(name)))


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
        return yaml.load(data, PlainLoader)
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


def _recipe(name: str, content: Any) -> Recipe:
    try:
        parts = _table(content, _PARTS)
        steps = parts.get("steps")
        if not isinstance(steps, list) or not steps:
            raise _WrongError("has no list of steps")
        output = _table(parts.get("output", {}), set(_OUTPUT))
        for key, value in output.items():
            if not isinstance(value, _OUTPUT[key]):
                raise _WrongError(f"output: {key} is {_shown(value)}")
        about = parts.get("about", "")
        if not isinstance(about, str):
            raise _WrongError(f"about is {_shown(about)}")
        return Recipe(name, about, tuple(_steps(steps)), output)
    except _WrongError as error:
        raise UsageError(str(error), where=name, hint=error.hint) from None


class _WrongError(ValueError):
    """A recipe is malformed; the message names the place."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def _steps(listed: list[Any]) -> Iterator[Step]:
    for number, each in enumerate(listed, 1):
        if not isinstance(each, dict) or len(each) != 1:
            raise _WrongError(
                f"step {number} is not one word with its argument",
                hint="e.g. `- strip: module.`",
            )
        ((word, given),) = each.items()
        if word not in STEPS:
            close = nearest(_shown(word).strip("'"), STEPS) or STEPS
            raise _WrongError(
                f"step {number}: {_shown(word)} is not a step",
                hint=f"did you mean {', '.join(close)}?",
            )
        try:
            yield STEPS[word](given)
        except _WrongError as error:
            raise _WrongError(f"step {number} ({word}): {error}", hint=error.hint) from None


# The arguments of a step


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
            f"has no entry {' or '.join(wanted)}", hint="`ckptkit inspect --tree` shows its entries"
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


STEPS: dict[str, Callable[[Any], Step]] = {
    "extract": _extract,  # a dotted path, or several: the first that exists
    "weights": _plain(structure.bare),
    "ema": _plain(combine.ema),
    "select": _select,  # keep, drop: globs; those of drop need not match
    "strip": _strip,  # prefixes
    "add": _add,  # a prefix
    "rename": _rename,  # map: old name to new one; sub: regular expression to replacement
    "dequantize": _plain(quantized.dequantize),
    "cast": _cast,  # a dtype, or glob to dtype
    "remap": _remap,  # a device, or device to device
    "compact": _plain(elements.compact),
    "merge": _merge,  # files whose weights come after
    "average": _average,  # files with the same names
    "wrap": _wrap,  # the name of the entry
}
