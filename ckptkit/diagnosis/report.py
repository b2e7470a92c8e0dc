"""Findings of the doctor, as JSON values."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from ckptkit.analysis.reports import file_of, listed
from ckptkit.api import Conversion
from ckptkit.core import arguments
from ckptkit.core.checkpoint import Source
from ckptkit.core.options import Options
from ckptkit.diagnosis.cause import Cause
from ckptkit.diagnosis.diagnose import Diagnosis, examine

if TYPE_CHECKING:
    from torch import nn

    from ckptkit.analysis.json_types import DoctorReport


def doctor(
    source: Source, *, model: nn.Module | str | None = None, key: str | None = None
) -> DoctorReport:
    """Return why a file does not load, and the commands that help: ``ckptkit doctor --json``.

    `model` is a torch.nn.Module that the weights are meant for, or names a class: then
    ``package.module:Class`` or ``path/to/file.py:Class`` is imported and built.
    """
    path, read = file_of(source), Options(key=key)
    name = model if isinstance(model, str) else type(model).__qualname__
    options = ("--model", model) if isinstance(model, str) else ()
    if model is not None:
        from ckptkit.loading.building import model_from

        model = model_from(model) if isinstance(model, str) else model
        arguments.module("model", model)
    words = (*options, *(("--key", key) if key and options else ()))
    found = examine(path, read, model=model, words=words)
    facts = report(found, None, found, None if model is None else name)
    return cast("DoctorReport", listed(facts))


def report(
    found: Diagnosis, done: Conversion | None, left: Diagnosis, model: str | None
) -> dict[str, Any]:
    """Return the object of `doctor`: the causes, and what was done about them.

    `model` is how the caller named the model that the weights are for.
    """
    return {
        "file": found.path,
        "model": model,
        "readable": found.readable,
        "format": None if found.checkpoint is None else found.checkpoint.format,
        "causes": list(map(_cause, found.causes)),
        "fixed": None if done is None else _fixed(found, done, left),
    }


def _fixed(found: Diagnosis, done: Conversion, left: Diagnosis) -> dict[str, Any]:
    return {
        "output": done.path,
        "format": done.format,
        "done": list(done.notes),
        "left_out": list(done.plan.notes),
        "lost": list(map(asdict, found.lost)),
        "warnings": list(done.warnings),
        "remaining": list(map(_cause, left.causes)),
    }


def _cause(cause: Cause) -> dict[str, Any]:
    return {
        "code": cause.code,
        "level": cause.level,
        "title": cause.title,
        "explanation": cause.explanation,
        "command": cause.command,
        "fixable": cause.fix is not None,
    }
