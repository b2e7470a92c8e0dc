"""Run commands on many files, run recipes, and compare checkpoints.

Input: file patterns and a command, or a recipe. Output: one output for each input, and a manifest
of the finished jobs. Uses core, compute, remote, publish, quantized, rules, formats, edits,
analysis, loading and api.
"""
