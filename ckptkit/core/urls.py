"""Recognition and display of URLs."""

from __future__ import annotations

import re

# scheme://..., perhaps behind others that fsspec chains: simplecache::s3://...
_URL = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]+://")
_WEB_USER = re.compile(r"(?i)(?<=http://)[^/?#]*@|(?<=https://)[^/?#]*@")
_PASSWORD = re.compile(r"(?<=://)([^/?#@:]*):[^/?#]*@")
_HUB_PAGE = re.compile(r"(https?://(?:huggingface\.co|hf\.co)(?:/[^/]+){2,3})/(?:blob|raw)/")
_GITHUB_PAGE = re.compile(r"(https?://github\.com/[^/]+/[^/]+)/blob/")


def is_url(path: object) -> bool:
    """Return whether `path` is a URL, and not the path of a local file."""
    return isinstance(path, str) and _URL.match(path) is not None


def shown(path: str) -> str:
    """Return `path` for messages: a URL without its password and query (often a signature)."""
    if not is_url(path):
        return path
    path = _PASSWORD.sub(r"\1:***@", _WEB_USER.sub("***@", path))
    place, mark, _ = path.partition("?")
    return f"{place}{mark}***" if mark else place


def behind_page(url: str) -> str | None:
    """Return the URL of the file itself if `url` is a page about it, or its Git LFS pointer."""
    place = without_query(url)
    if _HUB_PAGE.match(place):
        return _HUB_PAGE.sub(r"\1/resolve/", place)
    return _GITHUB_PAGE.sub(r"\1/raw/", place) if _GITHUB_PAGE.match(place) else None


def without_query(url: str) -> str:
    """Return `url` up to its query."""
    return url.partition("?")[0]


def in_folder(url: str, name: str) -> str:
    """Return the URL of the file `name` in the folder `url`. Both use the same query."""
    folder, mark, query = url.partition("?")
    start = _start(folder)
    rest = folder[start:].rstrip("/")
    above = f"{rest}/" if rest or folder[start:] else ""
    return f"{folder[:start]}{above}{name}{mark}{query}"


def split(url: str) -> tuple[str, str]:
    """Return the URL of the folder of a file, with the file's query, and the file's name."""
    place, mark, query = url.partition("?")
    start = _start(place)
    above, slash, name = place[start:].rpartition("/")
    return f"{place[:start]}{above or slash}{mark}{query}", name


def _start(url: str) -> int:
    """Return where the place begins: behind ``memory://``, whose root may contain files."""
    found = _URL.match(url)
    return found.end() if found else 0
