"""Read adapters from their headers: folders of peft, files of kohya, diffusers and ComfyUI.

A layout is known by its names. Each tensor is a role of a module (`lora_A`, `alpha`...), replaces a
tensor of the base, is known to have no effect, or is listed as unknown. Sources: peft 0.21.2
(tuners, utils/save_and_load.py), diffusers 0.42.1 (loaders/lora_conversion_utils.py), sd-scripts
(networks/lora.py), LyCORIS (lycoris/modules), ComfyUI (comfy/lora.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from typing import Any, NamedTuple

from ckptkit import formats
from ckptkit.api import open_checkpoint
from ckptkit.core import arguments
from ckptkit.core.bytesource import ByteSource, Folder
from ckptkit.core.checkpoint import Checkpoint, Source, opened
from ckptkit.core.errors import CkptkitError, CorruptError, UsageError
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import quoted, shell_word, shown, typed
from ckptkit.formats import strict_json
from ckptkit.formats.format import open_place

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
METADATA = "lora_adapter_metadata"  # of diffusers, in the header of a file
_LARGEST = 16 << 20  # bytes of a configuration

# Roles, and what a name ends with. The name of the adapter is in those of state_dict() alone.
_NAME = r"(?:\.(?!weight$|bias$)[^.]+)?"
_SUFFIXES = (
    ("A", rf"\.lora_A{_NAME}\.weight|\.lora_A{_NAME}|\.lora_down\.weight|\.lora\.down\.weight"
     r"|\.lora_linear_layer\.down\.weight|_lora\.down\.weight"),
    ("B", rf"\.lora_B{_NAME}\.weight|\.lora_B{_NAME}|\.lora_up\.weight|\.lora\.up\.weight"
     r"|\.lora_linear_layer\.up\.weight|_lora\.up\.weight"),
    ("B_bias", rf"\.lora_B{_NAME}\.bias"),
    ("E", rf"\.lora_E{_NAME}"),
    ("embedding_A", rf"\.lora_embedding_A{_NAME}"),
    ("embedding_B", rf"\.lora_embedding_B{_NAME}"),
    ("magnitude", rf"\.lora_magnitude_vector{_NAME}(?:\.weight)?|\.dora_scale"),
    ("mid", r"\.lora_mid\.weight"),
    ("alpha", r"\.alpha"),
    ("", rf"\.((?:hada_w[12]_[ab]|hada_t[12]|lokr_w[12](?:_[ab])?|lokr_t2)){_NAME}"),
    ("ia3", rf"\.ia3_l{_NAME}"),
    ("tokens", rf"(?:\.token_adapter)?\.trainable_tokens_delta{_NAME}"),
    ("diff", r"\.diff"),
    ("diff_b", r"\.diff_b"),
)  # fmt: skip
_SUFFIX = tuple((role, re.compile(f"(?:{text})$")) for role, text in _SUFFIXES)
# What peft keeps in state_dict() beside the adapter, and what training alone needs.
_IGNORED = re.compile(
    r"\.original_module\.|\.lora_velora_embed|\.lora_monteclora_sampler\.|\.ranknum(\.[^.]+)?$"
    r"|\.trainable_tokens_original(\.[^.]+)?$"
)
# What stands between a module and its own tensors, where these are in the file as a whole.
_INSIDE = re.compile(
    r"\.modules_to_save\.[^.]+(?=\.)|\.ln_tuning_layers(?:\.[^.]+)?(?=\.[^.]+$)"
    r"|(?:\.token_adapter)?(?:\.base_layer)+(?=\.[^.]+$)"
)
_FACTOR = re.compile(r"\.(lora|hada|lokr|ia3|vera|oft|boft|hra)_[^.]+(\.[^.]+){0,2}$")
_LIKELY = re.compile("lora|hada_|lokr_|ia3_l|tokens_delta")  # as fast as names can be searched
# Kinds, and the roles that each needs: the first whose roles are all there.
_KINDS = (
    ("adalora", ("A", "B", "E")), ("tucker", ("A", "B", "mid")), ("lora", ("A", "B")),
    ("embedding", ("embedding_A", "embedding_B")),
    ("loha", ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")),
    *(("lokr", (*first, *second)) for first in (("lokr_w1",), ("lokr_w1_a", "lokr_w1_b"))
      for second in (("lokr_w2",), ("lokr_w2_a", "lokr_w2_b"))),
    ("ia3", ("ia3",)), ("tokens", ("tokens",)), ("diff", ("diff",)), ("diff", ("diff_b",)),
)  # fmt: skip
_METHODS = {"adalora": "ADALORA", "loha": "LOHA", "lokr": "LOKR", "ia3": "IA3"}
# The tensors whose first size is the rank.
_RANKS = ("A", "embedding_A", "hada_w1_b", "lokr_w1_b", "lokr_w2_b")

# Prefixes of the names, and the component of a pipeline that each stands for.
KOHYA = {
    "lora_unet__": "unet", "lora_unet_": "unet", "lora_te1_": "text_encoder",
    "lora_te2_": "text_encoder_2", "lora_te3_": "text_encoder_3", "lora_te_": "text_encoder",
    "lora_transformer_": "transformer", "lora_prior_unet_": "prior",
    "lora_prior_te_": "text_encoder", "lycoris_": "",
}  # fmt: skip
DIFFUSERS = {
    f"{name}.": name for name in (
        "unet", "transformer", "transformer_2", "text_encoder", "text_encoder_2", "text_encoder_3",
        "prior", "vae",
    )
}  # fmt: skip
COMFY = {"diffusion_model.": "unet", "text_encoders.": "text_encoders"}
PREFIXES = {"kohya": KOHYA, "comfy": COMFY, "diffusers": DIFFUSERS, "peft": {"": ""}}
WRAPPERS = ("module.", "_orig_mod.", "base_model.model.")
# Parameters of experts, in the order in which their modules define them and peft wraps them.
_EXPERTS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Module:
    """The change of an adapter at one place of a model.

    ``path`` is the name of the module as the file has it, without ``prefix`` (``lora_te1_``,
    ``unet.``); of a matrix of experts (``parameter``) it ends in the parameter. ``kind`` is one of
    lora, tucker, embedding, adalora, loha, lokr, ia3, tokens, diff, attention_out, and "" where
    tensors are missing. ``scale`` is the factor of the change, None if the files do not record it;
    the change of AdaLoRA is then divided by ``divisor``. ``expected`` is the rank in the
    configuration, None without one.
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

    @property
    def is_dora(self) -> bool:
        return "magnitude" in self.tensors


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter: what it changes, and how its files say so.

    ``modules`` are by their names as the file has them. ``replaced`` are whole tensors of the base,
    by their names there. ``ignored`` and ``unknown`` are names of tensors without effect, and of
    those that no layout has. ``configs`` are configurations by component; that of peft is "".
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
        """The configuration of peft, None without one."""
        return self.configs.get("")

    @property
    def ranks(self) -> list[int]:
        """The different ranks, sorted."""
        return sorted({each.rank for each in self.modules.values() if each.rank is not None})

    @property
    def components(self) -> list[str]:
        """The components of a pipeline that it changes, in the order of the file."""
        return list(dict.fromkeys(each.component for each in self.modules.values()))

    @property
    def base(self) -> str | None:
        """The name of the base model in the configuration."""
        name = (self.config or {}).get("base_model_name_or_path")
        return name if isinstance(name, str) and name else None

    def __repr__(self) -> str:
        return f"<Adapter {self.path}: {self.layout}, {self.method}, {len(self.modules)} modules>"


def is_adapter(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is an adapter, by its names and the file beside it.

    A model that holds the adapted weights too is none.
    """
    try:
        names = checkpoint.weights
    except CkptkitError:
        return False
    source = checkpoint.source
    place = source.folder_and_name() if isinstance(source, ByteSource) else None
    if place is not None and place[1].startswith("adapter_") and _config(checkpoint) is not None:
        return True
    for name in names:
        found = _role(name) if _LIKELY.search(name) else None
        if found is not None and found[1] not in ("alpha", "diff", "diff_b"):
            return not any(f"{found[0]}{end}.weight" in names for end in ("", ".base_layer"))
    return False


def adapter_of(checkpoint: Checkpoint) -> Adapter | None:
    """Return the adapter that a checkpoint is; None if it is none, or cannot be read as one."""
    try:
        return _read(checkpoint, None) if is_adapter(checkpoint) else None
    except CkptkitError:
        return None


def read_adapter(
    path: Source,
    *,
    component: str | None = None,
    alpha: float | None = None,
) -> Adapter:
    """Read an adapter: a folder of peft, or one file. Only headers and alphas are read.

    `component` keeps the modules of one component of a pipeline. `alpha` is that of an adapter
    whose files record no scale. Raises UsageError for what is no adapter, for a folder of several,
    for an unknown component, and for an `alpha` where the files record one.
    """
    is_path = isinstance(path, (str, os.PathLike))
    checkpoint = _opened(arguments.path("adapters", path)) if is_path else opened(path)
    try:
        made = _read(checkpoint, alpha)
        if component is not None:
            kept = {key: each for key, each in made.modules.items() if each.component == component}
            if not kept:
                names = [each for each in made.components if each]
                found = (
                    f"it has {quoted(names)}" if names else "it is not of a pipeline: leave it out"
                )
                raise UsageError(f"has no component {component!r}", hint=found)
            made = replace(made, modules=kept)
    except CkptkitError as error:
        raise error.at(checkpoint.name or "the adapter") from error.__cause__
    return made


def _opened(path: str | os.PathLike[str]) -> Checkpoint:
    place = open_place(path)
    if not isinstance(place, Folder):
        return open_checkpoint(path)
    names = place.list()
    for name in WEIGHTS:
        if name in names:
            return formats.read(place.open(name))
    if CONFIG not in names:
        inside = [name for name in place.folders() if CONFIG in place.sub(name)]
        if inside:
            first = shell_word(os.path.join(place.name, inside[0]))
            what = f"holds {len(inside)} adapters: {quoted(inside)}"
            raise UsageError(what, where=place.name, hint=f"name one of them, e.g. {first}")
    return open_checkpoint(path)


def folder_of(checkpoint: Checkpoint) -> Folder | None:
    """Return the folder of a checkpoint, None if it is not in one."""
    source = checkpoint.source
    if checkpoint.folder is not None or isinstance(source, Folder):
        return checkpoint.folder or source  # type: ignore[return-value]
    place = None if source is None else source.folder_and_name()
    return None if place is None else place[0]


def _config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the configuration of peft beside the weights, None if there is none."""
    folder = folder_of(checkpoint)
    try:
        if folder is None or CONFIG not in folder:
            return None
        source = folder.open(CONFIG)
        data = source.read(0, min(source.size, _LARGEST))
    except CkptkitError:  # a web server does not list files
        return None
    found = strict_json.parse(data, CONFIG)
    if not isinstance(found, dict):
        raise CorruptError(f"{CONFIG} is not a JSON object")
    return found


def unwrapped(name: str) -> str:
    """Return a name of peft without what wrappers put in front of it, and torch.compile inside."""
    while wrapper := next((each for each in WRAPPERS if name.startswith(each)), None):
        name = name.removeprefix(wrapper)
    return name.replace("._orig_mod.", ".")


def _role(name: str) -> tuple[str, str] | None:
    """Split the name of a tensor of an adapter into its module and its role."""
    for role, suffix in _SUFFIX:
        found = suffix.search(name)
        if found is None:
            continue
        path = name[: found.start()]
        if found[0].startswith("_lora"):  # of attention processors of diffusers
            path = re.sub(r"to_out$", "to_out.0", path.replace(".processor.", "."))
        return path, role or found[1]
    return None


def _layout(names: Mapping[str, Tensor], config: Mapping[str, Any] | None) -> str:
    """Return the layout of an adapter by its names."""
    for name in names:
        found = _role(name)
        if found is None or found[1] == "tokens":
            continue
        if "." not in found[0] and name.startswith(tuple(KOHYA)):
            return "kohya"
        if config is not None:
            return "peft"
        layouts = ("comfy", "diffusers")
        if hit := [each for each in layouts if name.startswith(tuple(PREFIXES[each]))]:
            return hit[0]
        if re.search(r"_lora\.(down|up)|\.lora\.(down|up)", name):
            return "diffusers"  # of one component, without its name
    return "peft"


def _read(checkpoint: Checkpoint, alpha: float | None) -> Adapter:
    tensors = checkpoint.required.tensors
    config = _config(checkpoint)
    layout = _layout(tensors, config)
    configs = {"": config} if layout == "peft" and config is not None else {}
    if layout == "diffusers" and METADATA in checkpoint.extras:
        configs = _of_diffusers(checkpoint.extras[METADATA])
    groups: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    ignored, unknown = [], []
    for name, tensor in tensors.items():
        plain = unwrapped(name) if layout == "peft" else name
        found = _role(plain)
        if found is not None and layout == "peft" and config and found[1] in _ONLY_ELSEWHERE:
            found = None  # the name of a tensor of the model
        if _IGNORED.search(plain):
            ignored.append(name)
        elif found is not None:
            if groups.setdefault(found[0], {}).setdefault(found[1], tensor) is not tensor:
                raise UsageError(f"has {found[1]} of {shown(found[0])} twice")
        elif layout == "peft" and not _FACTOR.search(plain):
            whole[_INSIDE.sub("", plain)] = tensor
        else:
            unknown.append(name)
    if not groups and not configs:
        raise UsageError(
            "is not an adapter: it has no tensors of one",
            hint="`ckptkit inspect {where}` shows what it contains",
        )
    modules = {key: _module(key, group, layout, configs, alpha) for key, group in groups.items()}
    if alpha is not None and all(each.alpha != alpha for each in modules.values()):
        given = typed("--alpha", "alpha")
        raise UsageError(f"records its scales: {given} is for files without", hint="leave it out")
    kinds = dict.fromkeys(_METHODS.get(each.kind, "LORA") for each in modules.values())
    method = str((configs.get("") or {}).get("peft_type") or "+".join(kinds)).upper()
    return Adapter(
        checkpoint.name or "", layout, method, configs, modules, whole, (*ignored,), (*unknown,),
        checkpoint.extras, checkpoint,
    )  # fmt: skip


_ONLY_ELSEWHERE = ("alpha", "diff", "diff_b")  # roles that no adapter of peft has


def _of_diffusers(text: str) -> dict[str, dict[str, Any]]:
    """Return the configurations by component in the metadata of diffusers."""
    found = strict_json.parse(text.encode("utf-8", "surrogatepass"), METADATA)
    made: dict[str, dict[str, Any]] = {}
    for name, value in found.items() if isinstance(found, dict) else ():
        component, _, entry = name.partition(".")
        made.setdefault(component, {})[entry] = value
    return made


def _module(
    key: str,
    tensors: dict[str, Tensor],
    layout: str,
    configs: Mapping[str, Mapping[str, Any]],
    alpha: float | None,
) -> Module:
    """Return one module, with its scale where the files record it."""
    kind = next((kind for kind, roles in _KINDS if all(role in tensors for role in roles)), "")
    prefix = next((each for each in PREFIXES[layout] if key.startswith(each)), "")
    component = PREFIXES[layout].get(prefix, "unet")
    path, is_parameter = key.removeprefix(prefix), False
    config = configs.get(component)
    if layout == "peft" and kind == "lora":
        if path.endswith(".base_layer.out_proj"):  # of nn.MultiheadAttention
            path, kind = path.replace(".base_layer.", "."), "attention_out"
        elif expert := _parameter(path, config or {}):
            path, is_parameter = expert, True
    rank = next((tensors[role].shape[0] for role in _RANKS if _has_size(tensors, role)), None)
    made = Module(prefix, component, path, kind, tensors, rank, parameter=is_parameter)
    if kind in ("", "ia3", "tokens"):
        return replace(made, rank=None, scale=1.0)
    if "alpha" in tensors and tensors["alpha"].numel != 1:
        raise CorruptError(f"{shown(key)} has {tensors['alpha'].numel} numbers as its alpha")
    stored = float(tensors["alpha"].numpy().reshape(-1)[0]) if "alpha" in tensors else None
    if config is not None:
        return _of_config(made, config)
    if stored is None and layout == "peft":
        if alpha is None or not rank:
            return replace(made, alpha=alpha)
        stored = alpha
    if rank is None or stored is None or (layout == "kohya" and not stored):
        return replace(made, alpha=rank, scale=1.0)
    return replace(made, alpha=stored, scale=stored / rank if rank else 1.0)


def _has_size(tensors: Mapping[str, Tensor], role: str) -> bool:
    return role in tensors and tensors[role].ndim > 0


def _of_config(module: Module, config: Mapping[str, Any]) -> Module:
    """Return a module with the scale that a configuration of peft gives it."""
    rank = _number(config, "r", module.path, "rank_pattern")
    word = "alpha" if "alpha" in config else "lora_alpha"
    alpha = _number(config, word, module.path, "alpha_pattern")
    if module.kind == "adalora":
        first = _number(config, "init_r", "", "")
        return replace(
            module, alpha=alpha, scale=alpha if alpha > 0 else first, divisor=first + 1e-5
        )
    if rank <= 0:
        raise CorruptError(f"{CONFIG} has the rank {rank:g} for {shown(module.path)}")
    scale = alpha / (sqrt(rank) if config.get("use_rslora") else rank)
    expected = int(rank) if module.kind in ("lora", "embedding", "attention_out") else None
    found = module.rank
    if module.parameter and found and expected and found % expected == 0:
        found = expected  # A and B hold those of all experts
    return replace(module, rank=found, alpha=alpha, scale=scale, expected=expected)


def _number(config: Mapping[str, Any], name: str, path: str, patterns: str) -> float:
    """Return a number of the configuration, that of the first pattern that matches `path`.

    As in peft.utils.get_pattern_key. Raises CorruptError for what is no number or no pattern.
    """
    found = config.get(name)
    table = config.get(patterns) or {}
    for pattern in table if isinstance(table, dict) else ():
        if matches(pattern, path):
            found = table[pattern]
            break
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    if found is None or not is_number or not isfinite(found):
        raise CorruptError(f"{CONFIG} has no number {name!r}: it is {shown(found)}")
    return float(found)


def matches(pattern: str, path: str) -> bool:
    """Return whether a pattern of a configuration means the module `path`.

    A stranger wrote it: it gets a second at most.
    """
    import regex

    if pattern == path:
        return True
    try:
        re.compile(pattern)
        return regex.match(rf"(.*\.)?({pattern})$", path, timeout=1) is not None
    except (re.error, regex.error, RecursionError, OverflowError, TimeoutError) as error:
        raise CorruptError(f"{CONFIG} has a bad pattern {shown(pattern)}: {error}") from error


def _parameter(path: str, config: Mapping[str, Any]) -> str | None:
    """Return the name of the parameter that a module of `target_parameters` changes.

    Several parameters of one module are wrapped in the order of their definition, the first
    innermost: its tensors are those of `base_layer`.
    """
    plain = path
    while plain.endswith(".base_layer"):
        plain = plain.removesuffix(".base_layer")
    names: list[str] = []
    for each in config.get("target_parameters") or ():
        module, _, name = str(each).rpartition(".")
        if name not in names and (not module or f".{plain}".endswith(f".{module}")):
            names.append(name)
    names.sort(key=lambda name: _EXPERTS.index(name) if name in _EXPERTS else len(_EXPERTS))
    depth = path.count(".base_layer") - plain.count(".base_layer")
    return f"{plain}.{names[-1 - depth]}" if depth < len(names) else None


# What cannot be merged


class Problem(NamedTuple):
    """Why an adapter cannot be merged: a code of `lora check`, a sentence, a hint, and modules."""

    code: str
    title: str
    hint: str | None = None
    modules: tuple[str, ...] = ()


MERGED = ("LORA", "ADALORA", "LOHA", "LOKR", "IA3", "LN_TUNING", "TRAINABLE_TOKENS")
_NO_WEIGHTS = (
    "PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE",
    "ADAPTION_PROMPT", "XLORA", "POLY",
)  # fmt: skip
_RANDOM = ("FOURIERFT", "WAVEFT")
RESIDUAL = re.compile(r"pissa(_niter_[0-9]+)?|olora|corda|loftq|lora_ga")
_NO_FUNCTION = {
    "alora_invocation_tokens": "is aLoRA: it acts on some tokens only",
    "use_qalora": "is QALoRA: it acts on pooled inputs",
    "arrow_config": "is Arrow: it chooses among adapters for each token",
    "kasa_config": "is KaSA: it needs the SVD of the base",
    "use_bdlora": "is BD-LoRA: its matrices are block-diagonal",
}


def problems(adapter: Adapter, base_is: str | None = None) -> Iterator[Problem]:
    """Yield why an adapter cannot be merged, as far as its own files tell."""
    if (found := _of_method(adapter)) is not None:
        yield found
        return
    for config in adapter.configs.values():
        for name, why in _NO_FUNCTION.items():
            if config.get(name):
                yield Problem("method", f"{why} ({name} in {CONFIG})")
        start = config.get("init_lora_weights")
        if isinstance(start, str) and RESIDUAL.fullmatch(start.lower()) and base_is != "residual":
            given = typed("--base-is residual", "base_is='residual'")
            yield Problem(
                "residual",
                f"was trained on what {start} left of the base, and not on the base",
                f"{given}, if BASE is that residual",
            )
    modules = adapter.modules
    if unknown := [key for key, each in modules.items() if each.scale is None]:
        given = typed("--alpha A", "alpha=A")
        yield Problem(
            "no-config",
            f"records no scale: there is no {CONFIG}",
            f"{given}, if you know the alpha that it was trained with",
            tuple(unknown),
        )
    if adapter.unknown:
        what = f"has tensors of an unknown kind: {quoted(adapter.unknown)}"
        yield Problem("method", what, None, adapter.unknown)
    for key, each in modules.items():
        what = f"{shown(key)} has only {quoted(sorted(each.tensors))}: the others are missing"
        if not each.kind:
            yield Problem("pair", what, None, (key,))
        if each.expected is not None and each.rank != each.expected:
            what = f"{shown(key)} has rank {each.rank}, and {CONFIG} says {each.expected}"
            yield Problem("rank", what, None, (key,))
        for role, tensor in each.tensors.items():
            if role != "alpha" and tensor.dtype.kind != "float":
                what = f"{shown(key)} has {role} of {tensor.dtype}: only floats are factors"
                yield Problem("method", what, None, (key,))
            if 0 in tensor.shape and each.kind != "adalora":
                what = f"{shown(key)} is empty: {role} has no elements"
                hint = "it was saved without gathering it first (ZeRO-3, FSDP)"
                yield Problem("empty", what, hint, (key,))


def _of_method(adapter: Adapter) -> Problem | None:
    """Return why the method of an adapter cannot be merged, None if it can."""
    method = adapter.method
    if adapter.layout != "peft" or method in MERGED:
        return None
    config = adapter.config or {}
    if method in _NO_WEIGHTS:
        why = "changes no weight of the base: nothing can be merged"
    elif method in _RANDOM or (method == "VERA" and not config.get("save_projection", True)):
        why = "has random matrices that are not in its file (save_projection is false)"
        why = why if method == "VERA" else why.partition(" (")[0]
    else:
        why = "is not supported"
    return Problem("method", f"is of the method {method}, which {why}")


# Fields of a LoRA configuration of peft 0.21.2 and before that ckptkit reads, or that have no
# effect on what is merged.
_FIELDS = """
alora_invocation_tokens alpha_pattern arrow_config auto_mapping base_model_name_or_path bias
corda_config enable_lora ensure_weight_tying eva_config exclude_modules fan_in_fan_out
inference_mode init_lora_weights kasa_config layer_replication layers_pattern layers_to_transform
loftq_config lora_alpha lora_bias lora_dropout lora_ga_config lora_nums megatron_config
megatron_core merge_weights modules_to_save monteclora_config peft_type peft_version
qalora_group_size r rank_pattern revision runtime_config target_modules target_parameters task_type
trainable_token_indices use_bdlora use_dora use_qalora use_rslora velora_config
"""


def unknown_fields(adapter: Adapter) -> list[str]:
    """Return the fields of a LoRA configuration that are not known, and are set."""
    config = (adapter.config if adapter.method == "LORA" else None) or {}
    known = _FIELDS.split()
    return [name for name, value in config.items() if name not in known and value]
