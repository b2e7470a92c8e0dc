"""Checkpoint -> Checkpoint, pure: nothing is read but what the tree holds, nothing is written."""
