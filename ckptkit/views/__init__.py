"""Show facts as an HTML page, a picture, a terminal browser, or HTML for notebooks.

The input is a checkpoint, or a result of `ckptkit.analysis`. The output is an HTML page, an SVG,
PNG or PDF file, or a program in the terminal.
This package uses core, compute, quantized, formats, analysis and diagnosis.
"""
