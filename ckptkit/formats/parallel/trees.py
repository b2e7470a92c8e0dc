"""One tree of the trees that ranks saved: pieces joined, what all hold alike kept once, anything
else refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ckptkit.core.errors import CkptkitError, CorruptError, UnsupportedError
from ckptkit.core.limits import check
from ckptkit.core.piece_forms import piece_of
from ckptkit.core.pieces import Mesh, Piece
from ckptkit.core.tree import Node, OrderedMapping, Path, join, key_text, type_name
from ckptkit.core.weights import as_tensor
from ckptkit.formats.parallel.copies import FIRST
from ckptkit.formats.parallel.joining import Held, Joiner

_SHOWN = 80  # characters of a name or value in a message
FLAT = "_flat_param"
_MIXED = "the files are not of one save"


class Ranked(NamedTuple):
    """The tree that one rank saved, and its file."""

    rank: int
    file: str
    root: Node


class Merger:
    """Goes through the trees of all ranks at once. Errors name the entry and the files."""

    def __init__(self, ranks: Sequence[Ranked], joiner: Joiner, known: Mapping[int, Piece]) -> None:
        self.ranks = ranks
        self.joiner = joiner
        self.known = known  # pieces by the id of their nodes, as far as they were read
        self._made: dict[tuple[int, ...], Node] = {}
        self._meshes: dict[int, Mesh] = {}

    def merged(self) -> Node:
        return self._node((), [each.root for each in self.ranks])

    def _node(self, path: Path, nodes: Sequence[Node]) -> Node:
        key = tuple(map(id, nodes))
        if key not in self._made:
            check("depth", len(path), "levels of values")
            self._made[key] = self._merge(path, nodes)
        return self._made[key]

    def _merge(self, path: Path, nodes: Sequence[Node]) -> Node:
        first = nodes[0]
        pieces = [self._piece(path, node) for node in nodes]
        if pieces[0] is not None:
            return self._pieces(path, pieces)
        tensors = [as_tensor(node) for node in nodes]
        if tensors[0] is not None and first is not None:
            return self._same(path, nodes)
        if isinstance(first, dict):
            return self._mapping(path, nodes)
        if isinstance(first, (list, tuple)):
            return self._sequence(path, nodes)
        self._check_equal(path, nodes)
        return first

    def _piece(self, path: Path, node: Node) -> Piece | None:
        if id(node) in self.known:
            return self.known[id(node)]
        try:
            return piece_of(node, self._meshes)
        except CkptkitError as error:
            error.message = f"{_name(path)}: {error.message}"
            raise

    def _pieces(self, path: Path, pieces: Sequence[Piece | None]) -> Node:
        """The whole tensor. Raises CorruptError where the files contradict each other."""
        name = join(path)
        first = pieces[0]
        assert first is not None
        held: list[Held] = []
        for ranked, piece in zip(self.ranks, pieces, strict=True):
            if piece is None:
                raise self._differ(path, ranked, "a piece of a tensor", "none")
            if (piece.dtype, piece.shape) != (first.dtype, first.shape):
                whole, other = (f"{each.dtype} {each.shape}" for each in (first, piece))
                raise self._differ(path, ranked, f"of {whole}", f"of {other}")
            try:
                held += [Held(box, ranked.file) for box in piece.boxes(ranked.rank)]
            except CkptkitError as error:
                error.message = f"{_name(path)} in {ranked.file}: {error.message}"
                raise
        if name.rpartition(".")[2] == FLAT:
            raise flat_parameters(path)
        return self.joiner.tensor(name, first.dtype, first.shape, held)

    def _same(self, path: Path, nodes: Sequence[Node]) -> Node:
        held = []
        for ranked, node in zip(self.ranks, nodes, strict=True):
            tensor = as_tensor(node)
            if tensor is None:
                raise self._differ(path, ranked, "a tensor", "none")
            held.append((tensor, ranked.file))
        return self.joiner.same(join(path), held)

    def _mapping(self, path: Path, nodes: Sequence[Node]) -> Node:
        first = nodes[0]
        keys = list(first)
        for ranked, node in zip(self.ranks, nodes, strict=True):
            if not isinstance(node, dict):
                raise self._differ(path, ranked, "a dict", "none")
            odd = [key for key in (*first, *node) if key not in first or key not in node]
            if odd:
                where = (self.ranks[0].file, ranked.file)
                has, lacks = where if odd[0] in first else where[::-1]
                raise CorruptError(
                    f"{_name((*path, odd[0]))} is in {has} and not in {lacks}", hint=_MIXED
                )
        made = {key: self._node((*path, key), [node[key] for node in nodes]) for key in keys}
        return OrderedMapping(made, first.state) if isinstance(first, OrderedMapping) else made

    def _sequence(self, path: Path, nodes: Sequence[Node]) -> Node:
        first = nodes[0]
        for ranked, node in zip(self.ranks, nodes, strict=True):
            if not isinstance(node, (list, tuple)) or len(node) != len(first):
                raise self._differ(path, ranked, f"{len(first):,} values", "not as many")
        made = [
            self._node((*path, number), [node[number] for node in nodes])
            for number in range(len(first))
        ]
        return tuple(made) if isinstance(first, tuple) else made

    def _check_equal(self, path: Path, nodes: Sequence[Node]) -> None:
        """Raise CorruptError unless plain values are equal; of objects the first counts."""
        if self.joiner.copies.policy == FIRST:
            return
        first = nodes[0]
        plain = isinstance(first, (str, bytes, int, float, complex, type(None)))
        for ranked, node in zip(self.ranks, nodes, strict=True):
            if type(node) is not type(first) or (plain and repr(node) != repr(first)):
                raise self._differ(path, ranked, _value(first), _value(node))

    def _differ(self, path: Path, ranked: Ranked, first: str, other: str) -> CorruptError:
        return CorruptError(
            f"{_name(path)} is {first} in {self.ranks[0].file} and {other} in {ranked.file}",
            hint=_MIXED,
        )


def _name(path: Path) -> str:
    return repr(join(path)[:_SHOWN])


def _value(node: Node) -> str:
    if isinstance(node, (str, bytes, int, float, complex, type(None))):
        return (
            key_text(node)[:_SHOWN] if not isinstance(node, (str, bytes)) else repr(node[:_SHOWN])
        )
    return f"a {type_name(node)}"


def flat_parameters(path: Path) -> UnsupportedError:
    """The refusal of what FSDP saves with LOCAL_STATE_DICT."""
    return UnsupportedError(
        f"holds flat parameters of FSDP (LOCAL_STATE_DICT), e.g. {_name(path)}: the names and "
        "shapes of what is in "
        "them are not in the files",
        hint="load it in the training script, and save with SHARDED_STATE_DICT or FULL_STATE_DICT",
    )
