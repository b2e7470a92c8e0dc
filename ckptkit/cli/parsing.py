"""Values of options: texts as typed -> sizes, pairs, mappings (callbacks of click)."""

from __future__ import annotations

import re

import click

from ckptkit.core.text import shell_word

_UNITS = {
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip


def size(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    """Parse the value of --shard-size (click callback)."""
    return None if text is None else bytes_of(text)


def bytes_of(text: str) -> int:
    """Parse a size in bytes; ``5GB`` is 5 * 10**9, ``5GiB`` is 5 * 2**30."""
    from fractions import Fraction  # and with it decimal

    found = re.fullmatch(r"([0-9]{1,18})(\.[0-9]{1,9})? ?([kmgt]i?b|b?)", text.strip().lower())
    size = int(Fraction(found[1] + (found[2] or "")) * _UNITS.get(found[3], 1)) if found else 0
    if not size:
        raise click.BadParameter(
            f"{text!r} is not a size: use 5GB, 500MB, 2GiB or a number of bytes"
        )
    return size


def pairs(_: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """Parse repeatable options of the form A=B (click callback)."""
    found = {}
    for text in given:
        left, equals, right = text.partition("=")
        if not equals or not left or not right:
            raise click.BadParameter(f"{text!r} is not of the form {parameter.metavar}")
        found[left] = right
    return found


def arguments(
    _: click.Context, parameter: click.Parameter, given: tuple[str, ...]
) -> dict[str, object]:
    """Parse --arg NAME=JSON into a dict of name to value (click callback)."""
    import json

    found: dict[str, object] = {}
    for text in given:
        name, equals, value = text.partition("=")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise click.BadParameter(
                f"{text!r} is not of the form {parameter.metavar}: {value!r} is not JSON, in which "
                f"a text has quotes: {shell_word(f'{name}={json.dumps(value)}')}"
            ) from error
        if not equals or not name:
            raise click.BadParameter(f"{text!r} is not of the form {parameter.metavar}")
    return found


def casts(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """Parse --cast into glob to dtype; a dtype alone is for all other names (click callback)."""
    found: dict[str, str] = {}
    for text in given:
        glob, _equals, dtype = text.rpartition("=")
        if found.setdefault(glob or "*", dtype) != dtype:
            raise click.BadParameter(f"{glob or 'a dtype without a glob'} is given twice")
    return found


def texts(_: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """Parse repeatable options of the form NAME=TEXT, where the text may be empty."""
    found = {}
    for each in given:
        name, equals, text = each.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{each!r} is not of the form {parameter.metavar}")
        found[name] = text
    return found


def mapping(_: click.Context, __: click.Parameter, path: str | None) -> dict[str, str]:
    """Read the JSON file of --map, a mapping of names to names (click callback)."""
    if path is None:
        return {}
    import json

    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except OSError as error:
        raise click.BadParameter(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise click.BadParameter(f"{path}: not a JSON object that maps names to names")
    return found


def substitutions(
    _: click.Context, parameter: click.Parameter, given: tuple[str, ...]
) -> list[tuple[str, str]]:
    """Parse --sub (click callback).

    Splits at the last equals sign, since expressions contain one more often than replacements.
    """
    found = []
    for text in given:
        pattern, equals, replacement = text.rpartition("=")
        if not equals or not pattern:
            sed = re.fullmatch(r"s([/|#,])(.+)\1(.*)\1g?", text)
            instead = f": write {shell_word(f'{sed[2]}={sed[3]}')}" if sed else ""
            raise click.BadParameter(f"{text!r} is not of the form {parameter.metavar}{instead}")
        found.append((pattern, replacement))
    return found
