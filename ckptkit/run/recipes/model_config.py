"""Make config.json of a model from the arguments that its training left in the checkpoint.

Source: megatron/training/arguments.py of Megatron-LM, and the configurations of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import UnsupportedError, UsageError
from ckptkit.core.text import shown, typed
from ckptkit.core.tree import Global, children, find
from ckptkit.edits.rules import CONFIG_NAME, RuleOptions

Arguments = Mapping[str, Any]

_LONGEST = 40  # characters of a value


class Table(NamedTuple):
    """Rules that derive the fields of a config.json from the arguments of a training.

    ``entry`` is the path of the arguments in the checkpoint. ``required`` lists, for an argument,
    the values with which a model is one of this kind; an argument that is missing does not count.
    ``defaults`` are those of the framework, for versions that did not save the argument.
    """

    entry: str
    fixed: Mapping[str, Any]
    copied: Mapping[str, str]
    derived: Mapping[str, Callable[[Arguments], Any]]
    required: Mapping[str, tuple[Any, ...]]
    defaults: Mapping[str, Any]


_NOT_SET = (None, False, 0)

MEGATRON_LLAMA = Table(
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
        "torch_dtype": lambda args: _name(args["params_dtype"]),
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


def with_config(checkpoint: Checkpoint, table: Table, options: RuleOptions) -> Checkpoint:
    """Return the checkpoint with a config.json, which is written beside it into a folder.

    That is the one that was named (`--config`), if there is one; without arguments there is none.
    Raises UnsupportedError for the arguments of another kind of model, or too few of them.
    """
    given = options.config() if callable(options.config) else options.config
    if given is not None:
        return _with(checkpoint, given)
    try:
        _, entry = find(checkpoint.root, table.entry)
    except UsageError:
        return checkpoint
    said = {str(key): value for key, value in children(entry)}
    _check(said, table)
    missing = {name: value for name, value in table.defaults.items() if said.get(name) is None}
    args = {**said, **missing}
    args["vocab_size"] = options.args.get("vocab", args.get("vocab_size"))
    try:
        made = {
            **table.fixed,
            **{field: _plain(args[name], name) for field, name in table.copied.items()},
            **{field: _plain(derive(args), field) for field, derive in table.derived.items()},
        }
    except KeyError as error:
        raise _unfit(f"{table.entry} has no {error.args[0]}") from None
    notes = [
        f"{table.entry} has no {name}: config.json says {value}, the default of Megatron-LM"
        for name, value in missing.items()
    ]
    return _with(checkpoint, made).with_root(checkpoint.root, notes=notes)


def _check(args: Arguments, table: Table) -> None:
    for name, allowed in table.required.items():
        if name in args and not any(args[name] == each for each in allowed):
            raise _unfit(f"{table.entry}.{name} is {shown(args[name])}")


def _plain(value: Any, name: str) -> bool | int | float | str:
    """Return a value that JSON holds in a few characters."""
    if type(value) not in (bool, int, float, str) or len(repr(value)) > _LONGEST:
        raise _unfit(f"{name} is {shown(value)}")
    plain: bool | int | float | str = value
    return plain


def _unfit(message: str) -> UnsupportedError:
    return UnsupportedError(
        f"config.json cannot be made: {message}",
        hint=f"name one: {typed('--config config.json', 'config')}",
    )


def _with(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    others = (each for each in checkpoint.companions if each[0] != CONFIG_NAME)
    return replace(checkpoint, companions=(*others, (CONFIG_NAME, text.encode())))


def _name(dtype: Any) -> str:
    """Return "bfloat16" for torch.bfloat16, which is a name in the file."""
    if not isinstance(dtype, Global):
        raise KeyError("params_dtype")
    return dtype.name
