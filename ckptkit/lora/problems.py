"""Define problems: reasons why an adapter cannot be merged, each with a next step.

`merge` raises the first problem; `check` lists all problems. This module finds problems in the
files of the adapter. `merge` finds problems that involve the base.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.core.text import quoted, shown, typed
from ckptkit.lora.changes import change_of
from ckptkit.lora.reading import CONFIG, Adapter, expression, table

HELP = "`ckptkit help lora` lists what can be merged, and how names are looked up"
_AGAIN = "save it again with `model.save_pretrained(FOLDER)` of the peft model"
_BASE = "BASE must be the model that the adapter was trained on"
# Hints by code, for problems without a hint of their own.
_NEXT = {
    "pair": _AGAIN,
    "empty": "gather the parameters before saving (ZeRO-3, FSDP), then save again",
    "shape": _BASE,
    "no-module": _BASE,
}


class Problem(NamedTuple):
    """Why an adapter cannot be merged: a code of `lora check`, a sentence, a hint, and modules.

    ``mend`` are the options of `lora merge` that make the merge possible.
    """

    code: str
    title: str
    hint: str = HELP
    modules: tuple[str, ...] = ()
    mend: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: CkptkitError, key: str) -> Problem:
        """Return the problem for an error about one module."""
        code = {"shape": "shape", "ambiguous": "no-module"}.get(error.code, "method")
        return cls(code, error.message, error.hint or _NEXT.get(code, HELP), (key,))

    @property
    def error(self) -> UnsupportedError:
        return UnsupportedError(self.title, hint=self.hint, code=self.code)


def problems(adapter: Adapter, base_is: str | None = None) -> Iterator[Problem]:
    """Yield the problems that the adapter's own files show.

    A problem without modules concerns the whole adapter.
    """
    config, method = adapter.config or {}, adapter.method
    kind = table("methods").get(method, "unsupported") if adapter.layout == "peft" else "merge"
    if method == "VERA" and not config.get("save_projection", True):
        kind = "projection"
    if kind != "merge":
        loads = "load it beside its base, with PeftModel.from_pretrained"
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
            title = f"was trained on the residual that {start} left of the base, not on the base"
            hint = f"{given}, if BASE is that residual"
            yield Problem("residual", title, hint, (), ("--base-is", "residual"))
    unscaled = tuple(key for key, each in adapter.modules.items() if each.scale is None)
    if unscaled:
        given = typed("--alpha A", "alpha=A")
        hint = f"{given}, if you know the alpha that it was trained with"
        yield Problem("no-config", f"records no scale: there is no {CONFIG}", hint, unscaled)
    if adapter.unknown:
        title = f"has tensors of an unknown kind: {quoted(adapter.unknown)}"
        yield Problem("method", title, HELP, adapter.unknown)
    for key in adapter.modules:
        yield from _of_module(adapter, key)


def _of_module(adapter: Adapter, key: str) -> Iterator[Problem]:
    module, name = adapter.modules[key], shown(key)
    found: list[tuple[str, str]] = []
    if not module.kind:
        title = f"{name} has only {quoted(sorted(module.tensors))}: the other factors are missing"
        found.append(("pair", title))
    if module.expected is not None and module.rank != module.expected:
        title = f"{name} has rank {module.rank}, and {CONFIG} has {module.expected}"
        hint = f"set r or rank_pattern in {CONFIG} to the rank that it was trained with"
        yield Problem("rank", title, hint, (key,))
    for role, tensor in module.tensors.items():
        if role != "alpha" and tensor.dtype.kind != "float":
            found.append(
                ("method", f"{name} has {role} of {tensor.dtype}: only floats are factors")
            )
        if 0 in tensor.shape and module.kind != "adalora":
            found.append(("empty", f"{name} is empty: {role} has no elements"))
    if not found and module.kind not in ("", "ia3", "tokens", "bias", "vera"):
        try:
            change_of(module, adapter.configs.get(module.component, {}))
        except UnsupportedError as error:
            found.append(("shape", error.message))
    for code, title in found:
        yield Problem(code, title, _NEXT.get(code, HELP), (key,))


def unknown_fields(adapter: Adapter) -> list[str]:
    """Return the fields of a LoRA configuration that are set, but unknown to ckptkit."""
    config = (adapter.config if adapter.method == "LORA" else None) or {}
    known = table("fields")["known"].split()
    return [name for name, value in config.items() if name not in known and value]
