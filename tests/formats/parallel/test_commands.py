"""Folders of many processes with the whole beside them, made by torch and by the rules of the
layouts (CKPTKIT_VECTORS names them), and every command on them and on a folder with a table."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from ckptkit.core.errors import CkptkitError, CorruptError, UnsupportedError
from tests.conftest import Done, Run
from tests.formats.parallel.trees import assert_same
from tests.formats.parallel.unfit import TABLE, own
from tests.torch_equality import tensors

REFUSED: dict[str, tuple[type[CkptkitError], str]] = {
    "bad_rank_missing": (CorruptError, "model_world_size_3_rank_1.pt"),
    "bad_two_saves_mixed": (CorruptError, "inv_freq"),
    "bad_tp_w2_replicas_differ": (CorruptError, "input_layernorm"),
    "bad_fsdp1dt_hsdp_replicas_differ": (CorruptError, "elements differ"),
    "fsdp1local_w2_accelerate": (UnsupportedError, "flat parameters"),
}
NAMES = (
    "ds_mprank_tp2", "fsdp1dt_hsdp_2x2_f32", "fsdp1dt_w2_bf16", "fsdp1st_w2_f32", "fsdp1st_w2_orig_wrap",
    "fsdp2_w2_f32", "fsdp2_w2_otherseed", "fsdp2_w2_tied_bf16", "fsdp2_w3_f32", "fsdp2_w4_bf16_empty",
    "fsdp2tp_2x2_f32", "hsdp2_2x2_f32", "mega_gpt_v0_release_tp2", "mega_gpt_v3_tp2_pp1", "mega_llama_tp1_pp1",
    "mega_llama_tp1_pp2", "mega_llama_tp2_pp1", "mega_llama_tp2_pp2", "mega_moe_tp1_ep2", "meta_llama2_mp2",
    "meta_llama3_mp2", "neox_pipe_tp2", "tp_w2_f32",
)  # fmt: skip


def vector(name: str) -> Path:
    folder = Path(os.environ.get("CKPTKIT_VECTORS", "")) / "parallel" / name
    if not folder.is_dir():
        pytest.skip("CKPTKIT_VECTORS does not name a folder with them")
    return folder


def parts(name: str, tmp_path: Path) -> Path:
    """The folder without the whole, which would be a checkpoint by its name."""
    folder = tmp_path / name
    shutil.copytree(vector(name), folder, ignore=shutil.ignore_patterns("full*.pt", "facts.json"))
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    folder.chmod(0o755)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_make_the_whole(name: str, tmp_path: Path) -> None:
    truth = vector(name)
    checkpoint = ckptkit.open(parts(name, tmp_path))
    ckptkit.save(checkpoint, tmp_path / "out.pth")
    (key,) = checkpoint.required.path or (None,)
    whole = ckptkit.load(tmp_path / "out.pth", key=key)
    assert_same(whole, torch.load(truth / "full.pt", weights_only=True))
    if (truth / "full_optim.pt").exists():
        made = torch.load(tmp_path / "out.pth", weights_only=True)
        expected = torch.load(truth / "full_optim.pt", weights_only=True)
        assert_same(made["optimizer"]["state"], expected["state"])


def test_an_optimizer_with_a_replica_whose_rank_is_missing(tmp_path: Path) -> None:
    """The other replica of HYBRID_SHARD is complete."""
    folder = parts("fsdp1dt_hsdp_2x2_f32", tmp_path)
    for path in folder.glob("*_rank_3.pt"):
        path.unlink()
    ckptkit.save(ckptkit.open(folder), tmp_path / "out.pth")
    made = torch.load(tmp_path / "out.pth", weights_only=True)
    expected = torch.load(vector(folder.name) / "full_optim.pt", weights_only=True)
    assert_same(made["optimizer"]["state"], expected["state"])


def test_every_vector_is_here() -> None:
    assert {path.name for path in vector(".").iterdir()} == {*NAMES, *REFUSED}


# Every command

# What reads a folder, and its exit code: the doctor has something to say about every folder.
READING: dict[str, int] = {
    "inspect": 0, "inspect --tree": 0, "inspect --json": 0, "stats": 0, "stats --json": 0, "digest": 0,
    "verify": 0, "verify --json": 0, "doctor": 1, "doctor --json": 1, "check --expect *": 0, "diff --values": 0,
}  # fmt: skip
WRITING = (
    "convert", "add-module", "remap --to cpu", "rename --sub layers=l", "average", "join --last-wins",
)  # fmt: skip


def done_on(run: Run, line: str, folder: Path, *others: object) -> Done:
    """Run a command on a folder, or on the folder twice, and other words."""
    command, *options = line.split()
    return run(
        command, *options, *[folder] * (1 + (command in ("average", "join", "diff"))), *others
    )


@pytest.mark.parametrize("name", NAMES)
def test_commands_on_each_folder(name: str, tmp_path: Path, run: Run) -> None:
    folder = parts(name, tmp_path)
    shown = {}
    for line, code in READING.items():
        done = shown[line] = done_on(run, line, folder)
        assert done.code == code, (line, done.stdout + done.stderr)
        assert "--json" not in line or json.loads(done.stdout)
    is_named = name.split("_")[0] in ("ds", "mega", "meta", "neox")
    assert is_named or "rank files of" in shown["inspect"].stdout
    first = json.loads(shown["inspect --json"].stdout)["files"][0]["tensors"][0]
    assert run("show", folder, first["path"]).code == 0
    for number, line in enumerate(WRITING):
        done = done_on(run, line, folder, tmp_path / f"{number}.pth")
        assert done.code == 0, (line, done.stdout + done.stderr)
    assert run("convert", folder, tmp_path / "a.safetensors").code == 0
    assert run("diff", "--values", folder, tmp_path / "a.safetensors").code == 0
    done = run("strip-module", "--in-place", folder)
    assert done.code == 2 and "single local file" in done.stderr


@pytest.mark.parametrize("name", REFUSED)
def test_commands_on_what_is_refused(name: str, tmp_path: Path, run: Run) -> None:
    """Each says the same, and nothing is written."""
    folder = parts(name, tmp_path)
    for line in (*READING, *WRITING):
        done = done_on(run, line, folder, *([tmp_path / "out.pth"] if line in WRITING else []))
        said = done.stdout + done.stderr
        assert done.code == 3 or (line.startswith("verify") and done.code == 1), (line, said)
        assert REFUSED[name][1] in said.replace("\n   ", " "), line
    assert not (tmp_path / "out.pth").exists()


# With a table of one's own

Tabled = tuple[Path, list[Any], dict[str, torch.Tensor]]


@pytest.fixture
def tabled(tmp_path: Path) -> Tabled:
    """A folder, the options that read it, and the whole."""
    torch.manual_seed(1)
    folder, whole = own(tmp_path / "x")
    (tmp_path / "t.yaml").write_text(TABLE)
    torch.save(whole, tmp_path / "whole.pth")
    return folder, ["--parts", tmp_path / "t.yaml"], whole


@pytest.mark.parametrize("command", ["inspect", "doctor", "verify", "digest", "stats", "diff"])
def test_commands_that_read_take_a_table(
    command: str, tabled: Tabled, tmp_path: Path, run: Run
) -> None:
    folder, options, _ = tabled
    other = [tmp_path / "whole.pth", "--values"] if command == "diff" else []
    done = run(command, folder, *other, *options)
    assert done.code == (1 if command == "doctor" else 0), done.stderr
    if command == "digest":
        digest = run("digest", tmp_path / "whole.pth").stdout.splitlines()
        assert sorted(done.stdout.splitlines()[1:]) == sorted(digest[1:])
    if command == "doctor":
        assert "--parts" in done.stdout
    wrong = run(command, tmp_path / "whole.pth", *options)
    assert wrong.code == 2 or command == "diff"  # whose other side may be a file


def test_show_with_a_table(tabled: Tabled, run: Run) -> None:
    folder, options, whole = tabled
    done = run("show", *options, folder, "blocks.1.down")
    assert done.code == 0 and "blocks.1.down, float32 [4, 6]" in done.stdout
    assert f"{whole['blocks.1.down'][0, 0]:.3g}"[:4] in done.stdout
    assert run("show", folder, "blocks.1.down").code != 0


def test_run_with_a_table(tabled: Tabled, tmp_path: Path, run: Run) -> None:
    folder, options, whole = tabled
    (tmp_path / "r.yaml").write_text("steps: [{rename: {sub: {blocks: layers}}}]")
    out = tmp_path / "out.safetensors"
    assert run("run", *options, tmp_path / "r.yaml", folder, out).code == 0
    assert_same(load_file(out), {k.replace("blocks", "layers"): v for k, v in tensors(whole)})


def test_browse_with_a_table(tabled: Tabled, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """Its diagnosis, which runs in a thread, and the command that it leaves have the table."""
    pytest.importorskip("textual", reason="textual, which browse is made with, is not installed")
    from ckptkit.views.browser import Browser

    folder, options, whole = tabled
    seen: list[Any] = []

    def shown(self: Browser) -> str:
        with ThreadPoolExecutor(1) as threads:
            seen.extend(threads.submit(self.diagnose).result())
        assert len(self.contents.shares) == len(whole)
        return self.contents.command("inspect")

    monkeypatch.setattr("ckptkit.cli.render.is_terminal", lambda stream: True)
    monkeypatch.setattr(Browser, "run", shown)
    done = run("browse", *options, folder)
    assert done.code == 0 and f"--parts {options[1]} " in done.stdout
    assert "t.yaml" in seen[0].title
