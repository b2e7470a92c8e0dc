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
from collections.abc import Callable, Mapping, Sequence
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
from ckptkit.core.text import flatten, nearest, shown, typed, without
from ckptkit.core.tree import Global, children, find
from ckptkit.edits.expect import Expectations
from ckptkit.edits.rules import RuleOptions
from ckptkit.edits.rules import step as apply_step
from ckptkit.quantized.group import with_config
from ckptkit.rules.notation import RuleError, in_step, is_word
from ckptkit.rules.planner import RuleSet, unused_argument

FOLDER = Path(__file__).parent
_SUFFIXES = (".yaml", ".yml", ".toml")
_BYTES = 1 << 20  # maximum size of a recipe in bytes
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
        text = " ".join(str(error).split())[:120]  # one line
        raise UsageError(f"is not valid: {text}", where=where) from error


def _shown(value: Any) -> str:
    try:
        return shown(value)
    except ValueError:  # Python does not convert an integer of thousands of digits to a string
        return "a huge number"


def _recipe(name: str, content: Any, options: RuleOptions) -> Recipe:
    if isinstance(content, dict) and "merge_method" in content:
        return Recipe(name, "a merge of mergekit", (), {}, merge=content)
    try:
        parts = _table(content, _PARTS)
        steps = parts.get("steps")
        if not isinstance(steps, list) or not steps:
            raise UsageError("has no list of steps")
        output = _table(parts.get("output", {}), set(_OUTPUT))
        for key, value in output.items():
            if not isinstance(value, _OUTPUT[key]):
                raise UsageError(f"output: {key} has a value of the wrong type: {_shown(value)}")
        texts = {word: parts.get(word, "") for word in ("about", "source", "checked")}
        for word, text in texts.items():
            if not isinstance(text, str):
                raise UsageError(f"{word} is {text!r}")
        known = [_written(number, each) for number, each in enumerate(steps, 1)]
        defaults = _sizes(parts.get("args", {}))
        # Parse all steps before any step is applied.
        made = [_step(number, each, options, defaults) for number, each in enumerate(known, 1)]
        if options.reverse:
            back, notes = backwards(known)
            made = [_step(number, each, options, defaults) for number, each in enumerate(back, 1)]
            made.append(lambda ck: ck.with_root(ck.root, notes=notes))
        given = {each.word for each in known}
        if options.dequantize is not None and not given & {"dequantize", "recipe"}:
            raise UsageError("has no step dequantize, so --dequantize has no effect")
        if options.args and "recipe" not in given:
            rules = [_parsed_rules(each, defaults) for each in known if each.word == "rules"]
            words = set(flatten(each.words() for each in rules))
            if unused := [word for word in options.args if word not in words]:
                raise unused_argument(unused[0], words)
        return Recipe(name, steps=tuple(made), output=output, written=tuple(known), **texts)
    except UsageError as error:
        raise error.at(name) from None


def _written(number: int, step: Any) -> WrittenStep:
    if isinstance(step, dict) and "rules" in step:
        given = without(step, ("rules",))
        if odd := given.keys() - _RULE_OPTIONS:
            what = f"step {number} (rules): unknown option {', '.join(sorted(map(repr, odd)))}"
            raise UsageError(what, hint="the options are keep, sizes, keys")
        return WrittenStep("rules", step["rules"], given)
    if not isinstance(step, dict) or len(step) != 1:
        what = f"step {number} must be a mapping from the name of one step to its argument"
        raise UsageError(what, hint="write, for example, `- strip: module.`")
    ((word, argument),) = step.items()
    return WrittenStep(word, argument, {})


def _step(
    number: int, step: WrittenStep, options: RuleOptions, defaults: dict[str, str | int]
) -> Step:
    word, given = step.word, step.given
    if word not in (known := [*edits.BY_WORD, "config", "expect", "gguf", "recipe"]):
        close = nearest(_shown(word).strip("'"), known) or known
        what = f"step {number}: {_shown(word)} is not a step"
        raise UsageError(what, hint=f"did you mean {', '.join(close)}?")
    try:
        if word == "rules":
            return _rules(number, step, options, defaults)
        if word == "config":
            if given != MEGATRON:
                what = f"unknown argument table {_shown(given)}"
                raise UsageError(what, hint=f"use {MEGATRON}")
            return partial(with_megatron_config, options=options)
        if word == "gguf":
            return partial(with_gguf_config, architectures=_texts(given), options=options)
        if word == "recipe":
            if given != BY_ARCHITECTURE:
                raise UsageError(f"must be {BY_ARCHITECTURE}, got {_shown(given)}")
            return partial(_by_architecture, options=options)
        if word == "expect":
            return Expectations(_texts(given), options.config).check
        if word == "dequantize" and options.dequantize is not None:
            given = options.dequantize
        return _edited(edits.BY_WORD[word], given)
    except RuleError as error:
        raise in_step(number, error) from None
    except UsageError as error:
        error.message = f"step {number} ({word}): {error.message}"
        raise


BY_ARCHITECTURE = "gguf-*"


def _by_architecture(checkpoint: Checkpoint, options: RuleOptions) -> Checkpoint:
    """Apply the recipe for the architecture of a GGUF file."""
    from ckptkit.run.recipes import gguf

    found = load(gguf.recipe_name(checkpoint, names()), options)
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
        checkpoint = with_config(checkpoint, config)
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
        raise UsageError("there are no rules")
    return RuleSet.parse(lines, _sizes(step.options.get("sizes", {})), defaults)


def _sizes(given: Any) -> dict[str, str | int]:
    """Return a dict that maps the name of each axis in the ``sizes`` of a step to its size.

    Raises UsageError for an invalid name or size.
    """
    if not isinstance(given, dict):
        raise UsageError(f"{_shown(given)} is not a mapping from axis names to sizes")
    for word, size in given.items():
        if not is_word(str(word)) or type(size) not in (int, str):
            hint = "write, for example, h: 32 or h: config.num_attention_heads"
            raise UsageError(f"{word}: {_shown(size)} is not a size", hint=hint)
    return {str(word): size for word, size in given.items()}


# The arguments of a step


def _if(fits: Callable[[Any], bool], noun: str) -> Callable[[Any], Any]:
    """Return a function that returns its argument if it `fits`, and raises UsageError otherwise."""

    def read(given: Any) -> Any:
        if not fits(given):
            raise UsageError(f"{_shown(given)} is not {noun}")
        return given

    return read


_text = _if(lambda given: isinstance(given, str) and bool(given), "a string")
_number = _if(lambda given: type(given) in (int, float), "a number")


def _texts(given: Any) -> list[str]:
    return [_text(each) for each in (given if isinstance(given, list) else [given])]


def _table(given: Any, known: set[str]) -> dict[str, Any]:
    if not isinstance(given, dict) or not given.keys() <= known:
        odd = [_shown(given)]
        if isinstance(given, dict):
            odd = sorted(map(_shown, given.keys() - known))
        raise UsageError(
            f"unknown: {', '.join(odd)[:200]}; the known keys are {', '.join(sorted(known))}"
        )
    return given


def _mapping(given: Any) -> dict[str, str]:
    if not isinstance(given, dict):
        raise UsageError(f"{_shown(given)} is not a mapping whose keys and values are strings")
    return {_text(key): "" if value == "" else _text(value) for key, value in given.items()}


def _true(given: Any) -> bool:
    if given is not True:
        raise UsageError(f"must be true, got {_shown(given)}")
    return True


def _text_or_mapping(given: Any) -> str | dict[str, str]:
    return _mapping(given) if isinstance(given, dict) else str(_text(given))


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
    "count": _if(lambda given: type(given) is int and given >= 0, "a non-negative integer"),
    "number": lambda given: float(_number(given)),
}


def _edited(edit: edits.Edit, given: Any) -> Step:
    """Return the step of an edit. Raises UsageError for an argument of the wrong kind."""
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


# config.json from the training arguments of Megatron-LM

MEGATRON = "megatron-llama"
# Fields of config.json, and the training arguments with their values.
_COPIED = {
    "hidden_size": "hidden_size", "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers", "num_attention_heads": "num_attention_heads",
    "head_dim": "kv_channels", "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "norm_epsilon", "rope_theta": "rotary_base",
}  # fmt: skip
# Training arguments, and the values with which the model is a Llama.
_LLAMA: dict[str, tuple[Any, ...]] = {
    "swiglu": (True,), "normalization": ("RMSNorm",), "position_embedding_type": ("rope",),
    "rotary_percent": (1, None),
    **dict.fromkeys(
        ("rotary_interleaved", "use_rope_scaling", "apply_layernorm_1p", "qk_layernorm",
         "add_bias_linear", "add_qkv_bias", "num_experts", "multi_latent_attention"),
        (None, False, 0),
    ),
}  # fmt: skip
# Defaults of Megatron-LM, for versions that did not save the argument.
_DEFAULTS = {"norm_epsilon": 1e-5, "rotary_base": 10000}
_LONGEST = 40  # maximum number of characters of a value in config.json


def with_megatron_config(checkpoint: Checkpoint, options: RuleOptions) -> Checkpoint:
    """Add the config.json of a Llama model to a checkpoint of Megatron-LM.

    If `--config` is given, use this configuration. Otherwise, make the config.json from the
    training arguments in the checkpoint. If the checkpoint has no training arguments, return it
    unchanged. Raises UnsupportedError if the arguments belong to another kind of model, or if an
    argument is missing.
    """
    given = options.config() if callable(options.config) else options.config
    if given is not None:
        return with_config(checkpoint, given)
    try:
        _, entry = find(checkpoint.root, "args")
    except UsageError:
        return checkpoint
    saved = {str(key): value for key, value in children(entry)}
    for name, allowed in _LLAMA.items():
        if name in saved and not any(saved[name] == each for each in allowed):
            what = f"args.{name} is {shown(saved[name])}, which the target model does not support"
            raise _unfit(what)
    missing = {name: value for name, value in _DEFAULTS.items() if saved.get(name) is None}
    args = {**saved, **missing}
    try:
        made = {field: (name, args[name]) for field, name in _COPIED.items()}
        groups = "num_query_groups" if args["group_query_attention"] else "num_attention_heads"
        vocabulary = options.args.get("vocab", args.get("vocab_size")) or args["padded_vocab_size"]
        if not isinstance(args.get("params_dtype"), Global):  # such as torch.bfloat16
            raise KeyError("params_dtype")
        for field, value in (
            ("num_key_value_heads", args[groups]),
            ("vocab_size", vocabulary),
            ("tie_word_embeddings", not args["untie_embeddings_and_output_weights"]),
            ("torch_dtype", args["params_dtype"].name),
        ):
            made[field] = field, value
    except KeyError as error:
        raise _unfit(f"args has no {error.args[0]}") from None
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"
    }  # fmt: skip
    for field, (name, value) in made.items():
        if type(value) not in (bool, int, float, str) or len(repr(value)) > _LONGEST:
            raise _unfit(f"{name} must be a short scalar or string, but is {shown(value)}")
        config[field] = value
    notes = [
        f"args has no {name}; config.json has {value}, the default of Megatron-LM"
        for name, value in missing.items()
    ]
    return with_config(checkpoint, config).with_root(checkpoint.root, notes=notes)


def _unfit(message: str) -> UnsupportedError:
    return UnsupportedError(
        f"cannot make config.json: {message}",
        hint=f"give a config.json with {typed('--config config.json', 'config')}",
    )


class WrittenStep(NamedTuple):
    """A step as written in a recipe: its word, its argument, and further options."""

    word: str
    given: Any
    options: dict[str, Any]


_OPPOSITES = {"add": "strip", "strip": "add", "wrap": "extract", "tie": "untie", "untie": "tie"}
# Steps that a reversed recipe skips, because they do not change the layout. If a step `strip`
# removes several prefixes, it is unknown which key had which prefix.
_PASSED_OVER = ("config", "gguf", "weights", "select", "dequantize", "cast", "remap", "compact",
                "drop-entry", "strip")  # fmt: skip


def backwards(steps: Sequence[WrittenStep]) -> tuple[list[WrittenStep], list[str]]:
    """Return the steps that undo `steps`, and a note about steps that are not undone.

    Raises UsageError for a step that cannot be undone.
    """
    found: list[WrittenStep] = []
    left: list[str] = []
    for number, step in reversed(list(enumerate(steps, 1))):
        if (undone := _undone(step)) is not None:
            found.append(undone)
        elif step.word in _PASSED_OVER:
            left.append(step.word)
        elif step.word != "expect":  # `expect` checks the target layout
            hint = "write a recipe for the other direction, or remove the step"
            if step.word == "recipe":
                hint = "use the recipe of the architecture; `ckptkit run --list` lists all recipes"
            raise UsageError(f"not reversible: step {number} ({step.word})", hint=hint)
    return found, [f"not undone: {', '.join(left)}"] if left else []


def _undone(step: WrittenStep) -> WrittenStep | None:
    """Return the step that undoes `step`. Return None if there is no such step."""
    word, given = step.word, step.given
    if word == "rules":
        return step
    if word in _OPPOSITES and (word != "strip" or isinstance(given, str)):
        return WrittenStep(_OPPOSITES[word], given, {})
    if word == "compute":
        inverse = {glob: INVERSES.get(each, each) for glob, each in _mapping(given).items()}
        return WrittenStep(word, inverse, {})
    if word == "rename":
        mapping = given.get("map", {}) if isinstance(given, dict) else {}
        if mapping and not given.get("sub") and len(set(mapping.values())) == len(mapping):
            return WrittenStep(word, {"map": {new: old for old, new in mapping.items()}}, {})
    if word == "extract":
        path = given[0] if isinstance(given, list) and len(given) == 1 else given
        if isinstance(path, str) and "." not in path:
            return WrittenStep("wrap", path, {})
    return None
