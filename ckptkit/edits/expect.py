"""Before a checkpoint is written, check that its tensors fulfill conditions.

An expectation is a line with a glob and conditions:

    lm_head.weight exists                             a tensor matches
    *.rotary_emb.inv_freq missing                     no tensor matches
    model.layers.*.gate_up_proj count=32              32 tensors match
    *.embed_tokens.weight shape=[config.vocab_size _] shape, where _ is any size
    *.embed_tokens.weight dtype=bfloat16              dtype
    lm_head.weight equal=model.embed_tokens.weight    elements are equal
    * finite                                          no NaN, no infinities

All conditions of an expectation must hold for each tensor whose name matches the glob.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ckptkit.compute.compare import compare
from ckptkit.compute.tallies import nonfinite
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import TensorError
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import matcher, nearest, plural, typed
from ckptkit.core.text import shape as shape_text
from ckptkit.edits import config_file
from ckptkit.rules.names import Config, KnownSizes, Settings
from ckptkit.rules.notation import Given, Rule, RuleError, Side, given_text, parse_given


class ExpectationError(TensorError):
    """The error for tensors that do not fulfill an expectation."""


class Expectation(NamedTuple):
    """An expectation: a glob, and conditions on the tensors whose names match.

    ``conditions`` maps the word of each condition to its value, or to True.
    """

    text: str
    glob: str
    conditions: Mapping[str, Any]


_WORD = re.compile(r"(?P<word>[a-z]+)(?:=(?P<value>\[[^\]]*\]|\S+))?(?:\s+|$)")


def _shape(value: str) -> tuple[Given, ...]:
    if not value.startswith("["):
        hint = "write, for example, shape=[config.vocab_size _]"
        raise RuleError(f"shape={value} is not a shape", hint=hint)
    return tuple(map(parse_given, value[1:-1].replace(",", " ").split()))


_BARE = ("exists", "missing", "finite")
_READERS: Mapping[str, Callable[[str], Any]] = {
    "count": parse_given,
    "shape": _shape,
    "dtype": lambda value: value.split("|"),
    "equal": str,
}


def parse_expectation(text: str) -> Expectation:
    """Parse one expectation, such as ``"lm_head.weight exists"``.

    Raises RuleError for an invalid expectation.
    """
    glob, _, rest = text.strip().partition(" ")
    if not glob:
        raise RuleError("an expectation is empty; write a name or a glob, then conditions")
    conditions: dict[str, Any] = {}
    at, rest, known = 0, rest.strip(), (*_BARE, *_READERS)
    while at < len(rest):
        found = _WORD.match(rest, at)
        if found is None or found["word"] not in known:
            what = f"{text!r}: {rest[at:].split()[0]!r} is not a condition"
            raise RuleError(what, hint=f"use one of {', '.join(known)}")
        word, value = found["word"], found["value"]
        if (value is None) != (word in _BARE):
            raise RuleError(f"{text!r}: {word} {'takes no' if value else 'needs a'} value")
        conditions[word] = True if value is None else _READERS[word](value)
        at = found.end()
    return Expectation(text.strip(), glob, conditions)


class Expectations:
    """A list of expectations, and the configuration that contains sizes such as ``vocab_size``."""

    def __init__(self, lines: list[str], config: Config = None) -> None:
        self.parsed = [parse_expectation(line) for line in lines]
        self.config = config

    def failures(self, checkpoint: Checkpoint) -> Iterator[str]:
        """Yield a message for each expectation that fails. Read elements only for `equal` and
        `finite`."""
        value = _values(config_file.lazily(checkpoint) if self.config is None else self.config)
        tensors = checkpoint.weights
        for each in self.parsed:
            matches = matcher([each.glob])
            hits = {name: tensor for name, tensor in tensors.items() if matches(name)}
            faults = _failures(each.glob, each.conditions, hits, tensors, value)
            yield from (f"{each.text}: {fault}" for fault in faults)

    def check(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint unchanged. Raises ExpectationError if an expectation fails."""
        found = list(self.failures(checkpoint))
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise ExpectationError(f"not as expected: {found[0]}{more}", hint="nothing was written")
        return checkpoint


Value = Callable[[Given], int | None]


def _values(config: Config) -> Value:
    """Return a function that converts a size, such as ``config.vocab_size``, to a number.

    For the size ``_``, the function returns None.
    """

    def value(given: Given) -> int | None:
        side = Side(("x",))
        rule = Rule(side, side, sizes=(("size", given),))
        size = KnownSizes(rule, Settings(config=config)).sizes.get("size")
        if size is None and given != (None,):
            raise RuleError(
                f"the value of {given_text(given)} is unknown",
                hint=f"pass {typed('--config config.json', 'config')}, or put config.json next to "
                "the file",
            )
        return None if size is None else size[0]

    return value


def _failures(
    glob: str,
    conditions: Mapping[str, Any],
    hits: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    value: Value,
) -> Iterator[str]:
    if "missing" in conditions:
        yield from (f"{name} exists" for name in list(hits)[:1])
        return
    expected = value(conditions["count"]) if "count" in conditions else None
    if expected is not None and len(hits) != expected:
        yield f"{plural(len(hits), 'tensor')} instead of {expected:,}"
    if not hits and expected is None:
        close = nearest(glob, tensors)
        yield "no such tensor" + (f"; did you mean {close[0]}?" if close else "")
    shape = [value(given) for given in conditions["shape"]] if "shape" in conditions else None
    for name, tensor in hits.items():
        yield from (f"{name} {fault}" for fault in _faults(conditions, tensor, shape, tensors))


def _faults(
    conditions: Mapping[str, Any],
    tensor: Tensor,
    shape: list[int | None] | None,
    tensors: Mapping[str, Tensor],
) -> Iterator[str]:
    if shape is not None:
        pairs = zip(tensor.shape, shape, strict=False)
        if len(tensor.shape) != len(shape) or any(n not in (None, m) for m, n in pairs):
            expected = ", ".join("_" if n is None else str(n) for n in shape)
            yield f"has shape {shape_text(tensor.shape)} instead of [{expected}]"
    dtypes = conditions.get("dtype", [tensor.dtype.name])
    if tensor.dtype.name not in dtypes:
        yield f"is {tensor.dtype} instead of {' or '.join(dtypes)}"
    if (name := conditions.get("equal")) is not None:
        other = tensors.get(name)
        if other is None:
            yield f"cannot be compared with {name}, which is missing"
        elif other.shape != tensor.shape or other.dtype != tensor.dtype:
            yield f"differs from {name}, which is {other.dtype} {shape_text(other.shape)}"
        elif (difference := compare(tensor, other)) is not None:
            yield f"differs from {name} in {plural(difference.count, 'element')}"
    if "finite" in conditions and tensor.storage is not None:
        nan, infinite = nonfinite(tensor)
        if nan or infinite:
            yield f"has {nan:,} NaN and {infinite:,} infinite elements"
