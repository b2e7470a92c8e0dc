"""Everything that reads bytes, given bytes that nobody meant.

``targets`` are functions of bytes that fail if anything but a CkptkitError leaves, if what was
accepted does not come back as it was, or if too much memory or time is used. They are driven by
seeded loops (``test_targets``: the same inputs in every run), by cuts and flipped bits
(``test_sweeps``), by a generator of pickles (``pickles``), and by atheris:

    python -m tests.fuzz                            what there is
    python -m tests.fuzz zip -max_total_time=600    atheris, guided by coverage (the extra `fuzz`)
    python -m tests.fuzz zip --seeded 600           the loops of the tests, for ten minutes and other seeds
    python -m tests.fuzz zip --once FILE            one input again

Beside them, hunts for files that scan calls harmless and that do something (``hunting``):

    python -m tests.fuzz hunt --seconds 600 --seed 7
    python -m tests.fuzz hunt --writers --seconds 600     what writing commands make of hostile files
    python -m tests.fuzz holes --seconds 600              each hole of the reviews is found again
    python -m tests.fuzz load FILE...                     what a file does in the sandbox
"""
