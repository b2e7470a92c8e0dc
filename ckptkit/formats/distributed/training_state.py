"""Read and write training state: files of optimizer, scheduler and random generators.

The files are in the same folder as the weights:

* accelerate's save_state writes optimizer.bin, scheduler.bin and random_states_0.pkl.
* The Trainer of transformers writes optimizer.pt, scheduler.pt and rng_state_0.pth.

Each file is a torch.save file. If a run has several optimizers or schedulers, accelerate adds a
number to the names: scheduler_1.bin.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace

from ckptkit import formats
from ckptkit.core.bytesource import Folder
from ckptkit.core.checkpoint import Beside, Checkpoint
from ckptkit.core.errors import CkptkitError, within
from ckptkit.core.options import Options
from ckptkit.core.plan import OutputFile, Plan
from ckptkit.core.text import some, typed
from ckptkit.core.tree import Node
from ckptkit.formats.folder import is_state
from ckptkit.formats.table import BY_NAME, TORCH_ZIP

WEIGHTS = "model"  # key of the weights in a checkpoint with training state
_OTHERS = ("trainer_state.json", "training_args.bin")  # never read


def beside(checkpoint: Checkpoint, folder: Folder, *, take: bool) -> Checkpoint:
    """If `take` is true, add each training-state file in the folder as an entry of the checkpoint.

    If `take` is false, add a warning that names these files. If a file cannot be read, raises a
    CkptkitError with the name of the file.
    """
    try:
        names = folder.list()
    except CkptkitError:  # web servers do not list files
        return checkpoint
    found = sorted(filter(is_state, names))
    if take and found:
        checkpoint = _with_entries(checkpoint, folder, found)
    left = [name for name in (*(() if take else found), *_OTHERS) if name in names]
    if not left:
        return checkpoint
    more = f"; {typed('--all', 'all=True')} adds the training state" if not take else ""
    warning = f"ckptkit did not read these files beside the weights: {some(left, 9)}{more}"
    return replace(checkpoint, warnings=(*checkpoint.warnings, warning))


def _with_entries(checkpoint: Checkpoint, folder: Folder, names: Collection[str]) -> Checkpoint:
    """Return the checkpoint with the root ``{"model": weights, "optimizer": ..., ...}``."""
    root: dict[Node, Node] = {WEIGHTS: checkpoint.root}
    files: dict[str, str] = {}
    globals_, warnings = dict.fromkeys(checkpoint.globals), [*checkpoint.warnings]
    for name in names:
        other = formats.read(folder.open(name))
        entry = os.path.splitext(name)[0]
        root[entry], files[entry] = other.root, name
        globals_ |= dict.fromkeys(other.globals)
        warnings += [within(name, warning) for warning in other.warnings]
    key = None if checkpoint.key is None else f"{WEIGHTS}.{checkpoint.key}"
    unordered = not BY_NAME[checkpoint.format].loaded_by_torch
    return replace(
        checkpoint, root=root, key=key, globals=tuple(globals_), warnings=tuple(warnings),
        beside=Beside(files, WEIGHTS, unordered),
    )  # fmt: skip


def as_files(checkpoint: Checkpoint, options: Options) -> tuple[Checkpoint, Plan]:
    """Return the checkpoint without its training state, and a plan of separate files for the state.

    Folders of shards need this function, because their weight files can contain only weights.
    """
    beside, root = checkpoint.beside, checkpoint.root
    if beside is None or not isinstance(root, dict) or beside.weights not in root:
        return checkpoint, Plan(())
    files: list[OutputFile] = []
    notes: list[str] = []
    for entry, name in beside.files.items():
        if entry in root:
            part = replace(checkpoint, root=root[entry], key=None, extras={}, beside=None)
            plan = formats.layout(part, TORCH_ZIP, options)
            files += [replace(file, name=name) for file in plan.files]
            notes += [within(name, note) for note in plan.notes]
    key = None if checkpoint.key is None else checkpoint.key.removeprefix(f"{WEIGHTS}.")
    weights = replace(checkpoint, root=root[beside.weights], key=key, beside=None)
    return weights, Plan(tuple(files), tuple(notes))
