"""One self-contained HTML page: the facts as JSON, and the script that shows them.

It loads nothing and works offline. The content security policy in its head allows only that script
and that style, by their digests, so that no other code runs whatever a file calls its tensors. The
script creates text nodes, never markup.
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from html import escape as html
from pathlib import Path
from typing import Any

# In this order, as one function: each sees what those before it define, and nothing else does.
SCRIPTS = (
    "treemap.js",
    "table.js",
    "facts.js",
    "map.js",
    "tensors.js",
    "differences.js",
    "report.js",
)
_MARK = re.compile(r"\{\{(\w+)\}\}")
_UNSAFE = re.compile("[<>&\u2028\u2029]")


def page(facts: dict[str, Any]) -> bytes:
    """Return the page that shows `facts`, encoded as UTF-8."""
    style, script = static("report.css"), "(() => {\n" + "\n".join(map(static, SCRIPTS)) + "})();\n"
    names = " and ".join(file["name"] for file in facts["files"])
    given = {
        "title": html(names),
        "policy": f"default-src 'none'; script-src {_digest(script)}; "
        f"style-src {_digest(style)}; base-uri 'none'",
        "style": style,
        "script": script,
        "data": embedded(facts),
    }
    return _MARK.sub(lambda mark: given[mark[1]], static("report.html")).encode()


def embedded(value: Any) -> str:
    """Return JSON for use inside ``<script>``, without characters that have a meaning in HTML."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def static(name: str) -> str:
    """Return the text of a file in the folder ``static``."""
    return (Path(__file__).parent / "static" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
