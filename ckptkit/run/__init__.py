"""Commands over many files: batches, worker processes, recipes.

In: patterns of files and a command, or a recipe. Out: one output for each input, and a manifest of
the finished jobs. Uses core, compute, remote, publish, quantized, rules, formats, edits, analysis
and api.
"""
