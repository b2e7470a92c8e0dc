"""Execute plans: write an output file, folder or upload at the speed of ``cp``, or edit a file in
place.

The input is a `Plan` or a `Patch`. An output is either complete or does not exist. The modules in
this package do not depend on file formats. This package uses core, remote and compute.
"""
