"""Read recipes: files that list the steps to convert one kind of checkpoint to another.

A recipe is a YAML or TOML file:

    about: One sentence.
    steps:                          # in this order
      - extract: [ema, model]       # the first of these entries that exists
      - strip: module.
      - config: megatron-llama      # make config.json from the training arguments
      - cast: {"*": bfloat16, "*norm*": float32}
      - rules: ["a.{l}.w{p:1|3} [o i] -> b.{l} [(p o) i]"]      # the notation of ckptkit.rules
        keep: rest                  # keys to keep without a rule: globs, or rest for all
        sizes: {h: config.num_attention_heads}
    args: {heads: 32}               # defaults of --arg
    output: {format: safetensors, shard_size: 5GB}      # the command line overrides these

A step is an edit of `ckptkit.edits`, or one of:

- `config`: make config.json from training arguments
- `rules`: apply tensor rules
- `expect`: check expectations
- `gguf`: check the architecture, and make config.json from GGUF metadata
- `recipe`: apply the recipe of the architecture

A recipe in this folder is loaded by its name (``lightning``).
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ckptkit import edits
from ckptkit.api import Step, open_checkpoint
from ckptkit.compute.numbers import INVERSES
from ckptkit.core.bytesource import LocalFile
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import (
    CollisionError,
    InputError,
    TensorError,
    UnsupportedError,
    UsageError,
)
from ckptkit.core.text import flatten, nearest, shown, typed
from ckptkit.core.tree import Global, children, find
from ckptkit.edits import config_file
from ckptkit.edits.expect import Expectations
from ckptkit.edits.rules import RuleOptions
from ckptkit.edits.rules import step as apply_step
from ckptkit.rules.notation import RuleError, in_step, is_word
from ckptkit.rules.planner import RuleSet, unused_argument

FOLDER = Path(__file__).parent
_SUFFIXES = (".yaml", ".yml", ".toml")
_BYTES = 1 << 20  # maximum size of a recipe in bytes
_SHOWN = 120  # maximum number of characters of a value in a message
_PARTS = {"about", "steps", "output", "args", "source", "checked"}
_OUTPUT = {"format": str, "shard_size": str, "all": bool, "objects": str, "ties": str}


@dataclass(frozen=True, slots=True)
class Recipe:
    """The content of a recipe file.

    - ``steps``: the steps as functions
    - ``output``: options for writing the result
    - ``written``: the steps as written in the file
    - ``source``: source of the facts about the layout
    - ``checked``: what the test of the recipe compares, or ""
    - ``merge``: a configuration of mergekit, which is a recipe without steps
    """

    name: str
    about: str
    steps: tuple[Step, ...]
    output: Mapping[str, Any]
    written: tuple[WrittenStep, ...] = ()
    source: str = ""
    checked: str = ""
    merge: Mapping[str, Any] | None = None  # a configuration of mergekit


def names() -> list[str]:
    """Return the names of the built-in recipes."""
    return sorted(path.stem for path in FOLDER.iterdir() if path.suffix in _SUFFIXES)


def load(name: str, options: RuleOptions | None = None) -> Recipe:
    """Load the built-in recipe `name`, or the recipe in the file `name`.

    `options` contains the sizes, the configuration and the direction for the rules of the recipe.
    Raises UsageError for an unknown name and for an invalid recipe.
    """
    options = options or RuleOptions()
    if name in names():
        return _recipe(name, _parsed(FOLDER / f"{name}.yaml"), options)
    if not name.endswith(_SUFFIXES):
        close = nearest(name, names()) or names()
        raise UsageError(
            f"there is no recipe {name!r}",
            hint=f"did you mean {', '.join(close)}? A recipe file must end in .yaml or .toml",
        )
    return _recipe(name, _parsed(Path(name)), options)


def _parsed(path: Path) -> Any:
    """Return the plain values in a YAML or TOML file. Raises UsageError for an invalid file."""
    where = os.fspath(path)
    try:
        with closing(LocalFile(path)) as source:
            if source.size > _BYTES:
                what = f"is larger than {_BYTES:,} bytes, too large for a recipe"
                raise UsageError(what, where=where)
            data = source.read(0, source.size)
    except InputError as error:
        raise UsageError(error.message, where=where, hint=error.hint) from error
    try:
        if path.suffix == ".toml":
            import tomllib

            return tomllib.loads(data.decode())
        from ckptkit.run.recipes import plain_yaml

        return plain_yaml.loaded(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"is not valid: {_line(str(error))}", where=where) from error


def _line(text: str) -> str:
    """Shorten a string from the file to one line."""
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _shown(value: Any) -> str:
    """Return a value as one short line."""
    try:
        return _line(reprlib.repr(value))
    except ValueError:  # Python does not convert an integer of thousands of digits to a string
        return "a huge number"


def _recipe(name: str, content: Any, options: RuleOptions) -> Recipe:
    if isinstance(content, dict) and "merge_method" in content:
        return Recipe(name, "a merge of mergekit", (), {}, merge=content)
    try:
        parts = _table(content, _PARTS)
        steps = parts.get("steps")
        if not isinstance(steps, list) or not steps:
            raise _WrongError("has no list of steps")
        output = _table(parts.get("output", {}), set(_OUTPUT))
        for key, value in output.items():
            if not isinstance(value, _OUTPUT[key]):
                raise _WrongError(f"output: {key} has a value of the wrong type: {_shown(value)}")
        texts = {word: parts.get(word, "") for word in ("about", "source", "checked")}
        for word, text in texts.items():
            if not isinstance(text, str):
                raise _WrongError(f"{word} is {text!r}")
        known = list(_written(steps))
        defaults = _sizes(parts.get("args", {}))
        # Parse all steps before any step is applied.
        made = [_step(number, each, options, defaults) for number, each in enumerate(known, 1)]
        if options.reverse:
            back, notes = backwards(known)
            made = [_step(number, each, options, defaults) for number, each in enumerate(back, 1)]
            made.append(lambda ck: ck.with_root(ck.root, notes=notes))
        given = {each.word for each in known}
        if options.dequantize is not None and not given & {"dequantize", "recipe"}:
            raise _WrongError("has no step dequantize, so --dequantize has no effect")
        if options.args and "recipe" not in given:
            rules = [_parsed_rules(each, defaults) for each in known if each.word == "rules"]
            words = set(flatten(each.words() for each in rules))
            for word in options.args:
                if word not in words:
                    raise unused_argument(word, words)
        return Recipe(name, steps=tuple(made), output=output, written=tuple(known), **texts)
    except _WrongError as error:
        raise UsageError(str(error), where=name, hint=error.hint) from None
    except RuleError as error:
        raise error.at(name) from None


class _WrongError(ValueError):
    """A recipe is malformed. The message names the invalid part of the recipe."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def _written(steps: list[Any]) -> Iterator[WrittenStep]:
    for number, each in enumerate(steps, 1):
        if isinstance(each, dict) and "rules" in each:
            given = {word: value for word, value in each.items() if word != "rules"}
            if given.keys() <= _RULE_OPTIONS:
                yield WrittenStep("rules", each["rules"], given)
                continue
            odd = ", ".join(sorted(map(repr, given.keys() - _RULE_OPTIONS)))
            what = f"step {number} (rules): unknown option {odd}"
            raise _WrongError(what, hint="the options are keep, sizes, keys")
        if not isinstance(each, dict) or len(each) != 1:
            what = f"step {number} must be a mapping from the name of one step to its argument"
            raise _WrongError(what, hint="write, for example, `- strip: module.`")
        ((word, given),) = each.items()
        yield WrittenStep(word, given, {})


def _step(
    number: int, step: WrittenStep, options: RuleOptions, defaults: dict[str, str | int]
) -> Step:
    word = step.word
    if word not in (known := [*edits.BY_WORD, "config", "expect", "gguf", "recipe"]):
        close = nearest(_shown(word).strip("'"), known) or known
        hint = f"did you mean {', '.join(close)}?"
        raise _WrongError(f"step {number}: {_shown(word)} is not a step", hint)
    try:
        if word == "rules":
            return _rules(number, step, options, defaults)
        if word == "config":
            if step.given not in TABLES:
                what = f"unknown argument table {_shown(step.given)}"
                raise _WrongError(what, hint=f"use {', '.join(TABLES)}")
            return partial(with_config, table=TABLES[step.given], options=options)
        if word == "gguf":
            return partial(with_gguf_config, architectures=_texts(step.given), options=options)
        if word == "recipe":
            if step.given != BY_ARCHITECTURE:
                raise _WrongError(f"must be {BY_ARCHITECTURE}, got {_shown(step.given)}")
            return partial(_by_architecture, options=options)
        if word == "dequantize" and options.dequantize is not None:
            step = step._replace(given=options.dequantize)
        if word == "expect":
            return Expectations(_texts(step.given), options.config).check
        return _edited(edits.BY_WORD[word], step.given)
    except _WrongError as error:
        raise _WrongError(f"step {number} ({word}): {error}", hint=error.hint) from None
    except RuleError as error:
        raise in_step(number, error) from None


BY_ARCHITECTURE = "gguf-*"


def _by_architecture(checkpoint: Checkpoint, options: RuleOptions) -> Checkpoint:
    """Apply the recipe for the architecture of a GGUF file."""
    from ckptkit.run.recipes import gguf

    known = [each for each in names() if each.startswith(gguf.RECIPES)]
    found = load(gguf.recipe_name(checkpoint, known), options)
    for step in found.steps:
        checkpoint = step(checkpoint)
    return checkpoint.with_root(checkpoint.root, notes=[f"used the recipe {found.name}"])


def with_gguf_config(
    checkpoint: Checkpoint, architectures: Sequence[str], options: RuleOptions
) -> Checkpoint:
    """Add a config.json to a GGUF checkpoint.

    If `--config` is given, use this configuration. Otherwise, make the config.json from the
    metadata of the checkpoint. Raises UnsupportedError if the architecture of the checkpoint is not
    one of `architectures`.
    """
    from ckptkit.run.recipes import gguf

    gguf.check_architecture(checkpoint, architectures)
    if gguf.architecture(checkpoint) is not None:
        gguf.refuse_unread(checkpoint)
    given = options.config() if callable(options.config) else options.config
    checkpoint = gguf.with_matrices(checkpoint)
    config, notes = (given, []) if given is not None else gguf.config_of(checkpoint)
    if config is not None:
        checkpoint = config_file.with_config(checkpoint, config)
    return checkpoint.with_root(checkpoint.root, notes=notes)


_RULE_OPTIONS = {"keep", "sizes", "keys"}


def _rules(
    number: int, step: WrittenStep, options: RuleOptions, defaults: dict[str, str | int]
) -> Step:
    rules = _parsed_rules(step, defaults)
    keep = _texts(step.options.get("keep", []))
    paths = _texts(step.options.get("keys", []))

    def step_of_rules(checkpoint: Checkpoint) -> Checkpoint:
        try:
            return apply_step(checkpoint, rules, keep, options, paths, number)
        except (RuleError, TensorError, CollisionError) as error:
            raise in_step(number, error) from None

    return step_of_rules


def _parsed_rules(step: WrittenStep, defaults: dict[str, str | int]) -> RuleSet:
    lines = _texts(step.given)
    if not lines:
        raise _WrongError("there are no rules")
    return RuleSet.parse(lines, _sizes(step.options.get("sizes", {})), defaults)


def _sizes(given: Any) -> dict[str, str | int]:
    """Return a dict that maps the name of each axis in the ``sizes`` of a step to its size.

    Raises _WrongError for an invalid name or size.
    """
    if not isinstance(given, dict):
        raise _WrongError(f"{_shown(given)} is not a mapping from axis names to sizes")
    for word, size in given.items():
        if not is_word(str(word)) or type(size) not in (int, str):
            hint = "write, for example, h: 32 or h: config.num_attention_heads"
            raise _WrongError(f"{word}: {_shown(size)} is not a size", hint)
    return {str(word): size for word, size in given.items()}


# The arguments of a step


def _text(given: Any) -> str:
    if not isinstance(given, str) or not given:
        raise _WrongError(f"{_shown(given)} is not a string")
    return given


def _number(given: Any) -> float:
    if not isinstance(given, (int, float)) or isinstance(given, bool):
        raise _WrongError(f"{_shown(given)} is not a number")
    return float(given)


def _texts(given: Any) -> list[str]:
    return [_text(each) for each in (given if isinstance(given, list) else [given])]


def _table(given: Any, known: set[str]) -> dict[str, Any]:
    if not isinstance(given, dict) or not given.keys() <= known:
        odd = [_shown(given)]
        if isinstance(given, dict):
            odd = sorted(map(_shown, given.keys() - known))
        raise _WrongError(
            f"unknown: {', '.join(odd)[:200]}; the known keys are {', '.join(sorted(known))}"
        )
    return given


def _mapping(given: Any) -> dict[str, str]:
    if not isinstance(given, dict):
        raise _WrongError(f"{_shown(given)} is not a mapping whose keys and values are strings")
    return {
        _text(key): value if isinstance(value, str) else _text(value)
        for key, value in given.items()
    }


def _true(given: Any) -> bool:
    if given is not True:
        raise _WrongError(f"must be true, got {_shown(given)}")
    return True


def _count(given: Any) -> int:
    if type(given) is not int or given < 0:
        raise _WrongError(f"{_shown(given)} is not a non-negative integer")
    return given


def _text_or_mapping(given: Any) -> str | dict[str, str]:
    return _mapping(given) if isinstance(given, dict) else _text(given)


# Functions that parse the argument of an edit, by `Option.kind`.
KINDS: dict[str, Callable[[Any], Any]] = {
    "text": _text,
    "choice": _text,
    "strings": _texts,
    "first": _texts,  # the edit uses the first entry that exists
    "dtype": lambda given: None if given is True else _text(given),
    "casts": _text_or_mapping,
    "pairs": _text_or_mapping,
    "map": _mapping,
    "named": _mapping,
    "substitutions": lambda given: list(_mapping(given).items()),
    "flag": _true,
    "count": _count,
    "number": _number,
}


def _edited(edit: edits.Edit, given: Any) -> Step:
    """Return the step of an edit. Raises _WrongError for an argument of the wrong kind."""
    if edit.several:
        others = _texts(given)

        def step(ck: Checkpoint) -> Checkpoint:
            found = [*map(open_checkpoint, others)]
            found.insert(0 if edit.several == "first" else len(found), ck)
            return edit.function(found)

        return step
    options = {each.recipe: each for each in edit.options if each.recipe is not None}
    if not options or not edit.options[0].parameter:
        _true(given)
        return edits.step(edit.word)
    values = {"": given} if "" in options else _table(given, {*options})
    read = {
        options[word].parameter: KINDS[options[word].kind](each) for word, each in values.items()
    }
    return edits.step(edit.word, **read, **(edit.fixed or {}))


Arguments = Mapping[str, Any]

_LONGEST = 40  # maximum number of characters of a value in config.json


class ArgumentTable(NamedTuple):
    """Rules that derive the fields of config.json from training arguments.

    - ``entry``: path of the arguments in the checkpoint
    - ``fixed``: fields with constant values
    - ``copied``: fields with the value of an argument, as a dict from field to argument
    - ``derived``: fields that functions compute, as a dict from field to function of the arguments
    - ``required``: the supported values of arguments, as a dict from argument to the values that
      the target architecture supports
    - ``defaults``: defaults of the framework, for versions that did not save the argument
    """

    entry: str
    fixed: Mapping[str, Any]
    copied: Mapping[str, str]
    derived: Mapping[str, Callable[[Arguments], Any]]
    required: Mapping[str, tuple[Any, ...]]
    defaults: Mapping[str, Any]


_NOT_SET = (None, False, 0)

MEGATRON_LLAMA = ArgumentTable(
    entry="args",
    fixed={"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"},
    copied={
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_attention_heads",
        "head_dim": "kv_channels",
        "max_position_embeddings": "max_position_embeddings",
        "rms_norm_eps": "norm_epsilon",
        "rope_theta": "rotary_base",
    },
    derived={
        "num_key_value_heads": lambda args: args[
            "num_query_groups" if args["group_query_attention"] else "num_attention_heads"
        ],
        "vocab_size": lambda args: args.get("vocab_size") or args["padded_vocab_size"],
        "tie_word_embeddings": lambda args: not args["untie_embeddings_and_output_weights"],
        "torch_dtype": lambda args: _dtype_name(args["params_dtype"]),
    },
    required={
        "swiglu": (True,),
        "normalization": ("RMSNorm",),
        "position_embedding_type": ("rope",),
        "rotary_percent": (1, None),
        "rotary_interleaved": _NOT_SET,
        "use_rope_scaling": _NOT_SET,
        "apply_layernorm_1p": _NOT_SET,
        "qk_layernorm": _NOT_SET,
        "add_bias_linear": _NOT_SET,
        "add_qkv_bias": _NOT_SET,
        "num_experts": _NOT_SET,
        "multi_latent_attention": _NOT_SET,
    },
    defaults={"norm_epsilon": 1e-5, "rotary_base": 10000},
)

TABLES = {"megatron-llama": MEGATRON_LLAMA}


def with_config(checkpoint: Checkpoint, table: ArgumentTable, options: RuleOptions) -> Checkpoint:
    """Add a config.json to a checkpoint.

    If `--config` is given, use this configuration. Otherwise, make the config.json from the
    training arguments in the checkpoint. If the checkpoint has no training arguments, return it
    unchanged. Raises UnsupportedError if the arguments belong to another kind of model, or if an
    argument is missing.
    """
    given = options.config() if callable(options.config) else options.config
    if given is not None:
        return config_file.with_config(checkpoint, given)
    try:
        _, entry = find(checkpoint.root, table.entry)
    except UsageError:
        return checkpoint
    saved = {str(key): value for key, value in children(entry)}
    for name, allowed in table.required.items():
        if name in saved and not any(saved[name] == each for each in allowed):
            raise _unfit(
                f"{table.entry}.{name} is {shown(saved[name])}, which the target model does not "
                f"support"
            )
    missing = {name: value for name, value in table.defaults.items() if saved.get(name) is None}
    args = {**saved, **missing}
    args["vocab_size"] = options.args.get("vocab", args.get("vocab_size"))
    try:
        made = {
            **table.fixed,
            **{field: _plain_value(args[name], name) for field, name in table.copied.items()},
            **{field: _plain_value(derive(args), field) for field, derive in table.derived.items()},
        }
    except KeyError as error:
        raise _unfit(f"{table.entry} has no {error.args[0]}") from None
    notes = [
        f"{table.entry} has no {name}; config.json has {value}, the default of Megatron-LM"
        for name, value in missing.items()
    ]
    return config_file.with_config(checkpoint, made).with_root(checkpoint.root, notes=notes)


def _plain_value(value: Any, name: str) -> bool | int | float | str:
    """Return a short scalar or string unchanged. Raises UnsupportedError for other values."""
    if type(value) not in (bool, int, float, str) or len(repr(value)) > _LONGEST:
        raise _unfit(f"{name} must be a short scalar or string, but is {shown(value)}")
    plain: bool | int | float | str = value
    return plain


def _unfit(message: str) -> UnsupportedError:
    return UnsupportedError(
        f"cannot make config.json: {message}",
        hint=f"give a config.json with {typed('--config config.json', 'config')}",
    )


def _dtype_name(dtype: Any) -> str:
    """Return the name of a pickled dtype, such as "bfloat16" for ``torch.bfloat16``."""
    if not isinstance(dtype, Global):
        raise KeyError("params_dtype")
    return dtype.name


class WrittenStep(NamedTuple):
    """A step as written in a recipe: its word, its argument, and further options."""

    word: str
    given: Any
    options: dict[str, Any]


# Steps that a reversed recipe skips, because they do not change the layout.
PASSED_OVER = frozenset(
    {"config", "gguf", "weights", "select", "dequantize", "cast", "remap", "compact", "drop-entry"}
)
CHECKS = frozenset({"expect"})  # steps that check the target layout; a reversed recipe skips them


def backwards(steps: Sequence[WrittenStep]) -> tuple[list[WrittenStep], list[str]]:
    """Return the steps that undo `steps`, and a note about steps that are not undone.

    Raises UsageError for a step that cannot be undone.
    """
    found: list[WrittenStep] = []
    left: list[str] = []
    for number, step in reversed(list(enumerate(steps, 1))):
        undone = _undone(number, step)
        if undone is not None:
            found.append(undone)
        elif step.word not in CHECKS:
            left.append(step.word)
    return found, [f"not undone: {', '.join(left)}"] if left else []


def _undone(number: int, step: WrittenStep) -> WrittenStep | None:
    """Return the step that undoes `step`, or None if `step` needs no undoing."""
    word, given = step.word, step.given
    opposite = {"add": "strip", "wrap": "extract", "tie": "untie", "untie": "tie"}
    if word == "rules":
        return step
    if word in opposite:
        return WrittenStep(opposite[word], given, {})
    if word == "compute":
        expressions = _mapping(given)
        return WrittenStep(
            word, {glob: INVERSES.get(each, each) for glob, each in expressions.items()}, {}
        )
    if word == "strip":  # after several prefixes, it is unknown which key had which prefix
        return WrittenStep("add", given, {}) if isinstance(given, str) else None
    if word == "rename":
        mapping = given.get("map", {}) if isinstance(given, dict) else {}
        if mapping and not given.get("sub") and len(set(mapping.values())) == len(mapping):
            return WrittenStep("rename", {"map": {new: old for old, new in mapping.items()}}, {})
    if word == "extract":
        path = given[0] if isinstance(given, list) and len(given) == 1 else given
        if isinstance(path, str) and "." not in path:
            return WrittenStep("wrap", path, {})
    if word in PASSED_OVER or word in CHECKS:
        return None
    hint = "write a recipe for the other direction, or remove the step"
    if word == "recipe":
        hint = "use the recipe of the architecture; `ckptkit run --list` lists all recipes"
    raise UsageError(f"not reversible: step {number} ({word})", hint=hint)
