"""The opcodes of a pickle that work on other values: containers, stack, calls; the table of all."""

from __future__ import annotations

from collections.abc import Callable

from ckptkit.core.errors import FormatError, UnsupportedError
from ckptkit.core.limits import check
from ckptkit.core.tree import (
    Global,
    ModuleVersion,
    Node,
    Object,
    OrderedMapping,
    Pairs,
    SetNode,
    nodes,
    type_name,
)
from ckptkit.pickles.builders import built
from ckptkit.pickles.opcode_values import NO_TUPLE, U4, NotStoredError, Short, Values, decimal

_SETATTR, _GETATTR = Global("builtins", "setattr"), Global("builtins", "getattr")
_DILL_SETATTR = (Global("dill", "_dill"), "_setattr")
_CODE_OF_DILL = ("_create_cell", "_create_function", "_create_type")
_DROPPED = "pickle drops a value that it made: what that did would be lost"


class Opcodes(Values):
    """All opcodes but those that the loop of the machine has inline."""

    # Containers

    def _items(self) -> list[Node]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def op_empty_list(self, data: bytes, pos: int) -> int:
        self.stack.append([])
        return pos

    def op_list(self, data: bytes, pos: int) -> int:
        items = self._items()
        self.stack.append(items)
        return pos

    def op_append(self, data: bytes, pos: int) -> int:
        value = self.stack.pop()
        self._extend(self.stack[-1], [value])
        return pos

    def op_appends(self, data: bytes, pos: int) -> int:
        items = self._items()
        self._extend(self.stack[-1], items)
        return pos

    def _extend(self, target: Node, items: list[Node]) -> None:
        if target.__class__ is list:
            target.extend(items)
        elif isinstance(target, Object):
            _step(target, "append", items)
        else:
            raise FormatError(f"pickle appends to a {type_name(target)}")

    def op_dict(self, data: bytes, pos: int) -> int:
        items = self._items()
        if len(items) % 2:
            raise FormatError("pickle sets a key without a value")
        self.stack.append({})
        self._set(self.stack[-1], items[0::2], items[1::2])
        return pos

    def _set(self, target: Node, keys: list[Node], values: list[Node]) -> None:
        if isinstance(target, Object):
            _step(target, "set", list(zip(keys, values, strict=True)))
        elif isinstance(target, ModuleVersion):
            raise NotStoredError  # it has more than that: all opcodes are read one by one
        elif not isinstance(target, dict):
            raise FormatError(f"pickle sets a key of a {type_name(target)}")
        elif id(target) in self.pairs:
            self.pairs[id(target)][1].pairs.extend(zip(keys, values, strict=True))
        else:
            self._set_dict(target, keys, values)

    def _set_dict(self, target: dict[Node, Node], keys: list[Node], values: list[Node]) -> None:
        """Set all items or none: a repeated key must not overwrite its first value."""
        if all(key.__class__ is str for key in keys) or all(map(self.keys.hashable, keys)):
            new = dict(zip(keys, values, strict=True))
            if len(new) == len(keys) and (not target or target.keys().isdisjoint(new)):
                target.update(new)
                return
        pairs = Pairs([*target.items(), *zip(keys, values, strict=True)])
        self.pairs[id(target)] = (target, pairs)

    def op_empty_set(self, data: bytes, pos: int) -> int:
        self.stack.append(SetNode([]))
        return pos

    def op_additems(self, data: bytes, pos: int) -> int:
        items = self._items()
        target = self.stack[-1]
        if isinstance(target, Object):
            _step(target, "add", items)
        elif isinstance(target, SetNode) and not target.frozen:
            target.items.extend(items)
        else:
            raise FormatError(f"pickle adds items to a {type_name(target)}")
        return pos

    def op_frozenset(self, data: bytes, pos: int) -> int:
        items = self._items()
        self.stack.append(SetNode(items, frozen=True))
        return pos

    # Stack

    def op_dup(self, data: bytes, pos: int) -> int:
        self.stack.append(self.stack[-1])
        return pos

    def op_put(self, data: bytes, pos: int) -> int:
        text, pos = self._line(data, pos)
        self._put(decimal(text, least=0), self.stack[-1])
        return pos

    def op_get(self, data: bytes, pos: int) -> int:
        text, pos = self._line(data, pos)
        self.stack.append(self._get(decimal(text, least=0)))
        return pos

    def op_pop(self, data: bytes, pos: int) -> int:
        """Drop what is on top of the stack; the tree must hold it elsewhere when the pickle ends.

        CPython pickles a tuple that contains itself so: it drops the items, and gets the finished
        tuple instead. dill gets a dict that was made before, fills it, and drops it; so it does
        with what setattr returns (`_sets_code`). Anything else would hide a call.
        """
        after = pos
        while data[after : after + 1] in (b"0", b"1"):
            after += 1
        self.pops += after - pos + 1
        check("pickle_stack", self.pops, "values dropped in a pickle")
        if after == len(data):
            raise Short(after + 1)
        for op in data[pos - 1 : after]:
            if op == 0x30 and self.stack:
                self._drop([self.stack.pop()])
            else:  # POP takes an open mark where the stack above it is empty
                self._drop(self._items())
        if self.stack and isinstance(self.stack[-1], ModuleVersion):
            raise NotStoredError  # nothing else brings one to the top again
        return after

    def _drop(self, nodes: list[Node]) -> None:
        if ModuleVersion in map(type, nodes):
            raise NotStoredError
        self.dropped.update((id(node), node) for node in nodes if not _is_scalar(node))

    def check_dropped(self, root: Node) -> int:
        """Raise UnsupportedError if a value that was dropped is nowhere in the tree.

        Return the number of attributes that dill set in this way: those are not in the tree.
        """
        setting = [node for node in self.dropped.values() if _sets_code(node)]
        lost = self.dropped.keys() - set(map(id, setting))
        if lost:
            repeated = [pairs for _, pairs in self.pairs.values()]  # they replace dicts of the tree
            lost.difference_update(map(id, nodes([root, *setting, *repeated])))
        if lost:
            raise UnsupportedError(_DROPPED)
        return len(setting)

    def op_binget(self, data: bytes, pos: int) -> int:
        self.stack.append(self._get(data[pos]))
        return pos + 1

    def op_long_binget(self, data: bytes, pos: int) -> int:
        self.stack.append(self._get(U4(data, pos)[0]))
        return pos + 4

    # Objects

    def op_inst(self, data: bytes, pos: int) -> int:
        pos = self.op_global(data, pos)
        made = self.stack.pop()
        args = tuple(self._items())
        self.stack.append(self._called(made, args))
        return pos

    def op_obj(self, data: bytes, pos: int) -> int:
        items = self._items()
        if not items:
            raise FormatError("pickle makes an object of no class")
        self.stack.append(self._called(items[0], tuple(items[1:])))
        return pos

    def _called(self, made: Node, args: tuple[Node, ...]) -> Node:
        """Push the result of a call, as REDUCE does, which is how it is written back."""
        reducer = self.reducers.get(id(made))
        return Object(made, args) if reducer is None else reducer(made, args)

    def op_newobj(self, data: bytes, pos: int) -> int:
        args = self.stack.pop()
        if not isinstance(args, tuple):
            raise FormatError(NO_TUPLE)
        self.stack[-1] = Object(self.stack[-1], args, new=True)
        return pos

    def op_newobj_ex(self, data: bytes, pos: int) -> int:
        kwargs, args = self.stack.pop(), self.stack.pop()
        if not isinstance(args, tuple) or not isinstance(kwargs, dict):
            raise FormatError(NO_TUPLE)
        self.stack[-1] = Object(self.stack[-1], args, new=True, kwargs=kwargs)
        return pos

    def op_build(self, data: bytes, pos: int) -> int:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Object):
            target.steps.append(("build", state))
            if built(target, state):
                self.tensors.append(target)
        elif isinstance(target, OrderedMapping) and target.state is None:
            target.state = state
        else:
            raise FormatError(f"pickle sets the state of a {type_name(target)}")
        return pos

    def op_refused(self, data: bytes, pos: int) -> int:
        raise UnsupportedError(
            f"pickle opcode {_REFUSED[data[pos - 1]]}: it refers to something outside the file"
        )


def _step(target: Object, step: str, items: list[Node]) -> None:
    if target.steps and target.steps[-1][0] == step:
        target.steps[-1][1].extend(items)
    else:
        target.steps.append((step, items))


def _sets_code(node: Node) -> bool:
    """Return whether a call sets an attribute of a function, cell or class that dill made.

    dill ties the knots of recursive code so: no tensor can be changed.
    """
    if not isinstance(node, Object) or node.new or node.steps or len(node.args) != 3:
        return False
    called, made = node.callable, node.args[0]
    if isinstance(called, Object) and called.callable == _GETATTR:
        called = _SETATTR if called.args[:2] == _DILL_SETATTR else None
    return (
        called == _SETATTR
        and isinstance(made, Object)
        and made.global_ is not None
        and made.global_.module == "dill._dill"
        and made.global_.name in _CODE_OF_DILL
    )


def _is_scalar(node: Node) -> bool:
    return node is None or isinstance(node, (str, int, float, complex, bytes))


RARE: dict[int, Callable[[Opcodes, bytes, int], int]] = {
    ord("N"): Opcodes.op_none,
    ord("c"): Opcodes.op_global,
    ord("]"): Opcodes.op_empty_list,
    ord("e"): Opcodes.op_appends,
    ord("a"): Opcodes.op_append,
    ord("b"): Opcodes.op_build,
    ord("G"): Opcodes.op_binfloat,
    0x88: Opcodes.op_true,
    0x8A: Opcodes.op_long1,
    0x8B: Opcodes.op_long4,
    0x93: Opcodes.op_stack_global,
    0x81: Opcodes.op_newobj,
    0x92: Opcodes.op_newobj_ex,
    0x80: Opcodes.op_proto,
    0x95: Opcodes.op_frame,
    0x8D: Opcodes.op_binunicode8,
    ord("C"): Opcodes.op_short_binbytes,
    ord("B"): Opcodes.op_binbytes,
    0x8E: Opcodes.op_binbytes8,
    0x96: Opcodes.op_bytearray8,
    ord("T"): Opcodes.op_binstring,
    ord("S"): Opcodes.op_string,
    ord("V"): Opcodes.op_unicode,
    ord("I"): Opcodes.op_int,
    ord("L"): Opcodes.op_long,
    ord("F"): Opcodes.op_float,
    ord("l"): Opcodes.op_list,
    ord("d"): Opcodes.op_dict,
    0x8F: Opcodes.op_empty_set,
    0x90: Opcodes.op_additems,
    0x91: Opcodes.op_frozenset,
    ord("2"): Opcodes.op_dup,
    ord("p"): Opcodes.op_put,
    ord("g"): Opcodes.op_get,
    ord("0"): Opcodes.op_pop,
    ord("1"): Opcodes.op_pop,
    ord("i"): Opcodes.op_inst,
    ord("o"): Opcodes.op_obj,
}
_REFUSED = {
    ord("P"): "PERSID", 0x82: "EXT1", 0x83: "EXT2", 0x84: "EXT4",
    0x97: "NEXT_BUFFER", 0x98: "READONLY_BUFFER",
}  # fmt: skip
RARE.update(dict.fromkeys(_REFUSED, Opcodes.op_refused))

# Bytes of the operand that follows the opcode, where its length is fixed or leads a longer one.
OPERANDS = {
    **dict.fromkeys(b"KhqU\x8cC\x80\x8a", 1), **dict.fromkeys(b"M", 2),
    **dict.fromkeys(b"rjJXTB\x8b", 4),
    **dict.fromkeys(b"G\x8d\x8e\x95\x96", 8),
}  # fmt: skip
