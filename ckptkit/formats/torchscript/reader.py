"""TorchScript: torch.jit.save, a program with its weights. The weights and attributes are read, the
program is not.

    <top>/data.pkl, data/              the module, pickled: an object of __torch__.<class> for each, its state a dict
    <top>/code/__torch__/**.py         which attributes are parameters and buffers (:mod:`script_code`); deflated
    <top>/constants.pkl, constants/    a tuple, to which the code refers as CONSTANTS.c0, CONSTANTS.c1...
    <top>/bytecode.pkl                 for the mobile runtime (.ptl); mobile_debug_handles.pkl. Not read
    <top>/traced_inputs.pkl, traced_inputs/    of torch.jit.trace: tensors without their bytes. Not read
    <top>/extra/<name>                 whatever the one who saved it added: metadata here, if it is text
    <top>/model.json                   instead of data.pkl before torch 1.3: :mod:`script_json`

The container is that of zip_archive; the name constants.pkl alone makes torch.load hand a file to
torch.jit.load. Storages are numbered for each pickle.
(torch/csrc/jit/serialization/export_module.cpp, import.cpp.)

A module reads as the pickled nn.Module that it was made of would: attributes in ``_parameters``,
``_buffers`` and ``_modules``, so that its state_dict is that of ``torch.jit.load``. Constants are
the attribute CONSTANTS of the root. A frozen module has no other weights: they are taken for its
weights then.
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
    """The module and its constants. Raises FormatError, AmbiguousError, and what zip_archive
    raises."""
    from ckptkit.formats.torchscript import (
        modules as script_reader,  # every zip archive comes by here
    )

    archive = probe.zip
    assert archive is not None
    return script_reader.read(archive, table.TORCHSCRIPT.name)
