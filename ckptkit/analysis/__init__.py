"""Checkpoint -> facts: small dataclasses, which the command line turns into words or JSON."""
