"""Course assignments: released as skeletons, graded from outside the student's process. Not in the paper.

The library is the solution: the staff body of an exercise is a call of this package, the student's version is made
from it (`release`). A submission runs in a box without the solution; it is sent inputs and its outputs are compared
here with the staff version's (`grade`). This module imports nothing: its folder is copied into the box.
"""
