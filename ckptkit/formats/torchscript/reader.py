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
are its weights. Packed weights (:mod:`packed`) are weights in any case: ``CONSTANTS.c0.weight``.
"""

from __future__ import annotations

from collections.abc import Collection

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import AmbiguousError, FormatError
from ckptkit.core.limits import LIMITS
from ckptkit.core.text import shown
from ckptkit.core.tree import Global, Node, Object, walk
from ckptkit.core.weights import as_tensor, module_state
from ckptkit.formats.format import Probe
from ckptkit.formats.table import TORCHSCRIPT
from ckptkit.formats.torch_zip.reader import Archive
from ckptkit.formats.torchscript import old_json as script_json
from ckptkit.formats.torchscript.code import Code, Declared
from ckptkit.formats.torchscript.packed import is_custom, unpack

_FROZEN = "it is frozen: its weights are constants of its code, without their names"
_PACKED = "it has packed weights, without the names of their layers: CONSTANTS.c0.weight..."
PARTS = ("_parameters", "_buffers", "_modules")
CONSTANTS = "CONSTANTS"


def read(probe: Probe) -> Checkpoint:
    """Read the module and its constants.

    Raises FormatError, AmbiguousError, and what the reader of zip archives raises.
    """
    directory = probe.zip
    assert directory is not None
    archive = Archive(directory)
    warnings = archive.check()
    if f"{archive.folder}data.pkl" in directory or f"{archive.folder}model.json" not in directory:
        root, names, found = _pickled(archive)
    else:
        root, names, found = script_json.read(archive)
    texts, lost = _extra(archive)
    warnings += [*found, *archive.unverified(), *lost]
    key, remarks = _weights_of_constants(root)
    return Checkpoint(
        root,
        TORCHSCRIPT.name,
        directory.source,
        texts,
        names,
        (*warnings, *remarks),
        key=key,
    )


def _weights_of_constants(root: Object) -> tuple[str | None, list[str]]:
    """Make weights of packed constants, and of all tensors among them if the module is frozen.

    Return the key of the weights and warnings.
    """
    constants: dict[Node, Node] = root.state.get(CONSTANTS, {})
    is_frozen = not module_state(root)
    tensors = [name for name, node in constants.items() if is_frozen and as_tensor(node)]
    if packed := unpack({CONSTANTS: constants}, of_modules=True):
        # Beside other constants, so that one mapping has all weights.
        root.state["_modules"] |= packed
        root.state["_buffers"] |= {f"{CONSTANTS}.{name}": constants[name] for name in tensors}
        moved = {*tensors, *(place.split(".")[1] for place in packed)}
        root.state[CONSTANTS] = {
            name: node for name, node in constants.items() if name not in moved
        }
        return None, [_PACKED]
    return (CONSTANTS, [_FROZEN]) if tensors else (None, [])


def _pickled(archive: Archive) -> tuple[Object, tuple[Global, ...], list[str]]:
    """Return the module, the globals that its pickles name, and warnings."""
    tree = archive.unpickle("data")
    root, names, warnings = tree.root, tree.globals, list(tree.warnings)
    if not _is_scripted(root):
        raise FormatError("data.pkl does not hold a module of TorchScript")
    warnings += _arrange(root, Code(archive.directory))
    if f"{archive.folder}constants.pkl" in archive.directory:
        constants = archive.unpickle("constants")
        names += tuple(name for name in constants.globals if name not in names)
        warnings += constants.warnings
        _add_constants(root, constants.root)
    return root, names, warnings


def _add_constants(root: Object, constants: Node) -> None:
    if not isinstance(constants, tuple):
        raise FormatError("constants.pkl does not hold a tuple")
    if CONSTANTS in root.state:
        raise AmbiguousError(
            f"an attribute of its module is called {CONSTANTS}, as its constants are"
        )
    if constants:
        root.state[CONSTANTS] = {f"c{number}": each for number, each in enumerate(constants)}


def _is_scripted(node: Node) -> bool:
    """Return whether a node is an object of a class in the archive's own code."""
    made = node.global_ if isinstance(node, Object) else None
    return made is not None and made.module.split(".")[0] == "__torch__" and not is_custom(node)


def _arrange(root: Object, code: Code) -> list[str]:
    """Move all modules' attributes to where nn.Module has them; warn about uncertain ones."""
    found = {id(node): (node, code[node.callable]) for _, node in walk(root) if _is_scripted(node)}
    unknown = [node for node, declared in found.values() if declared is None]
    known = [node for node, declared in found.values() if declared and declared.is_module]
    packed = unpack(root, of_modules=False).values()
    modules = {id(node) for node in (root, *unknown, *known, *packed)}
    warnings = [
        f"there is no code of {node.global_}: "
        "its tensors count as parameters if they have a gradient"
        for node in unknown[:1]
    ]
    for key, (node, declared) in found.items():
        if key not in modules:
            continue
        is_own = _split(node, declared, modules)
        if is_own and declared is not None and (declared.parameters or declared.buffers):
            name = node.global_
            warnings.append(f"only its own code can tell the parameters of {name} from its state")
    return list(dict.fromkeys(warnings))


def _split(node: Object, declared: Declared | None, modules: Collection[int]) -> bool:
    """Give a module its parts.

    True if it defines its own state, which is not a dict of its attributes.
    """
    state = node.state
    if [step for step, _ in node.steps] != ["build"]:
        raise FormatError(f"an object of {node.global_} is not made as TorchScript makes it")
    is_own = not isinstance(state, dict) or (declared is not None and declared.has_setstate)
    attributes: dict[Node, Node] = {"state": state} if is_own else state
    if not attributes.keys().isdisjoint(PARTS):
        raise AmbiguousError(f"attributes of {node.global_} have names that nn.Module itself uses")
    parts: dict[str, dict[Node, Node]] = {part: {} for part in PARTS}
    rest: dict[Node, Node] = {}
    for name, value in attributes.items():
        part = "_modules" if id(value) in modules else _part(name, value, declared)
        (rest if part is None else parts[part])[name] = value
    node.steps[:] = [("build", rest | parts)]
    return is_own


def _part(name: Node, value: Node, declared: Declared | None) -> str | None:
    tensor = as_tensor(value)
    if declared is not None:
        return declared.part(name) if tensor is not None or value is None else None
    if tensor is None:
        return None
    return "_parameters" if tensor.requires_grad else "_buffers"


def _extra(archive: Archive) -> tuple[dict[str, str], list[str]]:
    """Return the texts saved with it, and a warning about bytes that are not text or too long."""
    texts: dict[str, str] = {}
    lost: list[str] = []
    left = LIMITS.line_bytes
    for name, entry in archive.directory.entries.items():
        if not name.startswith(f"{archive.folder}extra/"):
            continue
        short = name.removeprefix(archive.folder)
        try:
            if entry.size > left:
                raise ValueError
            texts[short] = archive.directory.read(name).decode()
            left -= entry.size
        except ValueError:
            lost.append(short)
    return texts, [
        f"left out, as they are not short texts: {', '.join(map(shown, lost[:4]))}"
    ] if lost else []
