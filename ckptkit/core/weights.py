"""Selection of the state_dict in a tree.

ckptkit tries these candidates in order:

1. The root is the state_dict if all its values except ``_extra_state`` are tensors.
2. An entry with a well-known name is the state_dict if most of its values are tensors.
3. If the tree contains exactly one mapping of tensors that is not an optimizer, this mapping is the
   state_dict.

For a pickled ``nn.Module``, the state_dict contains the parameters and buffers of the module and of
all its submodules. ckptkit reads the state_dict without importing the class of the module. If the
tree contains no tensors, numpy arrays take the place of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import NamedTuple, NoReturn

from ckptkit.core.dtypes import DType
from ckptkit.core.errors import AmbiguousError, ArgumentError, UsageError
from ckptkit.core.limits import LIMITS, check
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import plural, some, typed_value
from ckptkit.core.tree import (
    Global,
    Node,
    Object,
    OrderedMapping,
    Path,
    SetNode,
    children,
    find,
    join,
    walk,
)

# Maximum number of nodes to visit in each constructor argument of a tensor subclass. Without a
# maximum, a large attribute that thousands of tensors share would be visited for each tensor.
INSIDE = 200

# Prefixes that wrappers add to the names of the wrapped module.
WRAPPERS = {
    "module.": "DataParallel and DistributedDataParallel add 'module.' to the keys.",
    "_orig_mod.": "torch.compile adds '_orig_mod.' to the keys.",
    "_fsdp_wrapped_module.": "FSDP adds '_fsdp_wrapped_module.' to the keys.",
    "_checkpoint_wrapped_module.": "Activation checkpointing adds '_checkpoint_wrapped_module.'.",
}
# Well-known names of entries that contain weights, in order of preference.
WELL_KNOWN = (
    "state_dict", "model_state_dict", "model", "module", "net", "network", "params", "weights",
    "model_state", "params_ema", "state_dict_ema", "model_ema", "ema",
)  # fmt: skip


def refuse_change(*_: object, **__: object) -> NoReturn:
    """Raise ArgumentError, because checkpoints are read-only."""
    raise ArgumentError(
        "cannot change a checkpoint in place",
        hint="ck.with_value(path, tensor) and ck.without(path) return a changed checkpoint",
    )


class Tensors(dict[str, Tensor]):
    """A read-only dict of name -> Tensor.

    A change of this dict would have no effect, because ckptkit writes the tree of a checkpoint.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[object, ...]:
        return dict, (dict(self),)

    __setitem__ = __delitem__ = __ior__ = update = setdefault = refuse_change
    pop = popitem = clear = refuse_change


@dataclass(frozen=True, repr=False)
class Weights:
    """The state_dict of a checkpoint: its path, its node, and its tensors by name.

    ``node`` is a mapping with the names of the tensors as keys, or the Object of a pickled module
    (``is_module``). ckptkit computes the names of the tensors in a module. ``nodes`` maps each name
    to the node of its tensor. ``others`` are the paths of entries that also may be the weights.
    """

    path: Path
    node: Node
    nodes: dict[str, Node] = field(repr=False)
    others: tuple[Path, ...] = ()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """A mapping of names to Tensors, in the order of the file."""
        if {*map(type, self.nodes.values())} <= {Tensor}:
            return Tensors(self.nodes)  # 10x as fast as the code below
        return Tensors(
            (name, tensor)
            for name, node in self.nodes.items()
            if (tensor := as_tensor(node)) is not None
        )

    @cached_property
    def hold_tensors(self) -> bool:
        """True if the state_dict, or an ``_extra_state`` in it, contains a tensor."""
        return any(map(has_tensors, self.nodes.values() if self.is_module else (self.node,)))

    @cached_property
    def endings(self) -> frozenset[str]:
        """The distinct last components of the names, such as ``weight`` and ``bias``."""
        return frozenset({name.rpartition(".")[2] for name in self.nodes})

    @cached_property
    def dtypes(self) -> tuple[DType, ...]:
        """The distinct dtypes of the tensors, except tensors that an Object constructs."""
        found = [node.dtype for node in self.nodes.values() if node.__class__ is Tensor]
        return tuple(dict(zip(map(id, found), found, strict=True)).values())

    def __repr__(self) -> str:
        return f"<Weights {join(self.path) or 'at the root'}: {plural(len(self.nodes), 'tensor')}>"

    @property
    def is_module(self) -> bool:
        return isinstance(self.node, Object)

    @cached_property
    def module(self) -> ModuleState | None:
        """The contents of the pickled module. None if ``node`` is a mapping."""
        return read_module(self.node) if isinstance(self.node, Object) else None


def as_tensor(node: Node) -> Tensor | None:
    """Return `node` if it is a Tensor, or the tensor that an Object constructs.

    Return None for other nodes.
    """
    if isinstance(node, Tensor):
        return node
    return node.tensor if isinstance(node, Object) else None


def has_tensors(root: Node) -> bool:
    """Return True if the tree contains a tensor."""
    return any(as_tensor(node) is not None for _, node in walk(root))


def inner_tensors(args: Node) -> Iterator[tuple[Path, Tensor]]:
    """Yield (path, tensor) for each storage inside a tensor subclass.

    Each path starts with the position of an argument in `args`. The last argument comes first,
    because it contains the attributes, and attributes have names.
    """
    seen: set[int] = set()
    for position in range(len(args) - 1, -1, -1) if isinstance(args, tuple) else ():
        for path, node in islice(walk(args[position]), INSIDE):
            tensor = as_tensor(node)
            if tensor is not None and tensor.storage is not None and id(tensor.storage) not in seen:
                seen.add(id(tensor.storage))
                yield (position, *path), tensor


def locate(root: Node, key: str | None = None) -> Weights | None:
    """Return the weights of a tree, or of its entry `key`.

    Return None if the tree contains no weights. Raise AmbiguousError if several entries may be the
    weights. Raise UsageError if the entry `key` is not a mapping of tensors.
    """
    if key is not None:
        path, node = find(root, key)
        for rule in _RULES:
            if (nodes := _read(node, rule)) is not None:
                return Weights(path, node, nodes)
        raise UsageError(
            f"the entry {key!r} is not a mapping of tensors",
            hint="`ckptkit inspect --tree {where}` shows the entries",
        )
    for rule in _RULES:
        if (nodes := _read(root, rule)) is not None:
            return Weights((), root, nodes)
        found = _search(root, rule)
        # Candidates that are well-known entries of the root. `_search` may have found the same
        # nodes at other paths.
        by_node = {id(node): (node, nodes) for _, node, nodes in found}
        entries = {name: child for name, child in children(root) if name.__class__ is str}
        known: list[Found] = [
            ((name,), *by_node[id(entries[name])])
            for name in WELL_KNOWN
            if id(entries.get(name)) in by_node
        ]
        if rule == _PURE and not known:
            # Accept a well-known entry if most of its values are tensors. The other values may be
            # packed weights or states of metrics. If no such entry exists, the root is a candidate.
            known = [
                ((name,), entries[name], nodes)
                for name in WELL_KNOWN
                if (nodes := _read_most(entries.get(name))) is not None
            ]
            if not known and found and (nodes := _read_most(root)) is not None:
                found = [((), root, nodes), *found]
        if not known and len(found) > 1:
            names = [join(path) or "(root)" for path, _, _ in found]
            more = "..." if len(names) > 8 else ""
            raise AmbiguousError(
                f"{len(names)} entries could be the weights: {', '.join(names[:8])}{more}",
                hint=f"choose one, e.g. {typed_value('key', join(found[0][0]))}",
            )
        if known or found:
            path, node, nodes = (known or found)[0]
            others = tuple(place for place, other, _ in found if other is not node)
            return Weights(path, node, nodes, others)
    return None


def state_dicts(root: Node) -> Iterator[tuple[Node, dict[str, Node]]]:
    """Yield (node, tensors by name) for each state_dict and each pickled module of a tree.

    Optimizers, and state_dicts inside other state_dicts, are omitted.
    """
    nodes = _read(root, _PURE)
    if nodes is not None:
        yield root, nodes
        return
    for _, node, nodes in _search(root, _PURE):
        yield node, nodes


# Rules for the values of a state_dict:
# "pure" allows only tensors.
# "arrays" allows only tensors and numpy arrays.
# "mixed" allows any values, but requires at least one tensor or array.
_PURE, _ARRAYS, _MIXED = _RULES = ("pure", "arrays", "mixed")
# Kind, dtype and shape of the states of random number generators: torch on the CPU, torch on a GPU,
# and numpy (MT19937).
_GENERATORS = {
    ("tensor", "uint8", (5056,)),
    ("tensor", "uint8", (16,)),
    ("ndarray", "uint32", (624,)),
}
_MOST = 64  # a mapping with more keys cannot be a mapping of generator states

Found = tuple[Path, Node, dict[str, Node]]


def _read(node: Node, rule: str) -> dict[str, Node] | None:
    """Return the tensors of `node` by name. Return None if `rule` rejects `node`."""
    if isinstance(node, Object):
        return module_state(node)
    if not isinstance(node, dict) or not {*map(type, node)} <= {str}:
        return None
    named = dict(node)
    for key in [key for key in node if key.endswith("_extra_state")]:
        del named[key]
    tensors = [value if value.__class__ is Tensor else as_tensor(value) for value in named.values()]
    kinds = {None if each is None else each.kind for each in tensors}
    fits = {
        _PURE: kinds.isdisjoint((None, "ndarray")),
        _ARRAYS: bool(kinds) and None not in kinds,
        _MIXED: not kinds <= {None},
    }
    if not fits[rule]:
        return None
    if len(tensors) <= _MOST:  # rng_state.pth
        found = {(t.kind, t.dtype.name, t.shape) for t in tensors if t is not None}
        if found and found <= _GENERATORS:
            return None
    if None not in kinds:
        return named
    return {
        key: value
        for (key, value), tensor in zip(named.items(), tensors, strict=True)
        if tensor is not None
    }


def _read_most(node: Node) -> dict[str, Node] | None:
    """Return the tensors of a mapping by name. Return None unless most values are tensors."""
    nodes = _read(node, _MIXED) if isinstance(node, dict) else None
    return nodes if nodes and 2 * len(nodes) > len(node) else None


def _search(root: Node, rule: str) -> list[Found]:
    """Return the outermost state_dicts below the root, each once.

    Omit optimizers and graph data of PyTorch Geometric.
    """
    waiting: list[tuple[Path, Node]] = [((), root)]
    seen: set[int] = set()
    found: list[Found] = []
    while waiting:
        path, node = waiting.pop()
        if id(node) in seen or len(path) > LIMITS.depth:
            continue
        seen.add(id(node))
        nodes = _read(node, rule) if path else None
        if nodes:
            found.append((path, node, nodes))
        elif rule == _MIXED and isinstance(node, Object) and node.global_ in _NUMPY:
            continue  # a numpy array of Python objects, for example metrics, contains no weights
        elif not is_optimizer(node) and as_tensor(node) is None:
            below = [
                ((*path, key), child) for key, child in children(node) if isinstance(child, _OPEN)
            ]
            waiting.extend(reversed(below))
    if any(path[-1].__class__ is int for path, _, _ in found):
        return _without_graphs(found)
    return found


_OPEN = (dict, list, tuple, Object)  # types of nodes whose children are searched
_NUMPY = tuple(Global(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core"))


def _without_graphs(found: list[Found]) -> list[Found]:
    """Return `found` without graph data, which PyTorch Geometric saves as (data, slices).

    `slices` has the same names as `data`. For each tensor of `data`, `slices` contains the offset
    of each graph.
    """
    slices: dict[object, dict[str, Node]] = {}
    for path, _, nodes in found:
        tensors = list(map(as_tensor, nodes.values()))
        if path[-1].__class__ is int and all(
            each is not None and each.dtype.name == "int64" and len(each.shape) == 1
            for each in tensors
        ):
            slices[place_of(path[:-1])] = nodes
    kept = []
    for path, node, nodes in found:
        sliced = slices.get(place_of(path[:-1]))
        if sliced is None or not sliced.keys() <= nodes.keys():
            kept.append((path, node, nodes))
    return kept


def place_of(path: Path) -> tuple[object, ...]:
    """Return a hashable value that identifies a path.

    Dict keys other than strings and integers are compared by identity, because a hostile file could
    make `==` slow.
    """
    return tuple([key if key.__class__ in (str, int) else id(key) for key in path])


def is_optimizer(node: Node) -> bool:
    """Return True if a node is the state_dict of an optimizer (torch/optim/optimizer.py)."""
    held = node.state if isinstance(node, Object) else node
    return isinstance(held, dict) and "param_groups" in held and "state" in held


def plain_state_dict(parameters: Mapping[str, Node]) -> OrderedMapping:
    """Return `parameters` as torch's ``state_dict()`` does: each Parameter becomes a tensor."""
    made: dict[int, Node] = {}
    for node in parameters.values():
        if isinstance(node, Tensor) and (node.kind == "parameter" or node.requires_grad):
            made[id(node)] = replace(node, kind="tensor", requires_grad=False)
    return OrderedMapping((name, made.get(id(node), node)) for name, node in parameters.items())


class ModuleState(NamedTuple):
    """The state_dict of a pickled module.

    ``nodes`` maps names to nodes. ``places`` maps paths to names. The paths start at the module.
    ``unread`` contains warnings about differences from the ``state_dict()`` that torch would
    return.
    """

    nodes: dict[str, Node]
    places: dict[Path, str]
    unread: tuple[str, ...]


def module_state(node: Object) -> dict[str, Node] | None:
    """Return the state_dict of a pickled ``nn.Module`` as a mapping of names to nodes.

    Return None for other objects.
    """
    found = read_module(node)
    return None if found is None else found.nodes


def read_module(node: Object) -> ModuleState | None:
    """Return the state_dict of a pickled ``nn.Module``, with its paths and warnings.

    Return None for other objects. The attributes ``_parameters``, ``_buffers`` and ``_modules`` of
    a module map names to values or None (torch/nn/modules/module.py). As in torch, the state_dict
    does not contain buffers whose names are in ``_non_persistent_buffers_set``.
    """
    if not _is_module(node):
        return None
    nodes: dict[str, Node] = {}
    places: dict[Path, str] = {}
    # The names of module classes that torch does not define, and of modules with hooks that torch
    # does not define. The code of these classes and hooks could add or change entries.
    classes: dict[str, None] = {}
    hooked: list[str] = []
    unread: list[str] = []
    waiting: list[tuple[str, Path, Object]] = [("", (), node)]
    visits = 0
    while waiting:
        prefix, path, module = waiting.pop()
        visits += 1
        check("revisits", visits, "submodules, or a module inside itself")
        check("depth", prefix.count("."), "levels of submodules, or a module inside itself")
        here, made = prefix.removesuffix(".") or "the module itself", module.global_
        if made is None or made.module.partition(".")[0] not in ("torch", "__torch__"):
            classes[str(made or "of no name")] = None
        elif ".nn.quantized." in f"{made.module}.":
            unread.append(here)
        hooks = _attributes(module)[1].get("_state_dict_hooks")
        if not all(_is_of_torch(hook) for _, hook in children(hooks)):
            hooked.append(here)
        own, below = _parts(module)
        for name, place, value in own:
            if as_tensor(value) is not None:
                nodes[prefix + name] = value
                places[path + place] = prefix + name
            elif isinstance(value, Object):
                unread.append(prefix + name)
        # With activation checkpointing, the names in the state_dict do not contain the component
        # `_checkpoint_wrapped_module`.
        is_checkpointing = made is not None and made.module.endswith(".checkpoint_wrapper")
        for name, place, value in reversed(below):
            if _is_module(value):
                is_dropped = is_checkpointing and name == "_checkpoint_wrapped_module"
                inner = prefix if is_dropped else f"{prefix}{name}."
                waiting.append((inner, path + place, value))
            elif isinstance(value, Object):
                unread.append(prefix + name)
    remarks = []
    if classes:
        remarks.append(
            f"ckptkit does not run the code of module classes ({some(list(classes))}): entries "
            "that only their methods state_dict and get_extra_state add are missing"
        )
    if hooked:
        remarks.append(
            f"ckptkit does not run state_dict hooks, so entries may differ: {some(hooked)}"
        )
    if unread:
        remarks.append(
            "some weights of a module are missing, because ckptkit cannot read their classes: "
            f"{some(unread)}"
        )
    return ModuleState(nodes, places, tuple(remarks))


_Part = tuple[str, Path, Node]  # name, path below the module, value


def _parts(module: Object) -> tuple[list[_Part], list[_Part]]:
    """Return two lists: the parameters and buffers of a module, and its submodules."""
    if module.global_ == _COMPILED and not module.steps:
        return [], [("_orig_mod", (0,), module.args[0])]
    path, attributes = _attributes(module)
    skipped = attributes.get("_non_persistent_buffers_set")
    hidden = set()
    if isinstance(skipped, SetNode):
        hidden = {each for each in skipped.items if isinstance(each, str)}

    def entries(part: str) -> list[_Part]:
        held = children(attributes.get(part))
        return [
            (str(key), (*path, part, key), each)
            for key, each in held
            if isinstance(key, str) and each is not None
        ]

    buffers = [(name, *rest) for name, *rest in entries("_buffers") if name not in hidden]
    return [*entries("_parameters"), *buffers], entries("_modules")


def _attributes(node: Object) -> tuple[Path, dict[Node, Node]]:
    """Return the path of a module's attributes, and the attributes.

    If the object is not a module, return an empty path and no attributes. The attributes of a
    module are in the state of the Object. The attributes of a torch.fx module are in the first
    argument of the Object. Modules of torch 0.1.1 have no ``_modules``.
    """
    state = node.state
    first = node.args[0] if isinstance(node.args, tuple) and node.args and not node.steps else None
    if isinstance(state, tuple) and len(state) == 2:  # (__dict__, __slots__)
        state = state[0]
    for path, held in (((), state), ((0,), first)):
        if isinstance(held, dict) and "_parameters" in held and "_buffers" in held:
            parts = (held.get(part, {}) for part in ("_parameters", "_buffers", "_modules"))
            if all(isinstance(part, (dict, Object)) for part in parts):
                return path, held
    return (), {}


def _is_module(node: Node) -> bool:
    if isinstance(node, Object) and node.global_ == _COMPILED and not node.steps and node.args:
        node = node.args[0]
    return isinstance(node, Object) and bool(_attributes(node)[1])


def _is_of_torch(hook: Node) -> bool:
    """Return True if a state_dict hook belongs to torch.

    A hook of torch changes only names, and only for modules with activation checkpointing.
    """
    if isinstance(hook, Object) and hook.global_ == _WRAPPED_HOOK and isinstance(hook.state, dict):
        hook = hook.state.get("hook")
    made = hook.callable if isinstance(hook, Object) else hook
    return isinstance(made, Global) and made.module.partition(".")[0] == "torch"


_COMPILED = Global("torch._dynamo.eval_frame", "OptimizedModule")
_WRAPPED_HOOK = Global("torch.nn.modules.module", "_WrappedHook")
