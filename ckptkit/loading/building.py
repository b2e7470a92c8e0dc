"""Build models from the user's code, and describe models, torch and the devices of this machine."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ckptkit.core.errors import CkptkitError, ModelError
from ckptkit.core.text import typed

if TYPE_CHECKING:
    from torch import nn


def model_from(spec: str, args: Mapping[str, object] | None = None) -> nn.Module:
    """Import the class ``package.module:Class`` or ``path/to/file.py:Class``, and build the model.

    The import and the constructor run the user's code. The model is built on the meta device, which
    needs no memory for weights. If the constructor fails on the meta device, the model is built on
    the CPU. Raises ModelError if the import or the constructor fails.
    """
    import torch

    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ModelError(
            f"{spec!r} is not a model class",
            hint="write package.module:Class or path/to/file.py:Class",
        )
    folder = os.path.dirname(os.path.abspath(place)) if place.endswith(".py") else os.getcwd()
    sys.path.insert(0, folder)  # as if Python ran a file in this folder
    try:
        with _users_code(f"cannot import {spec}"):
            make = _member(_module(place), name, place)
            _check_arguments(make, name, args or {})
            model = _built(make, name, args or {})
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"{spec} returns a {type(model).__name__}, not a torch.nn.Module")
    return model


@contextmanager
def _users_code(what: str, hint: str | None = None) -> Iterator[None]:
    """Convert exceptions of the user's code to ModelError, except KeyboardInterrupt."""
    try:
        yield
    except (KeyboardInterrupt, CkptkitError):
        raise
    except BaseException as error:
        kind = type(error).__name__
        line = f"{kind}: {error}" if str(error) else kind
        raise ModelError(f"{what}: {line}", hint=hint) from error


def _built(make: Callable[..., object], name: str, args: Mapping[str, object]) -> object:
    import torch

    try:
        with _users_code(f"cannot build {name} on the meta device"), torch.device("meta"):
            return make(**args)
    except CkptkitError:  # building may succeed on the CPU
        pass
    with _users_code(f"cannot build {name}", _signature(make)):
        return make(**args)


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        hint = "for a file, write its path: path/to/file.py:Class"
        with _users_code(f"cannot import {place}", hint):
            return importlib.import_module(place)
    with _users_code(f"cannot import {place}"):
        name = os.path.splitext(os.path.basename(place))[0]
        spec = importlib.util.spec_from_file_location(name, place)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(name, module)  # dataclasses and pickle need this entry
        spec.loader.exec_module(module)
        return module


def _member(module: ModuleType, name: str, place: str) -> Callable[..., object]:
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        from torch.nn import Module

        known = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, Module)
        ]
        raise ModelError(
            f"{place} has no class {name!r}",
            hint=f"its models are: {', '.join(known[:12])}" if known else None,
        )
    return found


def _check_arguments(make: Callable[..., object], name: str, args: Mapping[str, object]) -> None:
    try:
        inspect.signature(make).bind(**args)
    except TypeError as error:
        raise ModelError(f"{name}: {error}", hint=_signature(make)) from error
    except ValueError:  # some builtins have no signature
        pass


def _signature(make: Callable[..., object]) -> str:
    hint = typed(
        "pass its arguments, as in --arg width=64 or --arg name='\"resnet18\"'",
        "pass a model built with its arguments",
    )
    try:
        return f"{hint}; its signature is {inspect.signature(make)}"
    except (TypeError, ValueError):
        return hint


def model_shapes(module: nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Map the name of each tensor in the module's state_dict to (dtype, shape), in order."""
    import torch

    return {
        name: (str(value.dtype).removeprefix("torch."), tuple(value.shape))
        for name, value in _state_dict(module)
        if isinstance(value, torch.Tensor)
    }


def _state_dict(module: nn.Module, **options: Any) -> list[tuple[str, Any]]:
    """Return the items of the module's state_dict. Raises ModelError if the module's code fails."""
    with _users_code(f"{type(module).__qualname__}.state_dict() fails"):
        return list(module.state_dict(**options).items())


def model_ties(module: nn.Module) -> list[list[str]]:
    """Return groups of tied names: names in the state_dict that share a parameter or buffer."""
    names: dict[int, list[str]] = {}
    for name, value in _state_dict(module, keep_vars=True):
        names.setdefault(id(value), []).append(name)
    return [same for same in names.values() if len(same) > 1]


def torch_lacks(names: Iterable[tuple[str, str]]) -> list[str]:
    """Return ``module.name`` for each (module, name) that the installed torch lacks.

    This function imports only torch, and calls nothing in torch. Names in modules that `import
    torch` does not load are skipped. If torch is not installed, return an empty list.
    """
    if torch_or_none() is None:
        return []
    loaded = ((module, name, sys.modules.get(module)) for module, name in names)
    return [
        f"{module}.{name}" for module, name, found in loaded if found and name not in vars(found)
    ]


def environment() -> dict[str, object]:
    """Return the versions of Python and of packages, and the devices of this machine.

    The entry "devices" maps the name of each device to its title, memory in bytes and UUID. If
    torch is not installed, the entries for torch are None, and the CPU is the only device.
    """
    import numpy
    import safetensors

    torch = torch_or_none()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": None if torch is None else torch.__version__,
        "safetensors": safetensors.__version__,
        "numpy": numpy.__version__,
        "cuda": None if torch is None else torch.version.cuda,
        "rocm": None if torch is None else torch.version.hip,
        "cudnn": torch.backends.cudnn.version() if torch and torch.version.cuda else None,
        "devices": dict(_devices(torch)),
    }


def torch_or_none() -> Any:
    """Import and return torch. Return None if torch is not installed."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    return torch


def _devices(torch: Any) -> Iterator[tuple[str, dict[str, object]]]:
    machine, memory = platform.machine(), _memory()
    yield "cpu", {"title": platform.processor() or machine, "memory": memory, "uuid": None}
    if torch is None:
        return
    for number in range(torch.cuda.device_count()):
        each = torch.cuda.get_device_properties(number)
        uuid = getattr(each, "uuid", None)  # since torch 2.4
        about = {"title": each.name, "memory": each.total_memory}
        yield f"cuda:{number}", {**about, "uuid": None if uuid is None else str(uuid)}
    if torch.backends.mps.is_available():
        yield "mps", {"title": machine, "memory": memory, "uuid": None}


def _memory() -> int | None:
    """Return the memory of the machine in bytes.

    Return None if the system does not report the memory.
    """
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
