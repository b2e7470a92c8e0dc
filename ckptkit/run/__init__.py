"""Many files at once: batches, worker processes, recipes.

In: patterns of files and a command, or a recipe. Out: one output for each input, and a manifest of
what is done. Uses core, remote, transforms, publish, formats and api.
"""
