"""The data side of the pipeline: demonstrations, records, synthesis, the four-stage filter, pre-training."""
