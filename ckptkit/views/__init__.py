"""Show facts as an HTML page, a picture, a terminal browser, or HTML for notebooks.

Input: checkpoints and the results of analysis. Output: HTML, SVG, PNG, PDF, a terminal program.
Uses core, compute, quantized, formats, analysis and diagnosis.
"""
