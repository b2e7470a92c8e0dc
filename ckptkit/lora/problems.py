"""Find the reasons why an adapter cannot be merged, and a next step for each reason.

This module finds problems of the adapter itself. `ckptkit.lora.merge` finds problems of the adapter
and its base. `lora merge` raises the first problem. `lora check` lists all problems.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.core.text import quoted, shown, typed
from ckptkit.lora.changes import change_of
from ckptkit.lora.reading import CONFIG, Adapter, expression, table

HELP = "`ckptkit help lora` lists the supported adapters, and explains the search for names"
_AGAIN = "save the adapter again with `model.save_pretrained(FOLDER)` of the peft model"
_BASE = "BASE must be the model that the adapter was trained on"
# Default hint of each problem code
_NEXT = {
    "pair": _AGAIN,
    "empty": "gather the parameters before saving (ZeRO-3, FSDP), then save again",
    "shape": _BASE,
    "no-module": _BASE,
}


class Problem(NamedTuple):
    """A reason why an adapter cannot be merged.

    ``code`` is a code of `lora check`. ``mend`` contains the options of `lora merge` that solve the
    problem.
    """

    code: str
    title: str
    hint: str = HELP
    modules: tuple[str, ...] = ()
    mend: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: CkptkitError, key: str) -> Problem:
        """Convert an error about the module `key` to a problem."""
        code = {"shape": "shape", "ambiguous": "no-module"}.get(error.code, "method")
        return cls(code, error.message, error.hint or _NEXT.get(code, HELP), (key,))

    @property
    def error(self) -> UnsupportedError:
        return UnsupportedError(self.title, hint=self.hint, code=self.code)


def problems(adapter: Adapter, base_is: str | None = None) -> Iterator[Problem]:
    """Yield the problems that are visible in the files of the adapter.

    A problem without modules concerns the complete adapter.
    """
    config, method = adapter.config or {}, adapter.method
    kind = table("methods").get(method, "unsupported") if adapter.layout == "peft" else "merge"
    if method == "VERA" and not config.get("save_projection", True):
        kind = "projection"
    if kind != "merge":
        loads = "load the adapter and its base with PeftModel.from_pretrained"
        yield Problem("method", f"has the method {method}, which {table('reasons')[kind]}", loads)
        return
    for config in adapter.configs.values():
        for name, why in table("fields")["refused"].items():
            if config.get(name):
                yield Problem("method", f"{why} ({name} in {CONFIG})")
        start = config.get("init_lora_weights")
        is_residual = isinstance(start, str) and expression("residual").fullmatch(start.lower())
        if is_residual and base_is != "residual":
            given = typed("--base-is residual", "base_is='residual'")
            title = f"was trained on the residual of the base after {start}, not on the base"
            hint = f"if BASE is this residual, use {given}"
            yield Problem("residual", title, hint, (), ("--base-is", "residual"))
    unscaled = tuple(key for key, each in adapter.modules.items() if each.scale is None)
    if unscaled:
        given = typed("--alpha A", "alpha=A")
        hint = f"if you know the alpha of the training, use {given}"
        yield Problem(
            "no-config", f"contains no scale, because {CONFIG} is missing", hint, unscaled
        )
    if adapter.unknown:
        title = f"contains unknown tensors: {quoted(adapter.unknown)}"
        yield Problem("method", title, HELP, adapter.unknown)
    for key in adapter.modules:
        yield from _of_module(adapter, key)


def _of_module(adapter: Adapter, key: str) -> Iterator[Problem]:
    module, name = adapter.modules[key], shown(key)
    found: list[tuple[str, str]] = []
    if not module.kind:
        title = f"{name} has only {quoted(sorted(module.tensors))}; the other factors are missing"
        found.append(("pair", title))
    if module.expected is not None and module.rank != module.expected:
        title = f"{name} has rank {module.rank}, but {CONFIG} has {module.expected}"
        hint = f"set r or rank_pattern in {CONFIG} to the rank of the training"
        yield Problem("rank", title, hint, (key,))
    for role, tensor in module.tensors.items():
        if role != "alpha" and tensor.dtype.kind != "float":
            found.append(("method", f"{role} of {name} is {tensor.dtype}; ckptkit requires floats"))
        if 0 in tensor.shape and module.kind != "adalora":
            found.append(("empty", f"{name} is empty; {role} has no elements"))
    if not found and module.kind not in ("", "ia3", "tokens", "bias", "vera"):
        try:
            change_of(module, adapter.configs.get(module.component, {}))
        except UnsupportedError as error:
            found.append(("shape", error.message))
    for code, title in found:
        yield Problem(code, title, _NEXT.get(code, HELP), (key,))


def unknown_fields(adapter: Adapter) -> list[str]:
    """Return the fields of a LoRA configuration that have a value but are unknown to ckptkit."""
    config = (adapter.config if adapter.method == "LORA" else None) or {}
    known = table("fields")["known"].split()
    return [name for name, value in config.items() if name not in known and value]
