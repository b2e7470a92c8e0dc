"""The layouts of the models in transformers: its registry of conversions, read as data.

A model is built on the meta device, without a byte of weights. Its keys are taken back to the
layout of the files, as `save_pretrained` does it; nothing of a checkpoint is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptkit.core.errors import UnsupportedError, UsageError
from ckptkit.core.text import owners

_CLASSES = (
    "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM", "AutoModel", "AutoModelForMultimodalLM", "AutoModelForObjectDetection",
    "AutoModelForDepthEstimation", "AutoModelForPreTraining",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Moved:
    """Tensors of the files that become tensors of the model by a chain of operations.

    ``old`` has the names in the files for each pattern of the converter, ``new`` those of the
    model; operations are (name, parameters). Without operations it is a rename.
    """

    old: tuple[tuple[str, ...], ...]
    new: tuple[str, ...]
    operations: tuple[tuple[str, Mapping[str, Any]], ...] = ()


@dataclass(slots=True)
class Layouts:
    """Both layouts of a model: names and shapes, and how one becomes the other."""

    model_type: str
    version: str
    old: dict[str, tuple[int, ...]] = field(default_factory=dict)
    new: dict[str, tuple[int, ...]] = field(default_factory=dict)
    moved: list[Moved] = field(default_factory=list)
    tied: frozenset[str] = frozenset()  # names of the model that its files may lack


def layouts_of(model_type: str, config: Mapping[str, Any] | None = None) -> Layouts:
    """The layouts of a model type that the installed transformers knows.

    Raises UsageError for an unknown type and where transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        hint = "pip install transformers"
        raise UsageError("transformers is not installed", hint=hint) from error
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if model_type not in CONFIG_MAPPING_NAMES:
        from ckptkit.core.text import nearest

        close = nearest(model_type, CONFIG_MAPPING_NAMES)
        near = f"did you mean {', '.join(close)}?" if close else None
        raise UsageError(f"transformers has no model type {model_type!r}", hint=near)
    settings = {name: value for name, value in (config or {}).items() if name != "model_type"}
    try:
        made = transformers.AutoConfig.for_model(model_type, **settings)
    except Exception as error:  # whatever the code of a configuration raises
        message = f"transformers does not take the configuration of {model_type}"
        raise UsageError(f"{message}: {str(error)[:200]}") from error
    return layouts_of_model(_built(transformers, made), model_type)


def _built(transformers: Any, config: Any) -> Any:
    import torch

    first: Exception | None = None
    for name in _CLASSES:
        try:
            with torch.device("meta"):
                return getattr(transformers, name).from_config(config)
        except Exception as error:  # whatever the code of a model raises
            first = first or error
    raise UnsupportedError(f"transformers cannot build it: {str(first)[:200]}") from first


def layouts_of_model(model: Any, model_type: str) -> Layouts:
    """The layouts of a model that is there, on any device."""
    import torch
    import transformers
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming

    forward = [
        each
        for each in get_model_conversion_mapping(model, add_legacy=False)
        if not isinstance(each, PrefixChange)
    ]
    back = [each.reverse_transform() for each in forward[::-1]]
    work = _Reading(
        model,
        [each for each in back if isinstance(each, WeightRenaming)],
        [each for each in back if isinstance(each, WeightConverter)],
        {id(b): f for f, b in zip(forward[::-1], back, strict=True)},
    )
    tied = frozenset(getattr(model, "all_tied_weights_keys", None) or ())
    found = Layouts(model_type, transformers.__version__, tied=tied)
    state = model.state_dict()
    meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    found.new = {name: tuple(tensor.shape) for name, tensor in meta.items()}
    work.read(meta, found)
    return found


class _Reading:
    def __init__(
        self, model: Any, renamings: list[Any], converters: list[Any], forward: dict[int, Any]
    ) -> None:
        self.model, self.renamings, self.converters, self.forward = (
            model,
            renamings,
            converters,
            forward,
        )

    def read(self, state: Mapping[str, Any], found: Layouts) -> None:
        """Take every key back, as `revert_weight_conversion` does."""
        from transformers.core_model_loading import (
            apply_converters,
            apply_renamings,
            dot_natural_key,
        )

        by_pattern = owners((each, each.source_patterns) for each in self.converters)
        groups: dict[tuple[str, int], list[tuple[str, str]]] = {}
        for key in sorted(state, key=dot_natural_key):
            renamed, pattern = apply_converters(key, self.converters)
            if pattern is None:
                old = apply_renamings(key, self.renamings)
                found.old[old] = tuple(state[key].shape)
                found.moved.append(Moved(((old,),), (key,)))
            else:
                group = renamed, id(by_pattern[pattern])
                groups.setdefault(group, []).append((key, pattern))
        for (renamed, _), members in groups.items():
            self._convert(renamed, by_pattern[members[0][1]], members, state, found)

    def _convert(
        self,
        renamed: str,
        converter: Any,
        members: list[tuple[str, str]],
        state: Mapping[str, Any],
        found: Layouts,
    ) -> None:
        from copy import deepcopy

        from transformers.core_model_loading import apply_renamings

        copy = deepcopy(converter)
        for key, pattern in members:
            copy.add_tensor(renamed, key, pattern, state[key])
        made = copy.convert(renamed, model=self.model, config=self.model.config)
        names = []
        for name, tensor in made.items():
            old = apply_renamings(name, self.renamings)
            tensor = tensor[0] if isinstance(tensor, list) else tensor
            found.old[old] = tuple(tensor.shape)
            names.append(old)
        forward = self.forward[id(converter)]
        order = {pattern: number for number, pattern in enumerate(forward.target_patterns)}
        rank = {pattern: number for number, pattern in enumerate(converter.source_patterns)}
        members.sort(key=lambda member: order.get(member[1], rank.get(member[1], 0)))
        count = len(forward.source_patterns)
        each = len(names) // count
        old_names = tuple(tuple(names[n * each : (n + 1) * each]) for n in range(count))
        operations = tuple(
            (type(op).__name__, {**vars(op), "heads": _heads(op, self.model.config)})
            for op in forward.operations
        )
        found.moved.append(Moved(old_names, tuple(key for key, _ in members), operations))


def _heads(operation: Any, config: Any) -> str:
    """The number of heads that an operation takes from the configuration, as rules write it."""
    key = getattr(operation, "subconfig_key", None)
    part = getattr(config, key, None) if key else None
    path = "config" if part is None else f"config.{key}"
    holder = config if part is None else part
    name = "num_attention_heads"
    if not hasattr(holder, name):
        return "1"
    return f"{path}.{getattr(holder, 'attribute_map', {}).get(name, name)}"
