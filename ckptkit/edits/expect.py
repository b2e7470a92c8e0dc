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
from dataclasses import dataclass
from fnmatch import translate

from ckptkit.compute.compare import compare
from ckptkit.compute.tallies import nonfinite
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import TensorError
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import nearest, plural, typed
from ckptkit.core.text import shape as shape_text
from ckptkit.edits import rules
from ckptkit.rules.names import Config, Settings, evaluate
from ckptkit.rules.notation import Given, Rule, RuleError, Side, given_text, parse_given


class ExpectationError(TensorError):
    """The error for tensors that do not fulfill an expectation."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """An expectation: a glob, and conditions on the tensors whose names match."""

    text: str
    glob: str
    missing: bool = False
    finite: bool = False
    count: Given | None = None
    shape: tuple[Given, ...] | None = None
    dtypes: tuple[str, ...] = ()
    equal: str | None = None


_WORD = re.compile(r"(?P<word>[a-z]+)(?:=(?P<value>\[[^\]]*\]|\S+))?(?:\s+|$)")


def parse_expectation(text: str) -> Expectation:
    """Parse one expectation, such as ``"lm_head.weight exists"``.

    Raises RuleError for an invalid expectation.
    """
    glob, _, rest = text.strip().partition(" ")
    if not glob:
        raise RuleError("an expectation is empty; write a name or a glob, then conditions")
    words: dict[str, str | None] = {}
    at, rest = 0, rest.strip()
    while at < len(rest):
        found = _WORD.match(rest, at)
        if found is None or found["word"] not in _WORDS:
            odd = rest[at:].split()[0]
            raise RuleError(
                f"{text!r}: {odd!r} is not a condition", hint=f"use one of {', '.join(_WORDS)}"
            )
        if (found["value"] is None) != (found["word"] in _BARE):
            raise RuleError(
                f"{text!r}: {found['word']} {'takes no' if found['value'] else 'needs a'} value"
            )
        words[found["word"]] = found["value"]
        at = found.end()
    shape = words.get("shape")
    if shape is not None and not shape.startswith("["):
        raise RuleError(
            f"shape={shape} is not a shape", hint="write, for example, shape=[config.vocab_size _]"
        )
    sizes = None if shape is None else shape[1:-1].replace(",", " ").split()
    count, dtype = words.get("count"), words.get("dtype")
    return Expectation(
        text.strip(),
        glob,
        missing="missing" in words,
        finite="finite" in words,
        count=None if count is None else parse_given(count),
        shape=None if sizes is None else tuple(map(parse_given, sizes)),
        dtypes=tuple(dtype.split("|")) if dtype else (),
        equal=words.get("equal"),
    )


_BARE = ("exists", "missing", "finite")
_WORDS = (*_BARE, "count", "shape", "dtype", "equal")


class Expectations:
    """A list of expectations, and the configuration that contains sizes such as ``vocab_size``."""

    def __init__(self, lines: list[str], config: Config = None) -> None:
        self.parsed = [parse_expectation(line) for line in lines]
        self.config = config

    def failures(self, checkpoint: Checkpoint) -> Iterator[str]:
        """Yield a message for each expectation that fails. Read elements only for `equal` and
        `finite`."""
        config = self.config
        if config is None:
            config = rules.lazily(checkpoint)
        value = _values(config)
        tensors = checkpoint.weights
        for each in self.parsed:
            matches = re.compile(translate(each.glob)).match
            hits = {name: tensor for name, tensor in tensors.items() if matches(name)}
            yield from (f"{each.text}: {fault}" for fault in _failures(each, hits, tensors, value))

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
        size = evaluate(rule, Settings(config=config)).sizes.get("size")
        if size is None and given != (None,):
            raise RuleError(
                f"the value of {given_text(given)} is unknown",
                hint=f"pass {typed('--config config.json', 'config')}, or put config.json next to "
                "the file",
            )
        return None if size is None else size[0]

    return value


def _failures(
    each: Expectation, hits: Mapping[str, Tensor], tensors: Mapping[str, Tensor], value: Value
) -> Iterator[str]:
    if each.missing:
        if hits:
            yield f"{next(iter(hits))} exists"
        return
    expected = None if each.count is None else value(each.count)
    if expected is not None and len(hits) != expected:
        yield f"{plural(len(hits), 'tensor')} instead of {expected:,}"
    if not hits:
        if expected is None:
            close = nearest(each.glob, tensors)
            yield "no such tensor" + (f"; did you mean {close[0]}?" if close else "")
        return
    shape = None if each.shape is None else [value(given) for given in each.shape]
    for name, tensor in hits.items():
        yield from (f"{name} {fault}" for fault in _faults(each, tensor, shape, tensors))


def _faults(
    each: Expectation, tensor: Tensor, shape: list[int | None] | None, tensors: Mapping[str, Tensor]
) -> Iterator[str]:
    fits = shape is None or (
        len(tensor.shape) == len(shape)
        and all(n is None or n == m for m, n in zip(tensor.shape, shape, strict=True))
    )
    if shape is not None and not fits:
        expected = ", ".join("_" if n is None else str(n) for n in shape)
        yield f"has shape {shape_text(tensor.shape)} instead of [{expected}]"
    if each.dtypes and tensor.dtype.name not in each.dtypes:
        yield f"is {tensor.dtype} instead of {' or '.join(each.dtypes)}"
    if each.equal is not None:
        other = tensors.get(each.equal)
        if other is None:
            yield f"cannot be compared with {each.equal}, which is missing"
        elif other.shape != tensor.shape or other.dtype != tensor.dtype:
            yield f"differs from {each.equal}, which is {other.dtype} {shape_text(other.shape)}"
        elif (difference := compare(tensor, other)) is not None:
            yield f"differs from {each.equal} in {plural(difference.count, 'element')}"
    if each.finite:
        nan, infinite = nonfinite(tensor) if tensor.storage is not None else (0, 0)
        if nan or infinite:
            yield f"has {nan:,} NaN and {infinite:,} infinite elements"
