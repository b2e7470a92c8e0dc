"""Collect facts about checkpoints: summary, diff, name matching, statistics, verification, digests.

Input: checkpoints or files. Output: small dataclasses. Commands and views print them as text, JSON
or pictures. Uses core, compute, pickles, quantized, formats, scanning, api and lora.
"""
