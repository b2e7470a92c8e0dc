"""Pickles as trees, which can be composed, changed, made smaller, and written in many ways.

A node is ``(kind, value, children)``. Every kind leaves one value on the pickle machine's stack, so
that any node can take the place of any other. `file` puts a pickle where torch.load looks for one.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any
from zlib import crc32

Node = tuple[str, Any, tuple[Any, ...]]
NONE: Node = ("const", None, ())
HELD: Node = ("held", None, ())
DEEP = 40  # levels that are written
STORING = ("put", "ref", "alias", "held", "disguised")  # kinds that use the memo
_KEPT: dict[int, Node] = {}
_computed: dict[tuple[object, int], Any] = {}


def const(value: object) -> Node:
    """A number, text or bytes."""
    return ("const", value, ())


def named(module: str, name: str) -> Node:
    """A global."""
    return ("global", (module, name), ())


def call(made: Node, *args: Node) -> Node:
    """REDUCE with a tuple."""
    return ("reduce", None, (made, *args))


def apply(dotted: str, *args: Node) -> Node:
    """REDUCE of a name; the last dot divides."""
    module, _, name = dotted.rpartition(".")
    return call(named(module, name), *args)


def mapping(*pairs: Node) -> Node:
    """A dict of keys and values."""
    return ("dict", None, pairs)


def changed(target: Node, kind: str, *values: Node) -> Node:
    """BUILD, APPEND and their kin: a step on a value, which stays."""
    return (kind, None, (target, *values))


def aliased(target: Node, user: Node, step: str, *values: Node) -> Node:
    """A value that has `target` where HELD stands, and a step on `target` when it is made."""
    return ("alias", step, (target, user, *values))


def late(item: Node) -> Node:
    """A list that gets its item when it stands in its place."""
    return aliased(("list", None, ()), HELD, "appends", item)


def size(node: Node) -> int:
    """Count the nodes."""
    return 1 + sum(map(size, node[2]))


def keep(node: Node) -> Node:
    """Let what is computed of the nodes of a tree be computed once: most of a changed tree stays."""
    kinds = {each[0] for _, each in places(node)}
    if kinds.isdisjoint(STORING):
        _KEPT.update((id(each), each) for _, each in places(node))
    return node


def once(what: object, node: Node, compute: Callable[[], Any]) -> Any:
    """Return what is computed of a node; of those that are kept, the result of the first time."""
    if (key := (what, id(node))) not in _computed:
        if id(node) not in _KEPT:
            return compute()
        _computed[key] = compute()
    return _computed[key]


def places(node: Node, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Node]]:
    """Every node with the way to it, from the root."""
    yield path, node
    for at, child in enumerate(node[2]):
        yield from places(child, (*path, at))


def replaced(node: Node, path: tuple[int, ...], new: Node) -> Node:
    """The tree with another node in one place."""
    if not path:
        return new
    kind, value, children = node
    at = path[0]
    child = replaced(children[at], path[1:], new)
    return (kind, value, (*children[:at], child, *children[at + 1 :]))


def mapped(node: Node, change: Callable[[Node], Node | None]) -> Node:
    """Return the tree with each node changed, the outer ones first; None leaves a node as it is."""
    return once(change, node, lambda: _mapped(node, change))


def _mapped(node: Node, change: Callable[[Node], Node | None]) -> Node:
    made = change(node) or node
    children = tuple(mapped(child, change) for child in made[2])
    same = all(a is b for a, b in zip(children, made[2], strict=True))
    return made if same else (made[0], made[1], children)


class Writer:
    """Opcodes of a tree; now and then in unusual spellings, which `spellings` chooses."""

    def __init__(self, protocol: int, spellings: Random | None = None) -> None:
        self.protocol = protocol
        self.spellings = spellings
        self.memo = 0
        self.held: list[int] = []

    def pickle(self, node: Node) -> bytes:
        """The whole stream."""
        head = b"" if self.protocol < 2 else bytes((0x80, self.protocol))
        return head + self.write(node, 0) + b"."

    def write(self, node: Node, depth: int) -> bytes:
        """The opcodes that leave the value of this node."""
        if self.spellings is None:
            if (done := _computed.get((self.protocol, id(node)))) is not None:
                return done
            if id(node) in _KEPT:
                return once(self.protocol, node, lambda: self._write(node, depth))
        return self._write(node, depth)

    def _write(self, node: Node, depth: int) -> bytes:
        kind, value, children = node
        if depth > DEEP:
            return b"N"
        if kind == "alias":
            return self.alias(value, children, depth + 1)
        parts = _LEAVES.get(kind)
        if parts is not None:
            return parts(self, value, depth)
        written = [self.write(child, depth + 1) for child in children]
        return _BRANCHES[kind](self, value, written)

    def odd(self, often: float = 0.2) -> bool:
        """Return whether an unusual spelling is due."""
        return self.spellings is not None and self.spellings.random() < often

    # Leaves

    def const(self, value: Any, depth: int) -> bytes:
        """By type."""
        if value is None or isinstance(value, bool):
            return {None: b"N", True: b"\x88", False: b"\x89"}[value]
        if isinstance(value, int):
            return self.integer(value)
        if isinstance(value, float):
            return b"G" + struct.pack(">d", value)
        return self.text(value) if isinstance(value, str) else self.data(value)

    def integer(self, value: int) -> bytes:
        """INT, LONG, BININT or LONG1."""
        if self.protocol == 0 or self.odd():
            line = f"L{value}L\n" if self.odd(0.5) else f"I{value}\n"
            return line.encode()
        if -(2**31) <= value < 2**31:
            return b"J" + struct.pack("<i", value)
        count = value.bit_length() // 8 + 1
        return b"\x8a" + bytes([count]) + value.to_bytes(count, "little", signed=True)

    def text(self, value: str) -> bytes:
        """UNICODE, STRING or BINUNICODE."""
        data = value.encode("utf-8", "surrogatepass")
        if self.odd() and value.isalnum() and value.isascii():
            return f"V\\u{ord(value[0]):04x}{value[1:]}\n".encode()
        if self.odd() and value.isalnum() and value.isascii():
            return f"S'\\x{ord(value[0]):02x}{value[1:]}'\n".encode()
        if self.protocol >= 4 and len(data) < 256:
            return b"\x8c" + bytes([len(data)]) + data
        return b"X" + struct.pack("<I", len(data)) + data

    def data(self, value: bytes | bytearray) -> bytes:
        """BINBYTES or BYTEARRAY8, whatever the protocol says it may."""
        if isinstance(value, bytearray):
            return b"\x96" + struct.pack("<Q", len(value)) + bytes(value)
        return b"B" + struct.pack("<I", len(value)) + value

    def named(self, value: tuple[str, str], depth: int) -> bytes:
        """GLOBAL, STACK_GLOBAL where there are dots."""
        module, name = value
        if "\n" in module + name or self.protocol >= 4 or ("." in name and not self.odd()):
            version = b"" if self.protocol >= 4 else b"\x80\x04"
            return version + self.text(module) + self.text(name) + b"\x93"
        return b"c" + module.encode() + b"\n" + name.encode() + b"\n"

    def extension(self, value: int, depth: int) -> bytes:
        """EXT1."""
        return b"\x82" + bytes([value])

    def persistent(self, value: str, depth: int) -> bytes:
        """PERSID."""
        return b"P" + value.encode("ascii", "replace") + b"\n"

    def octal(self, value: int, depth: int) -> bytes:
        """INT with a leading zero, which C reads otherwise than Python."""
        return b"I0%d\n" % value

    def disguised(self, value: tuple[tuple[str, str], tuple[str, str]], depth: int) -> bytes:
        """STACK_GLOBAL of names in the memo; another name is there if indices are read badly."""
        real, decoy = value
        base = 900 + self.memo
        self.memo += 2
        stored = [(text, f"{base + at}") for at, text in enumerate(decoy)]
        stored += [(text, f"{base + at:0>40}") for at, text in enumerate(real)]
        puts = b"".join(self.text(text) + b"p" + index.encode() + b"\n0" for text, index in stored)
        return puts + b"\x80\4g%d\ng%d\n\x93" % (base, base + 1)

    def again(self, value: int, depth: int) -> bytes:
        """BINGET of one of the values that were stored."""
        if not self.memo:
            return b"N"
        at = value % self.memo
        return f"g{at}\n".encode() if self.odd() else b"j" + struct.pack("<I", at)

    # Branches

    def store(self, value: Any, written: list[bytes]) -> bytes:
        """LONG_BINPUT, or MEMOIZE."""
        at, self.memo = self.memo, self.memo + 1
        if self.odd():
            return written[0] + f"p{at}\n".encode()
        return written[0] + b"r" + struct.pack("<I", at)

    def alias(self, step: str, children: tuple[Node, ...], depth: int) -> bytes:
        """The target is stored, used, taken again, changed and dropped."""
        target, user, *values = children
        at, self.memo = struct.pack("<I", self.memo), self.memo + 1
        first = self.write(target, depth) + b"r" + at + b"0"
        self.held.append(self.memo - 1)
        first += self.write(user, depth)
        self.held.pop()
        parts = [b"j" + at, *(self.write(each, depth) for each in values)]
        return first + _BRANCHES[step](self, None, parts) + b"0"

    def taken(self, value: Any, depth: int) -> bytes:
        """LONG_BINGET of the innermost target."""
        return b"j" + struct.pack("<I", self.held[-1]) if self.held else b"N"

    def items(self, opening: bytes, closing: bytes, written: list[bytes]) -> bytes:
        """Something between a mark and an opcode."""
        return opening + b"".join(written) + closing

    def tuple_of(self, written: list[bytes]) -> bytes:
        """TUPLE."""
        return b"(" + b"".join(written) + b"t" if written else b")"

    def reduce(self, value: Any, written: list[bytes]) -> bytes:
        """REDUCE, OBJ now and then."""
        if self.odd(0.1):
            return b"(" + b"".join(written) + b"o"
        return written[0] + self.tuple_of(written[1:]) + b"R"

    def inst(self, value: tuple[str, str], written: list[bytes]) -> bytes:
        """INST."""
        return b"(" + b"".join(written) + "i{}\n{}\n".format(*value).encode()


_Leaf = Callable[[Writer, Any, int], bytes]
_Branch = Callable[[Writer, Any, list[bytes]], bytes]

_LEAVES: dict[str, _Leaf] = {
    "const": Writer.const, "global": Writer.named, "ext": Writer.extension,
    "persid": Writer.persistent, "octal": Writer.octal, "disguised": Writer.disguised,
    "ref": Writer.again, "held": Writer.taken,
    "nested": lambda writer, node, depth: writer.const(Writer(writer.protocol).pickle(node), depth),
}  # fmt: skip
_BRANCHES: dict[str, _Branch] = {
    "put": Writer.store, "list": lambda writer, value, written: writer.items(b"](", b"e", written),
    "tuple": lambda writer, value, written: writer.tuple_of(written),
    "dict": lambda writer, value, written: writer.items(b"}(", b"u", written[len(written) % 2 :]),
    "set": lambda writer, value, written: writer.items(b"\x8f(", b"\x90", written),
    "frozenset": lambda writer, value, written: writer.items(b"(", b"\x91", written),
    "reduce": Writer.reduce, "apply": lambda writer, value, written: b"".join(written) + b"R",
    "new": lambda writer, value, written: written[0] + writer.tuple_of(written[1:]) + b"\x81",
    "newapply": lambda writer, value, written: b"".join(written) + b"\x81",
    "newex": lambda writer, value, written: b"".join(written) + b"\x92", "inst": Writer.inst,
    "build": lambda writer, value, written: b"".join(written) + b"b",
    "append": lambda writer, value, written: b"".join(written) + b"a",
    "appends": lambda writer, value, written: writer.items(written[0] + b"(", b"e", written[1:]),
    "additems": lambda writer, _, written: writer.items(written[0] + b"(", b"\x90", written[1:]),
    "setitem": lambda writer, value, written: b"".join(written) + b"s",
    "setitems": lambda writer, value, written: writer.items(written[0] + b"(", b"u", written[1:]),
    "binpersid": lambda writer, value, written: written[0] + b"Q",
    "pop": lambda writer, value, written: written[0] + b"0" + written[1],
}  # fmt: skip


def write(node: Node, protocol: int, spelling: int = 0) -> bytes:
    """The pickle of a tree; in odd spellings if `spelling` is not 0."""
    return Writer(protocol, Random(spelling) if spelling else None).pickle(node)


def read(data: bytes) -> Node:
    """The tree of a library's pickle; what was stored and taken again stands there twice."""
    return _Reader().read(data)


class _Reader:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Node] = {}
        self.protocol = 0

    def read(self, data: bytes) -> Node:
        for opcode, arg, _ in pickletools.genops(data):
            name = opcode.name
            if name == "STOP":
                break
            if name == "PROTO":
                self.protocol = int(arg)
            elif name == "FRAME":
                continue
            elif name == "MEMOIZE":
                self.memo[len(self.memo)] = self.stack[-1]
            elif "PUT" in name:
                self.memo[int(arg)] = self.stack[-1]
            elif "GET" in name:
                again = self.memo[int(arg)]
                self.stack.append(again if size(again) < 30 else NONE)
            elif name == "MARK":
                self.stack.append("mark")
            else:
                self._opcode(name, arg)
        made: Node = self.stack[-1]
        return made

    def _marked(self) -> tuple[Node, ...]:
        at = len(self.stack) - 1 - self.stack[::-1].index("mark")
        items = tuple(self.stack[at + 1 :])
        del self.stack[at:]
        return items

    def _pop(self, count: int) -> tuple[Node, ...]:
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        return items

    def _opcode(self, name: str, arg: Any) -> None:
        if name in _CONSTANTS:
            self.stack.append(const(_CONSTANTS[name]))
        elif name in _EMPTY:
            self.stack.append((_EMPTY[name], None, ()))
        elif name in _FIXED:
            kind, count = _FIXED[name]
            self.stack.append((kind, None, self._pop(count)))
        elif name in _MARKED:
            items = self._marked()
            onto = (self.stack.pop(),) if name in ("APPENDS", "ADDITEMS", "SETITEMS") else ()
            self.stack.append((_MARKED[name], None, onto + items))
        elif name in ("GLOBAL", "INST"):
            module, _, inner = arg.partition(" ")
            name_now = (module, inner) if self.protocol > 2 else today(module, inner)
            made = named(*name_now) if name == "GLOBAL" else ("inst", name_now, self._marked())
            self.stack.append(made)
        elif name == "STACK_GLOBAL":
            module, inner = self._pop(2)
            self.stack.append(named(module[1], inner[1]))
        elif name == "POP":
            self.stack.pop()
        else:
            self.stack.append(const(arg))


def today(module: str, name: str) -> tuple[str, str]:
    """The name that unpicklers look up where Python 2's is written."""
    return NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_LIST": "list", "EMPTY_TUPLE": "tuple", "EMPTY_DICT": "dict", "EMPTY_SET": "set"}
_FIXED = {
    "TUPLE1": ("tuple", 1), "TUPLE2": ("tuple", 2), "TUPLE3": ("tuple", 3), "REDUCE": ("apply", 2),
    "NEWOBJ": ("newapply", 2), "NEWOBJ_EX": ("newex", 3), "BUILD": ("build", 2),
    "APPEND": ("append", 2), "SETITEM": ("setitem", 3), "BINPERSID": ("binpersid", 1),
}  # fmt: skip
_MARKED = {
    "TUPLE": "tuple", "LIST": "list", "DICT": "dict", "FROZENSET": "frozenset",
    "APPENDS": "appends", "ADDITEMS": "additems", "SETITEMS": "setitems", "OBJ": "reduce",
}  # fmt: skip


ITEMS = {
    "Float": 4, "Double": 8, "Long": 8, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2, "QInt32": 4,
    "ComplexFloat": 8,
}  # fmt: skip


def archive(data: bytes, storages: Mapping[str, int] | None = None) -> bytes:
    """Return what torch.save writes around a pickle, with storages of so many bytes."""
    files = {"data.pkl": data, "version": b"3\n"}
    files |= {f"data/{key}": bytes(nbytes) for key, nbytes in (storages or {}).items()}
    body = directory = b""
    for name, content in files.items():
        path, nbytes = f"archive/{name}".encode(), len(content)
        facts = (20, 0, 0, 0, 0x21, crc32(content), nbytes, nbytes, len(path), 0)
        head = struct.pack("<5H3L2H", *facts)
        offset = struct.pack("<3HLL", 0, 0, 0, 0, len(body))
        directory += b"PK\1\2\x14\0" + head + offset + path
        body += b"PK\3\4" + head + path + content
    end = (b"PK\5\6", 0, 0, len(files), len(files), len(directory), len(body), 0)
    return body + directory + struct.pack("<4s4H2LH", *end)


def storages(node: Node) -> Mapping[str, int]:
    """Return the storages that a tree names, and the bytes of each."""
    return once("storages", node, lambda: _storages(node))


def _storages(node: Node) -> Mapping[str, int]:
    found: dict[str, int] = {}
    kind, _, parts = node
    for each in map(storages, parts):
        found |= {key: max(nbytes, found.get(key, 0)) for key, nbytes in each.items()}
    if kind == "tuple" and len(parts) == 5 and parts[0] == const("storage"):
        name, key, numel = parts[1], parts[2][1], parts[4][1]
        if name[0] == "global" and type(numel) is int and type(key) is str and key.isalnum():
            nbytes = max(numel, 0) * ITEMS.get(name[1][1].removesuffix("Storage"), 1)
            found[key] = max(found.get(key, 0), min(nbytes, 1 << 16))
    return found


MAGIC = 0x1950A86A20F9469CFC6C
LEGACY = (
    5  # pickles of a file that torch wrote before 1.6; the first is this number, in any spelling
)
MAGICS = (
    pickle.dumps(MAGIC, 2), b"I%d\n." % MAGIC, b"L%dL\n." % MAGIC, b"NN00" + pickle.dumps(MAGIC, 2),
    pickle.dumps(MAGIC, 4), pickle.dumps(MAGIC, 2)[:-1] + b"20.",
)  # fmt: skip


def legacy(data: bytes, place: int, magic: int = 0) -> bytes:
    """Return such a file with a pickle in one of the places: 3 is that of the value."""
    parts = [pickle.dumps(each, 2) for each in (MAGIC, 1001, {"little_endian": True}, 1, [])]
    parts[0] = MAGICS[magic]
    parts[place] = data
    return b"".join(parts)


def file(node: Node, protocol: int, spelling: int, container: str) -> bytes:
    """The bytes of a tree in a container: "raw", "zip", or "legacy", the place and the magic."""
    if container.startswith("legacy"):
        place, magic = map(int, container[6:])
        return legacy(write(mapped(node, _with_view), protocol, spelling), place, magic)
    data = write(node, protocol, spelling)
    return archive(data, storages(node)) if container == "zip" else data


def _with_view(node: Node) -> Node | None:
    """The id of a storage as files had it before torch 1.6."""
    if node[0] == "tuple" and len(node[2]) == 5 and node[2][0] == const("storage"):
        return ("tuple", None, (*node[2], NONE))
    return None
