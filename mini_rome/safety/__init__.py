"""The safety drill: conduct beside success, golden trajectories, a held-out detector, the report of a run."""
