"""Find problems of an adapter, and problems of merging the adapter into a base.

`lora check` and `doctor` show the findings. This module reads the headers of the adapter and of the
base, and the elements of the adapter. It also reads the weights that the adapter changes, to
compute their norms. The norm of an update of plain LoRA follows from its factors. For all other
kinds, this module computes the update.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import hypot, sqrt
from typing import Any

from ckptkit.compute.compare import compare
from ckptkit.compute.numbers import FLOATS
from ckptkit.compute.tallies import nonfinite, parts, tally, zeros
from ckptkit.core.arguments import checked
from ckptkit.core.checkpoint import Source, opened
from ckptkit.core.errors import UsageError
from ckptkit.core.text import argument, output_name, quoted, shell_command, some
from ckptkit.edits.keys import substituted
from ckptkit.lora.changes import BASE, ERROR, WARNING, Finding, problems
from ckptkit.lora.merge import MergePlan, refuse_base
from ckptkit.lora.reading import Adapter, Module, read_adapter

TARGETS = ("vllm",)
_NO_FACTORS = "alpha", "magnitude", "B_bias", "diff_b", "ia3", "tokens"
_VLLM_RANK = 16  # default of the vLLM option --max-lora-rank


@dataclass(frozen=True, slots=True)
class LoraReport:
    """An adapter and the findings about it, errors first."""

    adapter: Adapter
    findings: tuple[Finding, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the object of ``lora check --json``, without its schema."""
        facts, names = self.adapter.as_json(), Finding._fields[:-1]  # without `mend`
        facts = {name: facts[name] for name in ("layout", "method", "modules", "ranks")}
        findings = [dict(zip(names, finding, strict=False)) for finding in self.findings]
        return {"adapter": facts, "findings": findings}


@checked
def check_lora(
    adapter: Source,
    *,
    base: Source | None = None,
    target: str | None = None,
    component: str | None = None,
) -> LoraReport:
    """Return the problems of an adapter.

    If `base` is given, ckptkit also compares the adapter with the base. If `target` is ``vllm``,
    ckptkit also checks whether vLLM can load the adapter. `component` selects one component of a
    pipeline. Raises UsageError if the file is not an adapter.
    """
    if target not in (None, *TARGETS):
        raise UsageError(f"target {target!r} is not one of {quoted(TARGETS)}")
    read = read_adapter(adapter, component=component)
    where = os.fspath(adapter) if isinstance(adapter, (str, os.PathLike)) else read.path
    under = None if base is None else opened(base)
    name = os.fspath(base) if isinstance(base, (str, os.PathLike)) else under and under.name
    mends: dict[tuple[str, ...], None] = {}  # options that solve the problems in the plan

    def command(*words: str) -> str | None:
        """Return a `lora merge` command with the options `words`.

        If `words` begins with ``convert``, return a `convert` command for the base instead. If the
        base is not a file, return None.
        """
        if not name:
            return None
        if words[:1] == ("convert",):
            names = (*argument(name), output_name(name, "new"))
            return shell_command(("ckptkit", "convert", *names, *words[1:]))
        names = (*argument(name), *argument(where), output_name(name, "merged"))
        given = [word for each in {words: None} | mends for word in each]
        return shell_command(("ckptkit", "lora", "merge", *given, *names))

    if under is None:
        found = [*alone(read)]
    else:
        refuse_base(under)
        plan = MergePlan(under.require_complete(), read)
        mends = dict.fromkeys(each.mend for each in plan.problems)
        found = [*_of(plan.problems, command), *_of_elements(read)]
        found += _of_plan(plan, command, all(each.code != "nonfinite" for each in found))
        if under is not base:
            under.close()
    if target is not None:
        words = ("ckptkit", "lora", "convert", "--to", "peft", *argument(where))
        convert = shell_command((*words, output_name(where, "peft", "")))
        found += _for_vllm(read, command(), convert)
    return LoraReport(read, tuple(sorted(found, key=lambda each: each.level != ERROR)))


def alone(read: Adapter) -> Iterator[Finding]:
    """Yield the problems of an adapter that are visible without a base."""
    yield from _of(problems(read), lambda *words: None)
    yield from _of_elements(read)


def _of(found: Iterable[Finding], command: Callable[..., str | None]) -> Iterator[Finding]:
    """Yield each problem, with the command that solves the problem.

    Equal problems of several modules become one finding.
    """
    kinds: dict[str, list[Finding]] = {}
    for each in found:
        kinds.setdefault(each.code if each.modules else each.title, []).append(each)
    for first, *others in kinds.values():
        title = f"{first.title}, and {len(others):,} more" if others else first.title
        modules = tuple(dict.fromkeys(name for each in (first, *others) for name in each.modules))
        is_quantized = first.code == "quantized"
        words = ("convert", "--dequantize", "bfloat16") if is_quantized else first.mend
        mends = command(*words) if words else None
        yield first._replace(title=title, modules=modules, command=mends)


def _of_elements(read: Adapter) -> Iterator[Finding]:
    """Yield findings about NaN, infinity and zeros in an adapter."""
    odd, empty = [], []
    for key, module in read.modules.items():
        floats = {r: each for r, each in module.tensors.items() if each.dtype.name in FLOATS}
        factors = [each for role, each in floats.items() if role not in _NO_FACTORS and each.numel]
        if any(any(nonfinite(each)) for each in floats.values()):
            odd.append(key)
        ones = module.tensors["ia3"].numpy() == 1 if module.kind == "ia3" else None
        if any(zeros(each) == each.numel for each in factors) or (ones is not None and ones.all()):
            empty.append(key)
    if odd:
        title = f"contains NaN or infinity in {quoted(odd)}"
        hint = "use an earlier checkpoint of the training run"
        yield Finding("nonfinite", ERROR, title, tuple(odd), None, hint)
    if empty and len(empty) == len(read.modules):
        title = "every change is zero: the adapter was not trained, or the wrong object was saved"
        hint = "save the trained object: model.save_pretrained(FOLDER) of the peft model"
        yield Finding("zero", WARNING, title, tuple(empty), None, hint)


def _of_plan(
    plan: MergePlan, command: Callable[..., str | None], is_finite: bool
) -> Iterator[Finding]:
    """Yield the findings that do not prevent merging the adapter into its base."""
    renames = plan.renames
    if renames and not any(each.code in ("no-module", "module") for each in plan.problems):
        said = some(map(str, renames))
        title = f"the base has all modules, but only after a rename: {said}"
        subs = [word for pair in _subs(plan) for word in ("--sub", "=".join(pair))]
        modules = tuple(plan.renamed)
        yield Finding("prefix", ERROR, title, modules, command(*subs), None)
    large, all_modules = dict[str, str](), plan.adapter.modules
    tensors: dict[str, set[str]] = {}  # of each module
    for tensor, pieces in plan.pieces.items():
        for key, *_ in pieces:
            tensors.setdefault(key, set()).add(tensor)
    for key, names in tensors.items():
        blocks = (part for name in names for part in parts(plan.new[name]))
        change, weight = _norm(all_modules[key]), hypot(*(tally(each).norm for each in blocks))
        if change is None and is_finite:
            found = (compare(plan.new[n], plan.changed(n), measured=True) for n in names)
            change = hypot(*(each.distance or 0.0 for each in found if each is not None))
        if change and change > weight > 0:
            large[key] = f"{key} ({change:.3g} of {weight:.3g})"
    if large:
        title = f"the norm of the change exceeds the norm of the weight in {some(large.values())}"
        hint = "compare lora_alpha with the value used in training, or merge with a smaller weight"
        hint = hint if all(all_modules[key].is_sum for key in large) else BASE
        yield Finding("norm", WARNING, title, tuple(large), None, hint)
    if plan.is_untied and plan.pair:
        title = f"the merge unties {plan.pair[1]} from {plan.pair[0]}"
        yield Finding("tied", WARNING, title, plan.pair, command(), None)
    for name, rows, old in plan.unlike:
        title = f"{name} has {rows:,} rows in the adapter, but {old:,} in the base"
        hint = "if the adapter has a larger vocabulary, use the tokenizer of the adapter"
        yield Finding("vocab", WARNING, title, (name,), None, hint)


def _subs(plan: MergePlan) -> list[tuple[str, str]]:
    """Return the substitutions for the renames of a merge.

    `lora merge` applies all substitutions to each name. A pattern therefore must not match names
    with a longer prefix, or names that an earlier substitution made. If the substitutions still
    differ from the renames, return [], because `lora merge` without substitutions finds the renames
    itself.
    """
    for sign in (-1, 1):  # the longest prefix first, or the shortest prefix first
        made, done = list[tuple[str, str]](), [each.old for each in plan.renames]
        for old, new in sorted(plan.renames, key=lambda each: sign * len(each.old)):
            taken = [re.escape(each) for each in done if each.startswith(old) and each != old]
            other = f"(?!{'|'.join(taken)})" if taken else ""
            made.append((f"^{other}{re.escape(old)}", new))
            done.append(new)
        names, unused = substituted(plan.renamed, made)
        if not unused and names == plan.renamed:
            return made
    return []


def _norm(module: Module) -> float | None:
    """Return the Frobenius norm of the update ``s B A``.

    Return None for other kinds of updates, because their norm requires the complete update.
    """
    is_plain = module.kind in ("lora", "embedding") and not (module.is_dora or module.parameter)
    if not is_plain or module.scale is None:
        return None
    a, b = (module.tensors[role].numpy().astype("f8") for role in module.pair)
    a, b = a.reshape(a.shape[0], -1), b.reshape(b.shape[0], -1)
    if len(a) != b.shape[1]:  # block-diagonal
        return None
    return abs(module.scale) * sqrt(max(0.0, float(((b.T @ b) * (a @ a.T)).sum())))


def _for_vllm(read: Adapter, merge: str | None, convert: str) -> Iterator[Finding]:
    """Yield findings about properties of an adapter that vLLM rejects or ignores.

    vLLM reads the rank and the alpha only from the fields r and lora_alpha. See
    vllm/lora/peft_helper.py and lora_model.py.
    """
    config = read.config or {}
    if read.layout != "peft" or read.config is None:
        title = f"vLLM loads only peft folders with a configuration, not the layout {read.layout}"
        yield Finding("vllm-layout", ERROR, title, (), convert, None)
        return
    patterns = [name for name in ("rank_pattern", "alpha_pattern") if config.get(name)]
    dora = tuple(key for key, each in read.modules.items() if each.is_dora)
    biases = tuple(key for key, each in read.modules.items() if "B_bias" in each.tensors)
    rows = (
        ("vllm-method", read.method != "LORA", f"does not load {read.method}", ()),
        ("vllm-dora", config.get("use_dora") or dora, "does not load DoRA", dora),
        ("vllm-modules-to-save", config.get("modules_to_save"), "does not load modules_to_save",
         tuple(read.replaced)),
        ("vllm-bias", config.get("bias", "none") != "none" or biases, "does not load biases",
         biases),
        ("vllm-pattern", patterns, f"ignores {some(patterns)}, so some scales would be wrong", ()),
    )  # fmt: skip
    into = "merge the adapter into its base, and load the result in vLLM"
    for code, applies, why, modules in rows:
        if applies:
            yield Finding(code, ERROR, f"vLLM {why}", modules, merge, into)
    recorded = config.get("r")
    rank = max([*read.ranks, recorded if isinstance(recorded, int) else 0], default=0)
    if rank > _VLLM_RANK:
        title = f"vLLM loads ranks up to {_VLLM_RANK} by default, but this adapter has rank {rank}"
        yield Finding("vllm-rank", WARNING, title, (), f"vllm serve --max-lora-rank {rank}", None)
