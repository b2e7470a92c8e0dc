"""The JSON schemas of the manual, and the tables that are made of them.

`python -m tests.schemas` writes the tables into the page `ckptkit help json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ckptkit

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


if __name__ == "__main__":
    head = PAGE.read_text(encoding="utf-8").partition(START)[0]
    PAGE.write_text(head + START + "\n" + tables(), encoding="utf-8")
