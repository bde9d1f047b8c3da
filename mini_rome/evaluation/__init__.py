"""How well a policy does: episodes, policies, statistics, figures, the paper's own numbers."""
