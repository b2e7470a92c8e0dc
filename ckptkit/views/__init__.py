"""Facts as pictures: the report page, the terminal browser, notebooks.

In: checkpoints and the facts of analysis. Out: HTML, SVG, PNG, a full-screen terminal program.
Uses core, compute, quantized, formats, analysis and diagnosis.
"""
