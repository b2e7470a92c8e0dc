"""YAML from a file: plain values, without the anchors and tags that make little text a lot."""

from __future__ import annotations

from typing import Any

from ckptkit.core.errors import UsageError

_BYTES = 1 << 20


def parse(data: bytes, where: str) -> Any:
    """The values in a text of YAML or JSON. Raises UsageError."""
    import yaml

    if len(data) > _BYTES:
        raise UsageError(f"is larger than {_BYTES:,} bytes", where=where)
    try:
        events = list(yaml.parse(data, Loader=yaml.SafeLoader))
        if any(isinstance(event, yaml.events.AliasEvent) for event in events):
            raise UsageError("uses anchors, which ckptkit does not follow", where=where)
        return yaml.safe_load(data)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"is not YAML: {str(error).splitlines()[0]}", where=where) from error
