r"""The grader of MATH: is the prediction in the last `\boxed{...}` equal to the reference answer?

boxed.py       finds the box
grader.py      the reward "math" and its extractor
latex.py       one spelling for equal LaTeX
tree.py        the structure of an answer: lists, intervals, matrices, ...
same_tree.py   whether two structures are equal
value.py       single values: numbers, units, words
relation.py    equations and inequalities, by sympy
sentence.py    the answer in a sentence that stands in the box
formula.py     formulas, by math-verify

Other packages use `boxed.last_boxed` and `grader.latex_answer`. They call `formula.import_math_verify` to import
math-verify outside a measured time. The table ENTRANCES of `tests/test_layers.py` names these packages.
"""
