"""TorchScript (torch.jit.save), a program with its weights: weights and attributes are read.

The program is not read.

    <top>/data.pkl, data/              the module, pickled: an object of __torch__.<class> for each,
                                       its state a dict
    <top>/code/__torch__/**.py         which attributes are parameters and buffers (:mod:`code`);
                                       deflated
    <top>/constants.pkl, constants/    a tuple, which the code names CONSTANTS.c0, CONSTANTS.c1...
    <top>/bytecode.pkl                 for the mobile runtime (.ptl); mobile_debug_handles.pkl.
                                       Not read
    <top>/traced_inputs.pkl, traced_inputs/
                                       of torch.jit.trace: tensors without their bytes. Not read
    <top>/extra/<name>                 extra files of the user: metadata here, if they are text
    <top>/model.json                   instead of data.pkl before torch 1.3: :mod:`old_json`

The container is that of :mod:`torch_zip`; the name constants.pkl alone makes torch.load pass a file
to torch.jit.load. Storages are numbered for each pickle.
(torch/csrc/jit/serialization/export_module.cpp, import.cpp.)

A module reads as the pickled nn.Module that it was made of would: attributes in ``_parameters``,
``_buffers`` and ``_modules``, so that its state_dict is that of ``torch.jit.load``. Constants are
the attribute CONSTANTS of the root. A frozen module has no other weights, so its constants
are its weights.
"""

from __future__ import annotations

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.formats import table
from ckptkit.formats.format import Probe

_TELLING = ("data.pkl", "constants.pkl", "bytecode.pkl", "model.json", "version")


def matches(probe: Probe) -> bool:
    archive = probe.zip
    if archive is None:
        return False
    there = {name for name in _TELLING if f"{archive.top}/{name}" in archive}
    return bool(there & {"constants.pkl", "bytecode.pkl"}) or there == {"model.json", "version"}


def read(probe: Probe) -> Checkpoint:
    """Read the module and its constants.

    Raises FormatError, AmbiguousError, and what zip_reader raises.
    """
    from ckptkit.formats.torchscript import (
        modules as script_reader,  # not needed by most zip archives, which are matched here too
    )

    archive = probe.zip
    assert archive is not None
    return script_reader.read(archive, table.TORCHSCRIPT.name)
