"""Errors name what is nearest: commands, options, entries, names, dtypes."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from click.testing import Result

from ckptkit.cli import COMMANDS
from ckptkit.cli.suggestions import OPTIONS, WITHOUT_JSON, WORDS
from tests.cli.conftest import Ckptkit
from tests.conftest import COMMAND, ENVIRONMENT


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("inspekt", "inspect"),
        ("strip", "strip-module"),
        ("stat", "stats"),
        ("dif", "diff"),
    ],
)
def test_commands(ckptkit: Ckptkit, word: str, meant: str) -> None:
    done = ckptkit(word, "run.pth")
    assert done.exit_code == 2
    assert (
        done.stderr
        == f"error: No such command '{word}'.\nhint: did you mean {meant}? see `ckptkit --help`\n"
    )


def test_a_file_instead_of_a_command(ckptkit: Ckptkit, run_pth: Path) -> None:
    assert ckptkit(run_pth, "--json").stdout == ckptkit("inspect", "--json", run_pth).stdout
    assert ckptkit("--traceback", run_pth.parent, "--brief").stdout.startswith("file")
    assert "did you mean" in ckptkit(run_pth.with_name("ran.pth")).stderr


def test_nothing_is_near(ckptkit: Ckptkit) -> None:
    assert (
        ckptkit("xyzzy").stderr == "error: No such command 'xyzzy'.\nhint: see `ckptkit --help`\n"
    )


def ran(ckptkit: Ckptkit, hint: str) -> Result:
    """Run the command that a hint prints."""
    (command,) = re.findall(r"`ckptkit ([^`]+)`", hint)
    return ckptkit(*shlex.split(command))


@pytest.mark.parametrize("word", WORDS)
def test_other_words_for_commands(
    ckptkit: Ckptkit, run_pth: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    assert word not in COMMANDS
    monkeypatch.chdir(run_pth.parent)
    for rest in (["run.pth"], ["run.pth", "new.pth"], []):
        said = ckptkit(word, *rest).stderr
        assert WORDS[word] in said
        assert ran(ckptkit, said).exit_code in (0, 1), said
        for made in Path.cwd().glob("new.pth"):
            (shutil.rmtree if made.is_dir() else Path.unlink)(made)


@pytest.mark.parametrize(
    "option", [old for old, new in OPTIONS.items() if " " in new and " " not in old]
)
def test_other_words_for_options(ckptkit: Ckptkit, option: str) -> None:
    name, new, *_ = OPTIONS[option].split()
    for other in (name, "extract"):
        said = ckptkit(other, "run.pth", "out.pth", option).stderr
        assert new in said and "Did you mean" not in said
        assert ran(ckptkit, said).exit_code == 0


def test_commands_without_json_name_another(ckptkit: Ckptkit, run_pth: Path) -> None:
    said = ckptkit("browse", run_pth, "--json").stderr
    assert f"did you mean `ckptkit inspect {run_pth} --json`?" in said
    for name, hint in WITHOUT_JSON.items():
        assert f"hint: {hint}" in ckptkit(name, "--json").stderr


def test_no_reading_command_becomes_one_that_replaces_a_file(
    ckptkit: Ckptkit, run_pth: Path
) -> None:
    said = ckptkit("inspect", run_pth, "-f").stderr
    assert "convert has --force: see `ckptkit convert --help`" in said


@pytest.fixture
def several(run_pth: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three checkpoints in a folder, below the working directory."""
    monkeypatch.chdir(run_pth.parent)
    Path("a b").mkdir()
    Path("strip.toml").write_text('[[steps]]\nstrip = "module."\n')
    for name in "123":
        shutil.copy(run_pth, f"a b/{name}.pth")
    return run_pth


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        ("strip-module 'a b/1.pth' 'a b/2.pth' 'a b/3.pth'", "batch strip-module --into out 'a b/*.pth'"),
        ("strip-module 'a b/1.pth' 'a b/2.pth' new", "batch strip-module --into new 'a b/1.pth' 'a b/2.pth'"),
        ("strip-module 'a b' new", "batch strip-module --into new 'a b/*.pth'"),
        ("run strip.toml 'a b' new --dry-run", "batch run strip.toml --dry-run --into new 'a b/*.pth'"),
        ("convert --format safetensors 'a b/*.pth' new", "batch convert --format safetensors --into new 'a b/*.pth'"),
    ],
)  # fmt: skip
def test_several_files(ckptkit: Ckptkit, several: Path, words: str, printed: str) -> None:
    done = ckptkit(*shlex.split(words))
    assert done.exit_code in (2, 3) and f"`ckptkit {printed}`" in done.stderr
    assert ran(ckptkit, done.stderr).exit_code == 0


@pytest.mark.parametrize(
    "words", ["inspect", "verify", "digest", "inspect --brief", "doctor --fail-on never"]
)
def test_commands_that_read_several_take_patterns_and_folders(
    ckptkit: Ckptkit, several: Path, words: str
) -> None:
    files = [f"a b/{number}.pth" for number in "123"]
    each = ckptkit(*words.split(), *files)
    assert each.exit_code == 0 and all(file in each.stdout for file in files)
    assert ckptkit(*words.split(), "a b/*.pth").stdout == each.stdout
    assert ckptkit(*words.split(), "a b").stdout == each.stdout
    for output in ("digest -o x.manifest", "doctor --fix x.pth"):
        assert "contains 3 checkpoints" in ckptkit(*output.split(), "a b").stderr
    assert "3 files: 3 safe" in ckptkit("scan", "a b/*.pth").stdout


def test_a_pattern_that_no_file_matches(ckptkit: Ckptkit, several: Path) -> None:
    assert "no file matches this pattern" in ckptkit("inspect", "b/*.pth").stderr
    assert "no file matches this pattern" in ckptkit("doctor", "b/*.pth").stderr
    assert "did you mean a b/1.pth" in ckptkit("doctor", "a b/1.pht").stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("extract run.pth new.pth", "`ckptkit extract run.pth new.pth --key model`"),
        ("convert run.pth new.pth --key optimizer", "`ckptkit inspect --tree run.pth` shows"),
        ("rename run.pth new.pth --sub (=x", "write a backslash before a literal ( ) "),
        ("rename run.pth new.pth --sub s/0(.weight)/1/g", "--sub '0(.weight)=1'"),
        ("rename run.pth new.pth --map map.json", "the keys are: module.0.weight"),
        ("convert run.pth new.pth --drop zzzz", "the keys are: module.0.weight"),
        ("rename run.pth new.pth --sub weight=bias", "`ckptkit convert run.pth run-new.pth --drop module.0.weight`"),
        ("run lightning run.pth new.pth", "the entries are: "),
        ("diff run.pth --model a.py:B --arg name={", "'name=\"{\"'"),
        ("ema run.pth new.pth", "`ckptkit inspect --tree run.pth`"),
        ("average run.pth other.pth new.pth", "`ckptkit join run.pth other.pth new.pth` joins parts"),
        ("completion", "Choose from: bash, zsh, fish\n"),
    ],
)  # fmt: skip
def test_next_steps(ckptkit: Ckptkit, several: Path, words: str, said: str) -> None:
    Path("map.json").write_text('{"zzzz": "x"}')
    torch.save({"w": torch.ones(1)}, "other.pth")
    done = ckptkit(*words.split())
    assert done.exit_code in (2, 3) and said in done.stderr
    for command in re.findall(r"`ckptkit ([^`]+)`", done.stderr):
        assert ckptkit(*shlex.split(command)).exit_code in (0, 1), command


def test_a_pipe(run_pth: Path) -> None:
    words = f"{shlex.join(COMMAND)} inspect <(cat {shlex.quote(str(run_pth))})"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, env=ENVIRONMENT)
    assert (
        done.returncode == 3
        and "cannot seek in a pipe or device: save the checkpoint as a file" in done.stderr
    )


def test_options(ckptkit: Ckptkit) -> None:
    assert "use --json: see" in ckptkit("inspect", "--jsn", "run.pth").stderr


@pytest.mark.parametrize("key", ["modle", "Model"])
def test_entries(ckptkit: Ckptkit, run_pth: Path, key: str) -> None:
    assert (
        "hint: did you mean model? the entries are: model, optimizer,"
        in ckptkit("extract", run_pth, "x.pth", "--key", key).stderr
    )


def test_no_network_and_no_code_of_a_model_for_a_hint(
    ckptkit: Ckptkit, several: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CKPTKIT_HINTS", raising=False)  # there is no such server
    Path("harm.py").write_text("open('ran', 'w')\nclass Net: pass\n")
    done = ckptkit("convert", "run.pth", "new.pth", "--half", "--like", "harm:Net")
    assert "--cast float16 --like harm:Net`" in done.stderr and not Path("ran").exists()
    ckptkit("strip-module", "run.pth", "plain.pth")
    done = ckptkit("convert", "plain.pth", "new.pth", "--cast", "bfloat16", "--like", "run.pth")
    assert "differs from run.pth" in done.stderr and "did you mean" not in done.stderr
    done = ckptkit("convert", "http://localhost:9/a.pth", "new.pth", "--half")
    assert "`ckptkit convert http://localhost:9/a.pth new.pth --cast float16`" in done.stderr


def test_names(ckptkit: Ckptkit, run_pth: Path) -> None:
    assert "did you mean module.0.weight" in ckptkit("show", run_pth, "0.weigth").stderr


def test_globs(ckptkit: Ckptkit, run_pth: Path) -> None:
    said = ckptkit("inspect", run_pth, "--keys", "1.w*").stdout
    assert "matches --keys 1.w*\nhint: --keys '*1.w*' matches 1 tensor\n" in said
    assert "hint: --keys" not in ckptkit("inspect", run_pth, "--keys", "xyz").stdout


def test_dtypes(ckptkit: Ckptkit, run_pth: Path) -> None:
    done = ckptkit("convert", run_pth, run_pth.with_name("x.pth"), "--cast", "bfloat17")
    assert "hint: did you mean bfloat16, " in done.stderr


def test_very_long_names_are_not_compared(ckptkit: Ckptkit, run_pth: Path) -> None:
    """The time grows with the square of their length."""
    done = ckptkit("inspect", run_pth, "--key", "m" * 1_000_000)
    assert done.exit_code == 2 and "the entries are: model" in done.stderr
