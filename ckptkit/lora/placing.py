"""Find the tensors of a base that the modules of an adapter of peft change.

A name is looked up as it is. If the base lacks it, prefixes are renamed: a base without its head
(`bert.`, `transformer.`), a base inside another model, and vision-language models, whose modules
have other names in memory than in files. A rename is unambiguous or refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckptkit.core.errors import UnsupportedError
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import quoted, shown, typed

# Experts in a matrix each: the module of all of them, the number of one, and its matrix.
_EXPERT = re.compile(r"(.*\.experts)\.([0-9]+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
# The matrices of one expert that are rows of a parameter of all experts, in order.
_PARTS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
          "down_proj": (("down_proj",), ("w2",))}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rename:
    """The prefix of the adapter's names, and that of the base's for it."""

    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.old or '(no prefix)'} -> {self.new or '(no prefix)'}"


class PeftNames:
    """The modules of a base by the names that peft gives them.

    ``tensors`` maps a module, or a parameter, to the name of its tensor; ``experts`` a parameter of
    all experts to the matrices of each.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.tensors: dict[str, str] = {}
        self.experts: dict[str, list[tuple[str, ...]]] = {}
        found: dict[str, dict[str, dict[int, str]]] = {}
        every = list(names)
        for name in every:
            for end in (".weight", ".in_proj_weight"):
                if name.endswith(end):
                    self.tensors.setdefault(name.removesuffix(end), name)
            if one := _EXPERT.fullmatch(name):
                found.setdefault(one[1], {}).setdefault(one[3], {})[int(one[2])] = name
        for name in every:
            self.tensors.setdefault(name, name)
        for stem, matrices in found.items():
            for parameter, ways in _PARTS.items():
                for way in ways:
                    if all(part in matrices for part in way):
                        numbers = sorted(matrices[way[0]])
                        rows = [tuple(matrices[part].get(n, "") for part in way) for n in numbers]
                        plain = stem.replace(".block_sparse_moe.", ".mlp.")
                        self.experts[f"{plain}.{parameter}"] = rows
        self.by_last: dict[str, list[str]] = {}
        for path in (*self.tensors, *self.experts):
            self.by_last.setdefault(path.rpartition(".")[2], []).append(path)

    def has(self, path: str) -> bool:
        return path in self.tensors or path in self.experts

    def renames(self, paths: Sequence[str], where: str | None) -> tuple[Rename, ...]:
        """Return the renames after which the base has all of `paths`; none where it has them.

        Raises UnsupportedError where it lacks some.
        """
        made: dict[str, str] = {}
        missing: list[str] = []
        unclear: list[str] = []
        for path in dict.fromkeys(paths):
            ways = [Rename("", "")] if self.has(path) else self._ways(path)
            known = [each for each in ways if made.get(each.old) == each.new]
            if not ways:
                missing.append(path)
            elif len(ways) == 1 and made.setdefault(ways[0].old, ways[0].new) == ways[0].new:
                continue
            elif not known:
                unclear.append(path)
        if missing or unclear:
            first = (missing or unclear)[0]
            like = self.by_last.get(first.rpartition(".")[2], [])[:4]
            closest = f" (it has {quoted(like)})" if like else ""
            count = f"{len(missing or unclear)} of {len(paths)} modules of the adapter"
            what = "are not in the base" if missing else "may be several modules of the base"
            raise UnsupportedError(
                f"{count} {what}: {quoted((missing or unclear)[:4])}{closest}",
                where=where,
                hint=f"{typed('--sub REGEX=REPL', 'sub=[(regex, replacement)]')} renames modules",
                code="no-module",
            )
        return tuple(Rename(old, new) for old, new in made.items() if old or new)

    def _ways(self, path: str) -> list[Rename]:
        """Return the best renames of the prefix of a module that the base lacks.

        The best has the longest common end, and then the most components in common before it. No
        number is renamed: layers keep theirs.
        """
        parts = path.split(".")
        best: tuple[int, int] = (0, -1)
        found: list[Rename] = []
        for other in self.by_last.get(parts[-1], ()):
            theirs = other.split(".")
            same = 0
            for one, two in zip(reversed(parts), reversed(theirs), strict=False):
                if one != two:
                    break
                same += 1
            old, new = parts[: len(parts) - same], theirs[: len(theirs) - same]
            if any(each.isdigit() for each in (*old, *new)):
                continue
            rank = (same, len({*old} & {*new}))
            if rank > best:
                best, found = rank, []
            if rank == best:
                ends = (".".join([*each, ""]) for each in (old, new))
                found.append(Rename(*ends))
        return found


def renamed(path: str, renames: Sequence[Rename]) -> str:
    """Return a name of the adapter in the base, by the longest prefix that is renamed."""
    for each in sorted(renames, key=lambda one: -len(one.old)):
        if path.startswith(each.old):
            return each.new + path.removeprefix(each.old)
    return path


EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "shared", "embed_in", "tok_embeddings")
HEADS = ("lm_head", "embed_out", "output")


def tied_pair(
    tensors: Mapping[str, Tensor], config: Mapping[str, object]
) -> tuple[str, str] | None:
    """Return the names of the embedding and of the head that is the same matrix, None if untied.

    A head that the base lacks has the name that transformers gives it.
    """
    ends = {name: name.removesuffix(".weight").rpartition(".")[2] for name in tensors}
    embedding = next((name for name, end in ends.items() if end in EMBEDDINGS), None)
    head = next(
        (n for n, end in ends.items() if end in HEADS and n.endswith(".weight") and "." in n), None
    )
    text = config.get("text_config")
    said = config.get("tie_word_embeddings")
    if said is None and isinstance(text, dict):
        said = text.get("tie_word_embeddings")
    if embedding is None or said is False:
        return None
    if head is None:
        return embedding, "embed_out.weight" if "embed_in" in embedding else "lm_head.weight"
    one, two = tensors[embedding], tensors[head]
    is_shared = one.storage is not None and one.storage is two.storage
    if one.shape != two.shape or not (is_shared or said):
        return None
    return embedding, head


def parts_of(path: str, names: PeftNames, experts: int) -> list[tuple[str, ...]]:
    """Return the matrices of each expert. Raises UnsupportedError for another number of experts."""
    found = names.experts[path]
    if len(found) != experts or not all(all(each) for each in found):
        what = f"{shown(path)} is for {experts} experts, and the base has {len(found)}"
        raise UnsupportedError(what)
    return found
