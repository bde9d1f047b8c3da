"""mini-rome: the ROME paper's agentic training pipeline (arXiv:2512.24873) on one machine.

Importing the package loads nothing heavy: import the module you need, for example `mini_rome.loss`.
"""

__version__ = "0.1.0"
