"""Merge adapters into a base. Changed tensors are computed while ckptkit writes the result.

`MergePlan` finds the tensor of the base for each module of an adapter. It also collects all reasons
why the merge is impossible. `lora check` shows these reasons. `merge_lora` raises the first reason
as an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from math import isfinite, prod
from typing import Any, TypeAlias

from ckptkit import quantized
from ckptkit.compute.arranged import contiguous
from ckptkit.compute.numbers import FLOATS, cast_record
from ckptkit.core import arguments
from ckptkit.core.arguments import checked, wrong
from ckptkit.core.checkpoint import Checkpoint, Source, opened
from ckptkit.core.dtypes import BY_NAME, DType, DTypeLike
from ckptkit.core.errors import ADAPTER, CkptkitError, Notice, UnsupportedError, UsageError
from ckptkit.core.tensor import Shape, Storage, Tensor
from ckptkit.core.text import output_name, plural, quoted, shell_command, shell_word, shown, typed
from ckptkit.core.text import shape as shape_text
from ckptkit.core.tree import like, rebuild
from ckptkit.edits.config_file import changes_of, config_of, with_changes
from ckptkit.edits.elements import cast
from ckptkit.edits.keys import substituted
from ckptkit.edits.quantized_names import dequantize_hint
from ckptkit.edits.structure import bare
from ckptkit.formats.sidecars import of_weights
from ckptkit.lora.changes import (
    HELP,
    Finding,
    ModuleChange,
    as_matrix,
    box,
    change_of,
    change_of_bias,
    is_feedforward,
    made_of,
    matrix,
    placed,
    problem,
    problems,
)
from ckptkit.lora.naming import (
    BESIDE_HEAD,
    EMBEDDINGS,
    HEADS,
    BaseNames,
    Placed,
    Rename,
    end_of,
    is_fused,
)
from ckptkit.lora.reading import (
    CONFIG,
    Adapter,
    Module,
    folder_of,
    is_adapter,
    read_adapter,
    same_bytes,
    table,
    unwrapped,
)

# Models for which transformers sets `is_transposed`: expert matrices have the shape [in, out]
_TRANSPOSED = ("gpt_oss", "aria", "openai_privacy_filter")
_MODEL = re.compile(r"((?:.*\.)?)(?:model|transformer)\.")
# Classes of transformers without a language model head
_HEADLESS = re.compile(
    r".*(?<!LMHead)(?<!MT)(?<!DoubleHeads)Model"
    r"|.*For(.*Classification|QuestionAnswering|MultipleChoice)"
)
# Maps task types to the names of the modules that peft adds to modules_to_save
_NEW_HEADS = {"SEQ_CLS": ("classifier", "score"), "TOKEN_CLS": ("classifier", "score")}
# Types of models that use Conv1D of transformers, and their Conv1D modules
_CONV1D_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp", "clvp_decoder")
_CONV1D = ("c_attn", "q_attn", "c_proj", "c_fc")
_LABELS = re.compile(r"(?:.*\.)?(?:classifier|score)(?:\.out_proj)?\.weight")
_COUNTS = "num_hidden_layers", "n_layer", "num_layers"  # fields for the number of layers
# The module whose layers peft repeats. See replicate_layers in tuners/tuners_utils.py.
_STACK = re.compile(r"(module\.|model\.)*(bert\.)?(layers|encoder\.layer|h)")
_LAYER = re.compile(r"((?:.*?\.)??(?:layers|layer|h))\.([0-9]+)(\..*)")

_Path: TypeAlias = str | os.PathLike[str] | Checkpoint


def _listed(name: str, given: object) -> list[object]:
    """Return `given`, which is one adapter or several adapters, as a list."""
    found = [given] if isinstance(given, (str, os.PathLike, Checkpoint)) else given
    if not isinstance(found, (list, tuple)):
        raise wrong(name, "the path of an adapter, or several paths", given)
    return [each if isinstance(each, Checkpoint) else arguments.path(name, each) for each in found]


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
    """Return `base` with the weight updates of adapters added. `save` computes the values.

    - `weights`: a factor for the updates of each adapter. The default is 1.
    - `tied`: required if an adapter changes only the embedding or only the head, and the two are
      tied. ``untie`` gives the head its own matrix. ``keep`` changes the embedding and the head.
    - `base_is`: ``residual`` if the base is the original base minus the initial update (PiSSA).
    - `component`: merge only the modules of this component of a pipeline, such as ``unet``.
    - `alpha`: the alpha of the training, for files that contain no scale.
    - `dtype`: the dtype of the result. ckptkit casts the base to this dtype before the merge.
    - `sub`: substitutions for module names, each a regular expression and its replacement.
    - `strict`: true to raise an error for an unknown field in a configuration.

    Raises UnsupportedError if ckptkit cannot merge an adapter. The message names the adapter.
    """
    if tied not in (None, "untie", "keep"):
        raise wrong("tied", "'untie' or 'keep'", tied)
    if base_is not in (None, "residual"):
        raise wrong("base_is", "'residual'", base_is)
    given: list[Any] = adapters  # type: ignore[assignment]  # of `_listed`
    factors = [1.0] * len(given) if weights is None else list(weights)
    if len(factors) != len(given) or not given or not all(map(isfinite, factors)):
        what = plural(len(given), "adapter")
        raise UsageError(f"{what} require one finite weight each, but got {factors}")
    checkpoint = opened(base).require_complete()
    refuse_base(checkpoint)
    found = [read_adapter(each, component=component, alpha=alpha) for each in given]
    if dtype is not None:
        checkpoint = cast(checkpoint, dtype)
    origin = checkpoint.required.tensors
    for adapter, factor in zip(found, factors, strict=True):
        try:
            before = {} if adapter is found[0] else origin
            plan = MergePlan(checkpoint, adapter, factor, tied, base_is, sub, strict, before)
            for each in plan.problems:
                raise each.error
            checkpoint = plan.merged()
        except CkptkitError as error:
            error.hint = error.hint or HELP
            raise error.at(adapter.path) from error.__cause__
    return checkpoint


def merged(base: Checkpoint, adapter: str = "", weight: float = 1.0) -> Checkpoint:
    """Return `base` with one adapter merged. Recipes call this function for the step `lora`."""
    if not adapter:
        known = "lora: {adapter: PATH, weight: 1.0}"
        raise UsageError("the step `lora` requires an adapter", hint=known)
    return merge_lora(base, adapter, weights=[weight])


def lora_hint(adapter: Checkpoint, others: Sequence[Checkpoint]) -> str:
    """Return a hint with the command that merges `adapter` into the base model in `others`.

    If the merge is impossible, return a hint that names a help page.
    """
    base = next((each for each in others if not is_adapter(each)), adapter)
    places = [str(each.folder.name if each.folder else each.name) for each in (base, adapter)]
    if base.name and adapter.name and base is not adapter:
        with suppress(CkptkitError):
            merge_lora(base, adapter)
            words = ("ckptkit", "lora", "merge", *places, output_name(places[0], "merged"))
            return f"`{shell_command(words)}` merges the adapter into its base"
    return "`ckptkit help lora` explains how to merge an adapter into its base"


def refuse_base(base: Checkpoint) -> None:
    """Raise UnsupportedError if the base is an adapter itself."""
    if is_adapter(base):
        what = "is an adapter, not a base model"
        raise UnsupportedError(what, where=base.name, hint="the first argument must be the base")


# The key of a module, its update, and the rows of a tensor to which rows of the update are added
_Piece: TypeAlias = tuple[str, ModuleChange, Placed]


class MergePlan:
    """The tensors of a base that an adapter changes, and all reasons why a merge is impossible.

    ``pieces`` maps each tensor to its updates. ``problems`` lists the reasons why the merge is
    impossible. ``renames`` lists prefixes of names that differ between the adapter and the base.
    ``origin`` contains the tensors of the base before any adapter was merged. peft computes the
    norms of DoRA from these tensors. ``unlike`` contains (tensor, rows in the adapter, rows in the
    base) for each embedding or head with different numbers of rows.
    """

    def __init__(
        self,
        base: Checkpoint,
        adapter: Adapter,
        weight: float = 1.0,
        tied: str | None = None,
        base_is: str | None = None,
        sub: Sequence[tuple[str, str]] = (),
        strict: bool = False,
        origin: Mapping[str, Tensor] = {},
    ) -> None:
        self.adapter, self.weight, self.tied, self.origin = adapter, weight, tied, origin
        self.base = bare(base) if base.required.is_module else base
        self.config, self.options = config_of(base), adapter.config or {}
        both = self.config, self.config.get("text_config")
        self.parts = [each for each in both if isinstance(each, dict)]
        self.is_transposed = self.config.get("model_type") in _TRANSPOSED
        self.problems = list(problems(adapter, base_is))
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.new_config: dict[str, Any] = {}
        self.pieces: dict[str, list[_Piece]] = {}
        self.later: list[_Piece] = []  # updates of the head of a tied pair, added after `pieces`
        self.rows: dict[str, list[tuple[Tensor, list[int]]]] = {}  # rows to replace in each tensor
        self.unlike: list[tuple[str, int, int]] = []
        self.replaced = 0
        self.is_untied = False  # True if the head gets its own matrix
        self.old = dict(self.base.required.tensors)
        self.new = dict(self.old)
        self.pair: tuple[str, str] | None = None
        self.renames: list[Rename] = []
        self.renamed: dict[str, str] = {}
        self.whole: dict[str, str] = {}  # names of complete tensors after the substitutions
        group = next(iter(quantized.find(base).groups), None)
        if group is not None:
            what = f"{group.name} of the base is quantized as {group.label} ({group.family})"
            name = base.name or "BASE"
            fix = dequantize_hint(base).replace("{where}", shell_word(name))
            fix = fix.replace("{new}", shell_word(output_name(name, "new")))
            self._refuse("quantized", what, fix)
        if any(each.code == "method" and not each.modules for each in self.problems) or group:
            return
        known = table("fields")["known"].split()
        fields = self.options.items() if adapter.method == "LORA" else ()
        if unknown := [name for name, value in fields if name not in known and value]:
            what = f"unknown fields of adapter_config.json: {quoted(unknown)}"
            if strict:
                self._refuse("method", what)
            self.warnings.append(f"{adapter.path}: {what}")
        mixed = next((each for each in adapter.modules.values() if not each.is_sum), None)
        if weight != 1 and mixed is not None:
            raise self._unweighted(mixed.path, "its update is not a plain sum")
        if self.options.get("layer_replication"):
            self._replicate(self.options["layer_replication"])
        names = [each.path for each in adapter.modules.values()]
        whole = [name.rpartition(".")[0] or name for name in adapter.replaced]
        paths, unused = substituted(dict.fromkeys([*names, *whole]), sub)
        if unused:
            raise UsageError(f"the substitution {unused[0]!r} matches no module")
        self.pair = self._tied_pair({*paths.values(), *adapter.replaced})
        self.untouched = dict(self.new)
        shapes = {name: each.shape for name, each in self.new.items()}
        self.names, self.paths = BaseNames(shapes, adapter.components), paths
        if adapter.layout == "peft":
            self._restore_wrappers()
            self._respell()
            self.whole = {own: self._whole(own) for own in adapter.replaced}
            self._rename([*(paths[name] for name in names), *self.whole.values()])
        for own in adapter.replaced:
            self._replace(own)
        missing = [key for key, module in adapter.modules.items() if not self._place(key, module)]
        if missing:
            self._miss(missing)
        self._find_twice()
        self._tie()

    def _refuse(self, code: str, title: str, hint: str = HELP, *keys: str, mend: str = "") -> None:
        self.problems.append(problem(code, title, hint, *keys, mend=mend))

    def _unweighted(self, name: str, why: str) -> UsageError:
        what = f"a weight of {self.weight:g} is impossible for {shown(name)}, because {why}"
        return UsageError(what, hint=f"{typed('--weight 1', 'weights=[1]')} for this adapter")

    # Find the tensors of each module

    def _restore_wrappers(self) -> None:
        """Restore the prefix of a name, like ``module.``, if the base has the prefix too."""
        for name in self.adapter.checkpoint.required.tensors:
            plain, full = unwrapped(name), name.rpartition("base_model.model.")[2]
            wrapper = full.removesuffix(plain)
            for found in re.finditer(r"\.", plain) if wrapper else ():
                path = plain[: found.start()]
                if self.paths.get(path) == path and wrapper + path in self.names.modules:
                    self.paths[path] = wrapper + path

    def _respell(self) -> None:
        """Convert names in memory to names in files, because transformers renames some modules."""
        tokens = [each for each in self.adapter.modules.values() if each.kind == "tokens"]
        for module in tokens:
            path = self.paths[module.path]
            shared = re.sub(r"(en|de)coder\.embed_tokens$", "shared", path)
            is_tied = path not in self.names.modules and shared in self.names.modules
            rows = module.tensors["tokens"]
            # In memory, the embeddings of encoder and decoder are tied to the shared embedding.
            if is_tied and all(same_bytes(each.tensors["tokens"], rows) for each in tokens):
                self.paths[module.path] = shared
        done: dict[str, None] = {}
        for path, name in self.paths.items():
            self.paths[path], renames = self.names.in_files(name)
            done |= dict.fromkeys(renames)
        self.notes += [f"renamed modules of the adapter: {each}" for each in done]

    def _rename(self, paths: Sequence[str]) -> None:
        """Find the modules of a peft adapter in the base, where they may have another prefix."""
        self.renamed, self.renames, missing, unclear = self.names.renames(paths)
        whole, saved = {*self.whole.values()}, self.options.get("modules_to_save")
        known = _NEW_HEADS.get(str(self.options.get("task_type")), ())
        heads = (*known, *(saved if isinstance(saved, list) else [saved]))
        # A complete tensor may belong to a head that the base does not have.
        new = {each for each in whole if any(f".{head}." in f".{each}." for head in heads)}
        missing = [each for each in missing if each not in new]
        self.notes += [f"renamed modules of the adapter: {each}" for each in self.renames]
        sub = f"{typed('--sub REGEX=REPL', 'sub=[(regex, replacement)]')} renames modules"
        for found, what in ((missing, "are not in the base"),
                            (unclear, "may be several modules of the base")):  # fmt: skip
            if found:
                like = self.names.like(found[0])
                kind = "tensors" if whole & {*found} else "modules"
                title = f"{len(found)} of {len(paths)} {kind} of the adapter {what}: "
                title += quoted(found[:4]) + (f" (the base has {quoted(like)})" if like else "")
                self._refuse(_lacking(found, paths), title, sub, *found)

    def _miss(self, keys: list[str]) -> None:
        """Add a problem for modules that the base does not have.

        Modules that already have a problem are skipped.
        """
        modules, known = self.adapter.modules, {name for p in self.problems for name in p.modules}
        if self.adapter.layout == "peft" and all(
            self.paths[modules[k].path] in known for k in keys
        ):
            return
        what = f"{len(keys)} of {plural(len(modules), 'module')} of the adapter are not in "
        title = f"{what}{self.base.name or 'the base'}: {quoted(keys[:4])}"
        lacking = {modules[key].component for key in keys}
        parts = [each for each in self.adapter.components if each not in lacking]
        given = typed("--component NAME", "component=")
        hint = f"{given} selects the modules of one component ({quoted(parts)})" if parts else HELP
        mend = f"--component {parts[0]}" if parts else ""
        self._refuse(_lacking(keys, modules), title, hint, *keys, mend=mend)

    def _renamed(self, path: str) -> str:
        """Convert a name in the adapter, after the substitutions, to the name in the base."""
        # The longest prefix applies to a name that the base does not have, such as a new head.
        fitting = (each for each in self.renames if path.startswith(each.old))
        best = max(fitting, key=lambda each: len(each.old), default=Rename("", ""))
        return self.renamed.get(path) or best.new + path.removeprefix(best.old)

    def _place(self, key: str, module: Module) -> bool:
        """Find the tensors that a module changes. Return False if the base lacks these tensors."""
        if any(key in each.modules and each.code != "rank" for each in self.problems):
            return True  # the module already has a problem
        path = self._renamed(self.paths[module.path])
        try:
            place = self._place_experts if module.parameter else self._place_module
            return place(key, module, path)
        except CkptkitError as error:
            self.problems.append(Finding.of(error, key))
            return True

    def _place_module(self, key: str, module: Module, path: str) -> bool:
        config = self.adapter.configs.get(module.component, {})
        component = None if self.adapter.layout == "peft" else module.component
        is_flat = self.adapter.layout == "kohya" and self.paths[module.path] == module.path
        change: ModuleChange | None = None
        shape: Shape = (1, 1)
        of_weight = module.kind in ("ia3", "vera")  # the change depends on the shape of the weight
        if module.kind == "bias":
            shape = module.tensors["diff_b"].shape
        elif module.kind != "tokens" and not of_weight:
            change = change_of(module, config, self.weight)
            shape = change.shape
        found = self.names.find(component, path, shape, underscores=is_flat)
        if not found:
            return False
        name, roles = found[0].tensor, ["B_bias", "diff_b"]
        if module.kind == "tokens":
            self.rows.setdefault(name, []).append(self._tokens(module, self.new[name].shape))
        elif of_weight:
            config = {**config, "fan_in_fan_out": component is None and self._is_conv1d(name)}
            change = change_of(module, config, self.weight, self.new[name].shape)
        if module.kind == "ia3" and not is_feedforward(module, config):
            roles.append("ia3")
        for role in roles:
            if role in module.tensors:
                rows = module.tensors[role].numel
                places = found if rows == shape[0] else (Placed(name, 0, rows, 0, rows),)
                self._bias(key, module, places, role)
        if change is None:
            return True
        if component is None:
            # peft transposes and rounds the update of some weights.
            weight, is_expert = self.new[name].shape, is_fused(name, self.new[name].shape)
            if is_expert or name.endswith("in_proj_weight"):
                change = change._replace(adapt=replace(change.adapt, rounding="twice"))
            turned = change.shape[::-1]
            if is_expert:
                is_turned = self.is_transposed or turned == weight[1:] != change.shape
            else:
                is_turned = turned == weight and module.kind not in ("embedding", "ia3")
                is_turned = is_turned and self._is_conv1d(name)
            change = change.transposed() if is_turned else change
            one, old, now = found[0], shape[0], change.shape[0]
            if one[1:3] == (0, old) and now != old:
                found = (Placed(one.tensor, 0, now, one.at // old * now, one.rows // old * now),)
        for each in found:
            self._check_shape(module, change, each)
            self._add(key, change, each)
        return True

    def _is_conv1d(self, name: str) -> bool:
        """Return whether a weight has the shape [in, out], like Conv1D of transformers.

        peft decides by the class of each module, and stores fan_in_fan_out only for the last
        module. ckptkit decides by the shapes of weights and biases in the base.
        """
        kind, given = _class_of(name), bool(self.options.get("fan_in_fan_out"))
        known, model = self._classes.get(kind, set()), self.config.get("model_type")
        if len(known) == 1:
            return True in known
        if given or kind != "Conv1D":
            return given
        if not model:
            what = f"ckptkit does not know whether {shown(name)} is [in, out] or [out, in]"
            hint = (
                f"set fan_in_fan_out in {CONFIG} to true for [in, out], or add config.json to BASE"
            )
            raise UnsupportedError(what, hint=hint)
        return model in _CONV1D_MODELS

    @cached_property
    def _classes(self) -> dict[str, set[bool]]:
        """Map each result of `_class_of` to the layouts of the weights with this result.

        A layout is True for [in, out], and False for [out, in]. ckptkit finds the layout of a
        weight by the length of its bias. Other weights are ignored.
        """
        found: dict[str, set[bool]] = {}
        for name, tensor in self.old.items():
            bias = self.old.get(f"{name.removesuffix('weight')}bias")
            is_clear = tensor.ndim == len({*tensor.shape}) == 2  # a matrix that is not square
            if is_clear and bias is not None and bias.numel in tensor.shape:
                found.setdefault(_class_of(name), set()).add(bias.numel == tensor.shape[1])
        return found

    def _check_shape(self, module: Module, change: ModuleChange, place: Placed) -> None:
        """Raise UnsupportedError if the shapes of the update and the weight do not match.

        For a fused weight, the update may apply to some of the rows.
        """
        shape = self.new[place.tensor].shape
        rows, columns = as_matrix(shape)
        if is_fused(place.tensor, shape):
            rows, columns = shape[0] * shape[1], shape[2]
        adapt = change.adapt
        fits = (rows, columns) == (place.rows, adapt.columns)
        if change.kernel and len(shape) > 2:
            fits = fits and (change.kernel == shape[2:] or prod(change.kernel) == 1)
        is_part = place.stop - place.start < adapt.rows
        if is_part and adapt.by == "columns" and adapt.norm.startswith("norm"):
            what = f"{shown(module.path)} has a magnitude for each column"
            raise UnsupportedError(f"{what}, but the base stores its rows in several parts")
        if not fits:
            end = module.path.rpartition(".")[2]
            if end in (*EMBEDDINGS, *HEADS) and adapt.columns == columns:
                self.unlike.append((place.tensor, adapt.rows, rows))
            raise _misfit(module, change.shape, shape)

    def _place_experts(self, key: str, module: Module, path: str) -> bool:
        """Find the matrices that a LoRA of all experts changes.

        The LoRA belongs to the parameter that contains the matrices of all experts. Return False if
        the base does not have these matrices.
        """
        a, b = (matrix(module.tensors[role]) for role in "AB")
        rank, (height, width) = module.expected or module.rank or 1, (b.shape[0], a.shape[1])
        experts, name = a.shape[0] // rank, self.names.modules.get(path)
        if name is not None:
            count, *shape = (1, *self.new[name].shape)[-3:]  # a two-dimensional tensor has 1 expert
            if count != experts or len(shape) != 2:
                raise _misfit(module, (height, width), self.new[name].shape)
            rows: list[tuple[tuple[str, int, int], ...]]
            rows = [((name, number * shape[0], shape[0]),) for number in range(experts)]
        elif path in self.names.experts:
            parts = self.names.experts[path]
            if len(parts) != experts or not all(map(all, parts)):
                what = f"{shown(path)} has {experts} experts, but the base has {len(parts)}"
                raise UnsupportedError(what)
            rows = [tuple((one, 0, self.new[one].shape[0]) for one in row) for row in parts]
            shape = [sum(count for *_, count in rows[0]), self.new[parts[0][0]].shape[1]]
        else:
            return False
        is_turned = self._is_turned(module, (height, width), tuple(shape))
        for number, places in enumerate(rows):
            down, right = b.stride  # adjacent columns of B belong to different experts
            own_b = replace(
                box(b, number, number + 1, 1), shape=(height, rank), stride=(down, experts * right)
            )
            own_a = box(a, number * rank, (number + 1) * rank)
            change = change_of(module, self.options, self.weight, A=own_a, B=own_b)
            change = change.transposed() if is_turned else change
            start = 0
            for one, at, count in places:
                self._add(key, change, Placed(one, start, start + count, at, count))
                start += count
        return True

    def _is_turned(self, module: Module, change: tuple[int, int], shape: Shape) -> bool:
        """Return whether the update of each expert is transposed.

        For a square matrix, this depends on the version of peft. See ParamWrapper.get_delta_weight
        in tuners/lora/layer.py of peft 0.18.0, 0.19.0 and 0.19.1.
        """
        is_plain, is_turned = change == shape, change[::-1] == shape
        if not (is_plain or is_turned):
            raise _misfit(module, change, shape)
        if is_plain != is_turned:
            return is_turned
        recorded = str(self.options.get("peft_version") or "")
        version = re.match(r"([0-9]+)\.([0-9]+)\.([0-9]+)", recorded)
        if version is None:
            raise UnsupportedError(
                f"ckptkit does not know whether to transpose the square matrices of "
                f"{shown(module.path)}, because adapter_config.json has no peft_version"
            )
        numbers = tuple(map(int, version.groups()))
        return numbers < (0, 19) or self.is_transposed == (numbers >= (0, 19, 1))

    def _add(self, key: str, change: ModuleChange, place: Placed) -> None:
        name, tensor = place.tensor, self.new[place.tensor]
        if tensor.dtype.name not in FLOATS or tensor.storage is None:
            raise UnsupportedError(
                f"{shown(name)} of the base has the dtype {tensor.dtype}; ckptkit can add an "
                "adapter only to floating-point weights"
            )
        self.pieces.setdefault(name, []).append((key, change, place))

    def _bias(self, key: str, module: Module, places: Sequence[Placed], role: str) -> None:
        """Record the update of the biases of the module whose weights are at `places`."""
        change = change_of_bias(module, role, self.weight)
        for place in places:
            bias = place.tensor.removesuffix("weight") + "bias"
            if bias == place.tensor or bias not in self.new:
                if role != "ia3":
                    what = f"changes the bias of {shown(module.path)}, which has no bias"
                    raise UnsupportedError(f"{what} in the base")
                return
            if place.rows != self.new[bias].numel:
                raise _misfit(module, change.shape[:1], self.new[bias].shape)
            self._add(key, change, place._replace(tensor=bias))

    def _tokens(self, module: Module, shape: Shape) -> tuple[Tensor, list[int]]:
        """Return the trained token embeddings, and the indices of the rows to replace."""
        named = self.options.get("trainable_token_indices", self.options.get("token_indices"))
        if isinstance(named, dict):
            own = [named[key] for key in named if module.path.endswith(str(key))]
            named = next(iter(own or (named.values() if len(named) == 1 else ())), None)
        count = module.tensors["tokens"].shape[0]
        if not isinstance(named, list) or len(named) != count:
            what = f"{shown(module.path)} has {plural(count, 'trained token')}, but "
            raise UnsupportedError(f"{what}adapter_config.json lists another number of tokens")
        rows, columns = as_matrix(shape)
        numbers, found = [int(each) for each in named], module.tensors["tokens"].shape
        if found != (count, columns) or not all(0 <= each < rows for each in numbers):
            there = f"cannot replace rows {quoted(map(str, numbers))} of {shape_text(shape)}"
            what = f"trained tokens of shape {shape_text(found)} {there}"
            raise UnsupportedError(what, code="shape")
        return module.tensors["tokens"], numbers

    def _find_twice(self) -> None:
        """Add a problem if two modules of the adapter change the same rows of a tensor."""
        for name, pieces in self.pieces.items():
            spans = sorted(
                (place.at, place.at + place.stop - place.start, key) for key, _, place in pieces
            )
            for (_, stop, one), (start, _, other) in pairwise(spans):
                if start < stop:
                    title = f"{shown(one)} and {shown(other)} would both change {shown(name)}"
                    self._refuse("module", title, HELP, one, other)
                    break

    # Complete tensors in the adapter, and tied tensors

    def _replace(self, own: str) -> None:
        """Replace a tensor of the base by a complete tensor of the adapter."""
        tensor, name = self.adapter.replaced[own], self._renamed(self.whole[own])
        old = self.new.get(name)
        target = old.dtype if old is not None else tensor.dtype
        if old is None and tensor.dtype.name in FLOATS:
            target = BY_NAME[of_weights(self.base) or tensor.dtype.name]
        made = _cast(tensor, target)
        # peft stores copies of embeddings and heads. If an earlier adapter changed a tensor, a copy
        # of the unchanged tensor must not undo this change.
        known = [each for each in (old, self.origin.get(name)) if each is not None]
        if any(same_bytes(made, each) for each in known):
            return
        if self.weight != 1:
            raise self._unweighted(own, "the adapter contains the complete tensor")
        if old is not None and made.shape != old.shape:
            if not self._fits(own, name, made, old):
                there = f"{shape_text(old.shape)} in the base"
                what = f"{shown(own)} has shape {shape_text(made.shape)}, but {there}"
                self._refuse("shape", what, HELP, own)
                return
            if made.ndim == 2:
                self.unlike.append((own, made.shape[0], old.shape[0]))
            if end_of(name) in (*EMBEDDINGS, *HEADS):
                self._configure("vocab_size", made.shape[0])
        if made.ndim == 2 and _LABELS.fullmatch(name) and (old is None or old.shape != made.shape):
            # Remove the names of the labels, because the adapter has no names for new labels.
            labels, count = self.config.get("id2label"), made.shape[0]
            before = len(labels) if isinstance(labels, dict) else self.config.get("num_labels", 2)
            if count != before:
                words = ("id2label", "label2id")
                self.new_config |= {word: None for word in words if word in self.config}
                self.new_config["num_labels"] = count
        if old is None:
            self.notes.append(f"added {shown(name)}, which the base does not have")
        self.new[name] = made
        self.replaced += 1

    def _fits(self, own: str, name: str, made: Tensor, old: Tensor) -> bool:
        """Return whether a complete tensor may replace a tensor with another number of rows.

        The weight and the bias of a module must have the same number of rows after the merge.
        """
        module, _, end = own.rpartition(".")
        other = {"weight": "bias", "bias": "weight"}.get(end, "")
        there = self.new.get(f"{name.removesuffix(end)}{other}")
        mate = self.adapter.replaced.get(f"{module}.{other}", there)
        is_bias = end == "bias" and made.ndim == old.ndim == 1 and mate is not None
        is_matrix = made.ndim == 2 and made.shape[1:] == old.shape[1:]
        return (is_matrix or is_bias) and (mate is None or mate.shape[:1] == made.shape[:1])

    def _configure(self, word: str, value: object) -> None:
        """Change a value of config.json where it is: at the top, in text_config, or in both."""
        for place, new in changes_of(self.config, word, value).items():
            known = self.new_config.get(place)
            self.new_config[place] = {**known, **new} if isinstance(known, dict) else new

    def _whole(self, own: str) -> str:
        """Return the name that a complete tensor of the adapter has after the substitutions."""
        module, dot, end = own.rpartition(".")
        name = f"{self.paths[module]}{dot}{end}" if dot else self.paths[own]
        if name in self.new or own in self.new:
            return name if name in self.new else own
        return self.names.in_files(name)[0]

    def _tied_pair(self, paths: set[str]) -> tuple[str, str] | None:
        """Return the names of a tied embedding and head.

        Return None if the two are not tied, or if the adapter changes neither of the two. If the
        base has no head, create a head as a copy of the embedding, under its name in transformers.
        """
        ends = {name: end_of(name) for name in self.new}
        given = (part.get("tie_word_embeddings") for part in self.parts)
        setting = next((each for each in given if each is not None), None)
        embedding = next((name for name, end in ends.items() if end in EMBEDDINGS), None)
        if embedding is None or setting is False:
            return None
        heads = (n for n, end in ends.items() if end in HEADS and n.endswith(".weight"))
        beside = (head for near, head in BESIDE_HEAD.items() if f"{near}.weight" in self.new)
        model = _MODEL.match(embedding)  # the head and the matched module have the same parent
        default = next(beside, f"{model[1] if model else ''}lm_head") + ".weight"
        head = next((name for name in heads if "." in name), default)
        # Some heads have the name lm_head in memory, but another name in files.
        pair = {ends[embedding]: embedding, end_of(head): head, "lm_head": head}
        changed = {pair.get(end_of(path)) for path in paths}
        if not changed & {embedding, head}:
            return None
        one, two = self.new[embedding], self.new.get(head)
        if two is None:
            if head in changed:
                self.new[head] = _copy(one)
            elif _HEADLESS.fullmatch(str(*(self.config.get("architectures") or ())[:1])):
                return None
        elif one.storage is not two.storage and not (setting and same_bytes(one, two)):
            return None
        return embedding, head

    def _tie(self) -> None:
        """Handle a tied embedding and head according to the argument `tied`."""
        if self.pair is None:
            return
        embedding, head = self.pair
        is_ensured = bool(self.options.get("ensure_weight_tying"))
        changed = [name for name in self.pair if name in self.pieces]
        whole = [name for name in self.pair if self.new.get(name) is not self.untouched.get(name)]
        if is_ensured and len(changed) == 2:  # the same update under both names
            self.pieces.pop(head)
        elif changed and self.tied != "untie":
            if self.tied is None:
                untie, keep = (typed(f"--tied {e}", f"tied={e!r}") for e in ("untie", "keep"))
                what = f"changes {quoted(changed)}, and {embedding} and {head} are tied"
                hint = f"{untie} creates a separate head, like training; {keep} changes both"
                self._refuse("tied", f"{what} to one matrix", hint, mend="--tied untie")
            # The update of the embedding is added first, and the update of the head second.
            of_head = self.pieces.pop(head, [])
            if self.pieces.setdefault(embedding, of_head) is not of_head:
                self.later = of_head
        elif (
            changed
            or len(whole) == 1
            or (whole and not same_bytes(self.new[embedding], self.new[head]))
        ):
            if head not in self.new or self.new[head].storage is self.new[embedding].storage:
                self.new[head] = _copy(self.untouched[embedding])
            self.is_untied, self.new_config["tie_word_embeddings"] = True, False
            self._configure("tie_word_embeddings", False)
            self.notes.append(f"untied {head} from {embedding}")
            one, two = (self.new[name].shape[0] for name in self.pair)
            if one != two:
                keys = ("--keys", embedding, *(("--keys", head) if head in self.old else ()))
                place = self.base.folder.name if self.base.folder else self.base.name
                name, most = place or "BASE", str(max(one, two))
                words = "ckptkit", "resize", *keys, "--rows", most, name, output_name(name, "new")
                what = f"{embedding} would have {one:,} rows, but {head} would have {two:,}"
                self._refuse("shape", what, f"`{shell_command(words)}` makes a base that fits")
        elif head in self.rows:
            self.rows[embedding] = self.rows.pop(head)

    def _replicate(self, ranges: object) -> None:
        """Repeat layers of the base. New layer N is a copy of old layer `order[N]`.

        If the base has several stacks of layers, peft repeats the stack with a name in `_STACK`.
        """
        stacks: dict[str, dict[int, list[tuple[str, Tensor]]]] = {}
        for name, tensor in self.old.items():
            if found := _LAYER.fullmatch(name):
                stack = stacks.setdefault(found[1], {})
                stack.setdefault(int(found[2]), []).append((found[3], tensor))
        stems = [each for each in stacks if len(stacks) == 1 or _STACK.fullmatch(each)]
        layers = stacks[stems[0]] if len(stems) == 1 else {}
        spans = ranges if isinstance(ranges, list) else []
        is_sound = [
            isinstance(each, list) and [*map(type, each)] == [int, int]
            and 0 <= each[0] < each[1] <= len(layers)
            for each in spans
        ]  # fmt: skip
        if not (spans and all(is_sound)) or {*layers} != {*range(len(layers))}:
            title = f"layer_replication {shown(ranges)} does not match the layers of the base"
            if len(stacks) > 1:
                title += f", which has several stacks of layers: {quoted(sorted(stacks)[:4])}"
            return self._refuse("method", title)
        stem, order = stems[0], [number for each in spans for number in range(*each)]
        own = re.compile(rf"{re.escape(stem)}\.[0-9]")
        made = {name: each for name, each in self.old.items() if not own.match(name)}
        for number, old in enumerate(order):
            made |= {f"{stem}.{number}{end}": _copy(tensor) for end, tensor in layers[old]}
        words = [word for word in _COUNTS for part in self.parts if word in part]
        if words:
            self._configure(words[0], len(order))
        else:
            self.new_config[_COUNTS[0]] = len(order)
        for part in self.parts:
            types = part.get("layer_types")
            if isinstance(types, list) and len(types) == len(layers):
                self._configure("layer_types", [types[number] for number in order])
        self.new = made
        return None

    # The result

    def changed(self, name: str, origin: Tensor | None = None) -> Tensor:
        """Return a tensor of the base after adding the updates.

        `origin` is the tensor before any adapter was merged.
        """
        made = _changed(self.new[name], self.pieces[name], origin)
        later = self.later if self.pair and name == self.pair[0] else []
        return _changed(made, later, origin) if later else made

    def merged(self) -> Checkpoint:
        """Return the base with the adapter merged."""
        base, adapter, new = self.base, self.adapter, dict(self.new)
        new |= {name: self.changed(name, self.origin.get(name)) for name in self.pieces}
        for name, replaced in self.rows.items():
            for tensor, numbers in replaced:
                own = _cast(tensor, new[name].dtype)
                rows = {n: box(own, place, place + 1) for place, n in enumerate(numbers)}
                parts = ((number, 0, row) for number, row in rows.items())
                new[name] = _like(new[name], placed(new[name], parts))
        if self.pair is not None and not self.is_untied:
            embedding, head = self.pair
            if head not in self.old:
                new.pop(head, None)
            elif new[embedding] is not self.old.get(embedding):
                is_shared = self.old[head].storage is self.old[embedding].storage
                new[head] = new[embedding] if is_shared else _copy(new[embedding])
        weights = base.required
        assert isinstance(weights.node, dict)
        kept = {k: node for k, node in weights.node.items() if k not in self.old or k in new}
        changed = {name: each for name, each in new.items() if each is not self.old.get(name)}
        mapping = like(weights.node, {**kept, **changed})
        ranks = f" (rank {', '.join(map(str, adapter.ranks))})" if adapter.ranks else ""
        note = f"merged {plural(len(adapter.modules), 'module')} of {adapter.path}{ranks}"
        note += f", replaced {plural(self.replaced, 'tensor')}" if self.replaced else ""
        rest = sum(name in self.old and name not in changed for name in new)
        merged = Notice(
            ADAPTER, f"{note}, {rest} unchanged", adapter=adapter.path, ranks=adapter.ranks,
            modules=len(adapter.modules), replaced=self.replaced, unchanged=rest,
        )  # fmt: skip
        notes = [merged, *self.notes]
        if adapter.ignored:
            notes.append(f"ignored {quoted(adapter.ignored)}")
        if adapter.base and os.path.basename(adapter.base.rstrip("/")) not in (base.name or ""):
            notes.append(f"the adapter was trained on {adapter.base}")
        folder = folder_of(adapter.checkpoint) if adapter.config is not None else None
        with suppress(CkptkitError):  # HTTP servers do not list the files of a folder
            names = [] if folder is None else folder.list()
            names = [n for n in names if "token" in n and n.endswith((".json", ".model"))]
            if names:
                notes.append(f"did not copy the tokenizer files of the adapter: {quoted(names)}")
        root = rebuild(base.root, swap={id(weights.node): mapping})
        return with_changes(
            base.with_root(root, notes=notes, warnings=self.warnings), self.new_config
        )


def _lacking(found: Collection[str], modules: Collection[str]) -> str:
    """Return the problem code for the modules `found` of the adapter, which the base lacks."""
    return "no-module" if len(found) == len(modules) else "module"


def _class_of(name: str) -> str:
    """Return the last component of a module name, or ``Conv1D`` for the modules in `_CONV1D`."""
    return "Conv1D" if end_of(name) in _CONV1D else end_of(name)


def _misfit(module: Module, change: tuple[int, ...], weight: Shape) -> UnsupportedError:
    there = f"the weight in the base has shape {shape_text(weight)}"
    what = f"the change of {shown(module.path)} has shape {shape_text(change)}, but {there}"
    return UnsupportedError(what, code="shape")


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy of the tensor in a new storage."""
    assert tensor.storage is not None
    return tensor.over(replace(tensor.storage))


def _cast(tensor: Tensor, dtype: DType) -> Tensor:
    record = contiguous(tensor)
    if tensor.dtype != dtype:
        record = cast_record(record, tensor.dtype, dtype, big_endian=False)
    return made_of(record, dtype, tensor.shape)


def _changed(tensor: Tensor, pieces: Sequence[_Piece], origin: Tensor | None) -> Tensor:
    """Return a tensor after adding the updates in `pieces`. No two pieces change the same row."""
    columns = pieces[0][1].shape[1]
    sizes = prod(tensor.shape) // max(columns, 1), columns
    old = matrix(origin, sizes) if origin is not None and origin.shape == tensor.shape else None
    whole, parts = matrix(tensor, sizes), list[tuple[int, int, Tensor]]()
    for _, change, (_, start, stop, at, _) in pieces:
        rows = at, at + stop - start
        is_from_old = old is not None and "norm" in change.adapt.norm
        before = box(old, *rows) if old is not None and is_from_old else None
        parts.append((at, 0, change.added(box(whole, *rows), start, before)))
    return _like(tensor, placed(whole, parts))


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    """Return a contiguous tensor with the elements of `values` and the attributes of `tensor`."""
    made = made_of(contiguous(values), tensor.dtype, tensor.shape)
    storage = Storage(contiguous(values), tensor.device)
    return replace(made, storage=storage, requires_grad=tensor.requires_grad, kind=tensor.kind)
