r"""The grader of MATH: is the prediction in the last `\boxed{...}` equal to the reference answer?

boxed.py       finds the box
grader.py      the reward "math" and its extractor
latex.py       one spelling for equal LaTeX
tree.py        the structure of an answer: lists, intervals, matrices, ...
value.py       single values: numbers, units, words
formula.py     formulas, by math-verify

Other rooms use `boxed.last_boxed`, `grader.latex_answer` and, to import it outside a measured time,
`formula.import_math_verify`. The table ENTRANCES of `tests/test_layers.py` names these rooms.
"""
