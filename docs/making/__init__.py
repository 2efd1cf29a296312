"""Makes the parts of the documentation that come from code, results and real output.

- site.py: the mkdocs hook. It adds the generated pages and puts tables of results into pages.
- reference.py: commands, Python, the format of a run, JSON keys, verdicts, settings, from the code.
- validation.py: tables of validation/results.
- diagrams.py: pictures drawn from the code's tables, as SVG.
- blocks.py: console blocks. It runs their commands, and compares or writes the output.
- picture.py: the picture of a real answer at the head of the README.
"""
