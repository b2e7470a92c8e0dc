"""Many files: names, what is skipped, failures, and whoever is killed on the way."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptkit import cli
from ckptkit.api import convert
from ckptkit.core.errors import OutputError, PathError, UsageError
from ckptkit.core.plan import Plan
from ckptkit.run import batch, workers
from ckptkit.run.batch import failed, same
from tests.conftest import COMMAND, ROOT, Ok, Run
from tests.run.batches import (
    answered,
    counts,
    deadly,
    expected,
    interrupted,
    interrupted_in_destructor,
    jobs_of,
    make,
    noted,
    slow,
    states,
    strip,
    suicidal,
    without_sum,
)


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return make(tmp_path / "runs", 25)


@pytest.fixture
def into(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def pattern(tmp_path: Path) -> Path:
    return tmp_path / "runs/**/*.pth"


def run_all(
    work: batch.Work, jobs: Sequence[batch.Job], into: Path, **options: Any
) -> dict[str, batch.Outcome]:
    with closing(batch.run(work, jobs, str(into), **options)) as results:
        return {job.output: outcome for job, outcome in results}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder but the manifest."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != batch.MANIFEST
    }


class TestCommands:
    def test_strip_module(
        self, runs: list[Path], into: Path, pattern: Path, ok: Ok, tmp_path: Path
    ) -> None:
        said = ok("batch", "strip-module", "--into", into, pattern, "--workers", 2)
        assert said.startswith(f"strip-module into {into}: 25 written;")
        assert contents(into) == expected(tmp_path / "runs")
        weights = {"weight": [13.0, -1.0, -1.0, -1.0], "bias": [0.0, 0.0]}
        assert without_sum(into / "0001/13.pth") == weights

    @pytest.mark.parametrize(
        "command",
        [
            "strip-module", "add-module --prefix x.", "remap --to cpu", "rename --sub ^module=net", "wrap --key model",
            "convert --format safetensors --cast float16", "recover", "extract --key module.weight",
        ],
    )  # fmt: skip
    def test_each_does_what_it_does_alone(
        self, command: str, tmp_path: Path, into: Path, ok: Ok
    ) -> None:
        (source,) = make(tmp_path / "runs", 1)
        suffix = ".safetensors" if "convert" in command else ".pth"
        ok(*command.split(), source, tmp_path / f"alone{suffix}")
        ok("batch", *command.split(), "--into", into, source)
        assert contents(into) == {f"0{suffix}": (tmp_path / f"alone{suffix}").read_bytes()}

    def test_a_recipe(self, runs: list[Path], into: Path, run: Run, tmp_path: Path) -> None:
        """It says the format of the outputs; when it changes, they are made again."""
        pytest.importorskip("yaml")
        recipe = tmp_path / "recipe.yaml"
        args = ("run", recipe, "--into", into, *runs[:2], "--workers", 2)
        for prefix in ("module.", "none."):
            text = f"about: x\nsteps:\n  - strip: {prefix}\noutput: {{format: safetensors}}\n"
            recipe.write_text(text)
            assert counts(run, *args) == {"done": 2}
            assert counts(run, *args) == {"skipped": 2}
        assert set(load_file(into / "1.safetensors")) == {"module.weight", "module.bias"}
        recipe.write_text("steps: 3")
        assert run("batch", *args).code == 2

    def test_every_command_that_writes_is_there(self) -> None:
        def found(name: str) -> click.Command:
            command = cli.main.get_command(click.Context(cli.main), name)
            assert command is not None
            return command

        group = found("batch")
        assert isinstance(group, click.Group)
        writing = {
            name
            for name in cli.COMMANDS
            if any(each.name == "in_place" for each in found(name).params)
        }
        assert set(group.list_commands(click.Context(group))) == writing

    def test_help_has_the_options_of_the_command(self, ok: Ok) -> None:
        text = ok("batch", "remap", "--help")
        for each in ("--device", "--device-values", "--into DIR", "--workers", "SRC...", "batch/1"):
            assert each in text
        assert "DST" not in text and "--in-place" not in text

    def test_options_that_do_not_go_together(self, runs: list[Path], into: Path, run: Run) -> None:
        done = run("batch", "remap", "--into", into, *runs)
        assert (done.code, into.exists()) == (2, False)
        assert done.stderr.count("use either --to DEVICE or --device A=B") == 1

    def test_dry_run(self, runs: list[Path], into: Path, pattern: Path, run: Run, ok: Ok) -> None:
        words = ("strip-module", "--into", into)
        assert counts(run, *words, "--dry-run", pattern) == {"planned": 25}
        assert not into.exists()
        counts(run, *words, runs[0])
        said = ok("batch", *words, "--dry-run", runs[0], runs[11])
        assert f"0.pth: already done, from {runs[0]}\n11.pth: to write, from {runs[11]}\n" in said


class TestNames:
    def test_below_the_fixed_part(self, runs: list[Path], into: Path, tmp_path: Path) -> None:
        jobs = jobs_of(tmp_path / "runs/000*/*1*.pth", into)
        assert [job.output for job in jobs][:3] == ["0000/1.pth", "0001/10.pth", "0001/11.pth"]

    @pytest.mark.parametrize(
        ("name", "options", "output"),
        [
            ("runs/0000/3.pth", {}, "3.pth"),
            ("runs/0000/3.pth", {"format": "safetensors"}, "3.safetensors"),
            ("runs/0000/3.pth", {"format": "torch-zip"}, "3.pth"),
            ("runs/0000/3.pth", {"shards": True}, "3"),
            ("run.pth.tar", {"format": "safetensors"}, "run.safetensors"),
        ],
    )
    def test_suffixes(
        self, name: str, options: Any, output: str, runs: list[Path], into: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "run.pth.tar").write_bytes(runs[0].read_bytes())
        (job,) = jobs_of(tmp_path / name, into, **options)
        assert job.output == output

    def test_folders_that_are_checkpoints(self, tmp_path: Path, into: Path, run: Run) -> None:
        for step in (1, 2):
            folder, name = tmp_path / f"steps/step-{step}", "model-00001-of-00001.safetensors"
            folder.mkdir(parents=True)
            save_file({"module.w": torch.full((2,), float(step))}, folder / name)
            places = {"weight_map": {"module.w": name}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(places))
        pattern = tmp_path / "steps/step-*"
        counts(run, "convert", "--format", "safetensors", "--into", into, pattern)
        assert load_file(into / "step-2.safetensors")["module.w"].tolist() == [2, 2]
        for state in ("done", "skipped"):
            answer = answered(run, "strip-module", "--into", tmp_path / "kept", pattern)
            assert {job["output"] for job in answer["jobs"]} == {"step-1", "step-2"}
            assert answer["counts"][state] == 2
        assert (tmp_path / "kept/step-1").is_dir()

    def test_collisions(self, runs: list[Path], into: Path, tmp_path: Path, run: Run) -> None:
        (tmp_path / "more").mkdir()
        (tmp_path / "more/0.pth").write_bytes(runs[0].read_bytes())
        done = run("batch", "strip-module", "--into", into, runs[0], tmp_path / "more/0.pth")
        assert (done.code, into.exists()) == (2, False)
        assert str(runs[0]) in done.stderr and "more/0.pth" in done.stderr
        (runs[0].parent / "0").mkdir()
        (runs[0].parent / "0/x.pth").write_bytes(runs[0].read_bytes())
        # a folder 0, and a folder x in it
        with pytest.raises(UsageError, match="would overwrite each other"):
            jobs_of(tmp_path / "runs/**/[0x].pth", into, shards=True)

    def test_one_file_named_twice_is_one(self, runs: list[Path], into: Path) -> None:
        assert len(batch.find([str(runs[0]), f"{runs[0].parent}/../0000/0.pth"], str(into))) == 1

    def test_outputs_are_no_inputs(
        self, runs: list[Path], pattern: Path, tmp_path: Path, run: Run
    ) -> None:
        for want in ({"done": 25}, {"skipped": 25}):
            assert counts(run, "strip-module", "--into", tmp_path / "runs/out", pattern) == want
        done = run("batch", "strip-module", "--into", tmp_path / "runs", pattern)
        assert done.code == 2 and "in the output folder" in done.stderr

    def test_refusals(self, runs: list[Path], tmp_path: Path, into: Path, run: Run) -> None:
        done = run("batch", "strip-module", "--into", into, tmp_path / "nothing*.pth")
        assert done.code == 2 and "nothing matches" in done.stderr
        done = run("batch", "convert", "--format", "gguf", "--into", into, runs[0])
        assert (done.code, into.exists()) == (2, False)
        (tmp_path / "beside.pth").write_bytes(runs[0].read_bytes())
        with pytest.raises(PathError, match="is not a valid output name"):
            batch.find([str(tmp_path / "runs/00*/../../*.pth")], str(into))


class TestSkipping:
    def test_what_is_done_is_not_done_again(
        self, runs: list[Path], into: Path, pattern: Path, run: Run
    ) -> None:
        args = ("strip-module", "--into", into, pattern)
        assert counts(run, *args) == {"done": 25}
        assert counts(run, *args) == {"skipped": 25}
        torch.save({"module.other": torch.ones(1)}, runs[3])
        (into / "0000/4.pth").unlink()
        before = (into / "0000/5.pth").stat()
        assert counts(run, *args) == {"done": 2, "skipped": 23}
        assert without_sum(into / "0000/3.pth") == {"other": [1.0]}
        assert (into / "0000/5.pth").stat() == before

    def test_other_options_do_it_again(self, runs: list[Path], into: Path, run: Run) -> None:
        for words, state in (
            (("strip-module",), "done"),
            (("add-module",), "done"),
            (("add-module", "--prefix", "x."), "done"),
            (("add-module", "--prefix", "x.", "--durable"), "skipped"),
        ):
            assert counts(run, *words, "--into", into, *runs[:2]) == {state: 2}
        assert "x.module.bias" in without_sum(into / "0.pth")

    def test_folders_are_never_replaced(self, runs: list[Path], into: Path, run: Run) -> None:
        args = ("--into", into, "--shard-size", "1GB", *runs[:2])
        for state in ("done", "skipped", "found"):
            if state == "found":
                (into / batch.MANIFEST).unlink()
            assert counts(run, "strip-module", *args) == {state: 2}
        answer = answered(run, "add-module", *args, code=2)
        assert "is a folder and not empty" in answer["jobs"][0]["error"]["message"]

    def test_what_somebody_changed_is_not_replaced(
        self, runs: list[Path], into: Path, run: Run
    ) -> None:
        args = ("strip-module", "--into", into, *runs[:2])
        counts(run, *args)
        (into / "0.pth").write_bytes(b"mine")
        answer = answered(run, *args, code=2)
        assert (answer["counts"]["skipped"], answer["counts"]["failed"]) == (1, 1)
        assert answer["jobs"][0]["error"]["hint"] == "--force replaces it"
        assert (into / "0.pth").read_bytes() == b"mine"
        assert counts(run, *args, "--force") == {"skipped": 1, "done": 1}

    def test_without_the_manifest_outputs_are_compared(
        self, runs: list[Path], into: Path, run: Run
    ) -> None:
        args = ("strip-module", "--into", into, *runs[:3])
        counts(run, *args)
        (into / batch.MANIFEST).unlink()
        data = bytearray((into / "1.pth").read_bytes())
        data[len(data) // 2] ^= 1
        (into / "1.pth").write_bytes(data)
        assert counts(run, *args, code=2) == {"found": 2, "failed": 1}
        assert counts(run, *args, "--force") == {"skipped": 2, "done": 1}

    @pytest.mark.parametrize(
        "end", [b'{"output": "0000/1.p', b"\xff\x00", b'{"output": 3}\n[]\nnull\n{}\n']
    )
    def test_a_torn_manifest(
        self, end: bytes, runs: list[Path], into: Path, tmp_path: Path
    ) -> None:
        jobs = jobs_of(tmp_path / "runs/0000/*.pth", into)
        run_all(strip, jobs[:5], into)
        with (into / batch.MANIFEST).open("ab") as file:
            file.write(end)
        assert states(run_all(strip, jobs, into).values()) == {"skipped": 5, "done": 5}
        assert states(run_all(strip, jobs, into).values()) == {"skipped": 10}

    def test_one_batch_at_a_time(self, runs: list[Path], into: Path) -> None:
        pytest.importorskip("fcntl")
        jobs, said = jobs_of(runs[0], into), "another batch is writing to this folder"
        with batch.manifest(str(into)), pytest.raises(UsageError, match=said):
            run_all(strip, jobs, into)
        assert states(run_all(strip, jobs, into).values()) == {"done": 1}

    def test_same_compares_every_byte(self, runs: list[Path], tmp_path: Path) -> None:
        for name in ("a.pth", "b.safetensors"):
            path = tmp_path / name
            plan = convert(runs[0], path).plan
            assert isinstance(plan, Plan) and same(plan, str(path))
            data = path.read_bytes()
            for at in (0, len(data) // 2, len(data) - 1):
                path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
                assert not same(plan, str(path))
            path.write_bytes(data + b"x")
            assert not same(plan, str(path))


class TestFailures:
    def test_the_others_go_on(self, runs: list[Path], into: Path, tmp_path: Path, run: Run) -> None:
        runs[3].write_bytes(runs[3].read_bytes()[:-100])
        torch.save({"module.w": torch.ones(1), "w": torch.ones(1)}, runs[12])
        runs[20].unlink()
        words = ("strip-module", "--into", into)
        done = run("batch", *words, *runs, tmp_path / "gone.pth", "--workers", 2)
        assert done.code == 3
        assert f"strip-module into {into}: 22 written, 4 failed" in done.stdout
        lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        for path, line in zip((runs[3], runs[12], runs[20]), lines, strict=False):
            assert str(path) in line
        assert set(contents(into)) == {path.name for path in runs} - {"3.pth", "12.pth", "20.pth"}
        left = [path for path in runs if path.exists()]
        assert counts(run, *words, *left, code=3) == {"skipped": 22, "failed": 2}

    def test_warnings_name_their_file(self, tmp_path: Path, into: Path, run: Run) -> None:
        for number in range(30):
            torch.save({"w": torch.ones(1)}, tmp_path / f"{number:02}.pth")
        said = run("batch", "strip-module", "--into", into, tmp_path / "*.pth").stderr
        assert said.startswith("warning: 00.pth: ")
        more = "note: 10 more files with warnings or notes (--json lists them)\n"
        assert said.endswith(more)
        quiet = run("batch", "strip-module", "-q", "--into", tmp_path / "q", tmp_path / "*.pth")
        assert (quiet.stdout, quiet.stderr) == ("", "")

    def test_names_are_escaped(self, tmp_path: Path, into: Path, run: Run) -> None:
        (tmp_path / "b\x1b[2Jad.pth").write_bytes(b"text")
        done = run("batch", "strip-module", "--into", into, tmp_path / "b\x1b[2Jad.pth")
        assert done.code == 3 and "\x1b" not in done.stdout + done.stderr


class TestKilled:
    def test_a_worker(self, pattern: Path, tmp_path: Path, into: Path) -> None:
        """One that dies once, one that always kills its worker, and all that were with them."""
        runs = make(tmp_path / "runs", 40)
        runs[5].rename(runs[5].with_name("killer.pth"))
        runs[30].rename(runs[30].with_name("once.pth"))
        with workers.opened(2) as pool:
            found = run_all(deadly, jobs_of(pattern, into), into, pool=pool)
        assert "its worker was killed twice" in str(found.pop("0000/killer.pth").error)
        # found: made by a worker that died before it could say so
        assert set(states(found.values())) == {"done", "found"}
        assert len(contents(into)) == 39  # and nothing half-written
        assert all(set(without_sum(into / name)) == {"weight", "bias"} for name in contents(into))

    def test_from_outside(self, pattern: Path, tmp_path: Path, into: Path) -> None:
        make(tmp_path / "runs", 60)
        jobs = jobs_of(pattern, into)
        with (
            workers.opened(2) as pool,
            closing(batch.run(slow, jobs, str(into), pool=pool)) as results,
        ):
            assert pool is not None
            found = [next(results)[1]]
            os.kill(pool.submit(os.getpid).result(), signal.SIGKILL)
            found += [outcome for _, outcome in results]
        assert states(found) == {"done": 60}
        assert contents(into) == expected(tmp_path / "runs")

    def test_workers_that_cannot_work(
        self, pattern: Path, tmp_path: Path, into: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(batch, "DEATHS", 2)
        make(tmp_path / "runs", 30)
        with pytest.raises(OutputError, match="workers keep dying"), workers.opened(2) as pool:
            run_all(suicidal, jobs_of(pattern, into), into, pool=pool)

    @pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
    def test_the_client(
        self, sign: signal.Signals, pattern: Path, tmp_path: Path, into: Path, run: Run
    ) -> None:
        """Files that exist are complete; a second run does the rest; the workers are gone."""
        make(tmp_path / "runs", 400)
        want = expected(tmp_path / "runs")
        args = ("strip-module", "--into", into, pattern)
        code, said = interrupted(
            [*COMMAND, "batch", *args, "--workers", "2"],
            lambda: noted(into) >= 60,
            lambda client: client.send_signal(sign),
            cwd=ROOT,
        )
        assert code == (-9 if sign == signal.SIGKILL else 130)
        assert b"Traceback" not in said
        left = contents(into)
        whole = {name: data for name, data in left.items() if name.endswith(".pth")}
        assert whole.items() <= want.items() and len(whole) < 400
        assert len(left) == len(whole) or sign == signal.SIGKILL
        done = counts(run, *args)
        assert done["skipped"] + done.get("found", 0) == len(whole)
        assert done["skipped"] > 0 and done["done"] == 400 - len(whole)
        assert contents(into) == want

    def test_in_a_destructor(self, capfd: pytest.CaptureFixture[str]) -> None:
        """Python drops what is raised there: the worker still exits, and prints nothing."""
        with workers.opened(2) as pool:
            assert pool is not None
            lost = pool.submit(interrupted_in_destructor)
            with pytest.raises(BrokenExecutor):
                lost.result(60)
        assert "Traceback" not in capfd.readouterr().err


def test_thousands_of_small_files(tmp_path: Path, pattern: Path, into: Path, run: Run) -> None:
    runs = make(tmp_path / "runs", 3_000)
    args = ("strip-module", "--into", into, pattern)
    assert counts(run, *args, "--workers", 2) == {"done": 3_000}
    for path in runs[::997]:
        made = without_sum(into / path.relative_to(tmp_path / "runs"))
        assert made["weight"][0] == float(path.stem)
    assert counts(run, *args) == {"skipped": 3_000}


def test_a_package_that_is_not_installed_is_no_bug() -> None:
    done = failed(ModuleNotFoundError("No module named 'yaml'", name="yaml"))
    assert (done.exit_code, done.hint) == (2, "pip install pyyaml")
    assert failed(ModuleNotFoundError("no ckptkit.x", name="ckptkit.x")).exit_code == 5
