"""mini-rome: the ROME paper's agentic training pipeline (arXiv:2512.24873) on one machine.

Importing the package loads nothing heavy: import the module you need, for example `mini_rome.loss`.
"""

import warnings

# TRL warns of vLLM versions that its own vLLM code was not tried with; the samplers here talk to vLLM themselves.
warnings.filterwarnings("ignore", "TRL currently supports vLLM")

__version__ = "0.1.0"
