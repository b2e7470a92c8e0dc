"""Writes a Megatron-LM checkpoint cut for tensor parallelism: the inverse of :mod:`megatron`.

What is written has the names and arguments of a checkpoint that was read from Megatron's own
folders.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import UsageError
from ckptkit.core.options import Options
from ckptkit.core.plan import OutputFile, Plan
from ckptkit.core.tree import Global, Node, Object, OrderedMapping
from ckptkit.formats.folder import TRACKER
from ckptkit.formats.format import Probe
from ckptkit.formats.parallel.cutting import cut, file, ranks_of
from ckptkit.formats.parallel.megatron import FILE, LEGACY, Arguments, arguments_of, table
from ckptkit.formats.table import MEGATRON_PARTS

_NAMESPACE = Global("argparse", "Namespace")


def layout(checkpoint: Checkpoint, options: Options) -> Plan:
    """A folder of an iteration, with the tracker beside it. Raises UsageError where the arguments
    are missing."""
    count = ranks_of(options, MEGATRON_PARTS.name)
    root = checkpoint.root
    if not isinstance(root, dict) or not isinstance(root.get("args"), dict):
        raise UsageError(
            "has no arguments of Megatron-LM, which say how its tensors are cut",
            hint="convert from the folder of the training, or from a .pth that ckptkit made of it",
        )
    tensors = checkpoint.required.tensors
    trained = arguments_of(root)
    arguments = Arguments(
        {**trained.values, "tensor_model_parallel_size": count}, max(trained.version, 3.0)
    )
    legacy = any(name.startswith(LEGACY) for name in tensors)
    parts = cut(tensors, table(arguments, legacy=legacy), count)
    iteration = root.get("iteration")
    number = iteration if type(iteration) is int and 0 <= iteration < 10**7 else 0
    names = [f"iter_{number:07d}/mp_rank_{rank:02d}/{FILE}" for rank in range(count)]
    others = {key: node for key, node in root.items() if key not in ("args", "model")}
    files = [
        file(
            name,
            {
                "args": _namespace(arguments.values),
                **others,
                "model": _nested(part) if legacy else part,
            },
            options,
        )
        for name, part in zip(names, parts, strict=True)
    ]
    tracker = OutputFile(TRACKER, (str(number).encode(),))
    return Plan((*files, tracker), (), len(tensors))


def _namespace(values: Mapping[str, Node]) -> Object:
    made = Object(_NAMESPACE, (), new=True)
    made.steps.append(("build", dict(values)))
    return made


def _nested(part: OrderedMapping) -> dict[str, Node]:
    """The nested dicts of the legacy classes: names of layers stay as they are."""
    made: dict[str, Node] = {}
    for name, tensor in part.items():
        place = made
        head, dot, rest = name.partition("layers.")
        steps = [*head.strip(".").split("."), *([dot + rest] if dot else [])]
        if not dot:
            whole = next((n for n in ("final_layernorm", "final_norm") if f".{n}." in name), None)
            if whole is not None:
                before, _, after = name.partition(f".{whole}.")
                steps = [*before.split("."), f"{whole}.{after}"]
        for step in steps[:-1]:
            place = place.setdefault(step, {})
        place[steps[-1]] = tensor
    return made


def matches(probe: Probe) -> bool:
    """Never: the format is written, and its folders are read as `parallel`."""
    return False
