"""A checkpoint in a terminal, to look around in: headers alone, until somebody asks for values.

``contents`` is what there is to see, and the command that shows the same; ``panels`` puts it into
words; ``app`` is the program, with textual.
"""
