"""Plan -> file: copy byte ranges at the speed of ``cp``, then rename the output into place.

In: a Plan. Out: a file, a folder or an upload, complete or absent; or a file edited in place. No
module here depends on a format. Uses core, remote and compute.
"""
