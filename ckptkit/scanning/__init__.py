"""Find the pickles in any file, trace the calls that they make, and return a verdict.

Input: files of any kind. Output: a verdict for each file, with reasons. Nothing is executed.
This subpackage imports core, pickles and formats.
"""
