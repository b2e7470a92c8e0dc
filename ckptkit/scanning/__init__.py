"""Find the pickles in any file, trace what loading them would run, and give a verdict.

In: files of any kind. Out: a verdict for each, with the reasons. Nothing is executed.
Uses core, pickles and formats.
"""
