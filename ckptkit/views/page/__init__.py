"""Facts as pictures: a page for browsers, a treemap for papers.

The facts come from :mod:`ckptkit.analysis`. ``seen`` is a checkpoint that has been read, ``facts``
collects what the page shows, as JSON values, with ``columns`` of the tensors and the
``differences`` of two files; ``report`` makes the page from them and the files in ``static``.
``treemap`` lays out rectangles, and ``drawing`` draws them with matplotlib.
"""
