"""Why a checkpoint does not load: facts -> causes, each with the command that helps.

``cause`` is what a cause is, ``content`` gives those that the file itself shows (``container``, ``names``), ``refused``
that of a file that cannot be read, ``fit`` those that show beside a model.
"""
