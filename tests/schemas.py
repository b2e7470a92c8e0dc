"""The JSON schemas of the manual, and the tables that are made of them.

`python -m tests.schemas` writes the tables into the page `ckptkit help json`, and the types of
what the library returns into `ckptkit/analysis/json_types.pyi`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from keyword import iskeyword
from pathlib import Path
from typing import Any

import ckptkit

TYPES = Path(ckptkit.__file__).parent / "analysis/json_types.pyi"
RETURNED = ("diff", "digest", "doctor", "inspect", "scan", "stats", "verify")  # by functions
HELP = Path(ckptkit.__file__).parent / "help"
PAGE = HELP / "json.md"
START = "<!-- made from the schemas by python -m tests.schemas -->\n"


def schemas() -> dict[str, Any]:
    """Return the schemas by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(HELP.glob("schemas/*.json"))}


def tables() -> str:
    """Return a section for each schema: its fields, and those of each part."""
    lines: list[str] = []
    known: dict[str, Any] = {}
    for name, schema in schemas().items():
        lines += [f"## {name}", "", f"`{schema['title']}`: {schema['description']}", ""]
        lines += table(schema)
        for title, part in schema.get("$defs", {}).items():
            if known.get(title) == part:
                continue
            known[title] = part
            lines += [f"{title}: {part['description']}", "", *table(part)]
    return "\n".join(lines).rstrip() + "\n"


def table(schema: Any) -> Iterator[str]:
    """Yield the lines of a table of fields."""
    yield from ("| field | |", "|---|---|")
    optional = set(schema["properties"]) - set(schema["required"])
    for name, field in schema["properties"].items():
        if name == "schema":
            continue
        text = f"`{name}`{' (not always)' if name in optional else ''}"
        yield f"| {text} | {described(field)} |"
    yield ""


def described(field: Any) -> str:
    """Return the description of a field, and the part or the fields that it consists of."""
    text = field.get("description", "")
    inner = field.get("items", field)
    refs = [
        each.rpartition("/")[2] for each in re.findall(r'"\$ref": "([^"]*)"', json.dumps(inner))
    ]
    if "properties" in inner:
        refs = [", ".join(f"`{name}`" for name in inner["properties"])]
    return ": ".join(filter(None, (" or ".join(refs), text)))


HEAD = """\"\"\"The objects that functions of the library return, and ``--json`` prints.

Made of the schemas by ``python -m tests.schemas``.
\"\"\"

from __future__ import annotations

from typing import Any, NotRequired, TypedDict, final
"""
_WORDS = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}


def types() -> str:
    """Return the classes of the objects that the library returns."""
    found = schemas()
    classes = [HEAD]
    for name in RETURNED:
        for title, part in found[name].get("$defs", {}).items():
            if name == "scan" or title not in ("FAILED", "ERROR"):
                classes += typed(class_name(name, title), part, name)
        if "tensors" in found[name]["properties"] or name in ("diff", "doctor"):
            title = "facts" if name in ("diff", "stats") else "report"
            classes += typed(class_name(name, title), found[name], name)
    return "\n\n".join(classes)


def formatted(source: str) -> str:
    """Return Python as ruff lays it out."""
    words = [Path(sys.executable).with_name("ruff"), "format", "--stdin-filename", TYPES, "-"]
    return subprocess.run(words, input=source, capture_output=True, text=True, check=True).stdout


def class_name(name: str, title: str) -> str:
    """Return the name of the class of a part of a schema, as in ``InspectTensor``."""
    return name[:1].upper() + name[1:] + title.title().replace("_", "")


def typed(called: str, schema: Any, name: str) -> Iterator[str]:
    """Yield the class of an object, after those of the objects inside it."""
    fields = {}
    for field, said in schema["properties"].items():
        if field == "schema" or (called == "DiffFacts" and field in ("a", "b", "model")):
            continue
        inner = said.get("items", said)
        for each in (inner, *inner.get("anyOf", ())):
            if "properties" in each:
                yield from typed(class_name(called, field), each, name)
        kind = kind_of(said, class_name(called, field), name)
        fields[field] = kind if field in schema["required"] else f"NotRequired[{kind}]"
    words = schema["description"].rstrip(".")
    if any(map(iskeyword, fields)):
        listed = ", ".join(f'"{field}": {kind}' for field, kind in fields.items())
        yield f'# {words[:1].upper()}{words[1:]}.\n{called} = TypedDict("{called}", {{{listed}}})\n'
        return
    lines = [
        "@final",
        f"class {called}(TypedDict):",
        f'    """{words[:1].upper()}{words[1:]}."""',
        "",
    ]
    lines += [f"    {field}: {kind}" for field, kind in fields.items()]
    yield "\n".join(lines) + "\n"


def kind_of(said: Any, called: str, name: str) -> str:
    """Return the Python type of a field; `called` is that of an object in it."""
    if "$ref" in said:
        return class_name(name, said["$ref"].rpartition("/")[2])
    if "anyOf" in said:
        return " | ".join(kind_of(each, called, name) for each in said["anyOf"])
    if "properties" in said:
        return called
    kinds = said.get("type", "any")
    listed = [kinds] if isinstance(kinds, str) else kinds
    return " | ".join(plain_kind(each, said, called, name) for each in listed)


def plain_kind(kind: str, said: Any, called: str, name: str) -> str:
    if kind == "array":
        return f"list[{kind_of(said['items'], called, name) if 'items' in said else 'Any'}]"
    if kind == "object":
        inner = said.get("additionalProperties")
        return f"dict[str, {kind_of(inner, called, name) if isinstance(inner, dict) else 'Any'}]"
    return _WORDS.get(kind, "Any")


if __name__ == "__main__":
    TYPES.write_text(formatted(types()), encoding="utf-8")
    head = PAGE.read_text(encoding="utf-8").partition(START)[0]
    PAGE.write_text(head + START + "\n" + tables(), encoding="utf-8")
