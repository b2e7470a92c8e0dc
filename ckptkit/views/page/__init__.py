"""Facts -> pictures: a page for browsers, a treemap for papers. What a picture shows is in
:mod:`ckptkit.reports`.

``seen`` is a checkpoint that was looked at, ``facts`` gathers what the page tells about it, as JSON
values, with ``columns`` of the tensors and the ``differences`` of two files; ``report`` makes the
page, of them and of the files in ``static``. ``treemap`` lays rectangles out, and ``drawing`` draws
them with matplotlib.
"""
