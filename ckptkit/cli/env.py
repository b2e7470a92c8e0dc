"""ckptkit env"""

from __future__ import annotations

from typing import Any

import click

from ckptkit.cli import options, render
from ckptkit.core import __version__


@click.command("env")
@options.of("env")
def command(as_json: bool) -> None:
    """Show versions of libraries and the devices of this machine.

    \b
    Example: ckptkit env
    """
    from ckptkit.loading.building import environment

    found: dict[str, Any] = {"ckptkit": __version__, **environment()}
    if as_json:
        render.emit_json({"schema": "ckptkit.env/1", **found})
        return
    devices = found.pop("devices")
    found["torch"] = found["torch"] or "not installed"
    rows = [(name, str(value)) for name, value in found.items() if value is not None]
    render.emit(*render.table(("", ""), rows))
    cells = [
        (name, each["title"], "" if each["memory"] is None else render.size(each["memory"]))
        for name, each in devices.items()
    ]
    render.emit("", *render.table(("device", "title", "memory"), cells, right=("memory",)))
    uuids = [(name, each["uuid"]) for name, each in devices.items() if each["uuid"]]
    if uuids:
        render.emit("", *render.table(("device", "uuid"), uuids))
