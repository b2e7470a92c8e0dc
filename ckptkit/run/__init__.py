"""Run commands on many files: batches, worker processes, recipes.

Input: file patterns and a command, or a recipe. Output: one output for each input, and a manifest
of the finished jobs. Uses core, compute, remote, publish, quantized, rules, formats, edits,
analysis and api.
"""
