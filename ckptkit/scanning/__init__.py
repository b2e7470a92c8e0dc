"""Find the pickles in any file, trace what loading them would run, and give a verdict.

Input: files of any kind. Output: a verdict for each file, with reasons. Nothing is executed.
This subpackage imports core, pickles and formats.
"""
