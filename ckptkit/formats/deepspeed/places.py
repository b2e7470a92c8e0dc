"""Find the folder and the files of a training state: tags, ranks, and unsupported parallelism."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from itertools import count, islice

from ckptkit.core.bytesource import ByteSource, Folder
from ckptkit.core.errors import AmbiguousError, CkptkitError, CorruptError, UnsupportedError
from ckptkit.core.text import shell_word

POINTERS = ("latest", "latest_universal")
UNIVERSAL = "zero"
_POINTER_BYTES = 1 << 10
_STATES = re.compile(r".+_(model|optim)_states\.pt|layer_.*-model_states\.pt")
_MODEL = re.compile(
    r"(?:zero_pp_rank_(?P<rank>[0-9]{1,9})_)?mp_rank_(?P<mp>[0-9]{1,9})_model_states\.pt"
)
_OPTIM = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>[0-9]{1,9})_mp_rank_(?P<mp>[0-9]{1,9})_optim_states\.pt"
)
_EXPERT = re.compile(r"(layer_.*_)?expert_.*|expp_rank_.*")
_LAYER = re.compile(r"layer_.*")
_MODEL_NAME, _OPTIM_NAME = (
    f"zero_pp_rank_{{}}_mp_rank_00_{kind}_states.pt" for kind in ("model", "optim")
)
_MODEL_FILE = re.compile(r"(.*\.index\.json|.*\.safetensors|(pytorch|adapter)_model.*\.bin)")
_MERGE = "merge the ranks with DeepSpeed's ds_to_universal.py; ckptkit reads its output"
_SHOWN = 4  # names in a message


def is_tag(names: Iterable[str]) -> bool:
    """Return whether these are the files of one training state."""
    return any(map(_STATES.fullmatch, names))


def tag_folders(folder: Folder) -> list[str]:
    """Return the folders of training states in `folder`."""
    return [name for name in folder.folders() if _holds_states(folder, name)]


def _holds_states(folder: Folder, name: str) -> bool:
    try:
        return is_tag(folder.sub(name).list())
    except CkptkitError:  # no folder, or one without permission to list
        return False


def pointer(folder: Folder, names: Collection[str]) -> tuple[str, str] | None:
    """Return the file that names the current tag, and the tag; None where there is none."""
    for name in POINTERS:
        if name in names and (tag := _word(folder, name)):
            return name, tag
    return None


def _word(folder: Folder, name: str) -> str:
    """Return the single line of a file, "" if it is no such file."""
    try:
        source: ByteSource = folder.open(name)
    except CkptkitError:
        return ""
    text = source.read(0, source.size) if source.size <= _POINTER_BYTES else b""
    word = text.decode("utf-8", "replace").strip()
    return word if word.isprintable() else ""


def find(folder: Folder, names: Collection[str]) -> Folder:
    """Return the folder with the files.

    It is `folder` itself, that of the tag in ``latest``, or the only one.
    """
    if is_tag(names):
        return folder
    named = pointer(folder, names)
    tags = [named[1]] if named else tag_folders(folder)
    if len(tags) != 1:
        raise AmbiguousError(
            f"holds {len(tags)} training states and no file that names the latest: {listed(tags)}",
            hint=f"name one of them, e.g. {shell_word(os.path.join(folder.name, tags[0]))}",
        )
    if named and not _holds_states(folder, named[1]):
        others = tag_folders(folder)
        hint = (
            f"it holds {listed(others)}: name the folder to read"
            if others
            else "fetch the whole folder again"
        )
        raise CorruptError(
            f"{named[0]} names {named[1][:80]!r}, which is not a folder of a training state",
            hint=hint,
        )
    _check_alone(folder, names, tags[0])
    return folder.sub(tags[0])


def _check_alone(folder: Folder, names: Collection[str], tag: str) -> None:
    model_files = sorted(filter(_MODEL_FILE.fullmatch, names))
    model_files = [name for name in model_files if name.endswith(".index.json")] or model_files
    if model_files:
        paths = [os.path.join(folder.name, name) for name in (tag, model_files[0])]
        raise AmbiguousError(
            f"holds the training state {tag} and a model of its own, {listed(model_files)}",
            hint=f"name one of them: {paths[0]} or {paths[1]}",
        )


def listed(names: Collection[str]) -> str:
    return ", ".join(islice(names, _SHOWN)) + (", ..." if len(names) > _SHOWN else "")


class RankFiles:
    """The files of a training state by rank; those of other parallelism are refused.

    ``models`` holds the one of stages 0 to 2 as that of rank -1, or those of stage 3; ``optims``
    those with weights and optimizer. Where the model-parallel ranks are `merged` elsewhere, the
    files of the first are taken, and ``parallel`` says that there are others.
    """

    def __init__(self, names: Iterable[str], *, merged: bool) -> None:
        states = sorted(filter(_STATES.fullmatch, names))
        others = _others(states)
        if others and not merged:
            raise UnsupportedError(
                f"is of several model-parallel ranks ({listed(others)})", hint=_MERGE
            )
        self.parallel = bool(others)
        left = [name for name in states if name not in set(others)]
        self.models, self.optims = _by_rank(left, _MODEL), _by_rank(left, _OPTIM)
        if -1 in self.models and len(self.models) > 1:
            raise AmbiguousError(
                f"holds {self.models[-1]} and files of ZeRO stage 3: "
                f"{listed(list(self.models.values())[1:])}",
                hint="the files of two runs are mixed: move those of one of them away",
            )

    @property
    def model(self) -> str:
        """The file with the model of rank 0. Raises CorruptError if it is missing."""
        found = self.models.get(-1) or self.models.get(0)
        if found is None:
            raise _incomplete(
                [_MODEL_NAME.format(0)] if self.models else ["mp_rank_00_model_states.pt"]
            )
        return found

    def check_complete(self, ranks: int) -> None:
        """Raise CorruptError unless there is exactly one file of each kind for each rank."""
        prefix = "bf16_" if any(name.startswith("bf16_") for name in self.optims.values()) else ""
        _check(self.optims, ranks, prefix + _OPTIM_NAME)
        if -1 not in self.models:
            self.check_models(ranks)

    def check_models(self, ranks: int) -> None:
        """Raise CorruptError unless there is exactly one model file of stage 3 for each rank."""
        _check(self.models, ranks, _MODEL_NAME)


def _others(names: Iterable[str]) -> list[str]:
    """Return the files of model-parallel ranks after the first.

    Raises UnsupportedError for other parallelism.
    """
    others = []
    for name in names:
        if _EXPERT.fullmatch(name):
            hint = "load it with DeepSpeed and save engine.module_state_dict()"
            raise UnsupportedError(
                f"has files of single experts, e.g. {name}, which ckptkit cannot join", hint=hint
            )
        match = _MODEL.fullmatch(name) or _OPTIM.fullmatch(name)
        if match is None:
            what = (
                "single pipeline layers"
                if _LAYER.fullmatch(name)
                else "a kind that ckptkit does not know"
            )
            raise UnsupportedError(f"has files of {what}, e.g. {name}", hint=_MERGE)
        if int(match["mp"]):
            others.append(name)
    return others


def _by_rank(names: Iterable[str], pattern: re.Pattern[str]) -> dict[int, str]:
    """Return names by rank, in the order of the ranks, -1 for a name without one."""
    found: dict[int, str] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        rank = -1 if match["rank"] is None else int(match["rank"])
        if rank in found:
            raise AmbiguousError(f"has two files of rank {rank}: {found[rank]} and {name}")
        found[rank] = name
    return dict(sorted(found.items()))


def _check(found: Mapping[int, str], ranks: int, name: str) -> None:
    absent = (rank for rank in count() if rank not in found)  # however many `ranks` claims to be
    missing = [name.format(rank) for rank in islice(absent, _SHOWN + 1) if rank < ranks]
    if missing:
        raise _incomplete(missing)
    stale = [name for rank, name in found.items() if rank >= ranks]
    if stale:
        raise CorruptError(
            f"is of {ranks:,} ranks, but there are files of others: {listed(stale)}",
            hint="they are from another run: move them away",
        )


def _incomplete(missing: Collection[str]) -> CorruptError:
    return CorruptError(
        f"is not complete: {listed(missing)} {'is' if len(missing) == 1 else 'are'} missing",
        hint="copy the missing files too; every process wrote its own, perhaps on its own machine",
    )
