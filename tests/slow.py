"""The cases of large matrices that run on every push; all other cases of these tests are `slow`.

``python -m pytest`` leaves the slow ones out, ``python -m pytest -m slow`` runs only them, and
``.ci/run`` runs both. Each matrix keeps at least one case in every run; a single test is left out
only where a smaller one of the same kind stays, which the comment names.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import filter, fnmatchcase
from pathlib import Path

# Test -> patterns of the ids of its cases that run on every push.
KEPT: dict[str, tuple[str, ...]] = {
    "benchmarks/test_benchmarks.py::test_our_commands": ("strip-module", "inspect"),
    "core/test_tree.py::test_rebuild_any_depth": ("dict", "list", "tuple", "state"),
    "deltas/test_in_place.py::test_killed_at_every_call": ("folder-True",),
    "formats/dcp/test_writing.py::test_two_processes_load_their_shards": (),  # test_a_model_loads_it
    "formats/parallel/test_commands.py::test_commands_on_each_folder": (
        "fsdp2_w2_tied_bf16", "fsdp1st_w2_orig_wrap", "tp_w2_f32", "mega_moe_tp1_ep2", "meta_llama2_mp2",
        "neox_pipe_tp2",
    ),
    "formats/parallel/test_processes.py::test_each_file_alone_is_a_part": ("2-*",),
    "formats/parallel/test_processes.py::test_rank_files_of_torch_make_the_whole": ("2-*",),
    "formats/parallel/test_processes.py::test_torchrun_saves_the_same": (),
    # test_rank_files_of_torch_make_the_whole, of processes that were forked
    "formats/torch_zip/test_writer.py::test_ZP_16_more_storages_than_16_bits_count": (),
    # containers/test_zip_writer.py::test_ZP_16_many_members
    "fuzz/test_hunting.py::test_hunts_find_nothing_but_the_holes_of_reviews": (),
    # test_the_sandbox_sees_what_bad_pickles_do_and_scan_reports_them
    "fuzz/test_sweeps.py::test_PK_14_ZP_23_LG_05_ST_11_TR_02_cut_at_every_byte": (
        "zip", "legacy", "safetensors", "npy", "npz", "pickle",
    ),
    "fuzz/test_sweeps.py::test_PK_15_ZP_04_every_bit_flipped": (
        "zip", "legacy", "safetensors", "npy", "npz", "pickle",
    ),
    "fuzz/test_targets.py::test_2Y_RS_01_RS_02_only_our_own_errors_leave": (
        "pickle", "tar", "numpy", "geometry", "hidden", "journal", "edit",
    ),
    "interop/test_accelerate.py::test_load_checkpoint_and_dispatch": ("model.safetensors-*-True",),
    "interop/test_transformers_rules.py::test_each_layout_gives_the_other": (
        "mixtral", "qwen3_moe", "gemma3", "gpt_neox",
    ),
    "pickles/test_machine_hostile.py::test_PK_20_floods": ("N", "("),
    "pickles/test_machine_hostile.py::test_PK_21_PK_22_PK_23_laughs_cycles_and_depth": (
        "[!d]*", "deep dicts", "deep marks",
    ),
    "pickles/test_machine_hostile.py::test_PK_27_lines_without_end": ("V", "I"),
    "publish/test_patching.py::test_DS_01_killed_at_every_call": (
        "pth-grow-before", "safetensors-strip-half",
    ),
    "run/test_batch.py::test_thousands_of_small_files": (),  # test_batch.py::TestSkipping
    "run/test_workers.py::test_a_job_that_kills_workers_of_a_cluster": (),
    # run/test_workers.py::test_a_worker_of_a_cluster_is_killed
    "safety/test_disks.py::test_DS_03_power_cut_at_every_step": ("replaced",),
    "safety/test_failures.py::test_DS_04_DS_10_no_room": ("ENOSPC-*",),
    "safety/test_failures.py::test_DS_05_DS_06_an_error_of_any_call": ("replaced",),
    "safety/test_failures.py::test_DS_05_a_file_system_that_syncs_no_folders": ("replaced",),
    "safety/test_kills.py::test_DS_01_DS_22_killed_at_every_call": ("new", "rewritten"),
    "safety/test_kills.py::test_DS_02_killed_at_any_moment": ("replaced", "patched"),
    "safety/test_signals.py::test_DS_18_interrupted_at_every_call": ("new", "patched"),
    "test_cost_model.py::test_bytes": ("large-*", "medium-pth"),
    "test_fixtures.py::test_making_them_again_gives_the_same": ("some of that",),
    "test_readme.py::test_library_is_typed": (),  # test_types_are_looked_at; .ci/run: mypy
    "test_resources.py::test_FS_01_what_is_no_file_is_refused_at_once": ("inspect", "digest"),
    "test_resources.py::test_RS_01_RS_02_RS_05_bombs": ("inspect-*",),
    "test_resources.py::test_RS_06_names_that_are_hard_to_match": ("inspect-*", "diff-*"),
    "test_resources.py::test_a_gigabyte_and_twenty_seconds": (
        "inspect", "scan", "convert", "diff",
    ),
    "trainer/test_loop.py::test_every_model_trains": ("options[012]",),
    "trainer/test_parallel.py::test_F3_every_model_trains_by_blocks": ("cnn", "mlp", "crnn"),
    "trainer/test_parallel.py::test_S25_two_processes_give_what_one_gives": (),
    # test_resuming.py::test_a_run_goes_on_under_another_kind
}  # fmt: skip


def is_slow(nodeid: str) -> bool:
    """Return whether a case belongs to a matrix above, and is none of those that it keeps."""
    test, case = _split(nodeid)
    return test in KEPT and not any(fnmatchcase(case, pattern) for pattern in KEPT[test])


def may_be_slow(file: Path) -> bool:
    """Return whether a file of tests has slow cases: in the table above, or marked in the file."""
    name = file.relative_to(Path(__file__).parent).as_posix()
    is_named = any(test.partition("::")[0] == name for test in KEPT)
    return is_named or "pytest.mark.slow" in file.read_text()


def unmatched(nodeids: Iterable[str]) -> list[str]:
    """Return the patterns that match no case of a test, of the tests among these."""
    cases: dict[str, list[str]] = {}
    for nodeid in nodeids:
        test, case = _split(nodeid)
        cases.setdefault(test, []).append(case)
    found = []
    for test in sorted(KEPT.keys() & cases.keys()):
        missing = (pattern for pattern in KEPT[test] if not filter(cases[test], pattern))
        found += [f"{test}[{pattern}]" for pattern in missing]
    return found


def _split(nodeid: str) -> tuple[str, str]:
    """Return the test, relative to the folder tests, and the id of the case."""
    test, _, case = nodeid.removeprefix("tests/").partition("[")
    return test, case.removesuffix("]")
