"""Merge adapters into a base: a checkpoint whose changed tensors are computed while it is written.

One adapter after the other. Of each: refuse what cannot be merged, find the tensors of its modules,
check all shapes, and put records in the place of those of the base.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite, prod
from typing import Any, TypeAlias

from ckptkit import quantized
from ckptkit.compute.arranged import contiguous
from ckptkit.compute.numbers import FLOATS, cast_record
from ckptkit.compute.operation import Concat, RecordSlice, in_step, stream
from ckptkit.core import arguments
from ckptkit.core.arguments import checked, wrong
from ckptkit.core.bytesource import Pending, Record
from ckptkit.core.checkpoint import Checkpoint, Source, opened
from ckptkit.core.dtypes import DTypeLike
from ckptkit.core.errors import ADAPTER, CkptkitError, Notice, UnsupportedError, UsageError
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import output_name, plural, quoted, shell_command, shown, typed
from ckptkit.core.text import shape as shape_text
from ckptkit.core.tree import like, rebuild
from ckptkit.edits.config_file import config_of, with_changes
from ckptkit.edits.elements import cast
from ckptkit.edits.groups import instead
from ckptkit.edits.keys import substituted
from ckptkit.edits.structure import bare
from ckptkit.lora.arithmetic import Factor, Formula, adapted, as_matrix
from ckptkit.lora.changes import ModuleChange, change_of, is_feedforward, matrix, multiplied
from ckptkit.lora.naming import BaseNames, spelled
from ckptkit.lora.placing import PeftNames, Rename, parts_of, renamed, tied_pair
from ckptkit.lora.reading import (
    Adapter,
    Module,
    folder_of,
    is_adapter,
    problems,
    read_adapter,
    unknown_fields,
)

# Models whose experts are [in, out] and say so: `is_transposed` in transformers.
_TRANSPOSED = ("gpt_oss", "aria", "openai_privacy_filter")
_LAYER = re.compile(r"((?:.*\.)?(?:layers|layer|h))\.([0-9]+)(\..*)")


_Path: TypeAlias = str | os.PathLike[str] | Checkpoint | Adapter


def _listed(name: str, given: object) -> list[object]:
    """Return the adapters that are given: one, or several."""
    kinds = (str, os.PathLike, Checkpoint, Adapter)
    found = [given] if isinstance(given, kinds) else given
    if not isinstance(found, (list, tuple)):
        raise wrong(name, "the path of an adapter, or several paths", given)
    return [
        each if isinstance(each, (Checkpoint, Adapter)) else arguments.path(name, each)
        for each in found
    ]


@partial(checked, more={"_Path | Sequence[_Path]": _listed})
def merge_lora(
    base: Source,
    adapters: _Path | Sequence[_Path],
    *,
    weights: Sequence[float] | None = None,
    tied: str | None = None,
    base_is: str | None = None,
    component: str | None = None,
    alpha: float | None = None,
    dtype: DTypeLike | None = None,
    sub: Sequence[tuple[str, str]] = (),
    strict: bool = False,
) -> Checkpoint:
    """Return `base` with the changes that adapters make; computed when it is written.

    `weights` multiply the changes of each adapter. `tied` says what becomes of a matrix that is the
    embedding and the head, if only one of them is changed: ``untie`` or ``keep``. With
    ``base_is="residual"``, the base is what an initialization such as PiSSA left. `component` keeps
    the modules of one component of a pipeline, `alpha` is that of files without a scale, `dtype`
    is that of the result, to which the base is cast first, and `sub` are substitutions in the names
    of modules. With `strict`, unknown fields of a configuration are errors. Raises UnsupportedError
    for what cannot be merged, with its name.
    """
    for name, value, words in (
        ("tied", tied, ("untie", "keep")),
        ("base_is", base_is, ("residual",)),
    ):
        if value not in (None, *words):
            raise wrong(name, " or ".join(map(repr, words)), value)
    given: list[Any] = adapters  # type: ignore[assignment]  # of `_listed`
    factors = [1.0] * len(given) if weights is None else list(weights)
    if len(factors) != len(given) or not given or not all(map(isfinite, factors)):
        what = plural(len(given), "adapter")
        raise UsageError(f"{what} need as many weights, all finite, and not {factors}")
    checkpoint = opened(base).whole()
    _check_base(checkpoint)
    found = [
        each if isinstance(each, Adapter) else read_adapter(each, component=component, alpha=alpha)
        for each in given
    ]
    for each in found:
        first = next(problems(each, base_is), None)
        if first is not None:
            raise UnsupportedError(first.title, where=each.path, hint=first.hint or _LISTED)
    if dtype is not None:
        checkpoint = cast(checkpoint, dtype)
    for adapter, weight in zip(found, factors, strict=True):
        try:
            checkpoint = _Merge(checkpoint, adapter, weight, tied, tuple(sub), strict).done()
        except CkptkitError as error:
            error.hint = error.hint or _LISTED
            raise error.at(adapter.path) from error.__cause__
    return checkpoint


_LISTED = "`ckptkit help lora` lists what can be merged, and how names are looked up"


def merged(base: Checkpoint, adapter: str = "", weight: float = 1.0) -> Checkpoint:
    """Return `base` with one adapter merged into it: the step `lora` of recipes."""
    if not adapter:
        raise UsageError(
            "the step lora names no adapter", hint="lora: {adapter: PATH, weight: 1.0}"
        )
    return merge_lora(base, adapter, weights=[weight])


def hint(adapter: Checkpoint, others: Sequence[Checkpoint]) -> str:
    """Return the command that merges an adapter into one of `others`, if that is possible."""
    base = next((each for each in others if not is_adapter(each)), None)
    places = [each and (each.folder.name if each.folder else each.name) for each in (base, adapter)]
    if base is not None and all(places):
        try:
            merge_lora(base, adapter)
        except CkptkitError:
            pass
        else:
            out = output_name(str(places[0]), "merged")
            words = ("ckptkit", "lora", "merge", *map(str, places), out)
            return f"`{shell_command(words)}` adds it to its base"
    return "`ckptkit help lora` says how an adapter is added to its base"


def _check_base(base: Checkpoint) -> None:
    """Raise UnsupportedError for a base that is an adapter itself, or quantized."""
    if is_adapter(base):
        raise UnsupportedError(
            "is an adapter, and not a base model",
            where=base.name,
            hint="the base comes first, then its adapters",
        )
    group = next(iter(quantized.find(base).groups), None)
    if group is not None:
        raise UnsupportedError(
            f"{shown(group.name)} is quantized as {group.label} ({group.family}), and codes are "
            "not numbers to add to",
            where=base.name,
            hint=instead(base),
        )


@dataclass(frozen=True, slots=True)
class _Piece:
    """A change of `stop - start` rows of a tensor from its row `at`: its own from `start` on."""

    change: ModuleChange
    start: int
    stop: int
    at: int


@dataclass
class _Merge:
    """One adapter on its way into a base."""

    base: Checkpoint
    adapter: Adapter
    weight: float
    tied: str | None
    sub: tuple[tuple[str, str], ...]
    strict: bool
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    config_changes: dict[str, Any] = field(default_factory=dict)

    def done(self) -> Checkpoint:
        """Return the base with the adapter in it."""
        self.config = config_of(self.base)
        options = self.adapter.config or {}
        self._check_fields()
        if self.base.required.is_module:
            self.base = bare(self.base)
        self.old = dict(self.base.required.tensors)
        self.new = dict(self.old)
        if options.get("layer_replication"):
            self.new = self._replicated(options["layer_replication"])
        self.untouched = dict(self.new)
        self.pieces: dict[str, list[_Piece]] = {}
        self.rows: dict[str, list[tuple[Tensor, list[int]]]] = {}  # replaced rows, by tensor
        self.paths = self._substituted()
        self.pair = self._tied_pair()
        self._place()
        replaced = self._replace()
        self._tie()
        for name, pieces in self.pieces.items():
            self.new[name] = _changed(self.new[name], pieces)
        for name, rows in self.rows.items():
            for source, places in rows:
                self.new[name] = _with_rows(self.new[name], source, places)
        self._follow_ties()
        return self._result(replaced)

    def _check_fields(self) -> None:
        adapter = self.adapter
        if unknown := unknown_fields(adapter):
            what = f"{adapter.path}: unknown fields of adapter_config.json: {quoted(unknown)}"
            if self.strict:
                raise UnsupportedError(what.partition(": ")[2])
            self.warnings.append(what)
        mixed = next((each for each in adapter.modules.values() if not _is_sum(each)), None)
        if self.weight != 1 and mixed is not None:
            raise UsageError(
                f"{shown(mixed.path)} is no sum: a weight of {self.weight:g} has no meaning for it",
                hint=f"{typed('--weight 1', 'weights=[1]')} for this adapter",
            )

    def _substituted(self) -> dict[str, str]:
        """Return the path of each module after the substitutions."""
        paths = [each.path for each in self.adapter.modules.values()]
        paths += [name.rpartition(".")[0] or name for name in self.adapter.replaced]
        made, unused = substituted(dict.fromkeys(paths), self.sub)
        if unused:
            raise UsageError(f"no module is changed by the substitution {unused[0]!r}")
        return made

    # The places of modules

    def _place(self) -> None:
        """Find the tensors of all modules, and check that changes fit."""
        adapter, shapes = self.adapter, {name: each.shape for name, each in self.new.items()}
        self.renames: tuple[Rename, ...] = ()
        self.names, self.dialect = PeftNames(shapes), BaseNames(shapes, adapter.components)
        modules = adapter.modules.values()
        paths = [self.paths[each.path] for each in modules if not self._is_tied_head(each)]
        is_peft = adapter.layout == "peft" and not self._is_spelled_otherwise(paths)
        if is_peft:
            if not paths:  # whole tensors alone
                paths = [self.paths[n.rpartition(".")[0]] for n in adapter.replaced if "." in n]
                paths = [each for each in paths if self.names.has(each)] or paths
            self.renames = self.names.renames(paths, adapter.path)
            self.notes += [f"renamed modules of the adapter: {each}" for each in self.renames]
        missing: list[str] = []
        for key, module in adapter.modules.items():
            place = self._of_peft if is_peft else self._of_dialect
            if not place(module):
                missing.append(key)
        if missing:
            raise UnsupportedError(
                f"{len(missing)} of {plural(len(adapter.modules), 'module')} of the adapter are "
                f"not in {self.base.name or 'the base'}: {quoted(missing[:4])}",
                code="no-module",
                hint=f"{typed('--component NAME', 'component=')} takes the modules of one component"
                f" ({quoted(filter(None, adapter.components))})"
                if len(adapter.components) > 1
                else None,
            )

    def _is_spelled_otherwise(self, paths: Sequence[str]) -> bool:
        """Return whether the base has all modules of an image model under their other names."""
        if not paths or any(map(self.names.has, paths)) or not all(map(spelled, paths)):
            return False
        return all(self.dialect.find("", path, (1, 1)) for path in paths)

    def _is_tied_head(self, module: Module) -> bool:
        """Return whether a module is the head of a base that stores it as the embedding."""
        return (
            self.pair is not None
            and self.pair[1] not in self.new
            and self.paths[module.path].rpartition(".")[2] == self.pair[1].split(".")[-2]
        )

    def _of_peft(self, module: Module) -> bool:
        path = renamed(self.paths[module.path], self.renames)
        config = self.adapter.config or {}
        if self._is_tied_head(module):
            assert self.pair is not None
            self.new[self.pair[1]] = _copy(self.new[self.pair[0]])
            self.untouched[self.pair[1]] = self.new[self.pair[1]]
            name = self.pair[1]
        elif module.parameter:
            self._of_experts(module, path)
            return True
        else:
            name = self.names.tensors[path]
        if module.kind == "tokens":
            self.rows.setdefault(name, []).append(
                (module.tensors["tokens"], self._tokens(module, config))
            )
            return True
        tensor = self._resized(name)
        if module.kind == "ia3":
            self._ia3(module, name, tensor)
            return True
        change = change_of(module, config, self.weight)
        if name.endswith("in_proj_weight"):
            change = replace(change, formula=replace(change.formula, rounding="twice"))
        is_turned = bool(config.get("fan_in_fan_out")) and module.kind != "embedding"
        if is_turned and tensor.ndim == 2 and (change.columns, change.rows) == tensor.shape:
            change = change.transposed()
        self._check_shape(module, change, tensor)
        self._add(name, _Piece(change, 0, change.rows, 0))
        if "B_bias" in module.tensors:
            self._bias(module, name)
        return True

    def _resized(self, name: str) -> Tensor:
        """Return the tensor that a change is added to: a whole one of the adapter comes first."""
        for own, tensor in self.adapter.replaced.items():
            if renamed(own, self.renames) == name:
                return tensor
        return self.new[name]

    def _of_dialect(self, module: Module) -> bool:
        """Place a module of kohya, ComfyUI or diffusers."""
        underscores = self.adapter.layout == "kohya" and self.paths[module.path] == module.path
        path = self.paths[module.path]
        if "diff_b" in module.tensors:
            found = self._dialect_find(module, path, module.tensors["diff_b"].shape, underscores)
            if not found:
                return False
            self._bias(module, found[0].tensor, "diff_b")
            if "diff" not in module.tensors:
                return True
        config = self.adapter.configs.get(module.component, {})
        change = change_of(module, config, self.weight)
        found = self._dialect_find(module, path, (change.rows, change.columns), underscores)
        for each in found:
            tensor = self.new[each.tensor]
            count = each.stop - each.start
            is_whole = len(found) == 1 and count == change.rows == tensor.shape[0]
            is_inside = each.at + count <= tensor.shape[0]
            if is_whole or not is_inside or as_matrix(tensor.shape)[1] != change.columns:
                self._check_shape(module, change, tensor)
            self._add(each.tensor, _Piece(change, each.start, each.stop, each.at))
        return bool(found)

    def _dialect_find(
        self, module: Module, path: str, shape: Shape, underscores: bool
    ) -> tuple[Any, ...]:
        return self.dialect.find(module.component, path, shape, underscores=underscores)

    def _of_experts(self, module: Module, path: str) -> None:
        """Place the change of a parameter of all experts: one matrix of each."""
        a, b = (matrix(module.tensors[role]) for role in "AB")
        rank = module.expected or module.rank or 1
        experts = a.shape[0] // rank
        sizes = b.shape[0], a.shape[1]
        name = self.names.tensors.get(path)
        if name is not None:
            rows: list[tuple[tuple[str, int], ...]]
            rows = [((name, number),) for number in range(experts)]
            count, *shape = (1, *self.new[name].shape)[-3:]  # a plain matrix is one expert
            if count != experts or len(shape) != 2:
                raise _misfit(module, sizes, self.new[name].shape)
        else:
            parts = parts_of(path, self.names, experts)
            rows = [tuple((one, 0) for one in row) for row in parts]
            heights = [self.new[one].shape[0] for one in parts[0]]
            shape = [sum(heights), self.new[parts[0][0]].shape[1]]
        is_turned = self._is_turned(module, sizes, tuple(shape))
        for number, places in enumerate(rows):
            own = {
                "A": _some_rows(a, number * rank, rank),
                "B": _every(b, number, experts, rank),
            }
            change = change_of(module, self.adapter.config or {}, self.weight, own)
            change = change.transposed() if is_turned else change
            start = 0
            for one, place in places:
                height = shape[0] if len(places) == 1 else self.new[one].shape[0]
                self._add(one, _Piece(change, start, start + height, place * shape[0]))
                start += height

    def _is_turned(self, module: Module, change: tuple[int, int], shape: Shape) -> bool:
        """Return whether the change of each expert is transposed: its shape decides.

        Versions of peft differ for square matrices. Sources: peft 0.18.0, 0.19.0, 0.19.1
        (tuners/lora/layer.py, ParamWrapper.get_delta_weight).
        """
        is_plain, is_turned = change == tuple(shape), change[::-1] == tuple(shape)
        if not (is_plain or is_turned):
            raise _misfit(module, change, shape)
        if is_plain != is_turned:
            return is_turned
        said = str((self.adapter.config or {}).get("peft_version") or "")
        version = re.match(r"([0-9]+)\.([0-9]+)\.([0-9]+)", said)
        if version is None:
            raise UnsupportedError(
                f"{shown(module.path)} has square matrices, and adapter_config.json has no "
                "peft_version: which way round they are is unknown"
            )
        numbers = tuple(map(int, version.groups()))
        if numbers < (0, 19):
            return True
        is_marked = self.config.get("model_type") in _TRANSPOSED
        return not is_marked if numbers < (0, 19, 1) else is_marked

    def _check_shape(self, module: Module, change: ModuleChange, tensor: Tensor) -> None:
        """Raise UnsupportedError unless the change has the shape of the weight."""
        fits = as_matrix(tensor.shape) == (change.rows, change.columns)
        if change.kernel and tensor.ndim > 2:
            fits = fits and prod(change.kernel) in (1, prod(tensor.shape[2:]))
            fits = fits and (tensor.shape[2:] == change.kernel or prod(change.kernel) == 1)
        if not fits:
            raise _misfit(module, (change.rows, change.columns), tensor.shape)

    def _add(self, name: str, piece: _Piece) -> None:
        tensor = self.new[name]
        if tensor.dtype.name not in FLOATS or tensor.storage is None:
            raise UnsupportedError(f"{shown(name)} of the base is {tensor.dtype}, not plain floats")
        self.pieces.setdefault(name, []).append(piece)

    def _bias(self, module: Module, name: str, role: str = "B_bias") -> None:
        """Add to the bias beside a weight."""
        bias, scale = name.removesuffix("weight") + "bias", module.scale or 0.0
        if bias == name or bias not in self.new:
            raise UnsupportedError(f"changes the bias of {shown(module.path)}, and it has none")
        own = matrix(module.tensors[role], (prod(module.tensors[role].shape), 1))
        if own.shape[0] != prod(self.new[bias].shape):
            raise _misfit(module, (own.shape[0],), self.new[bias].shape)
        scale = self.weight * (scale if role == "B_bias" else 1.0)
        formula = Formula((Factor((0,)),), scale=scale)
        self._add(
            bias,
            _Piece(
                ModuleChange(formula, (own,), own.shape[0], 1, name=module.path), 0, own.shape[0], 0
            ),
        )

    def _ia3(self, module: Module, name: str, tensor: Tensor) -> None:
        config = self.adapter.config or {}
        change = multiplied(module, tensor.shape, config)
        self._add(name, _Piece(change, 0, change.rows, 0))
        bias = name.removesuffix("weight") + "bias"
        if bias != name and bias in self.new and not is_feedforward(module, config):
            count = prod(self.new[bias].shape)
            numbers = matrix(module.tensors["ia3"], (count, 1))
            formula = Formula(norm="none")
            self._add(bias, _Piece(ModuleChange(formula, (numbers,), count, 1), 0, count, 0))

    def _tokens(self, module: Module, config: Mapping[str, Any]) -> list[int]:
        """Return the rows that trained tokens replace."""
        named = config.get("trainable_token_indices", config.get("token_indices"))
        if isinstance(named, dict):
            named = next((named[key] for key in named if module.path.endswith(str(key))), None)
        count = module.tensors["tokens"].shape[0]
        if not isinstance(named, list) or len(named) != count:
            raise UnsupportedError(
                f"{shown(module.path)} has {plural(count, 'trained token')}, and "
                "adapter_config.json does not list as many"
            )
        return [int(each) for each in named]

    # Whole tensors, and tied ones

    def _replace(self) -> int:
        """Put whole tensors of the adapter in the place of the base's; return how many."""
        count = 0
        for own, tensor in self.adapter.replaced.items():
            module, dot, end = own.rpartition(".")
            name = renamed(f"{self.paths[module or own]}{dot}{end}" if dot else own, self.renames)
            if name not in self.new and own in self.new:
                name = own
            old = self.new.get(name)
            if old is None and self.pair is not None and name == self.pair[1]:
                old = self.new[self.pair[0]]
            target = self._main_dtype() if tensor.dtype.name in FLOATS else tensor.dtype
            target = old.dtype if old is not None else target
            made = _cast(tensor, target)
            if old is not None and made.shape == old.shape and _same(made, old):
                continue
            if self.weight != 1:
                raise UsageError(
                    f"{shown(own)} is a whole tensor, and a weight of {self.weight:g} has no "
                    "meaning for it"
                )
            if old is not None and old.ndim == 2 and made.shape[1:] == old.shape[1:]:
                if made.shape[0] != old.shape[0] and "vocab_size" in self.config:
                    self.config_changes["vocab_size"] = made.shape[0]
            elif old is not None and made.shape != old.shape:
                raise UnsupportedError(
                    f"{shown(own)} is {shape_text(made.shape)}, and {shape_text(old.shape)} in the "
                    "base"
                )
            self.new[name] = made
            count += 1
        return count

    def _main_dtype(self) -> Any:
        """Return the dtype of most weights, for a tensor that the base lacks."""
        sizes: dict[Any, int] = {}
        for each in self.old.values():
            if each.dtype.name in FLOATS:
                sizes[each.dtype] = sizes.get(each.dtype, 0) + each.nbytes
        return max(sizes, key=lambda each: sizes[each])

    def _tied_pair(self) -> tuple[str, str] | None:
        """Return the embedding and the head, if they are one matrix and the adapter is on it."""
        pair = tied_pair(self.new, self.config)
        if pair is None:
            return None
        ends = {name.removesuffix(".weight").rpartition(".")[2] for name in pair}
        paths = {path.rpartition(".")[2] for path in self.paths.values()}
        if not ends & paths:
            return None
        one, two = self.new[pair[0]], self.new.get(pair[1])
        if two is not None and one.storage is not two.storage and not _same(one, two):
            return None
        return pair

    def _tie(self) -> None:
        """Decide what becomes of a matrix that is the embedding and the head."""
        self.joined = False
        if self.pair is None:
            return
        embedding, head = self.pair
        is_ensured = bool((self.adapter.config or {}).get("ensure_weight_tying"))
        changed = [name for name in self.pair if name in self.pieces]
        whole = [name for name in self.pair if self.new.get(name) is not self.untouched.get(name)]
        tokens = [name for name in self.pair if name in self.rows]
        if changed and not (is_ensured and len(changed) == 2):
            untie, keep = (typed(f"--tied {e}", f"tied={e!r}") for e in ("untie", "keep"))
            if self.tied is None:
                raise UnsupportedError(
                    f"changes {quoted(changed)}, and {embedding} and {head} are tied: one matrix",
                    hint=f"{untie} gives the head a matrix of its own, as in training; {keep} adds "
                    "to both",
                    code="tied",
                )
            if self.tied == "untie":
                self._untie()
                return
            self.pieces[embedding] = [
                *self.pieces.get(embedding, ()), *self.pieces.pop(head, ())
            ]  # fmt: skip
            self.joined = True
        elif changed:  # one adapter under two names
            self.pieces.pop(head)
            self.joined = True
        elif len(whole) == 1 or (whole and not _same(*(self.new[name] for name in self.pair))):
            self._untie()
        elif whole or tokens:
            self.rows[embedding] = self.rows.pop(head, self.rows.get(embedding, []))
            self.joined = True

    def _untie(self) -> None:
        assert self.pair is not None
        embedding, head = self.pair
        if head not in self.new or self.new[head].storage is self.new[embedding].storage:
            self.new[head] = _copy(self.untouched[embedding])
        self.config_changes["tie_word_embeddings"] = False
        self.notes.append(f"untied {head} from {embedding}")

    def _follow_ties(self) -> None:
        """Give the head what became of the embedding, where they stay one."""
        if self.joined and self.pair is not None:
            embedding, head = self.pair
            if head in self.old:
                self.new[head] = self.new[embedding]
            else:
                self.new.pop(head, None)

    def _replicated(self, ranges: object) -> dict[str, Tensor]:
        """Return the tensors with layers repeated: new layer N is old layer `order[N]`."""
        layers: dict[int, list[tuple[str, str, Tensor]]] = {}
        made: dict[str, Tensor] = {}
        for name, tensor in self.old.items():
            found = _LAYER.fullmatch(name)
            if found is None:
                made[name] = tensor
            else:
                layers.setdefault(int(found[2]), []).append((found[1], found[3], tensor))
        stems = {stem for layer in layers.values() for stem, _, _ in layer}
        order: list[int] = []
        for each in ranges if isinstance(ranges, list) else ():
            is_range = isinstance(each, list) and len(each) == 2 and {*map(type, each)} == {int}
            if not is_range or not 0 <= each[0] < each[1] <= len(layers):
                order = []
                break
            order += range(*each)
        if len(stems) != 1 or not order or layers.keys() != {*range(len(layers))}:
            raise UnsupportedError(f"layer_replication {shown(ranges)} does not fit the base")
        for number, old in enumerate(order):
            for stem, end, tensor in layers[old]:
                made[f"{stem}.{number}{end}"] = _copy(tensor)
        self.config_changes["num_hidden_layers"] = len(order)
        return made

    # The result

    def _result(self, replaced: int) -> Checkpoint:
        base, adapter = self.base, self.adapter
        weights = base.required
        assert isinstance(weights.node, dict)
        entries = {
            key: node
            for key, node in weights.node.items()
            if key not in self.old or key in self.new
        }
        changed = {n: each for n, each in self.new.items() if each is not self.old.get(n)}
        mapping = like(weights.node, {**entries, **changed})
        ranks = f" (rank {', '.join(map(str, adapter.ranks))})" if adapter.ranks else ""
        note = f"merged {plural(len(adapter.modules), 'module')} of {adapter.path}{ranks}"
        if replaced:
            note += f", replaced {plural(replaced, 'tensor')}"
        rest = len([name for name in self.new if name in self.old and name not in changed])
        merged = Notice(
            ADAPTER, f"{note}, {rest} unchanged", adapter=adapter.path,
            modules=len(adapter.modules), ranks=adapter.ranks, replaced=replaced, unchanged=rest,
        )  # fmt: skip
        notes = [merged, *self.notes]
        if adapter.ignored:
            notes.append(f"ignored {quoted(adapter.ignored)}")
        if adapter.base and os.path.basename(adapter.base.rstrip("/")) not in (base.name or ""):
            notes.append(f"it was trained on {adapter.base}")
        if own := _tokenizer_files(adapter):
            notes.append(f"tokenizer files of the adapter are not copied: {quoted(own)}")
        root = rebuild(base.root, swap={id(weights.node): mapping})
        done = base.with_root(root, notes=notes, warnings=self.warnings)
        return with_changes(done, self.config_changes)


def _is_sum(module: Module) -> bool:
    return not module.is_dora and module.kind not in ("ia3", "tokens")


def _misfit(module: Module, change: tuple[int, ...], weight: Shape) -> UnsupportedError:
    return UnsupportedError(
        f"the change of {shown(module.path)} is {shape_text(change)}, and the weight in the base "
        f"{shape_text(weight)}",
        code="shape",
    )


def _some_rows(tensor: Tensor, start: int, rows: int) -> Tensor:
    """Return some rows of a matrix."""
    down, right = tensor.stride
    offset = tensor.offset + start * down
    return Tensor(tensor.storage, tensor.dtype, (rows, tensor.shape[1]), (down, right), offset)


def _every(b: Tensor, number: int, experts: int, rank: int) -> Tensor:
    """Return the columns of B that are one expert's: the experts are the fastest index."""
    down, right = b.stride
    offset = b.offset + number * right
    return Tensor(b.storage, b.dtype, (b.shape[0], rank), (down, experts * right), offset)


def _copy(tensor: Tensor) -> Tensor:
    """Return the same tensor with storage of its own."""
    assert tensor.storage is not None
    return tensor.over(replace(tensor.storage))


def _over(tensor: Tensor, record: Record) -> Tensor:
    """Return a contiguous tensor like another one, with these bytes."""
    stride = contiguous_stride(tensor.shape)
    storage = Storage(record, tensor.device)
    return Tensor(
        storage, tensor.dtype, tensor.shape, stride, 0, tensor.requires_grad, tensor.kind
    )  # fmt: skip


def _cast(tensor: Tensor, dtype: Any) -> Tensor:
    record = contiguous(tensor)
    if tensor.dtype != dtype:
        record = cast_record(record, tensor.dtype, dtype, big_endian=False)
    storage = Storage(record)
    return Tensor(storage, dtype, tensor.shape, contiguous_stride(tensor.shape))


def _same(one: Tensor, two: Tensor) -> bool:
    """Return whether two tensors have the same bytes."""
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    streams = [stream(contiguous(each).locate()) for each in (one, two)]
    return all(a == b for a, b in in_step(streams, (1, 1), 1 << 20))


def _changed(tensor: Tensor, pieces: Sequence[_Piece]) -> Tensor:
    """Return a tensor with changes of some of its rows, one after the other where they overlap."""
    record, size = contiguous(tensor), tensor.dtype.itemsize
    waiting = list(pieces)
    while waiting:
        last, later, parts = 0, [], list[Record]()
        for piece in sorted(waiting, key=lambda each: each.at):
            unit = piece.change.columns * size
            if piece.at * unit < last:
                later.append(piece)
                continue
            rows = piece.stop - piece.start
            if piece.at * unit > last:
                parts.append(RecordSlice(record, last, piece.at * unit - last))
            inside = RecordSlice(record, piece.at * unit, rows * unit)
            whole = rows * unit == tensor.nbytes
            parts.append(
                adapted(
                    record if whole else inside,
                    tensor.dtype.name,
                    rows,
                    piece.change.columns,
                    piece.change.formula,
                    piece.change.operands,
                    piece.start,
                    piece.change.name,
                )
            )
            last = (piece.at + rows) * unit
        if last < tensor.nbytes:
            parts.append(RecordSlice(record, last, tensor.nbytes - last))
        record = parts[0] if len(parts) == 1 else Pending(Concat(), (*parts,), tensor.nbytes)
        waiting = later
    return _over(tensor, record)


def _with_rows(tensor: Tensor, source: Tensor, numbers: Sequence[int]) -> Tensor:
    """Return a matrix with some rows replaced."""
    rows, columns = tensor.shape
    if source.shape != (len(numbers), columns) or not all(0 <= each < rows for each in numbers):
        raise UnsupportedError(
            f"trained tokens are {shape_text(source.shape)}, for rows {quoted(map(str, numbers))} "
            f"of {shape_text(tensor.shape)}"
        )
    own, old = contiguous(_cast(source, tensor.dtype)), contiguous(tensor)
    unit = columns * tensor.dtype.itemsize
    parts: list[Record] = []
    last = 0
    for number, place in sorted((number, place) for place, number in enumerate(numbers)):
        if number * unit > last:
            parts.append(RecordSlice(old, last, number * unit - last))
        parts.append(RecordSlice(own, place * unit, unit))
        last = (number + 1) * unit
    if last < tensor.nbytes:
        parts.append(RecordSlice(old, last, tensor.nbytes - last))
    return _over(tensor, Pending(Concat(), (*parts,), tensor.nbytes))


def _tokenizer_files(adapter: Adapter) -> list[str]:
    folder = folder_of(adapter.checkpoint)
    try:
        names = [] if folder is None or adapter.config is None else folder.list()
    except CkptkitError:  # a web server does not list files
        return []
    return [name for name in names if "token" in name and name.endswith((".json", ".model"))]
