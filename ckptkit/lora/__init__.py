"""Adapters (LoRA and its relatives): a change of a base model, in files of their own.

Uses core and rules.
"""
