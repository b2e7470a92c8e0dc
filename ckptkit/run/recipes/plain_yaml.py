"""Load YAML recipes. Recipes may contain only plain values, without aliases."""

from __future__ import annotations

import re
from typing import Any

import yaml

_DIGITS = 40  # maximum number of characters of a number


class PlainLoader(yaml.SafeLoader):
    """A SafeLoader that rejects aliases and huge numbers.

    With aliases, a few bytes could expand to any number of values.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            mark = self.get_mark()
            raise yaml.constructor.ConstructorError(
                None, None, "recipes may not contain aliases (*name)", mark
            )
        return super().compose_node(parent, index)

    def construct_yaml_int(self, node: Any) -> int:
        if len(node.value) > _DIGITS or re.search(":", node.value):
            text = f"a number has more than {_DIGITS} characters, or is in base 60"
            raise yaml.constructor.ConstructorError(None, None, text, node.start_mark)
        return int(super().construct_yaml_int(node))

    def construct_yaml_float(self, node: Any) -> float:
        if len(node.value) > _DIGITS:
            text = f"a number has more than {_DIGITS} characters"
            raise yaml.constructor.ConstructorError(None, None, text, node.start_mark)
        return float(super().construct_yaml_float(node))


PlainLoader.add_constructor("tag:yaml.org,2002:int", PlainLoader.construct_yaml_int)
PlainLoader.add_constructor("tag:yaml.org,2002:float", PlainLoader.construct_yaml_float)


def loaded(data: bytes) -> Any:
    """Parse the bytes of a YAML file. Raises ValueError for invalid YAML."""
    try:
        return PlainLoader(data).get_single_data()
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
