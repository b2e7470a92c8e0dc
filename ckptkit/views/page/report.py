"""One self-contained page: the facts as JSON, and the script that shows them. It loads nothing, and
works offline.

The policy in its head allows that script and that style alone, by their digests: whatever a file
calls its tensors, no other code runs. The script makes text of text, never markup.
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
    """The page that tells `facts`, UTF-8."""
    style, script = static("report.css"), "(() => {\n" + "\n".join(map(static, SCRIPTS)) + "})();\n"
    names = " and ".join(file["name"] for file in facts["files"])
    given = {
        "title": html(names),
        "policy": f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; base-uri 'none'",
        "style": style,
        "script": script,
        "data": embedded(facts),
    }
    return _MARK.sub(lambda mark: given[mark[1]], static("report.html")).encode()


def embedded(value: Any) -> str:
    """JSON that may stand in a ``<script>``: without any character that means something to HTML."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def static(name: str) -> str:
    """A file of the package."""
    return (Path(__file__).parent / "static" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
