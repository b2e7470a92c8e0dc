"""Every command on the folders of many processes: exit codes, words that fit, no traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from ckptkit.cli import main
from tests.formats.parallel.test_vectors import NAMES, REFUSED, parts
from tests.formats.parallel.trees import assert_same, flat
from tests.formats.parallel.unfit import TABLE, own


def ckptkit(*words: object) -> Result:
    """Run a command in this process; an error that is not our own is raised."""
    result = CliRunner().invoke(main, list(map(str, words)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


# What reads a folder, and its exit code: the doctor has something to say about every folder.
READING: dict[str, int] = {
    "inspect": 0, "inspect --tree": 0, "inspect --json": 0, "stats": 0, "stats --json": 0, "digest": 0,
    "verify": 0, "verify --json": 0, "doctor": 1, "doctor --json": 1, "check --expect *": 0, "diff --values": 0,
}  # fmt: skip
WRITING = (
    "convert",
    "add-module",
    "remap --to cpu",
    "rename --sub layers=l",
    "average",
    "join --last-wins",
)


@pytest.mark.parametrize("name", NAMES)
def test_commands_on_each_folder(name: str, tmp_path: Path) -> None:
    folder = parts(name, tmp_path)
    for line, code in READING.items():
        command, *options = line.split()
        done = ckptkit(command, *options, folder, *([folder] if command == "diff" else []))
        assert done.exit_code == code, (line, done.output)
        if "--json" in options:
            assert json.loads(done.stdout)
    assert "rank files of" in (said := ckptkit("inspect", folder).stdout) or name.split("_")[0] in (
        "ds", "mega", "meta", "neox"), said  # fmt: skip
    first = json.loads(ckptkit("inspect", "--json", folder).stdout)["files"][0]["tensors"][0]
    assert ckptkit("show", folder, first["path"]).exit_code == 0
    for number, line in enumerate(WRITING):
        command, *options = line.split()
        inputs = [folder] * (1 + (command in ("average", "join")))
        done = ckptkit(command, *options, *inputs, tmp_path / f"{number}.pth")
        assert done.exit_code == 0, (line, done.output)
    assert ckptkit("convert", folder, tmp_path / "a.safetensors").exit_code == 0
    assert ckptkit("diff", "--values", folder, tmp_path / "a.safetensors").exit_code == 0
    done = ckptkit("strip-module", "--in-place", folder)
    assert done.exit_code == 2 and "single local file" in done.stderr


@pytest.mark.parametrize("name", REFUSED)
def test_commands_on_what_is_refused(name: str, tmp_path: Path) -> None:
    """Each says the same, and nothing is written."""
    folder = parts(name, tmp_path)
    _, word = REFUSED[name]
    for line in (*READING, *WRITING):
        command, *options = line.split()
        inputs = [folder] * (1 + (command in ("average", "join", "diff")))
        target = [tmp_path / "out.pth"] if line in WRITING else []
        done = ckptkit(command, *options, *inputs, *target)
        assert done.exit_code == 3 or (command == "verify" and done.exit_code == 1), (
            line,
            done.output,
        )
        assert word in done.output.replace("\n   ", " "), line
    assert not (tmp_path / "out.pth").exists()


# With a table of one's own


@pytest.fixture
def tabled(tmp_path: Path) -> tuple[Path, list[Any], dict[str, torch.Tensor]]:
    """A folder, the options that read it, and the whole."""
    torch.manual_seed(1)
    folder, whole = own(tmp_path / "x")
    (tmp_path / "t.yaml").write_text(TABLE)
    return folder, ["--parts", tmp_path / "t.yaml"], whole


def test_show_with_a_table(tabled: Any) -> None:
    folder, options, whole = tabled
    done = ckptkit("show", *options, folder, "blocks.1.down")
    assert done.exit_code == 0 and "blocks.1.down, float32 [4, 6]" in done.stdout
    assert f"{whole['blocks.1.down'][0, 0]:.3g}"[:4] in done.stdout
    assert ckptkit("show", folder, "blocks.1.down").exit_code != 0


def test_run_with_a_table(tabled: Any, tmp_path: Path) -> None:
    folder, options, whole = tabled
    (tmp_path / "r.yaml").write_text("steps: [{rename: {sub: {blocks: layers}}}]")
    out = tmp_path / "out.safetensors"
    done = ckptkit("run", *options, tmp_path / "r.yaml", folder, out)
    assert done.exit_code == 0, done.output
    assert_same(load_file(out), {k.replace("blocks", "layers"): v for k, v in flat(whole)})


def test_browse_with_a_table(tabled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its diagnosis, which runs in a thread, and the command that it leaves have the table."""
    pytest.importorskip("textual", reason="textual, which browse is made with, is not installed")
    from concurrent.futures import ThreadPoolExecutor

    from ckptkit.views.browser import Browser

    folder, options, whole = tabled
    seen: list[Any] = []

    def run(self: Browser) -> str:
        with ThreadPoolExecutor(1) as threads:
            seen.extend(threads.submit(self.diagnose).result())
        assert len(self.contents.shares) == len(whole)
        return self.contents.command("inspect")

    monkeypatch.setattr("ckptkit.cli.render.is_terminal", lambda stream: True)
    monkeypatch.setattr(Browser, "run", run)
    done = ckptkit("browse", *options, folder)
    assert done.exit_code == 0 and f"--parts {options[1]} " in done.stdout
    assert "t.yaml" in seen[0].title
