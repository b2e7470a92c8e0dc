"""Read and write checkpoints of Megatron-LM with ``--ckpt-format torch``.

There is a folder for each combination of tensor, pipeline and expert rank. The files are:

* ``latest_checkpointed_iteration.txt`` contains a number, or "release".
* ``iter_<NNNNNNN>/mp_rank_<TT>[_<PPP>][_<EEE>]/model_optim_rng.pt`` is the file of a rank.

``TT`` is the tensor-parallel rank. If there are several pipeline stages, the name contains the
number ``PPP`` of the stage. If there are several expert ranks, the name contains the rank ``EEE``.
If a name has two numbers, the second is ``PPP`` or ``EEE``, depending on the training arguments.

A file contains ``args`` (argparse.Namespace), ``checkpoint_version``, ``iteration`` and ``model``.
With virtual pipeline stages, a file contains ``model0``, ``model1`` and so on in place of
``model``. Each rank numbers its layers and experts from 0.

The merged model is a flat dict with Megatron's own tensor names. The embedding includes the padding
rows of the vocabulary. The rows of query_key_value are sorted by head (the order of files since
checkpoint_version 2). The function :func:`layout` splits a model for tensor parallelism.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CorruptError, FormatError, UnsupportedError, UsageError
from ckptkit.core.options import Options
from ckptkit.core.plan import OutputFile, Plan
from ckptkit.core.tensor import Tensor, TypedStorage
from ckptkit.core.text import without
from ckptkit.core.tree import Global, Node, Object, OrderedMapping, walk
from ckptkit.core.weights import as_tensor
from ckptkit.formats.distributed import table
from ckptkit.formats.distributed.joining import Joiner
from ckptkit.formats.distributed.meshes import attributes
from ckptkit.formats.distributed.reading import RankReader
from ckptkit.formats.distributed.table import TP, RankFile
from ckptkit.formats.folder import TRACKER
from ckptkit.formats.format import Probe
from ckptkit.formats.table import MEGATRON_PARTS

FILE = "model_optim_rng.pt"
PP, EP, VP = "pp", "ep", "vp"
AXES = {TP: "TP", PP: "PP", EP: "EP", VP: "VPP"}
_FOLDER = re.compile(r"mp_rank_([0-9]{2,3})(?:_([0-9]{3}))?(?:_([0-9]{3}))?")
_MODEL = re.compile(r"model([0-9]{0,4})")
_LAYERS = re.compile(r"(?:^|\.)(?:decoder|encoder|transformer)\.layers\.([0-9]{1,9})\.")
_EXPERTS = re.compile(r"\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias))([0-9]{1,9})(?:\.|$)")
_SPLIT = "distrib_optim.pt"  # file of the distributed optimizer in the folder of a rank
_OF_PROCESS = ("optimizer", "rng_state", "num_floating_point_operations_so_far")
_SIZES = tuple(f"{kind}_model_parallel_size" for kind in ("expert", "pipeline", "tensor"))
_WHOLE = re.compile(r"\.((?:layers|final_layernorm|final_norm)\..*)")  # not nested in dicts
WORD = "embedding.word_embeddings.weight"
LEGACY = "language_model."


@dataclass(frozen=True)
class Arguments:
    """The training arguments of Megatron-LM.

    A missing flag is False. A missing size of tensor, pipeline or expert parallelism is 1.
    """

    values: Mapping[str, Node]
    version: float

    def number(self, *names: str) -> int | None:
        """Return the first positive integer among the arguments `names`, or None."""
        return table.positive(self.values, *names)

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes of tensor, pipeline and expert parallelism."""
        return {
            TP: self.number("tensor_model_parallel_size", "model_parallel_size") or 1,
            PP: self.number("pipeline_model_parallel_size") or 1,
            EP: self.number("expert_model_parallel_size") or 1,
        }

    @property
    def fused(self) -> str:
        """Return the rule for the fused rows of query, key and value.

        The rule depends on the file's checkpoint_version.
        """
        if self.version >= 2:
            return "cut 0"
        hidden, heads = self.number("hidden_size"), self.number("num_attention_heads")
        rows_of_head = self.number("kv_channels") or (hidden // heads if hidden and heads else None)
        if rows_of_head is None:
            raise UnsupportedError(
                f"has checkpoint_version {self.version:g}, but its arguments do not contain the "
                "width of a head, which ckptkit needs to merge query, key and value"
            )
        part = "h d t" if self.version >= 1 else "t h d"
        return f"[({part}) ...] -> [(tp h t d) ...] with t=3 d={rows_of_head}"


def arguments_of(root: Mapping[Node, Node]) -> Arguments:
    """Return the training arguments in a file. ``args`` is a Namespace or a dict."""
    version = root.get("checkpoint_version")
    number = float(version) if isinstance(version, (int, float)) else 0.0
    return Arguments(attributes(root.get("args")), number)


def layout_of(arguments: Arguments, *, legacy: bool) -> table.ParallelLayout:
    """Return the layout of a model that was trained with these arguments."""
    flags = {name for name, value in arguments.values.items() if value is True}
    gated = 1 if flags.isdisjoint(("swiglu", "gated_linear_unit")) else 2
    experts = arguments.number("num_experts")
    apart = arguments.number("expert_tensor_parallel_size")
    if experts and apart and apart != arguments.sizes[TP]:
        raise UnsupportedError(
            f"its experts are split over {apart} ranks, but its other tensors over "
            f"{arguments.sizes[TP]}; ckptkit cannot merge such a checkpoint",
            hint="save it with expert_tensor_parallel_size equal to tensor_model_parallel_size",
        )
    layers = table.Offset(_LAYERS, (VP, PP), arguments.number("num_layers"))
    if legacy:
        twice = ("word_embeddings_for_head.weight", "word_embeddings.weight")
        copies = tuple((name, LEGACY + WORD) for name in twice)
        rows = table.known_rows("megatron-legacy", gated=gated, fused=arguments.fused)
        return table.ParallelLayout(rows, (layers,), copies)
    numbers = layers, table.Offset(_EXPERTS, (EP,), experts, "experts")
    is_tied = "untie_embeddings_and_output_weights" not in flags
    copies = (("output_layer.weight", WORD),) if is_tied else ()
    return table.ParallelLayout(table.known_rows("megatron", gated=gated), numbers, copies)


def matches(probe: Probe) -> bool:
    """Return whether the folder is the folder of an iteration (``iter_<NNNNNNN>``)."""
    return any(FILE in probe.folder.sub(name) for name in _folders(probe))


def _folders(probe: Probe) -> list[str]:
    names = [name for name in probe.names if _FOLDER.fullmatch(name)]
    return sorted(set(names) & set(probe.folder.folders())) if names else []


def read(probe: Probe) -> Checkpoint:
    """Return the merged model, and the other entries of the first rank except the optimizer.

    Raises CorruptError if a rank's file is missing or from a different save. Raises
    UnsupportedError if the layout has no rule for a tensor.
    """
    folder, reader, names = probe.folder, RankReader(probe.folder), _folders(probe)
    roots: dict[str, dict[Node, Node]] = {}
    for name in names:
        root = reader.read(FILE, folder.sub(name)).root
        if not isinstance(root, dict) or not any(_MODEL.fullmatch(str(key)) for key in root):
            raise FormatError("contains no Megatron-LM model", where=f"{folder.name}/{name}/{FILE}")
        roots[name] = root
    first = roots[names[0]]
    arguments = arguments_of(first)
    sizes = arguments.sizes
    parts: list[RankFile] = []
    for name, root in roots.items():
        for (what, value), (_, expected) in zip(_facts(root), _facts(first), strict=True):
            if value != expected:
                raise CorruptError(
                    f"{what} is {value} in {name}, but {expected} in {names[0]}",
                    hint="the files are from two runs or two saves: move the files of each save to "
                    "a folder of its own",
                )
        parts += _parts(name, root, sizes)
    sizes[VP] = 1 + max(part.at[VP] for part in parts)
    table.check_grid(parts, sizes, AXES)
    joiner = Joiner(probe)
    legacy = any(name.startswith(LEGACY) for name in parts[0].entries)
    merged = table.merge(parts, sizes[TP], layout_of(arguments, legacy=legacy), joiner)
    words = as_tensor(merged.get(LEGACY + WORD if legacy else WORD))
    padded = arguments.number("padded_vocab_size")
    if words is not None and padded and words.shape[0] != padded:
        raise CorruptError(
            f"its embedding has {words.shape[0]:,} rows, but padded_vocab_size is {padded:,}"
        )
    left = [key for key in _OF_PROCESS if key in first]
    left += [_SPLIT] if any(_SPLIT in folder.sub(name) for name in names) else []
    if left:
        joiner.notes.append(f"dropped the state of single ranks: {', '.join(left)}")
    grid = " x ".join(f"{AXES[axis]} {n}" for axis, n in sizes.items() if n > 1 or axis in (TP, PP))
    names_of = "legacy names" if legacy else "mcore names"
    about = f"Megatron-LM: {grid}, iteration {_text(first.get('iteration'))}, {names_of}"
    made = {"model": merged, **_other_entries(first, arguments)}
    return joiner.checkpoint(made, reader, about, key="model")


def _facts(root: Mapping[Node, Node]) -> Iterator[tuple[str, str]]:
    """Yield facts that must be equal in the files of all ranks."""
    sizes = arguments_of(root).sizes
    yield "the number of ranks", " x ".join(f"{AXES[axis]} {n}" for axis, n in sizes.items())
    yield "iteration", _text(root.get("iteration"))
    yield "checkpoint_version", _text(root.get("checkpoint_version"))


def _parts(name: str, root: Mapping[Node, Node], sizes: Mapping[str, int]) -> list[RankFile]:
    """Return the entries of one file, as one RankFile for each virtual pipeline stage."""
    found = _FOLDER.fullmatch(name)
    assert found is not None
    numbers = [int(number) for number in found.groups() if number is not None]
    axes = [TP, *(axis for axis in (PP, EP) if sizes[axis] > 1)]
    if len(numbers) != len(axes):
        sizes_text = " x ".join(f"{AXES[axis]} {n}" for axis, n in sizes.items())
        raise CorruptError(
            f"{name} is not the name of a rank of {sizes_text}",
            hint="the folder was renamed: restore its original name",
        )
    at = {PP: 0, EP: 0, **dict(zip(axes, numbers, strict=True))}
    return [
        RankFile(f"{name}/{FILE}", {**at, VP: int(number[1] or 0)}, dict(table.flattened(node)))
        for key, node in root.items()
        if (number := _MODEL.fullmatch(str(key))) and isinstance(node, dict)
    ]


def _other_entries(root: Mapping[Node, Node], arguments: Arguments) -> dict[str, Node]:
    """Return the entries of the first rank, except model, optimizer and random state.

    Replace `args` by a dict with the arguments of the merged model.
    """
    kept = {key: node for key, node in root.items() if not _MODEL.fullmatch(str(key))}
    values: dict[str, Node] = dict.fromkeys(_SIZES, 1)
    for key, value in arguments.values.items():
        if key in ("virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size"):
            values[key] = None
        elif key not in (*_SIZES, "model_parallel_size") and _is_plain(value):
            values[key] = value
    return {
        **without(kept, (*_OF_PROCESS, "args")),
        "args": values,
        "checkpoint_version": max(arguments.version, 3.0),
    }


def _is_plain(node: Node) -> bool:
    """Return whether torch can load a pickled value without Megatron-LM."""
    others = (Object, dict, Tensor, TypedStorage)
    return not any(
        isinstance(each, others) or (isinstance(each, Global) and each.module != "torch")
        for _, each in walk(node)
    )


def _text(node: Node) -> str:
    return str(node) if isinstance(node, (int, float, str)) else "missing"


# Splitting a model for tensor parallelism, with Megatron's own names and arguments


def layout(checkpoint: Checkpoint, options: Options) -> Plan:
    """Plan the folder of an iteration, and the file ``latest_checkpointed_iteration.txt``.

    Raises UsageError if the checkpoint lacks the training arguments of Megatron-LM.
    """
    count = table.ranks_of(options, MEGATRON_PARTS.name)
    root = checkpoint.root
    if not isinstance(root, dict) or not isinstance(root.get("args"), dict):
        raise UsageError(
            "has no Megatron-LM arguments, which describe how its tensors are split",
            hint="convert from the folder of the training, or from a .pth that ckptkit converted",
        )
    tensors = checkpoint.required.tensors
    trained = arguments_of(root)
    values = {**trained.values, "tensor_model_parallel_size": count}
    legacy = any(name.startswith(LEGACY) for name in tensors)
    tables = layout_of(Arguments(values, max(trained.version, 3.0)), legacy=legacy)
    others = {key: node for key, node in root.items() if key not in ("args", "model")}
    iteration = root.get("iteration")
    number = iteration if type(iteration) is int and 0 <= iteration < 10**7 else 0
    files = []
    for rank, part in enumerate(table.cut_all(tensors, tables, count)):
        namespace = Object(Global("argparse", "Namespace"), (), new=True)
        namespace.steps.append(("build", dict(values)))
        model = _nested(part) if legacy else part
        name = f"iter_{number:07d}/mp_rank_{rank:02d}/{FILE}"
        files.append(table.file(name, {"args": namespace, **others, "model": model}, options))
    tracker = OutputFile(TRACKER, (str(number).encode(),))
    return Plan((*files, tracker), (), len(tensors))


def _nested(part: OrderedMapping) -> dict[str, Node]:
    """Return the tensors in nested dicts, as model classes before mcore save them.

    The names of layers and final norms remain dotted.
    """
    made: dict[str, Node] = {}
    for name, tensor in part.items():
        found = _WHOLE.search(name)
        steps = [*name[: found.start()].split("."), found[1]] if found else name.split(".")
        place = made
        for step in steps[:-1]:
            place = place.setdefault(step, {})
        place[steps[-1]] = tensor
    return made
