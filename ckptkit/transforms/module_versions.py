"""``_metadata`` of a state_dict: the path of each module -> the version of its layout.

Paths are ``""``, ``layer1``, ``layer1.0``. torch sets it on the OrderedDict as an attribute;
code that renames keys must rename its paths too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from ckptkit.core.text import flatten
from ckptkit.core.tree import MODULE_VERSIONS, Node, OrderedMapping, module_versions

Paths = dict[str, Node]


def of(mapping: Node) -> Paths | None:
    """The ``_metadata`` of a state_dict, None if it has none that is a mapping from strings."""
    paths = module_versions(mapping)
    if paths is None or not all(isinstance(path, str) for path in paths):
        return None
    return paths


def like(old: Node, entries: Mapping[Node, Node], edit: Callable[[Paths], Paths]) -> Node:
    """`entries` as a mapping of the type of `old`, with the edited ``_metadata`` of `old`."""
    if not isinstance(old, OrderedMapping):
        return dict(entries)
    paths = of(old)
    if paths is None:
        return OrderedMapping(entries, old.state)
    new = edit(paths)
    kept = OrderedMapping(new, paths.state) if isinstance(paths, OrderedMapping) else new
    return OrderedMapping(entries, {**old.state, MODULE_VERSIONS: kept})


def _parents(path: str) -> Iterator[str]:
    return (path[:n] for n in range(1, len(path) - 1) if path[n] == ".")


def stripped(
    paths: Paths, strip: Callable[[str], str], prefixes: Iterable[str], kept: Iterable[str]
) -> Paths:
    """Return paths without the prefixes.

    Where two meet (``""`` and ``module``), the inner one stays.

    A path on the way to a prefix (``a`` of ``a.b.``) goes, unless a name in `kept` is still below
    it.
    """
    on_the_way = set(flatten(map(_parents, prefixes)))
    depth: dict[str, int] = {}
    found: Paths = {}
    for path, value in paths.items():
        below = path + "."
        if path in on_the_way and not any(name.startswith(below) for name in kept):
            continue
        short = strip(below)
        new, gone = short[:-1], len(below) - len(short)
        if gone >= depth.get(new, 0):
            found[new], depth[new] = value, gone
    return found


def prefixed(paths: Paths, prefix: str) -> Paths:
    """Return paths below `prefix`, with entries of the modules around them, as in torch."""
    inside = prefix.rpartition(".")[0]
    parts = inside.split(".") if inside else []
    found: Paths = {".".join(parts[:n]): {"version": 1} for n in range(len(parts))}
    for path, value in paths.items():
        found[prefix + path if path else inside] = value
    return found


def pruned(paths: Paths, names: Iterable[str]) -> Paths:
    """The paths that still have a name below them, and the root."""
    live = {""}
    for name in names:
        path = name.rpartition(".")[0]
        while path not in live:
            live.add(path)
            path = path.rpartition(".")[0]
    return {path: value for path, value in paths.items() if path in live}


def renamed(paths: Paths, names: Mapping[str, str], lost: list[str]) -> Paths:
    """Return paths renamed like their keys; what cannot be derived is left out and added to `lost`.

    A module is where its own parameters are. One that has none is where its submodules are, if
    these kept their last component; one without either moves with the module around it.
    """
    new = _derived(paths, names)
    found: Paths = {}
    for path, value in paths.items():
        target = new[path]
        if target is None:
            lost.append(path)
        elif target not in found or path:
            found[target] = value
    return found


def moved(paths: Paths, pairs: Iterable[tuple[str, str]], lost: list[str]) -> Paths:
    """Paths as their keys went, (old name, new name) for each source of each new key.

    A module that is made of several has their entry if they agree; else it is left out, and added
    to `lost`. A module that is new around others has what torch gives it; one that has no keys
    stays.
    """
    sources: dict[str, set[str]] = defaultdict(set)
    held, live = {""}, {""}
    for old, new in pairs:
        sources[_parent(new)].add(_parent(old))
        _add_parents(old, held)
        _add_parents(new, live)
    found: Paths = {path: value for path, value in paths.items() if path not in held or path == ""}
    for path in sorted(live - {""}) if paths else ():
        own = [paths[old] for old in sorted(sources[path]) if old in paths]
        if not own:
            found[path] = paths.get(path, {"version": 1})
        elif all(same(each, own[0]) for each in own):
            found[path] = own[0]
        else:
            lost.append(path)
    return found


def _add_parents(name: str, found: set[str]) -> None:
    """Add the modules around a key, up to one that is there already."""
    path = _parent(name)
    while path not in found:
        found.add(path)
        path = _parent(path)


def same(one: Node, other: Node) -> bool:
    """Return whether two entries of ``_metadata`` are equal: dicts of a few plain values."""
    if one is other:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict) or one.keys() != other.keys():
        return False
    plain = (int, str, bool, float, type(None))
    return all(
        isinstance(v, plain) and isinstance(other[k], plain) and v == other[k]
        for k, v in one.items()
    )


def _derived(paths: Paths, names: Mapping[str, str]) -> dict[str, str | None]:
    own: dict[str, set[str]] = defaultdict(set)
    for old, new in names.items():
        own[_parent(old)].add(_parent(new))
    below: dict[str, set[str]] = defaultdict(set)
    by_depth = sorted(paths, key=lambda path: path.count("."))
    for path in reversed(by_depth):
        votes = own.get(path) or below[path]
        if path and len(votes) == 1:
            (vote,) = votes
            if _last(vote) == _last(path):
                below[_parent(path)].add(_parent(vote))
    result: dict[str, str | None] = {"": ""}
    for path in by_depth:
        votes = own.get(path) or below[path]
        if not path:
            continue
        if votes:
            result[path] = next(iter(votes)) if len(votes) == 1 else None
        else:
            result[path] = _inherited(path, result)
    return result


def _inherited(path: str, result: Mapping[str, str | None]) -> str | None:
    around = result.get(_parent(path), _parent(path))
    return None if around is None else f"{around}.{_last(path)}".removeprefix(".")


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _last(path: str) -> str:
    return path.rpartition(".")[2]
