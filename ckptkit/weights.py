"""Which part of a tree people mean by its state_dict.

It is the root if all its values are tensors (``_extra_state`` aside); else a well-known entry whose values are; else
the only mapping of tensors that there is (optimizers aside). A pickled ``nn.Module`` counts as the state_dict that
its parameters, buffers and submodules would give, read without its class. numpy arrays count where there is nothing
else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ckptkit.errors import AmbiguousError, LimitError, UsageError
from ckptkit.limits import LIMITS
from ckptkit.tensor import Tensor
from ckptkit.tree import Node, Object, Path, SetNode, children, find, join

# In the order in which they are preferred.
WELL_KNOWN = (
    "state_dict", "model_state_dict", "model", "module", "net", "network", "params", "weights",
    "model_state", "params_ema", "state_dict_ema", "model_ema", "ema",
)  # fmt: skip


@dataclass(frozen=True)
class Weights:
    """The state_dict of a checkpoint: where it is, the node that holds it, and its tensors by name.

    ``node`` is a mapping whose keys are the names, or the Object of a pickled module (``is_module``), whose names
    are computed. ``nodes`` maps each name to the node that stands for its tensor. ``others`` are the paths of what
    could have been meant instead.
    """

    path: Path
    node: Node
    nodes: dict[str, Node] = field(repr=False)
    others: tuple[Path, ...] = ()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Name to Tensor, in the order of the file."""
        return {name: tensor for name, node in self.nodes.items() if (tensor := as_tensor(node)) is not None}

    @property
    def is_module(self) -> bool:
        return isinstance(self.node, Object)


def as_tensor(node: Node) -> Tensor | None:
    """The tensor that a node is or would become, None for anything else."""
    if isinstance(node, Tensor):
        return node
    return node.tensor if isinstance(node, Object) else None


def locate(root: Node, key: str | None = None) -> Weights | None:
    """The weights of a tree, or of the entry `key` of it; None if it has none.

    Raises AmbiguousError where several mappings could be meant, UsageError if `key` names no mapping of tensors.
    """
    if key is not None:
        return _named(root, key)
    for qualifies in (_is_pure, _is_arrays, _is_mixed):
        if (nodes := _read(root, qualifies)) is not None:
            return Weights((), root, nodes)
        found = list(_search(root, qualifies))
        known = list(_well_known(root, found))
        if known or len(found) == 1:
            path, node, nodes = (known or found)[0]
            return Weights(path, node, nodes, tuple(place for place, other, _ in found if other is not node))
        if found:
            names = [join(path) or "(root)" for path, _, _ in found]
            raise AmbiguousError(
                f"{len(found)} entries could be the weights: {', '.join(names[:8])}{'...' if len(names) > 8 else ''}",
                hint=f"choose one with --key, e.g. --key {names[0]}",
            )
    return None


def _named(root: Node, key: str) -> Weights:
    path, node = find(root, key)
    for qualifies in (_is_pure, _is_arrays, _is_mixed):
        if (nodes := _read(node, qualifies)) is not None:
            return Weights(path, node, nodes)
    raise UsageError(f"the entry {key!r} is not a mapping of tensors")


def _is_pure(values: list[Tensor | None]) -> bool:
    return all(each is not None and each.kind != "ndarray" for each in values)


def _is_arrays(values: list[Tensor | None]) -> bool:
    return bool(values) and all(each is not None for each in values)


def _is_mixed(values: list[Tensor | None]) -> bool:
    return any(each is not None for each in values)


Rule = Callable[[list["Tensor | None"]], bool]


def _read(node: Node, qualifies: Rule) -> dict[str, Node] | None:
    """Names and nodes if `node` is a state_dict by this rule, else None."""
    if isinstance(node, Object):
        return module_state(node)
    if not isinstance(node, dict) or not all(isinstance(key, str) for key in node):
        return None
    named = {key: value for key, value in node.items() if not key.endswith("_extra_state")}
    tensors = [as_tensor(value) for value in named.values()]
    if not qualifies(tensors):
        return None
    return {key: value for (key, value), tensor in zip(named.items(), tensors, strict=True) if tensor is not None}


Found = tuple[Path, Node, dict[str, Node]]


def _well_known(root: Node, found: list[Found]) -> Iterator[Found]:
    """Those among `found` that stand in the root under a well-known name, whatever other names they have."""
    by_node = {id(node): (node, nodes) for _, node, nodes in found}
    entries = {key: child for key, child in children(root) if key.__class__ is str}
    for name in WELL_KNOWN:
        if id(entries.get(name)) in by_node:
            yield (name,), *by_node[id(entries[name])]


_OPEN = (dict, list, tuple, Object)  # what is searched


def _search(root: Node, qualifies: Rule) -> Iterator[Found]:
    """The outermost state_dicts below the root, optimizers left aside, each once."""
    waiting: list[tuple[Path, Node]] = [((), root)]
    seen: set[int] = set()
    while waiting:
        path, node = waiting.pop()
        if id(node) in seen or len(path) > LIMITS.depth:
            continue
        seen.add(id(node))
        nodes = _read(node, qualifies) if path else None
        if nodes:
            yield path, node, nodes
        elif not _is_optimizer(node):
            below = [((*path, key), child) for key, child in children(node) if isinstance(child, _OPEN)]
            waiting.extend(reversed(below))


def _is_optimizer(node: Node) -> bool:
    held = node.state if isinstance(node, Object) else node
    return isinstance(held, dict) and "param_groups" in held and "state" in held


def module_state(node: Object) -> dict[str, Node] | None:
    """The state_dict of a pickled ``nn.Module`` as name -> node, None if the Object is not one.

    A module's attributes hold ``_parameters``, ``_buffers`` and ``_modules``, each a mapping from name to value or
    None (torch/nn/modules/module.py). Buffers in ``_non_persistent_buffers_set`` are left out, as torch does.
    """
    if _module_attributes(node) is None:
        return None
    found: dict[str, Node] = {}
    waiting: list[tuple[str, Object]] = [("", node)]
    visits = 0
    while waiting:
        prefix, module = waiting.pop()
        visits += 1
        if visits > LIMITS.revisits or prefix.count(".") > LIMITS.depth:
            raise LimitError(f"more than {LIMITS.revisits:,} submodules (revisits), or a module inside itself")
        attributes = _module_attributes(module) or {}
        skipped = attributes.get("_non_persistent_buffers_set")
        hidden = {each for each in skipped.items if isinstance(each, str)} if isinstance(skipped, SetNode) else set()
        for name, value in (*_entries(attributes["_parameters"]), *_entries(attributes["_buffers"])):
            if as_tensor(value) is not None and name not in hidden:
                found[prefix + name] = value
        below = [(f"{prefix}{name}.", each) for name, each in _entries(attributes["_modules"]) if _is_module(each)]
        waiting.extend(reversed(below))
    return found


def _module_attributes(node: Object) -> dict[Node, Node] | None:
    state = node.state
    if isinstance(state, tuple) and len(state) == 2:  # (__dict__, __slots__)
        state = state[0]
    if isinstance(state, dict) and all(
        isinstance(state.get(part), (dict, Object)) for part in ("_parameters", "_buffers", "_modules")
    ):
        return state
    return None


def _is_module(node: Node) -> bool:
    return isinstance(node, Object) and _module_attributes(node) is not None


def _entries(mapping: Node) -> list[tuple[str, Node]]:
    return [(str(key), value) for key, value in children(mapping) if isinstance(key, str)]
