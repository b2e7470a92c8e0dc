"""The terminal browser: headers only, until values are requested.

``contents`` is the data, with the command that shows the same; ``panels`` formats it; ``app`` is
the program, made with textual.
"""
