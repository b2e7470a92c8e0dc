"""Holes that reviews have found in scan's verdict, to be put back one at a time.

A hole is what scan took a value for that is something else: a function from a node of a tree to the
node that scan saw instead, None for all others. A hunt that does not find a hole is no hunt.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.fuzz.hunting import Finding, Hole, Hunt, clean
from tests.fuzz.material import group
from tests.fuzz.trees import Node, apply, changed, const, mapping, named

LITERALS = {"list": group("list"), "tuple": group("tuple"), "dict": mapping(), "set": group("set")}


def callee(node: Node) -> str:
    """The name that a node calls or makes an object of, "" if there is none."""
    if node[0] == "inst":
        return ".".join(node[1])
    if node[0] in ("reduce", "new", "apply", "newapply") and node[2] and node[2][0][0] == "global":
        return ".".join(node[2][0][1])
    return ""


def taken(node: Node) -> Node:
    """What a call takes."""
    return group("tuple", *(node[2] if node[0] == "inst" else node[2][1:]))


def target(node: Node) -> Node:
    """What the steps on a value are steps on."""
    while node[0] in ("build", "append", "appends", "additems", "setitem", "setitems", "put"):
        node = node[2][0]
    return node


def is_pid(node: Node, kind: str) -> bool:
    return node[0] == "binpersid" and _is_id(node[2][0], kind)


def _is_id(node: Node, kind: str) -> bool:
    return node[0] == "tuple" and node[2][:1] == (const(kind),)


def memo_index(node: Node) -> Node | None:
    """R1: an index was cut at 20 characters."""
    return named(*node[1][1]) if node[0] == "disguised" else None


def octal(node: Node) -> Node | None:
    """R2: a leading zero meant nothing."""
    return const(node[1]) if node[0] == "octal" else None


def optimizer(node: Node) -> Node | None:
    """R3: a defaultdict was a dict, whatever its factory."""
    if callee(node) != "collections.defaultdict":
        return None
    return next((each for each in node[2][2:] if each[0] == "dict"), mapping())


def persistent(node: Node) -> Node | None:
    """R4: what a persistent id of a legacy file gives back was not seen."""
    return named("builtins", "dict") if is_pid(node, "module") else None


def location(node: Node) -> Node | None:
    """R5: key, location and size of a storage could be anything."""
    if not is_pid(node, "storage") or len(node[2][0][2]) < 5:
        return None
    word, kind, *rest = node[2][0][2]
    plain = (const("0"), const("cpu"), const(64))
    seen = [
        each if type(each[1]) is type(good[1]) and each[0] == "const" else good
        for each, good in zip(rest, plain, strict=False)
    ]
    if seen == rest[:3]:
        return None
    return ("binpersid", None, (group("tuple", word, kind, *seen, *rest[3:]),))


def datetimes(node: Node) -> Node | None:
    """R6: the state of a type for times could be without its unit."""
    if node[0] != "build" or callee(node[2][0]) != "numpy.dtype" or len(node[2][1][2]) != 8:
        return None
    kind = node[2][0][2][1][1] if len(node[2][0][2]) > 1 else ""
    if str(kind)[:1] not in ("M", "m"):
        return None
    unit = group("tuple", mapping(), group("tuple", const(b"D"), const(1), const(1), const(1)))
    parts = [*node[2][1][2][:7], const(0), unit]
    return ("build", None, (node[2][0], group("tuple", *parts)))


def endless(node: Node) -> Node | None:
    """R7: an iterator was a value like others."""
    return mapping() if callee(node).startswith("itertools.") else None


def deque(node: Node) -> Node | None:
    """R8: a deque was a list, whatever it held."""
    return group("list") if node[0] not in ("append", "appends") and callee(node) == "collections.deque" else (
        group("list") if callee(target(node)) == "collections.deque" else None)  # fmt: skip


def results(node: Node) -> Node | None:
    """R9: what list, tuple, dict and set return was not looked into."""
    module, _, name = callee(node).partition(".")
    return LITERALS.get(name) if module == "builtins" and len(node[2]) > 1 else None


def bags(node: Node) -> Node | None:
    """F1 A, H, I: an object with attributes of the file's choosing was a dict where one was asked for."""
    bags = ("types.SimpleNamespace", "argparse.Namespace")
    is_bag = node[0] == "build" and callee(node[2][0]) in bags
    return mapping() if is_bag else None


def bags_as_texts(node: Node) -> Node | None:
    """F1 G: and a text where one was asked for."""
    return const("0" * 32) if bags(node) is not None else None


def twice(node: Node) -> Node | None:
    """F1 C and D: an object could be changed once more when its attributes were set."""
    stepped = node[0] in ("build", "append", "appends", "additems") and node[2][0][0] == "build"
    return group("list") if stepped else None


def datapipes(node: Node) -> Node | None:
    """F1 E and F: classes of datapipes were known."""
    return group("list") if "datapipe" in callee(target(node)) else None


def loaders(node: Node) -> Node | None:
    """F1 J and K: what hangs on a known name was known, and so was a module's loader."""
    module, _, name = callee(node).partition("torch.jit._pickle.")
    return taken(node) if not module and "__" in name else None


def evaluated(node: Node) -> Node | None:
    """F1 L: classes of sympy were known, which evaluate texts."""
    return taken(node) if callee(node).startswith("sympy.") else None


def pointers(node: Node) -> Node | None:
    """The first hunt: a type of objects could say that it holds numbers."""
    if node[0] != "build" or callee(node[2][0]) != "numpy.dtype" or node[2][1][0] != "tuple":
        return None
    flags = node[2][1][2][7:8]
    is_object = len(node[2][0][2]) > 1 and str(node[2][0][2][1][1]).startswith("O")
    if not is_object or flags not in ((const(0),), (const(16),)):
        return None
    plain = apply("numpy.dtype", const("i8"), const(False), const(True))
    parts = (3, "<", None, None, None, -1, -1, 0)
    return changed(plain, "build", group("tuple", *map(const, parts)))


HOLES: dict[str, Hole] = {
    each.__name__: each
    for each in (
        memo_index, octal, optimizer, persistent, location, datetimes, endless, deque, results, bags, bags_as_texts, twice,
        datapipes, loaders, evaluated, pointers,
    )
}  # fmt: skip


def found(hunt: Hunt, hole: Hole, seconds: float, count: float) -> Iterator[tuple[Finding, bool]]:
    """Yield what a hunt finds with a hole, and whether only the hole lets it through."""
    hunt.hole = hole
    for each in (hunt.kinds, hunt.closed, hunt.material.accepted):
        each.clear()
    hunt.material.known = set(hunt.material.table)
    yield from ((each, not clean(each.composition.data())) for each in hunt.run(seconds, count))
