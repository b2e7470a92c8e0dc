"""Files and folders behind URLs: whatever fsspec knows.

:mod:`urls` tells a URL from a path, and costs nothing; :mod:`files` is imported, and fsspec with it, when there is one.
"""
