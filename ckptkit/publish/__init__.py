"""Execute plans: write or upload an output file or folder, or edit a file in place.

This package copies bytes as fast as ``cp``. The input is a `Plan` or a `Patch`. An output is either
complete or does not exist. The modules in this package do not depend on file formats. This package
uses core, remote and compute.
"""
