"""Errors name what is nearest: commands, options, entries, names, dtypes."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import Result

from ckptkit.cli import COMMANDS
from ckptkit.cli.suggestions import LACKING, OPTIONS, WORDS
from tests.cli.conftest import Ckptkit
from tests.conftest import COMMAND, ENVIRONMENT


def test_a_file_instead_of_a_command(ckptkit: Ckptkit, run_pth: Path) -> None:
    assert ckptkit("run.pth --json").stdout == ckptkit("inspect --json", run_pth).stdout
    assert ckptkit("--traceback", run_pth.parent, "--brief").stdout.startswith("file")
    assert "did you mean" in ckptkit("ran.pth").stderr


def ran(ckptkit: Ckptkit, hint: str) -> Result:
    """Run the command that a hint prints."""
    (command,) = re.findall(r"`ckptkit ([^`]+)`", hint)
    return ckptkit(*shlex.split(command))


@pytest.mark.parametrize("word", WORDS)
def test_other_words_for_commands(ckptkit: Ckptkit, run_pth: Path, word: str) -> None:
    assert word not in COMMANDS
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
    for words, hint in LACKING.items():
        if words.endswith(" --json"):
            assert f"hint: {hint}" in ckptkit(words).stderr


@pytest.fixture
def several(run_pth: Path) -> Path:
    """Three checkpoints in a folder, below the working directory."""
    Path("a b").mkdir()
    for name in "123":
        shutil.copy(run_pth, f"a b/{name}.pth")
    return run_pth


@pytest.mark.parametrize(
    "words", ["inspect", "verify", "digest", "inspect --brief", "doctor --fail-on never"]
)
def test_commands_that_read_several_take_patterns_and_folders(
    ckptkit: Ckptkit, several: Path, words: str
) -> None:
    files = [f"a b/{number}.pth" for number in "123"]
    each = ckptkit(*words.split(), *files, code=0)
    assert all(file in each.stdout for file in files)
    assert ckptkit(*words.split(), "a b/*.pth").stdout == each.stdout
    assert ckptkit(*words.split(), "a b").stdout == each.stdout
    for output in ("digest -o x.manifest", "doctor --fix x.pth"):
        assert "contains 3 checkpoints" in ckptkit(*output.split(), "a b").stderr
    assert "3 files: 3 safe" in ckptkit("scan 'a b/*.pth'").stdout


def test_a_pipe(run_pth: Path) -> None:
    words = f"{shlex.join(COMMAND)} inspect <(cat {shlex.quote(str(run_pth))})"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, env=ENVIRONMENT)
    assert (
        done.returncode == 3
        and "cannot seek in a pipe or device: save the checkpoint as a file" in done.stderr
    )


def test_no_network_and_no_code_of_a_model_for_a_hint(
    ckptkit: Ckptkit, several: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CKPTKIT_HINTS", raising=False)  # there is no such server
    Path("harm.py").write_text("open('ran', 'w')\nclass Net: pass\n")
    done = ckptkit("convert run.pth new.pth --half --like harm:Net")
    assert "--cast float16 --like harm:Net`" in done.stderr and not Path("ran").exists()
    ckptkit("strip-module run.pth plain.pth")
    done = ckptkit("convert plain.pth new.pth --cast bfloat16 --like run.pth")
    assert "differs from run.pth" in done.stderr and "did you mean" not in done.stderr
    done = ckptkit("convert http://localhost:9/a.pth new.pth --half")
    assert "`ckptkit convert http://localhost:9/a.pth new.pth --cast float16`" in done.stderr


def test_globs(ckptkit: Ckptkit, run_pth: Path) -> None:
    said = ckptkit("inspect", run_pth, "--keys", "1.w*").stdout
    assert "matches --keys 1.w*\nhint: --keys '*1.w*' matches 1 tensor\n" in said
    assert "hint: --keys" not in ckptkit("inspect", run_pth, "--keys", "xyz").stdout


def test_very_long_names_are_not_compared(ckptkit: Ckptkit, run_pth: Path) -> None:
    """The time grows with the square of their length."""
    done = ckptkit("inspect", run_pth, "--key", "m" * 1_000_000, code=2)
    assert "the entries are: model" in done.stderr
