"""Strip and add prefixes of names, rename weights, and select weights by name.

The edits change the keys of the state_dict, and the ``_metadata`` that torch sets on a state_dict.
``_metadata`` maps the path of each module (``""``, ``layer1``, ``layer1.0``) to a dict with a
version number. The edits replace a pickled module by its state_dict, because names inside a pickled
module are attributes of the user's classes.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from time import monotonic
from typing import NamedTuple

from ckptkit import quantized
from ckptkit.core.checkpoint import Checkpoint, NoOpWarning, edit
from ckptkit.core.errors import CollisionError, UsageError
from ckptkit.core.text import (
    entries,
    flatten,
    guess,
    merge_all,
    plural,
    quoted,
    shell_word,
    typed,
    without,
)
from ckptkit.core.tree import (
    MODULE_VERSIONS,
    Node,
    Object,
    OrderedMapping,
    Path,
    find,
    join,
    module_versions,
    rebuild,
    walk,
)
from ckptkit.core.weights import WRAPPERS, as_tensor, module_state, plain_state_dict, read_module
from ckptkit.edits import optimizers, quantized_names
from ckptkit.quantized import Quantization

Paths = dict[str, Node]
Names = Mapping[str, str] | Callable[[str], str]


def paths_of(mapping: Node) -> Paths | None:
    """Return the ``_metadata`` of a state_dict. Return None if there is no ``_metadata``, or if one
    of its keys is not a string."""
    paths = module_versions(mapping)
    if paths is None or not all(isinstance(path, str) for path in paths):
        return None
    return paths


def with_paths(
    old: Node, entries: Mapping[Node, Node], edit: Callable[[Paths], Paths] = lambda paths: paths
) -> Node:
    """Return a dict of the type of `old` with `entries` and the edited ``_metadata`` of `old`."""
    if not isinstance(old, OrderedMapping):
        return dict(entries)
    paths = paths_of(old)
    if paths is None:
        return OrderedMapping(entries, old.state)
    new = edit(paths)
    kept = OrderedMapping(new, paths.state) if isinstance(paths, OrderedMapping) else new
    return OrderedMapping(entries, {**old.state, MODULE_VERSIONS: kept})


def stripped_paths(
    paths: Paths, strip: Callable[[str], str], prefixes: Iterable[str], kept: Iterable[str]
) -> Paths:
    """Strip prefixes from the paths of ``_metadata``.

    If two paths become equal (such as ``""`` and ``module``), keep the entry of the inner module.
    Drop the path of each parent module of a prefix (``a`` for the prefix ``a.b.``), unless `kept`
    contains a name in that parent module.
    """
    on_the_way = {each[:n] for each in prefixes for n in range(1, len(each) - 1) if each[n] == "."}
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


def prefixed_paths(paths: Paths, prefix: str) -> Paths:
    """Add `prefix` to the paths of ``_metadata``. Also add an entry for each module in the
    prefix."""
    inside = prefix.rpartition(".")[0]
    parts = inside.split(".") if inside else []
    found: Paths = {".".join(parts[:n]): {"version": 1} for n in range(len(parts))}
    for path, value in paths.items():
        found[prefix + path if path else inside] = value
    return found


def pruned_paths(paths: Paths, names: Iterable[str]) -> Paths:
    """Return the entries of ``_metadata`` for the root, and for each module that contains one of
    `names`."""
    live = {""}
    for name in names:
        path = name.rpartition(".")[0]
        while path not in live:
            live.add(path)
            path = path.rpartition(".")[0]
    return {path: value for path, value in paths.items() if path in live}


def renamed_paths(paths: Paths, names: Mapping[str, str], lost: list[str]) -> Paths:
    """Rename the module paths of ``_metadata`` like the keys of the weights.

    `names` maps old to new keys. If a module has parameters, their new keys determine the new path
    of the module. If a module has only submodules, the new paths of the submodules determine the
    new path of the module. However, ckptkit ignores submodules whose last path component changed. A
    module that has neither parameters nor submodules stays in its parent module. If a new path is
    ambiguous, drop the entry and add the old path to `lost`.
    """
    votes: dict[str, set[str]] = defaultdict(set)  # module -> new paths of its parameters
    for old, new in names.items():
        votes[_parent(old)].add(_parent(new))
    below: dict[str, set[str]] = defaultdict(set)  # module -> new parents of its submodules
    by_depth = sorted(paths, key=lambda path: path.count("."))
    for path in reversed(by_depth):
        found_at = votes.get(path) or below[path]
        if path and len(found_at) == 1:
            (vote,) = found_at
            if _last(vote) == _last(path):
                below[_parent(path)].add(_parent(vote))
    placed: dict[str, str | None] = {"": ""}
    for path in filter(None, by_depth):
        found_at = votes.get(path) or below[path]
        if found_at:
            placed[path] = next(iter(found_at)) if len(found_at) == 1 else None
        else:
            around = placed.get(_parent(path), _parent(path))
            placed[path] = None if around is None else f"{around}.{_last(path)}".removeprefix(".")
    found: Paths = {}
    for path, value in paths.items():
        target = placed[path]
        if target is None:
            lost.append(path)
        elif target not in found or path:
            found[target] = value
    return found


def moved_paths(paths: Paths, pairs: Iterable[tuple[str, str]], lost: list[str]) -> Paths:
    """Move the entries of ``_metadata`` to the new modules of the keys.

    `pairs` contains (source key, new key).

    If the keys of a new module come from several old modules, and the entries of these old modules
    are equal, the new module gets this entry. If the entries differ, add the path of the new module
    to `lost`. A new parent module gets ``{"version": 1}``, as in torch. A module without keys keeps
    its entry.
    """
    sources: dict[str, set[str]] = defaultdict(set)
    before, after = {""}, {""}  # modules with keys
    for old, new in pairs:
        sources[_parent(new)].add(_parent(old))
        for name, modules in ((old, before), (new, after)):
            path = _parent(name)
            while path not in modules:
                modules.add(path)
                path = _parent(path)
    found: Paths = {
        path: value for path, value in paths.items() if path not in before or path == ""
    }
    for path in sorted(after - {""}) if paths else ():
        own = [paths[old] for old in sorted(sources[path]) if old in paths]
        if not own:
            found[path] = paths.get(path, {"version": 1})
        elif all(same_versions(each, own[0]) for each in own):
            found[path] = own[0]
        else:
            lost.append(path)
    return found


def same_versions(one: Node, other: Node) -> bool:
    """Return True if two entries of ``_metadata`` are equal dicts of ints, floats, bools, strings
    and None."""
    if one is other:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict) or one.keys() != other.keys():
        return False
    plain = (int, str, bool, float, type(None))
    return all(
        isinstance(v, plain) and isinstance(other[k], plain) and v == other[k]
        for k, v in one.items()
    )


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _last(path: str) -> str:
    return path.rpartition(".")[2]


@dataclass(frozen=True)
class EditedDict:
    """A dict whose keys an edit changes.

    ``node`` is the dict or pickled module in the tree. ``entries`` is the dict, or the state_dict
    of the pickled module. ``names`` contains only the keys of weights. For example, ``names`` of
    ``{"epoch": 3, "fc.weight": ...}`` is ``["fc.weight"]``.
    """

    path: Path
    node: Node
    entries: OrderedMapping | dict[Node, Node]
    names: list[str]

    @property
    def place(self) -> str:
        """The path as a part of messages: `` of model`` for the path ``model``, "" for the root."""
        return f" of {join(self.path)}" if self.path else ""

    def renamed(self, names: Mapping[str, str], edit_metadata: Callable[[Paths], Paths]) -> Node:
        """Return the dict with new keys in the order of the old keys.

        Raises CollisionError if two keys become equal.
        """
        new: dict[Node, Node] = {}
        for key, value in self.entries.items():
            name = names.get(key, key)
            if name in new:
                from glob import escape

                other = next(each for each in self.entries if names.get(each, each) == name)
                raise CollisionError(
                    f"{other!r} and {key!r}{self.place} would both become {name!r}",
                    hint="drop one of the two keys first: `ckptkit convert {where} {new} --drop "
                    f"{shell_word(escape(str(other)))}`",
                )
            new[name] = value
        return with_paths(self.entries, new, edit_metadata)


class NameChange(NamedTuple):
    """The new node for a dict whose names change, the old -> new names, and notes for the user."""

    target: EditedDict
    node: Node
    renamed: Mapping[str, str]
    notes: Sequence[str]


@edit
def strip_prefix(
    ck: Checkpoint, prefix: str | Sequence[str] = ("module.",), key: str | Sequence[str] = ()
) -> Checkpoint:
    """Remove leading prefixes from the names of the weights.

    ckptkit removes each prefix at most once from a name. If a name begins with several of the
    prefixes, ckptkit removes them all, in any order. If a prefix ends in a letter or digit, ckptkit
    adds a dot, so ``_orig_mod`` means ``_orig_mod.``. If `key` lists dotted paths of dicts,
    `strip_prefix` edits these dicts instead of the weights.

    Raises CollisionError if two names become equal, and UsageError for an empty prefix.
    """
    given = tuple(map(_whole_part, prefix)) or ("module.",)
    if "" in given:
        raise UsageError("an empty prefix cannot be stripped")
    found = tuple(sorted(given, key=len, reverse=True))
    targets, changes = list(targets_of(ck, key)), []
    warnings: list[str] = []
    for target in targets:
        names = {
            name: short
            for name in target.entries
            if isinstance(name, str)
            and name.startswith(found)
            and (short := _without_prefixes(name, found))
        }
        if not names:
            listed = " or ".join(map(repr, found))
            warnings.append(NoOpWarning(f"no key{target.place} starts with {listed}"))
            continue
        names, ck = quantized_names.rename_together(ck, names)
        kept = [name for name in target.names if name not in names]
        strip = partial(_without_prefixes, prefixes=found)
        follow = partial(stripped_paths, strip=strip, prefixes=found, kept=kept)
        gone = Counter(name[: len(name) - len(short)] for name, short in names.items())
        notes = [
            f"stripped {each!r} from {plural(number, 'key')}{target.place}"
            for each, number in gone.items()
        ]
        changes.append(NameChange(target, target.renamed(names, follow), names, notes))
        if kept:
            unchanged = f"{plural(len(kept), 'key')}{target.place} without the prefix, not changed"
            warnings.append(f"{unchanged}: {quoted(kept)}")
        outer = (*found, *WRAPPERS)
        again = [short for short in names.values() if short.startswith(outer)]
        if again:
            verb = "starts" if len(again) == 1 else "start"
            prefix = next(each for each in outer if again[0].startswith(each))
            warnings.append(
                f"{plural(len(again), 'key')}{target.place} still {verb} with {prefix!r}: "
                f"strip {prefix!r} from the result too"
            )
    done = applied(ck, changes, warnings)
    edited = {*(id(each.node) for each in targets), *(id(each.entries) for each in targets)}
    still = {
        path
        for path, node in walk(done.root)
        if isinstance(node, dict)
        and any(isinstance(name, str) and name.startswith(found) for name in node)
    }
    elsewhere = [
        join(path) for path, node in walk(ck.root) if path in still and id(node) not in edited
    ]
    if elsewhere:
        elsewhere = list(dict.fromkeys(elsewhere))
        every = [*(join(target.path) for target in targets), *elsewhere]
        options = typed(" ".join(f"--key {shell_word(each)}" for each in every), f"key={every}")
        warning = f"the prefix also occurs in {quoted(elsewhere)}; to edit all entries: {options}"
        done = done.with_root(done.root, warnings=[warning])
    return done


def _whole_part(prefix: str) -> str:
    """Append a dot to a prefix that ends in a letter or digit."""
    return f"{prefix}." if prefix[-1:].isalnum() else prefix


def _without_prefixes(name: str, prefixes: tuple[str, ...]) -> str:
    """Remove leading prefixes from `name`, each at most once."""
    while name.startswith(prefixes):
        hit = next(each for each in prefixes if name.startswith(each))
        at = prefixes.index(hit)
        prefixes = prefixes[:at] + prefixes[at + 1 :]
        name = name[len(hit) :]
    return name


@edit
def add_prefix(
    ck: Checkpoint, prefix: str = "module.", key: str | Sequence[str] = ()
) -> Checkpoint:
    """Add `prefix` to the names of the weights.

    If `key` lists dotted paths of dicts, `add_prefix` edits these dicts instead of the weights. If
    the prefix ends in a letter or digit, ckptkit adds a dot, as in `strip_prefix`. ``_metadata``
    changes as if the model became a submodule of another module.

    Raises CollisionError if two names become equal, and UsageError for an empty prefix.
    """
    prefix = _whole_part(prefix)
    if not prefix:
        raise UsageError("an empty prefix cannot be added")
    changes = []
    for target in targets_of(ck, key):
        names = {name: prefix + name for name in target.names}
        _, ck = quantized_names.rename_together(ck, names)
        new = target.renamed(names, lambda paths: prefixed_paths(paths, prefix))
        note = f"added {prefix!r} to {plural(len(names), 'key')}{target.place}"
        changes.append(NameChange(target, new, names, [note]))
    return applied(ck, changes)


@edit
def rename(
    ck: Checkpoint, map: Names | None = None, sub: Sequence[tuple[str, str]] = ()
) -> Checkpoint:
    """Rename weights by a mapping from old to new names, and by regular expressions.

    `map` may also be a function that returns the new name for an old name. Each item of `sub`
    is a regular expression and its replacement. If `map` does not contain a name, `rename`
    applies the items of `sub` to the name, in order, as :func:`re.sub` does.

    Raises UsageError for a missing name or an invalid expression. Raises CollisionError if two
    names become equal.
    """
    (target,) = targets_of(ck, ())
    mapping = map or {}
    if callable(mapping):
        try:
            mapping = {name: mapping(name) for name in target.names}
        except Exception as error:
            what = f"map: the function raises {type(error).__name__}: {error}"
            raise UsageError(what) from error
    for old, new in mapping.items():
        if old not in target.names:
            raise UsageError(
                f"there is no key {old!r}{target.place} to rename",
                hint=entries(old, [*target.names], "keys"),
            )
        if not isinstance(new, str) or not new:
            raise UsageError(
                f"{old!r} cannot be renamed to {new!r}: a name must be a string and not empty"
            )
    others = [name for name in target.names if name not in mapping]
    changed, unused = substituted(others, sub)
    every = {**mapping, **changed}
    names = {old: every[old] for old in target.names if every[old] != old}
    if not names:
        return ck.unchanged(f"no key{target.place} is renamed")
    names, ck = quantized_names.rename_together(ck, names)
    lost: list[str] = []
    whole = {name: names.get(name, name) for name in target.names}
    new_node = target.renamed(names, lambda paths: renamed_paths(paths, whole, lost))
    warnings: list[str] = [
        NoOpWarning(f"the substitution {pattern!r} changes no key{target.place}")
        for pattern in unused
    ]
    if lost:
        count = plural(len(lost), "_metadata entry")
        warnings.append(f"dropped {count} of modules whose new name is unclear: {quoted(lost)}")
    note = f"renamed {plural(len(names), 'key')}{target.place}"
    return applied(ck, [NameChange(target, new_node, names, [note])], warnings)


SECONDS = 20  # time limit for the substitutions in all names together


def substituted(
    names: Iterable[str], pairs: Sequence[tuple[str, str]]
) -> tuple[dict[str, str], list[str]]:
    """Return a dict from old to new names, and a list of the patterns that changed no name."""
    import regex  # unlike `re`, `regex` has a time limit

    compiled = []
    for pattern, replacement in pairs:
        try:
            re.compile(pattern).sub(replacement, "")  # raises an error for an invalid replacement
            compiled.append((regex.compile(pattern), pattern, replacement))
        except (re.error, regex.error, IndexError, RecursionError, OverflowError) as error:
            raise UsageError(
                f"bad substitution {pattern!r} = {replacement!r}: {error}",
                hint=r"write a backslash before a literal ( ) [ ] { } . * + ? |, as in \( or \.",
            ) from error
    deadline = monotonic() + SECONDS
    made: dict[str, str] = {}
    used: set[str] = set()
    for old in names:
        name = old
        for expression, pattern, replacement in compiled:
            before = name
            try:
                left = max(deadline - monotonic(), 0.001)
                name = expression.sub(replacement, name, timeout=left)
            except TimeoutError as error:
                raise UsageError(
                    f"the substitution {pattern!r} takes more than {SECONDS} seconds on {before!r}",
                    hint="nested repetition, as in (a+)+, takes exponential time",
                ) from error
            if name != before:
                used.add(pattern)
        if not name:
            raise UsageError(f"the substitutions make the name {old!r} empty")
        made[old] = name
    return made, [pattern for _, pattern, _ in compiled if pattern not in used]


@edit
def tie(ck: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """Add a new name for a weight. `names` maps each new name to the name of an existing weight.

    Raises UsageError if the existing weight is missing, and CollisionError if the new name exists.
    """
    (target,) = targets_of(ck, ())
    entries = dict(target.entries)
    for new, old in names.items():
        if old not in entries:
            raise UsageError(
                f"there is no key {old!r}{target.place}", hint=guess(old, target.names)
            )
        if new in entries:
            raise CollisionError(f"{new!r}{target.place} already exists")
        entries[new] = entries[old]
    node = with_paths(target.entries, entries)
    notes = [f"tied {new} to {old}" for new, old in names.items()]
    return applied(ck, [NameChange(target, node, {}, notes)])


@edit
def untie(ck: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """Drop names of tied weights.

    The keys of `names` are the names to drop. Each value is another name of the same weight.

    Ignore keys that do not exist in the checkpoint. Raises UsageError if a key and its value are
    not names of the same weight.
    """
    (target,) = targets_of(ck, ())
    gone = {new for new in names if new in target.entries}
    for new in gone:
        one, other = as_tensor(target.entries[new]), as_tensor(target.entries.get(names[new]))
        is_tied = one and other and one.storage and one.elements_key == other.elements_key
        if not is_tied:
            raise UsageError(
                f"{new!r} is not tied to {names[new]!r}{target.place}: their values may differ"
            )
    entries = without(target.entries, gone)
    left = [name for name in target.names if name not in gone]
    node = with_paths(target.entries, entries, lambda paths: pruned_paths(paths, left))
    notes = [f"dropped {new}, which is tied to {names[new]}" for new in sorted(gone)]
    return applied(ck, [NameChange(target, node, {}, notes)])


def applied(
    ck: Checkpoint, changes: Sequence[NameChange], warnings: Iterable[str] = ()
) -> Checkpoint:
    """Apply the changes to the checkpoint, and rename the parameters of its optimizers."""
    swap = {id(each.target.node): each.node for each in changes}
    names = merge_all(each.renamed for each in changes)
    notes = list(flatten((*each.notes, *_as_plain(each.target)) for each in changes))
    if names:
        nodes = [each.target.node for each in changes]
        followers, more = optimizers.rename_parameters(ck.root, names, nodes)
        swap, notes = {**swap, **followers}, [*notes, *more]
    root = rebuild(ck.root, swap=swap) if swap else ck.root
    return ck.with_root(root, notes=notes, warnings=warnings)


@edit
def select(
    ck: Checkpoint,
    keep: str | Sequence[str] = (),
    drop: str | Sequence[str] = (),
    missing_ok: bool = False,
) -> Checkpoint:
    """Keep only the weights whose names match a glob of `keep`, and no glob of `drop`.

    Without `keep`, all names match. ``*`` matches dots too. Entries other than the weights stay in
    the checkpoint. If an optimizer has state for a dropped parameter, ckptkit drops this state too.
    If ckptkit cannot identify the parameters of an optimizer, it drops the optimizer with a
    warning.

    Raises UsageError for a glob that matches nothing. With `missing_ok`, globs of `drop` may match
    nothing.
    """
    (target,) = targets_of(ck, ())
    if missing_ok:
        drop = [glob for glob in drop if any(fnmatchcase(name, glob) for name in target.names)]
        if not keep and not drop:
            return ck
    found = quantized.find(ck)
    kept = _matching(target, keep, found) if keep else set(target.names)
    kept -= _matching(target, drop, found) if drop else set()
    gone = len(target.names) - len(kept)
    if not kept:
        raise UsageError(
            "this drops all weights", hint="`ckptkit inspect {where}` lists their names"
        )
    if not gone:
        return ck.unchanged("the globs keep every weight, so no weight is dropped")
    dropped = set(target.names) - kept
    entries = without(target.entries, dropped)
    new = with_paths(target.entries, entries, lambda paths: pruned_paths(paths, kept))
    notes = [f"dropped {plural(gone, 'key')}{target.place}, kept {len(kept):,}", *_as_plain(target)]
    cut = optimizers.cut(ck, kept)
    root = rebuild(ck.root, swap={id(target.node): new, **cut.swap})
    warnings = [*quantized_names.incomplete_warning(found, kept), *cut.warnings]
    done = ck.with_root(root, notes=[*notes, *cut.notes], warnings=warnings)
    if cut.dropped:
        from ckptkit.edits.structure import drop_entry  # imported only when an optimizer is dropped

        done = drop_entry(done, cut.dropped)
    return done


def _matching(target: EditedDict, globs: Sequence[str], weights: Quantization) -> set[str]:
    """Return the names that match a glob. If a quantized weight matches, return all names of its
    tensors."""
    names = dict.fromkeys((*target.names, *(group.name for group in weights.groups)))
    found = set(flatten(quantized_names.matching(globs, names).values()))
    return quantized_names.with_members(weights, found).intersection(target.names)


def targets_of(ck: Checkpoint, keys: Sequence[str]) -> Iterator[EditedDict]:
    """Yield the dict of the weights if `keys` is empty. Otherwise, yield the dicts at the dotted
    paths `keys`."""
    if not keys:
        weights = ck.required
        node = weights.node
        if weights.is_module:
            mapping = plain_state_dict(weights.nodes)
            yield EditedDict(weights.path, node, mapping, list(weights.nodes))
            return
        is_state_dict = paths_of(node) is not None
        names = [
            key
            for key in node
            if isinstance(key, str)
            and (is_state_dict or key in weights.nodes or "." in key or key == "_extra_state")
        ]
        yield EditedDict(weights.path, node, node, names)
    seen: set[int] = set()
    for key in keys:
        path, node = find(ck.root, key)
        entries = module_state(node) if isinstance(node, Object) else node
        if not isinstance(entries, dict):
            raise UsageError(f"the entry {key!r} is not a dict", where=ck.name)
        if id(node) not in seen:
            seen.add(id(node))
            mapping = plain_state_dict(entries) if entries is not node else entries
            names = [name for name in entries if isinstance(name, str)]
            yield EditedDict(path, node, mapping, names)


def _as_plain(target: EditedDict) -> list[str]:
    if target.entries is target.node:
        return []
    module = read_module(target.node)
    unread = module.unread if module is not None else ()
    return [
        f"the pickled module{target.place} ({target.node.global_}) is now its plain state_dict",
        *unread,
    ]
