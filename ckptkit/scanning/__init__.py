"""Find the pickles in any file, trace the calls that they make, and return a verdict.

The input is files of any kind. The output is a verdict for each file, with reasons. This package
executes no code of the files. It uses core, pickles and formats.
"""
