"""The terms of the manual: no text that people read contains a private word where the field has one.

Each row of ``TERMS`` is a pattern and the standard term for it. The texts are those of the README,
the changelog, the manual, the JSON schemas, and the docstrings, comments and strings of the package.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

TERMS = {
    r"what is (?:whole|left|not)\b": "intact tensors; damaged; what remains",
    r"left (?:out|behind)\b": "dropped, not written, lost",
    r"lea(?:ves?|ving) (?:\w+ ){0,2}out\b": "drops, does not write",
    r"in silence": "silently",
    r"change that changes nothing|without (?:an )?effect": "no-op",
    r"\b(?:a|the|one|each|every) text\b(?! (?:file|mode|encoder|model|editor|view|report|format|output|form|stream|string|opcode))|\btexts\b": "string",
    r"mappings? from strings": "dict[str, ...]",
    r"below the normal": "subnormal",
    r"makes? (?:floats|numbers|float32) of": "dequantizes",
    r"byte for byte as": "bit-exactly",
    r"\b(?:no|not a|not|a) multiples? of": "divisible by",
    r"counted through": "renumbered globally",
    r"part \w+ of TP|of several processes": "rank N of M tensor-parallel ranks; several ranks",
    r"laid on (?:its|a|the) mesh|of one value in all": "placement; replicated",
    r"one by one": "by exact name, individually",
    r"allowlist (?:knows|does not know)": "allowlisted",
    r"killed run left|a run left": "stale temporary file",
    r"\bwants?\b(?! to\b)|\bwanted\b": "requires, needs",
    r"\bno place (?:for|in)\b": "rejects, cannot store",
    r"cannot be had|can be had|to be had": "missing, unavailable",
    r"does not understand|\bnot known\b": "unknown, cannot verify",
    r"(?<!than )\b(?:is|are|was|were) (?:not )?there\b": "exists, missing",
    r"tensors? (?:is|are) made of": "source keys",
    r"\bso many\b": "a number",
    r"\bsaid\b": "reported, printed, named",
    r"\bstands? for\b": "represents, means",
    r"\bmeets?\b|\bis met\b|\bare met\b": "matches, encounters, reads",
    r"(?:is|are) (?:not )?taken (?:for|as)\b": "treated as",
    r"(?:^|[.;:] )Others\b|\bothers (?:are|do|have|can|keep|need|remain)\b": "the other tensors, files, ...",
}
PATTERN = re.compile("|".join(TERMS), re.IGNORECASE)
TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*', re.DOTALL
)
GAP = re.compile(r"\s*[fr]*")  # between strings, or comments, that are one text


def texts_of(source: str) -> Iterator[str]:
    """Yield the docstrings, strings and comments of a module, each on one line; adjacent ones are
    one text."""
    text, end = "", 0
    for token in TOKEN.finditer(source):
        if not GAP.fullmatch(source, end, token.start()):
            yield _plain(text)
            text = ""
        text += token[0].lstrip("#") + "\n" if token[0][0] == "#" else token[0].strip("\"'")
        end = token.end()
    yield _plain(text)


def _plain(text: str) -> str:
    """Return a text on one line, without the expressions of f-strings; "" for a single word."""
    text = " ".join(re.sub(r"\{[^{}]*\}", "{}", text).split())
    return text if " " in text else ""


def hits(text: str) -> list[str]:
    """Return each private word of a text, with the words around it."""
    return [text[max(0, each.start() - 40) : each.end() + 40] for each in PATTERN.finditer(text)]


def prose(page: str) -> str:
    """Return the prose of a Markdown page: without blocks, on one line."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", page, flags=re.DOTALL | re.MULTILINE)
    return " ".join(text.split())


def room(path: Path) -> str:
    """Return the room of a file: the folder below the package, or the file itself."""
    parts = path.relative_to(ROOT).parts
    return parts[1] if len(parts) > 2 else parts[-1]


PACKAGE = ROOT / "ckptkit"
SUFFIXES = (".py", ".md", ".json", ".toml")  # of files that contain text
ROOMS = sorted(
    {"README.md", "CHANGELOG.md"}
    | {room(path) for path in [*PACKAGE.glob("*/*"), *PACKAGE.glob("*.*")]}
    - {"py.typed", "__pycache__"}
)


def files(name: str) -> list[Path]:
    """Return the files of a room that contain text."""
    if (PACKAGE / name).is_dir():
        return sorted(
            p
            for p in (PACKAGE / name).rglob("*")
            if p.suffix in SUFFIXES or p.name == "options.txt"
        )
    return [path for path in (ROOT / name, PACKAGE / name) if path.is_file()]


def found(name: str) -> list[str]:
    """Return the private words of a room, each with its file."""
    rows = []
    for path in files(name):
        text = path.read_text(encoding="utf-8")
        texts = texts_of(text) if path.suffix == ".py" else [prose(text)]
        rows += [f"{path.relative_to(ROOT)}: {hit}" for each in texts for hit in hits(each)]
    return rows


@pytest.mark.parametrize("name", ROOMS)
def test_terms(name: str) -> None:
    assert found(name) == []


def test_planted_words_are_found() -> None:
    planted = '''"""What is left."""
# A comment that goes on: it
# stands for a file.
x = 3  # made so many times
y = (f"error: {x} is "
    "not known")
'''
    assert len([hit for text in texts_of(planted) for hit in hits(text)]) == 4
    assert hits(prose("a `b` that\nis left\nout\n```\nnot known\n```\n")) == [
        "a `b` that is left out"
    ]
    assert hits("Return the intact tensors of a damaged file.") == []


def test_rooms_hold_everything() -> None:
    pages = {path for name in ROOMS for path in files(name)}
    assert {*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.md"), ROOT / "README.md"} <= pages
