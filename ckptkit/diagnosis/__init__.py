"""Find out why a checkpoint does not load, and which command fixes the checkpoint.

Input: a path, optionally a model. Output: causes with their fixes; ``diagnose.apply_fixes`` applies
all fixes in one pass. This package uses core, quantized, edits, formats, scanning, api, analysis,
loading and lora.
"""
