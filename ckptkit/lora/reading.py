"""Read the headers of adapters, which are folders of peft or files of kohya, diffusers and ComfyUI.

ckptkit recognizes the layout by the tensor names and the configuration of peft. Most tensors have a
role in a module, such as ``A`` or ``alpha``. `tables.toml` lists the roles. Some tensors replace a
tensor of the base, and some are not used. All other tensors are unknown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, TypeAlias

from ckptkit.api import open_checkpoint
from ckptkit.core import arguments
from ckptkit.core.bytesource import ByteSource, Folder, small_file_beside
from ckptkit.core.checkpoint import Checkpoint, Source, opened
from ckptkit.core.errors import CkptkitError, CorruptError, UnsupportedError, UsageError
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import quoted, shell_word, shown, typed, without_query
from ckptkit.formats import strict_json
from ckptkit.formats.format import open_place

CONFIG, WEIGHTS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
METADATA = "lora_adapter_metadata"  # metadata key of diffusers in a safetensors file
WRAPPERS = ("module.", "_orig_mod.", "base_model.model.")
_LIKELY = re.compile("lora|hada_|lokr_|ia3_l|vera_|tokens_delta")  # fast first check
_WEAK = {"alpha", "diff", "diff_b"}  # roles whose names are common in models
_METHODS = {"adalora": "ADALORA", "loha": "LOHA", "lokr": "LOKR", "ia3": "IA3"}
_RANKS = ("A", "embedding_A", "hada_w1_b", "lokr_w1_b", "lokr_w2_b")  # [rank, ...]
_WORDS = {list: "a list", dict: "an object", str: "a string", bool: "a boolean"}
_LONGEST = 4096  # maximum number of characters of a pattern
_GROUP, _REPEAT = re.compile(r"\(([^()]*)\)"), re.compile("[*+{\0]")
# Parameters of experts, in the order in which models define them. peft wraps the parameters in this
# order.
_EXPERTS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")

Formula: TypeAlias = str | list[Any]  # a role, or an operation and its two operands


@cache
def table(name: str) -> Mapping[str, Any]:
    """Return a table of `tables.toml`."""
    import tomllib  # imported here because only adapters need tomllib

    text = Path(__file__).with_name("tables.toml").read_text("utf-8")
    found: Mapping[str, Any] = tomllib.loads(text)[name]
    return found


@cache
def expression(name: str) -> re.Pattern[str]:
    """Return a regular expression of `tables.toml`."""
    return re.compile(table("patterns")[name])


@cache
def _roles(is_named: bool) -> re.Pattern[str]:
    """Return an expression that matches the end of a name. The name of its group is the role."""
    name = r"\.(?!weight$|bias$)[^.]+" if is_named else ""
    ways = [f"(?P<{role}>{text})" for role, text in table("roles").items()]
    return re.compile(f"(?:{'|'.join(ways)})$".replace("(NAME)", f"(?:{name})?"))


def roles_of(formula: Formula) -> list[str]:
    """Return the roles in a formula of an update."""
    if isinstance(formula, str):
        return [formula.rstrip("'")]
    return [role for operand in formula[1:] for role in roles_of(operand)]


def kind_and_formula(roles: Collection[str]) -> tuple[str, Formula]:
    """Return the kind of a module with these roles, and the formula of its update.

    If tensors are missing, return two empty strings.
    """
    ways = ((kind, each) for kind, formulas in table("kinds").items() for each in formulas)
    return next((way for way in ways if {*roles_of(way[1])} <= {*roles}), ("", ""))


@dataclass(frozen=True, slots=True)
class Module:
    """The tensors of an adapter for one module of the base.

    ``path`` is the name of the module in the file, without ``prefix`` (such as ``unet.``). If
    ``parameter`` is True, the module changes a parameter of experts, and ``path`` ends in the name
    of the parameter. ``kind`` is a key of the table ``kinds`` in `tables.toml`, or
    ``attention_out``. ``formula`` is the formula of the update. If tensors are missing, ``kind``
    and ``formula`` are "".

    The update is multiplied by ``scale``, and for AdaLoRA divided by ``divisor``. If the adapter
    does not contain a scale, ``scale`` is None. ``expected`` is the rank in the configuration, None
    without a configuration.
    """

    prefix: str
    component: str
    path: str
    kind: str
    tensors: Mapping[str, Tensor]
    rank: int | None = None
    alpha: float | None = None
    scale: float | None = None
    divisor: float | None = None
    expected: int | None = None
    parameter: bool = False
    formula: Formula = ""

    @property
    def is_dora(self) -> bool:
        return "magnitude" in self.tensors

    @property
    def is_lycoris(self) -> bool:
        """Return whether the layout is that of kohya or ComfyUI, which LyCORIS also writes."""
        return any(self.prefix in table("prefixes")[layout] for layout in ("kohya", "comfy"))

    @property
    def is_sum(self) -> bool:
        """Return whether the update is added to the weight. A factor can scale only a sum."""
        return not self.is_dora and self.kind not in ("ia3", "tokens")

    @property
    def pair(self) -> tuple[str, str]:
        """Return the roles of the two LoRA matrices."""
        return ("embedding_A", "embedding_B") if self.kind == "embedding" else ("A", "B")


@dataclass(frozen=True, slots=True)
class Adapter:
    """The content of an adapter.

    ``modules`` maps the name of each module in the file to its tensors. ``replaced`` maps names in
    the base to complete tensors. ``ignored`` lists unused tensors. ``unknown`` lists
    tensors that ckptkit does not recognize. ``configs`` maps each component of a pipeline to its
    configuration. The configuration of peft has the key "". ``metadata`` is the other metadata.
    """

    path: str
    layout: str
    method: str
    configs: Mapping[str, Mapping[str, Any]]
    modules: Mapping[str, Module]
    replaced: Mapping[str, Tensor]
    ignored: tuple[str, ...]
    unknown: tuple[str, ...]
    metadata: Mapping[str, str]
    checkpoint: Checkpoint

    @property
    def config(self) -> Mapping[str, Any] | None:
        """Return the configuration of peft. Return None if it is missing."""
        return self.configs.get("")

    @property
    def ranks(self) -> list[int]:
        """Return the different ranks of the modules in ascending order."""
        return sorted({each.rank for each in self.modules.values() if each.rank is not None})

    @property
    def components(self) -> list[str]:
        """Return the pipeline components that the adapter changes, in the order of the file."""
        return list(dict.fromkeys(each.component for each in self.modules.values()))

    @property
    def base(self) -> str | None:
        """Return the name of the base model in the configuration."""
        name = (self.config or {}).get("base_model_name_or_path")
        return name if isinstance(name, str) and name else None

    @property
    def targets(self) -> list[str]:
        """Return the last components of the module names, such as ``q_proj``, sorted."""
        paths = (each.path for each in self.modules.values())
        dotted = (p if "." in p else re.sub(r"_(\d+)(_|$)", r".\1.", p).strip(".") for p in paths)
        return sorted({re.sub(r"^.*\.(?=[^.]*[^.\d])", "", path) for path in dotted})

    def as_json(self) -> dict[str, Any]:
        """Return the object ADAPTER of the JSON schema of `inspect`."""
        alphas = {each.alpha for each in self.modules.values() if each.alpha is not None}
        return {
            "layout": self.layout, "method": self.method, "modules": len(self.modules),
            "ranks": self.ranks, "alphas": sorted(alphas), "targets": self.targets,
            "base_model": self.base,
        }  # fmt: skip

    @property
    def facts(self) -> dict[str, str]:
        """Return the facts about the adapter that one line of output shows."""
        known = self.as_json()
        facts = {
            "layout": self.layout, "method": self.method, "modules": f"{len(self.modules):,}",
            "rank": ", ".join(map(str, self.ranks)), "base model": self.base or "",
            "alpha": ", ".join(f"{alpha:g}" for alpha in known["alphas"]),
            "targets": ", ".join(self.targets),
        }  # fmt: skip
        return {name: text for name, text in facts.items() if text}

    def __repr__(self) -> str:
        return f"<Adapter {self.path}: {self.layout}, {self.method}, {len(self.modules)} modules>"


def is_adapter(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is an adapter.

    The criteria are the tensor names and the peft configuration. A checkpoint that contains an
    adapter and the base weights is not an adapter.
    """
    try:
        names = checkpoint.required.nodes
    except CkptkitError:
        return False
    source = checkpoint.source
    file = os.path.basename(without_query(source.name)) if isinstance(source, ByteSource) else ""
    if file.startswith("adapter_") and _config(checkpoint) is not None:
        return True
    roles: dict[str, set[str]] = {}
    for name in names:
        found = _role(name) if _LIKELY.search(name) else None
        if found is not None:
            roles.setdefault(found[0], set()).add(found[1])
    ends = (".weight", ".base_layer.weight")
    for path, own in roles.items():
        if own - _WEAK and (len(own) > 1 or kind_and_formula(own)[0]):
            return not any(f"{path}{end}" in names for end in ends)
    return False


def adapter_of(checkpoint: Checkpoint) -> Adapter | None:
    """Return the adapter in a checkpoint.

    Return None if the checkpoint is not an adapter, or if the adapter cannot be read.
    """
    try:
        return _read(checkpoint, None) if is_adapter(checkpoint) else None
    except CkptkitError:
        return None


def read_adapter(
    path: Source, *, component: str | None = None, alpha: float | None = None
) -> Adapter:
    """Read the headers and alphas of an adapter. The adapter is a folder of peft or a file.

    `component` selects the modules of one component of a pipeline. `alpha` sets the alpha of an
    adapter that contains no scale.

    Raises UsageError if the file is not an adapter, if the folder contains several adapters, if no
    module belongs to `component`, or if `alpha` is given for an adapter that contains a scale.
    """
    is_path = isinstance(path, (str, os.PathLike))
    checkpoint = _opened(arguments.path("adapters", path)) if is_path else opened(path)
    try:
        made = _read(checkpoint, alpha)
        if component is None:
            return made
        kept = {key: each for key, each in made.modules.items() if each.component == component}
        if not kept:
            names = [each for each in made.components if each]
            known = f"use one of {quoted(names)}" if names else "omit the option"
            raise UsageError(f"has no component {component!r}", hint=known)
        return replace(made, modules=kept)
    except CkptkitError as error:
        raise error.at(checkpoint.name or "the adapter") from error.__cause__


def _opened(path: str | os.PathLike[str]) -> Checkpoint:
    place = open_place(path)
    if isinstance(place, Folder) and not any(name in place for name in (CONFIG, *WEIGHTS)):
        inside = [name for name in place.folders() if CONFIG in place.sub(name)]
        if inside:
            first = shell_word(os.path.join(place.name, inside[0]))
            what = f"contains {len(inside)} adapters: {quoted(inside)}"
            hint = f"use the path of one adapter, e.g. {first}"
            raise UsageError(what, where=place.name, hint=hint)
    return open_checkpoint(path)


def folder_of(checkpoint: Checkpoint) -> Folder | None:
    """Return the folder of a checkpoint. Return None if the checkpoint is not in a folder."""
    source = checkpoint.source
    if checkpoint.folder is not None or isinstance(source, Folder):
        return checkpoint.folder or source  # type: ignore[return-value]
    place = None if source is None else source.folder_and_name()
    return None if place is None else place[0]


def _config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the configuration of peft in the folder of the weights, or None if it is missing."""
    data = small_file_beside(folder_of(checkpoint), CONFIG)
    if data is None:
        return None
    found = strict_json.parse(data, CONFIG)
    return _checked(found, CONFIG)


def _checked(config: Any, what: str) -> dict[str, Any]:
    """Return a configuration. Raises CorruptError if a field has a wrong type."""
    if not isinstance(config, dict):
        raise CorruptError(f"{what} is not a JSON object")
    types, inner = table("fields")["types"], config.get("use_bdlora")
    for name, value in (*config.items(), *(inner.items() if isinstance(inner, dict) else ())):
        words = types.get(name, "")
        if words and value is not None and _WORDS.get(type(value)) not in words.split(" or "):
            raise CorruptError(f"{name!r} in {what} must be {words}, but is {shown(value)}")
    return config


def same_bytes(one: Tensor, two: Tensor) -> bool:
    """Return whether two tensors have equal dtypes, shapes and bytes."""
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    # imported here because recognizing an adapter compares nothing
    from ckptkit.compute.arranged import contiguous
    from ckptkit.compute.compare import equal

    return equal(contiguous(one).locate(), contiguous(two).locate())


def unwrapped(name: str) -> str:
    """Remove the names of wrappers, such as ``_orig_mod`` of torch.compile, from a peft name."""
    while wrapper := next((each for each in WRAPPERS if name.startswith(each)), None):
        name = name.removeprefix(wrapper)
    return name.replace("._orig_mod.", ".")


def _role(name: str, is_named: bool = True) -> tuple[str, str] | None:
    """Split the name of a tensor of an adapter into its module and its role.

    If `is_named` is True, the name may contain the name of the adapter, like in state_dict().
    """
    found = _roles(is_named).search(name)
    if found is None:
        return None
    path = name[: found.start()]
    if found[0].startswith("_lora"):  # names of an attention processor of diffusers
        path = re.sub(r"to_out$", "to_out.0", path.replace(".processor.", "."))
    return path, str(found.lastgroup)


def _layout(names: Mapping[str, Tensor], config: Mapping[str, Any] | None) -> str:
    """Return the layout of an adapter, which follows from tensor names and configuration."""
    prefixes = table("prefixes")
    for name in names:
        found = _role(name)
        path = found[0] if found else name.rpartition(".")[0]
        is_named = found is not None or config is None
        if is_named and "." not in path and name.startswith(tuple(prefixes["kohya"])):
            return "kohya"
        if found is None or found[1] == "tokens":
            continue
        if config is not None:
            return "peft"
        for layout in ("comfy", "diffusers"):
            if name.removeprefix("_orig_mod.").startswith(tuple(prefixes[layout])):
                return layout
        if re.search(r"[._]lora\.(down|up)", name):
            return "diffusers"  # the names of a single component have no prefix
    return "peft"


def _groups(
    tensors: Mapping[str, Tensor], layout: str, config: Mapping[str, Any] | None, is_named: bool
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor], list[str], list[str]]:
    """Sort the tensors of an adapter into four groups.

    The groups are the tensors of each module by role, the complete tensors, the names of ignored
    tensors, and the names of unknown tensors.
    """
    groups: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    ignored, unknown = list[str](), list[str]()
    for name, tensor in tensors.items():
        plain = unwrapped(name) if layout == "peft" else re.sub(r"(^|\.)_orig_mod\.", r"\1", name)
        split = _role(plain, is_named)
        if split and layout == "peft" and config and split[1] in _WEAK:
            split = None  # peft has no such role, so this is the name of a tensor in the model
        if expression("ignored").search(plain):
            ignored.append(name)
        elif split is not None:
            path, role = split
            if groups.setdefault(path, {}).setdefault(role, tensor) is not tensor:
                raise UsageError(f"contains {role} of {shown(path)} twice")
        elif layout == "peft" and not expression("factor").search(plain):
            own = expression("inside").sub("", plain)
            first = whole.setdefault(own, tensor)
            if first is not tensor and not same_bytes(first, tensor):
                raise UsageError(f"contains {shown(own)} twice")
        else:
            unknown.append(name)
    # VeRA stores one pair of matrices that all modules share.
    shared = groups.pop("base_model", {}) if config and layout == "peft" else {}
    for group in groups.values():
        group |= shared if "lambda_b" in group else {}
    return groups, whole, ignored, unknown


def _read(checkpoint: Checkpoint, alpha: float | None) -> Adapter:
    tensors, config = checkpoint.required.tensors, _config(checkpoint)
    layout = _layout(tensors, config)
    configs: dict[str, dict[str, Any]] = {}
    if layout == "peft" and config is not None:
        configs = {"": config}
    elif layout == "diffusers" and METADATA in checkpoint.extras:
        found = strict_json.parse(
            checkpoint.extras[METADATA].encode("utf-8", "surrogatepass"), METADATA
        )
        for name, value in found.items() if isinstance(found, dict) else ():
            component, _, entry = name.partition(".")
            configs.setdefault(component, {})[entry] = value
        for each in configs.values():
            _checked(each, METADATA)
    # The second pass reads the names of state_dict(), which contain the name of the adapter. In the
    # first pass, all modules of such a file are incomplete.
    for is_named in (False, True):
        groups, whole, ignored, unknown = _groups(tensors, layout, config, is_named)
        if not unknown and all(kind_and_formula(each)[0] for each in groups.values()):
            break
    root = checkpoint.root
    if not groups and isinstance(root, dict) and root.get("general.type") == "adapter":
        what = "is an adapter in the GGUF layout, which `lora` does not read"
        raise UnsupportedError(what, hint="llama-export-lora of llama.cpp merges it into a model")
    if not groups and not configs and not unknown:
        hint = "`ckptkit inspect {where}` lists the content"
        raise UsageError("is not an adapter, because it has no adapter tensors", hint=hint)
    modules = {key: _module(key, group, layout, configs, alpha) for key, group in groups.items()}
    if alpha is not None and all(each.alpha != alpha for each in modules.values()):
        given = typed("--alpha", "alpha")
        raise UsageError(f"contains scales, so {given} is not allowed", hint="omit the option")
    kinds = dict.fromkeys(_METHODS.get(each.kind, "LORA") for each in modules.values())
    method = str((configs.get("") or {}).get("peft_type") or "+".join(kinds) or "LORA").upper()
    return Adapter(
        checkpoint.name or "", layout, method, configs, modules, whole, (*ignored,), (*unknown,),
        {k: v for k, v in checkpoint.extras.items() if k != METADATA}, checkpoint,
    )  # fmt: skip


def _module(
    key: str,
    tensors: dict[str, Tensor],
    layout: str,
    configs: Mapping[str, Mapping[str, Any]],
    alpha: float | None,
) -> Module:
    """Return the module `key` with its scale, which is None if it is unknown."""
    (kind, formula), prefixes = kind_and_formula(tensors), table("prefixes")[layout]
    prefix = next((each for each in prefixes if key.startswith(each)), "")
    component, path = prefixes.get(prefix, "unet"), key.removeprefix(prefix)
    config, is_parameter = configs.get(component), False
    if layout == "peft" and kind == "lora":
        if path.endswith(".base_layer.out_proj"):  # out_proj of nn.MultiheadAttention
            path, kind = path.replace(".base_layer.", "."), "attention_out"
        elif expert := _parameter(path, config or {}, tensors["A"]):
            path, is_parameter = expert, True
    sizes = (tensors[role].shape[0] for role in _RANKS if role in tensors and tensors[role].ndim)
    rank = next(sizes, None)
    made = Module(
        prefix, component, path, kind, tensors, rank, parameter=is_parameter, formula=formula
    )
    if kind in ("", "ia3", "tokens", "vera"):
        return replace(made, rank=None, scale=1.0)
    if "alpha" in tensors and tensors["alpha"].numel != 1:
        raise CorruptError(
            f"alpha of {shown(key)} has {tensors['alpha'].numel} elements; expected 1"
        )
    if config is not None:
        return _scaled(made, config)
    stored = float(tensors["alpha"].numpy().reshape(-1)[0]) if "alpha" in tensors else None
    if stored is None and layout == "peft":
        if alpha is None or not rank:
            return replace(made, alpha=alpha)
        stored = alpha
    if rank is None or stored is None or (layout == "kohya" and not stored):
        return replace(made, alpha=rank, scale=1.0)
    return replace(made, alpha=stored, scale=stored / rank if rank else 1.0)


def _scaled(module: Module, config: Mapping[str, Any]) -> Module:
    """Return a module with the scale from a peft configuration."""
    # peft compares patterns with the name of the attention module, without out_proj.
    is_inner = module.kind == "attention_out"
    path = module.path.removesuffix(".out_proj") if is_inner else module.path
    rank = _number(config, "r", path, "rank_pattern")
    word = "alpha" if "alpha" in config else "lora_alpha"
    alpha = _number(config, word, path, "alpha_pattern")
    if module.kind == "adalora":
        first = _number(config, "init_r", "", "")
        scale = alpha if alpha > 0 else first
        return replace(module, alpha=alpha, scale=scale, divisor=first + 1e-5)
    if rank <= 0:
        what = f"{CONFIG} has the rank {rank:g} for {shown(module.path)}"
        raise CorruptError(f"{what}; a rank must be positive")
    scale = alpha / (sqrt(rank) if config.get("use_rslora") else rank)
    expected = int(rank) if module.kind in ("lora", "embedding", "attention_out") else None
    found = module.rank
    if module.parameter and found and expected and found % expected == 0:
        found = expected  # A and B contain the factors of all experts
    return replace(module, rank=found, alpha=alpha, scale=scale, expected=expected)


def _number(config: Mapping[str, Any], name: str, path: str, patterns: str) -> float:
    """Return the number `name` of a peft configuration for the module `path`.

    `patterns` is the field that maps patterns to other numbers. The first pattern that matches
    `path` applies, like in peft.utils.get_pattern_key. Raises CorruptError if the value is not a
    finite number.
    """
    found, given = config.get(name), config.get(patterns) or {}
    if isinstance(given, dict):
        found = next((value for key, value in given.items() if matches(key, path)), found)
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    if found is None or not is_number or not isfinite(found):
        raise CorruptError(f"{name!r} in {CONFIG} is not a finite number: {shown(found)}")
    return float(found)


def matches(pattern: str, path: str, *, is_whole: bool = False) -> bool:
    """Return whether a pattern of a configuration matches the module `path`.

    If `is_whole` is False, a match with the last components of the path is sufficient. The pattern
    is untrusted. Raises CorruptError if the pattern is too long, repeats a group that contains
    a repetition, such as ``(a+)+``, or takes more than a second.
    """
    import regex

    if pattern == path:
        return True
    if len(pattern) > _LONGEST:
        what = f"a pattern of {len(pattern):,} characters; the limit is {_LONGEST:,}"
        raise CorruptError(f"{CONFIG} has {what}")
    if _is_nested(pattern):
        raise CorruptError(f"{CONFIG} has a pattern with nested repetitions: {shown(pattern)}")
    try:
        re.compile(pattern)
        start = "" if is_whole else r"(.*\.)?"
        return regex.match(rf"{start}({pattern})$", path, timeout=1) is not None
    except (re.error, regex.error, RecursionError, OverflowError, TimeoutError) as error:
        raise CorruptError(f"{CONFIG} has an invalid pattern {shown(pattern)}: {error}") from error


def _is_nested(pattern: str) -> bool:
    """Return whether a pattern repeats a group that contains a repetition.

    The function first replaces each escaped character, set and group with one character, the
    innermost group first.
    """
    text = re.sub(r"\\.|\[\^?\]?(?:\\.|[^]\\])*\]", "x", pattern, flags=re.DOTALL)
    count = 1
    while count:
        text, count = _GROUP.subn(lambda g: "\0" if _REPEAT.search(g[1]) else "x", text)
    return re.search("\0(?:[*+]|{(?![01]}|,1}|0,1}))", text) is not None


def _parameter(path: str, config: Mapping[str, Any], down: Tensor) -> str | None:
    """Return the name of the parameter that an adapter with `target_parameters` changes.

    If the adapter changes several parameters of a module, peft nests one wrapper per parameter. The
    innermost wrapper belongs to the parameter that the model defines first. Tensor names of an
    inner wrapper contain `base_layer`. Return None if `path` does not belong to a parameter.

    If `target_parameters` lists a parameter without the name of its module, the parameter may
    belong to any module. A module is an exception if it is in `target_modules` and `down` has as
    many rows as the rank: for a parameter, `down` would contain the factors of all experts.
    """
    plain = re.sub(r"(\.base_layer)+$", "", path)
    names: list[str] = []
    for each in config.get("target_parameters") or ():
        module, _, name = str(each).rpartition(".")
        if not module and plain == path:
            has_rank = down.shape[:1] == (_number(config, "r", path, "rank_pattern"),)
            targets = config.get("target_modules")
            if isinstance(targets, str):  # a pattern, like in peft
                is_target = targets == "all-linear" or matches(targets, path, is_whole=True)
            else:
                is_target = any(f".{path}".endswith(f".{name}") for name in targets or ())
            is_own = not (has_rank and is_target)
        else:
            is_own = not module or f".{plain}".endswith(f".{module}")
        if name not in names and is_own:
            names.append(name)
    names.sort(key=lambda name: _EXPERTS.index(name) if name in _EXPERTS else len(_EXPERTS))
    depth = path.count(".base_layer") - plain.count(".base_layer")
    return f"{plain}.{names[-1 - depth]}" if depth < len(names) else None
