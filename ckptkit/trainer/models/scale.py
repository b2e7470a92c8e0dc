"""The width of a model."""


def scaled(channels: int, width: float) -> int:
    """Return `channels` times `width`, at least 1."""
    return max(1, round(channels * width))
